/* Holds what the pool promises to threads that take turns, for a thread sanitizer too: a step that
 * two run in halves is a cycle, whose lock passes from one to the other, while a third comes
 * between now and then. A program of its own, as the test runner does not start under one: exit
 * status 0 when all held. Seed: 1, of the third thread's sizes, and of when it comes. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool/pool.h"
#include "threads/holds.h"

enum { BLOCKS = 64, STEPS = 2000, BURST = 32 };
#define GRANULE ((size_t)64 << 10)

struct shared {
    rebatch_pool *pool;
    pthread_barrier_t turn;
    unsigned char *blocks[BLOCKS];
    atomic_int failures, step; /* STEPS: all are done */
    uint64_t periods;          /* of cycles, in all */
};

static size_t bytes_of(size_t k)
{
    return k % 3 == 0 ? 40 * GRANULE / (k + 1) : 700 * (k + 1);
}

static void forward(struct shared *shared)
{
    for (size_t k = 0; k < BLOCKS; k++) {
        void *block = NULL;
        HOLDS(shared, rebatch_pool_alloc(&block, shared->pool, bytes_of(k), NULL, 0) == REBATCH_OK);
        shared->blocks[k] = block;
        shared->blocks[k][0] = shared->blocks[k][bytes_of(k) - 1] = (unsigned char)k;
    }
}

static void backward(struct shared *shared)
{
    for (size_t k = BLOCKS; k-- > 0;) {
        const unsigned char *block = shared->blocks[k];
        HOLDS(shared, block[0] == (unsigned char)k && block[bytes_of(k) - 1] == (unsigned char)k);
        HOLDS(shared, rebatch_pool_free(shared->pool, shared->blocks[k]) == REBATCH_OK);
    }
}

/* The second half of every step; every so often whole steps, in which it is alone for long. */
static void *work(void *user)
{
    struct shared *shared = user;
    for (int step = 1; step < STEPS; step++) {
        pthread_barrier_wait(&shared->turn);
        backward(shared);
        for (int i = 0; step % 100 == 0 && i < BURST; i++) {
            forward(shared);
            backward(shared);
        }
        pthread_barrier_wait(&shared->turn);
    }
    return NULL;
}

static uint64_t periods_of(struct shared *shared)
{
    rbi_lock_take(&shared->pool->lock);
    const uint64_t periods = shared->pool->cycle.periods;
    rbi_lock_give(&shared->pool->lock);
    return periods;
}

static void run_steps(struct shared *shared)
{
    while (atomic_fetch_add(&shared->step, 1) < STEPS - 1) {
        const uint64_t periods = periods_of(shared);
        forward(shared);
        pthread_barrier_wait(&shared->turn);
        pthread_barrier_wait(&shared->turn);
        shared->periods += periods_of(shared) > periods;
    }
}

static void wait_for_step(struct shared *shared, int step)
{
    const struct timespec pause = {.tv_nsec = 50 * 1000};
    while (atomic_load(&shared->step) < (step < STEPS ? step : STEPS))
        (void)nanosleep(&pause, NULL);
}

/* Allocates, as what prepares batches does, and now and then looks at the pool as a whole. */
static void *come_between(void *user)
{
    struct shared *shared = user;
    uint64_t random = 1;
    unsigned char *batch = NULL;
    while (atomic_load(&shared->step) < STEPS) {
        random = random * UINT64_C(6364136223846793005) + 1;
        HOLDS(shared, !batch || *batch == 99);
        HOLDS(shared, rebatch_pool_free(shared->pool, batch) == REBATCH_OK);
        void *block = NULL;
        const size_t bytes = 1 + (size_t)(random >> 40) % (3 * GRANULE);
        HOLDS(shared, rebatch_pool_alloc(&block, shared->pool, bytes, NULL, 0) == REBATCH_OK);
        batch = block;
        *batch = 99;
        if ((random >> 60) == 0)
            HOLDS(shared, rbi_pool_is_valid(shared->pool));
        wait_for_step(shared, atomic_load(&shared->step) + (int)(random >> 33) % 100);
    }
    HOLDS(shared, rebatch_pool_free(shared->pool, batch) == REBATCH_OK);
    return NULL;
}

/* 0 when all held, 1 when not, 2 when it could not be tried. */
static int run(void)
{
    static struct shared shared;
    const rebatch_host_options host = {sizeof host, GRANULE};
    rebatch_device *device;
    pthread_t worker, third;
    if (rebatch_device_open_host(&device, (size_t)64 << 20, &host) ||
        rebatch_pool_create(&shared.pool, device, NULL) ||
        pthread_barrier_init(&shared.turn, NULL, 2) != 0 ||
        pthread_create(&worker, NULL, work, &shared) != 0 ||
        pthread_create(&third, NULL, come_between, &shared) != 0) {
        fprintf(stderr, "setting up: %s\n", rebatch_last_error());
        return 2;
    }
    run_steps(&shared);
    (void)pthread_join(worker, NULL);
    (void)pthread_join(third, NULL);
    HOLDS(&shared, rbi_pool_is_valid(shared.pool));
    HOLDS(&shared, shared.periods > 0);
    printf("%d steps in turns, %llu of them a cycle's\n", STEPS,
           (unsigned long long)shared.periods);
    rebatch_pool_destroy(shared.pool);
    rebatch_device_close(device);
    return atomic_load(&shared.failures) == 0 ? 0 : 1;
}

int main(void)
{
    return run();
}
