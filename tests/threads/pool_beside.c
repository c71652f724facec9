/* Holds what a scope of one thread leaves to another, for a thread sanitizer too: attempts, of
 * which every third is taken back, use batches that another thread prepares beside them. A program
 * of its own, as the test runner does not start under one: exit status 0 when all held. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "invariants/invariants.h"
#include "pool/pool.h"
#include "threads/holds.h"

enum { BATCHES = 6000, QUEUE = 8, BLOCKS = 24 };
#define PAGE ((size_t)64 << 10)

struct batch {
    unsigned char *at;
    size_t bytes;
};

/* Batches go from one thread to the other by a ring: `made` are in it in all, `used` out of it. */
struct shared {
    rebatch_pool *pool;
    struct batch ring[QUEUE];
    pthread_mutex_t lock;
    pthread_cond_t moved;
    unsigned made, used;
    atomic_int failures;
    unsigned taken_back;
};

static size_t bytes_of(unsigned number)
{
    return number % 5 == 0 ? 3 * PAGE + number : 300 + number % 7 * 900;
}

static unsigned char *take(struct shared *shared, size_t bytes, unsigned mark)
{
    void *block = NULL;
    HOLDS(shared, rebatch_pool_alloc(&block, shared->pool, bytes, NULL, 0) == REBATCH_OK);
    unsigned char *const at = block;
    at[0] = at[bytes - 1] = (unsigned char)mark;
    return at;
}

static void give(struct shared *shared, unsigned char *at, size_t bytes, unsigned mark)
{
    HOLDS(shared, at[0] == (unsigned char)mark && at[bytes - 1] == (unsigned char)mark);
    HOLDS(shared, rebatch_pool_free(shared->pool, at) == REBATCH_OK);
}

/* Prepares a batch by way of something that it gives back itself. */
static void *prepare(void *user)
{
    struct shared *shared = user;
    for (unsigned i = 0; i < BATCHES; i++) {
        const size_t bytes = bytes_of(i);
        unsigned char *const raw = take(shared, bytes / 2 + 1, i + 1);
        const struct batch batch = {take(shared, bytes, i), bytes};
        give(shared, raw, bytes / 2 + 1, i + 1);
        (void)pthread_mutex_lock(&shared->lock);
        while (shared->made - shared->used == QUEUE)
            (void)pthread_cond_wait(&shared->moved, &shared->lock);
        shared->ring[shared->made++ % QUEUE] = batch;
        (void)pthread_cond_signal(&shared->moved);
        (void)pthread_mutex_unlock(&shared->lock);
    }
    return NULL;
}

static struct batch next_batch(struct shared *shared)
{
    (void)pthread_mutex_lock(&shared->lock);
    while (shared->made == shared->used)
        (void)pthread_cond_wait(&shared->moved, &shared->lock);
    const struct batch batch = shared->ring[shared->used++ % QUEUE];
    (void)pthread_cond_signal(&shared->moved);
    (void)pthread_mutex_unlock(&shared->lock);
    return batch;
}

/* Allocates, and gives the batch and some of its own back. */
static void attempt(struct shared *shared, const struct batch *batch, unsigned number, bool fails)
{
    unsigned char *blocks[BLOCKS];
    rebatch_scope scope;
    HOLDS(shared, rbi_scope_begin_phase(&scope, shared->pool, false, 0) == REBATCH_OK);
    for (unsigned k = 0; k < BLOCKS; k++)
        blocks[k] = take(shared, bytes_of(k), k);
    for (unsigned k = 0; k < (fails ? BLOCKS / 2 : BLOCKS); k++)
        give(shared, blocks[k], bytes_of(k), k);
    give(shared, batch->at, batch->bytes, number);
    if (fails)
        HOLDS(shared, rebatch_scope_rollback(shared->pool, scope) == REBATCH_OK);
    else
        HOLDS(shared, rebatch_scope_commit(shared->pool, scope) == REBATCH_OK);
    shared->taken_back += fails;
}

static void train(struct shared *shared)
{
    for (unsigned i = 0; i < BATCHES; i++) {
        const struct batch batch = next_batch(shared);
        if (i % 3 == 0)
            attempt(shared, &batch, i, true);
        attempt(shared, &batch, i, false);
        if (i % 500 == 0)
            HOLDS(shared, rbi_pool_is_valid(shared->pool));
    }
}

/* 0 when all held, 1 when not, 2 when it could not be tried. */
static int run(void)
{
    static struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                   .moved = PTHREAD_COND_INITIALIZER};
    const rebatch_host_options host = {sizeof host, PAGE};
    rebatch_device *device;
    pthread_t loader;
    if (rebatch_device_open_host(&device, (size_t)64 << 20, &host) ||
        rebatch_pool_create(&shared.pool, device, NULL) ||
        pthread_create(&loader, NULL, prepare, &shared) != 0) {
        fprintf(stderr, "setting up: %s\n", rebatch_last_error());
        return 2;
    }
    train(&shared);
    (void)pthread_join(loader, NULL);
    rebatch_pool_stats stats;
    HOLDS(&shared, rebatch_pool_get_stats(&stats, shared.pool) == REBATCH_OK);
    HOLDS(&shared, stats.live_bytes == 0);
    HOLDS(&shared, rbi_pool_is_valid(shared.pool));
    printf("%d batches prepared beside attempts, %u of which were taken back\n", BATCHES,
           shared.taken_back);
    rebatch_pool_destroy(shared.pool);
    rebatch_device_close(device);
    return atomic_load(&shared.failures) == 0 ? 0 : 1;
}

int main(void)
{
    return run();
}
