/* Holds what the pool promises when several threads use it at once, for a thread sanitizer too.
 * Seeds: 1 to 4, one a thread. A program of its own, as the test runner does not start under one:
 * exit status 0 when all held. All of it runs twice: in a pool that records events and in one that
 * does not. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "invariants/invariants.h"
#include "pool/pool.h"
#include "threads/holds.h"

enum { THREADS = 4, LIVE = 64, TURNS = 4000, STASH = 32, INSIDE = 200, BELT = 64, SMALL = 1000 };
#define CAPACITY ((size_t)7 << 20)
#define PAGE ((size_t)64 << 10)

struct shared {
    rebatch_device *device;
    rebatch_pool *pool;
    pthread_barrier_t barrier;
    _Atomic(void *) stash[STASH]; /* what the pressure callback can give up */
    _Atomic(void *) belt[BELT];   /* from those who allocate to those who free */
    atomic_int failures, done;
    atomic_uint_fast64_t ooms;
};

struct worker {
    struct shared *shared;
    unsigned number;
    uint64_t random;
    rebatch_stream stream;
    unsigned char *blocks[LIVE];
    size_t sizes[LIVE];
};

static uint64_t draw(struct worker *w)
{
    w->random ^= w->random >> 12;
    w->random ^= w->random << 25;
    w->random ^= w->random >> 27;
    return w->random * UINT64_C(2685821657736338717);
}

/* The ends of a block say whose it is, so that an overlap shows. */
static void mark(const struct worker *w, size_t k)
{
    w->blocks[k][0] = w->blocks[k][w->sizes[k] - 1] = (unsigned char)(w->number * LIVE + k);
}

static void give(struct worker *w, size_t k)
{
    if (!w->blocks[k])
        return;
    const unsigned char mine = (unsigned char)(w->number * LIVE + k);
    HOLDS(w->shared, w->blocks[k][0] == mine && w->blocks[k][w->sizes[k] - 1] == mine);
    HOLDS(w->shared, rebatch_pool_free(w->shared->pool, w->blocks[k]) == REBATCH_OK);
    w->blocks[k] = NULL;
}

static void take(struct worker *w, size_t k)
{
    void *block;
    const uint64_t r = draw(w);
    const size_t bytes = 1 + (size_t)(r >> 8) % ((size_t)512 << (r % 9));
    const rebatch_status status = rebatch_pool_alloc(&block, w->shared->pool, bytes, w->stream, 0);
    if (status == REBATCH_OOM) {
        atomic_fetch_add(&w->shared->ooms, 1);
        give(w, draw(w) % LIVE);
        return;
    }
    HOLDS(w->shared, status == REBATCH_OK && block);
    if (status != REBATCH_OK)
        return;
    w->blocks[k] = block;
    w->sizes[k] = bytes;
    mark(w, k);
}

/* Gives a block of 128 KiB up where there is one. */
static size_t give_up(size_t wanted_bytes, void *user)
{
    struct shared *shared = user;
    (void)wanted_bytes;
    for (size_t i = 0; i < STASH; i++) {
        void *block = atomic_exchange(&shared->stash[i], NULL);
        if (!block)
            continue;
        HOLDS(shared, rebatch_pool_free(shared->pool, block) == REBATCH_OK);
        return (size_t)128 << 10;
    }
    return 0;
}

static void fill_stash(struct worker *w)
{
    for (size_t i = 0; i < STASH; i++) {
        void *block;
        if (rebatch_pool_alloc(&block, w->shared->pool, (size_t)128 << 10, w->stream, 0))
            return;
        void *none = NULL;
        if (!atomic_compare_exchange_strong(&w->shared->stash[i], &none, block))
            HOLDS(w->shared, rebatch_pool_free(w->shared->pool, block) == REBATCH_OK);
    }
}

static rebatch_status count_bytes(const void *data, size_t size, void *user)
{
    (void)data;
    *(size_t *)user += size;
    return REBATCH_OK;
}

/* What is not an allocation or a free: rarer, and each from all threads. */
static void do_else(struct worker *w)
{
    rebatch_pool *pool = w->shared->pool;
    rebatch_pool_stats stats;
    size_t bytes, k = draw(w) % LIVE;
    switch (draw(w) % 6) {
    case 0:
        HOLDS(w->shared, rebatch_pool_get_stats(&stats, pool) == REBATCH_OK);
        HOLDS(w->shared, stats.live_bytes <= stats.reserved_bytes);
        HOLDS(w->shared, stats.reserved_bytes <= CAPACITY);
        break;
    case 1:
        HOLDS(w->shared, rebatch_pool_trim(pool, (size_t)1 << 20, &bytes) == REBATCH_OK);
        break;
    case 2:
        HOLDS(w->shared, rebatch_pool_reset_peaks(pool) == REBATCH_OK);
        break;
    case 3:
        fill_stash(w);
        break;
    case 4:
        bytes = 0;
        HOLDS(w->shared, rebatch_pool_write_snapshot(pool, (rebatch_snapshot_format)(k % 2),
                                                     count_bytes, &bytes) == REBATCH_OK);
        HOLDS(w->shared, bytes > 0);
        break;
    default:
        if (!w->blocks[k])
            break;
        HOLDS(w->shared, rebatch_pool_use_on(pool, w->blocks[k], NULL) == REBATCH_OK);
        HOLDS(w->shared, rebatch_pool_block_bytes(&bytes, pool, w->blocks[k]) == REBATCH_OK);
        HOLDS(w->shared, bytes >= w->sizes[k]);
    }
}

static void churn(struct worker *w)
{
    for (int turn = 0; turn < TURNS; turn++) {
        const size_t k = draw(w) % LIVE;
        give(w, k);
        take(w, k);
        if (turn % 64 == 0)
            do_else(w);
    }
}

/* Scopes belong to the pool, not to a thread: one thread opens and commits them while all churn, so
 * that frees of older blocks wait. */
static void churn_in_scopes(struct worker *w)
{
    for (int i = 0; i < 4; i++) {
        rebatch_scope scope = 0;
        if (w->number == 0)
            HOLDS(w->shared, rebatch_scope_begin(&scope, w->shared->pool) == REBATCH_OK);
        for (int turn = 0; turn < TURNS / 8; turn++) {
            const size_t k = draw(w) % LIVE;
            give(w, k);
            take(w, k);
        }
        if (w->number == 0)
            HOLDS(w->shared, rebatch_scope_commit(w->shared->pool, scope) == REBATCH_OK);
    }
}

/* What all threads allocate in a scope is taken back at once; each then frees its own too late. */
static void roll_back(struct worker *w)
{
    static _Thread_local void *inside[INSIDE];
    struct shared *shared = w->shared;
    rebatch_scope scope = 0;
    rebatch_pool_stats before, after;
    for (size_t k = 0; k < LIVE; k++)
        give(w, k);
    pthread_barrier_wait(&shared->barrier);
    if (w->number == 0) {
        HOLDS(shared, rebatch_pool_get_stats(&before, shared->pool) == REBATCH_OK);
        HOLDS(shared, rebatch_scope_begin(&scope, shared->pool) == REBATCH_OK);
    }
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < INSIDE; i++)
        HOLDS(shared, rebatch_pool_alloc(&inside[i], shared->pool, 512 + 512 * (draw(w) % 8),
                                         w->stream, 0) == REBATCH_OK);
    pthread_barrier_wait(&shared->barrier);
    if (w->number == 0)
        HOLDS(shared, rebatch_scope_rollback(shared->pool, scope) == REBATCH_OK);
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < INSIDE; i++)
        HOLDS(shared, rebatch_pool_free(shared->pool, inside[i]) == REBATCH_OK);
    pthread_barrier_wait(&shared->barrier);
    if (w->number != 0)
        return;
    HOLDS(shared, rebatch_pool_get_stats(&after, shared->pool) == REBATCH_OK);
    HOLDS(shared, after.rolled_back_blocks - before.rolled_back_blocks == THREADS * INSIDE);
    HOLDS(shared, after.late_frees - before.late_frees == THREADS * INSIDE);
    HOLDS(shared, after.live_bytes == before.live_bytes);
}

/* One half of the threads allocates, the other frees: the block's first byte says its size. */
static void hand_over(struct worker *w)
{
    struct shared *shared = w->shared;
    for (int turn = 0; turn < TURNS; turn++) {
        _Atomic(void *) *slot = &shared->belt[draw(w) % BELT];
        void *block = NULL, *none = NULL;
        if (w->number % 2) {
            unsigned char *given = atomic_exchange(slot, NULL);
            if (!given)
                continue;
            HOLDS(shared, given[0] != 0 && given[512 * given[0] - 1] == given[0]);
            given[0] = 0;
            HOLDS(shared, rebatch_pool_free(shared->pool, given) == REBATCH_OK);
            continue;
        }
        const size_t units = 1 + draw(w) % 16;
        if (rebatch_pool_alloc(&block, shared->pool, 512 * units, w->stream, 0))
            continue;
        unsigned char *bytes = block;
        bytes[0] = bytes[512 * units - 1] = (unsigned char)units;
        if (!atomic_compare_exchange_strong(slot, &none, block))
            HOLDS(shared, rebatch_pool_free(shared->pool, block) == REBATCH_OK);
    }
    pthread_barrier_wait(&shared->barrier);
    for (size_t i = w->number; i < BELT; i += THREADS) {
        void *left = atomic_exchange(&shared->belt[i], NULL);
        HOLDS(shared, rebatch_pool_free(shared->pool, left) == REBATCH_OK);
    }
}

/* One thread opens scopes and rolls them back while the others allocate; what they cannot know to
 * have been taken back they leave to the scope around all. */
static void roll_back_meanwhile(struct worker *w)
{
    struct shared *shared = w->shared;
    rebatch_pool_stats before, after;
    rebatch_scope outer = 0, inner;
    void *block;
    if (w->number == 0) {
        HOLDS(shared, rebatch_pool_get_stats(&before, shared->pool) == REBATCH_OK);
        HOLDS(shared, rebatch_scope_begin(&outer, shared->pool) == REBATCH_OK);
    }
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < SMALL && w->number != 0; i++)
        HOLDS(shared, rebatch_pool_alloc(&block, shared->pool, 1 + draw(w) % 1024, w->stream, 0) ==
                          REBATCH_OK);
    for (int i = 0; i < 40 && w->number == 0; i++) {
        HOLDS(shared, rebatch_scope_begin(&inner, shared->pool) == REBATCH_OK);
        for (int j = 0; j < 20; j++)
            HOLDS(shared,
                  rebatch_pool_alloc(&block, shared->pool, 600, w->stream, 0) == REBATCH_OK);
        HOLDS(shared, rebatch_scope_rollback(shared->pool, inner) == REBATCH_OK);
    }
    pthread_barrier_wait(&shared->barrier);
    if (w->number != 0)
        return;
    HOLDS(shared, rebatch_scope_rollback(shared->pool, outer) == REBATCH_OK);
    HOLDS(shared, rebatch_pool_get_stats(&after, shared->pool) == REBATCH_OK);
    HOLDS(shared, after.live_bytes == before.live_bytes && after.blocks == before.blocks);
    HOLDS(shared,
          after.rolled_back_blocks - before.rolled_back_blocks == (THREADS - 1) * SMALL + 40 * 20);
}

/* What other threads have freed is in lists of their streams, and one thread asks for half of the
 * device: it must be had. */
static void ask_for_what_others_have(struct worker *w)
{
    struct shared *shared = w->shared;
    void *blocks[LIVE];
    for (size_t k = 0; k < LIVE; k++)
        give(w, k);
    pthread_barrier_wait(&shared->barrier);
    if (w->number == 0)
        while (give_up(0, shared) > 0) {
        }
    pthread_barrier_wait(&shared->barrier);
    for (int round = 0; round < 20; round++) {
        const size_t count = w->number == 0 ? 0 : LIVE;
        for (size_t k = 0; k < count; k++)
            HOLDS(shared, rebatch_pool_alloc(&blocks[k], shared->pool, 16 << 10, w->stream, 0) ==
                              REBATCH_OK);
        for (size_t k = 0; k < count; k++)
            HOLDS(shared, rebatch_pool_free(shared->pool, blocks[k]) == REBATCH_OK);
        pthread_barrier_wait(&shared->barrier);
        if (w->number == 0) {
            HOLDS(shared, rebatch_pool_alloc(&blocks[0], shared->pool, CAPACITY / 2, w->stream,
                                             0) == REBATCH_OK);
            HOLDS(shared, rebatch_pool_free(shared->pool, blocks[0]) == REBATCH_OK);
        } else if (w->number == 1) {
            HOLDS(shared, rebatch_pool_alloc(&blocks[0], shared->pool, 16 << 10, w->stream, 0) ==
                              REBATCH_OK);
            HOLDS(shared, rebatch_pool_free(shared->pool, blocks[0]) == REBATCH_OK);
        }
        pthread_barrier_wait(&shared->barrier);
    }
}

static void *work(void *user)
{
    static void (*const parts[])(struct worker *) = {
        churn, churn_in_scopes, roll_back, hand_over, roll_back_meanwhile, ask_for_what_others_have,
    };
    struct worker *w = user;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        pthread_barrier_wait(&w->shared->barrier);
        parts[i](w);
    }
    return NULL;
}

/* Looks at the pool as a whole while the others are at work. It sleeps in between: a look holds the
 * lock for long under a sanitizer, and the lock goes to whoever runs, so without it they starve. */
static void *watch(void *user)
{
    const struct timespec between = {.tv_nsec = 1000 * 1000};
    struct shared *shared = user;
    while (!atomic_load(&shared->done)) {
        rebatch_pool_stats stats;
        rebatch_tag_usage usage;
        HOLDS(shared, rebatch_pool_get_stats(&stats, shared->pool) == REBATCH_OK);
        HOLDS(shared, stats.live_bytes <= stats.live_peak_bytes);
        HOLDS(shared, stats.allocations == stats.frees + stats.rolled_back_blocks + stats.blocks);
        HOLDS(shared, rebatch_pool_get_tag_usage(&usage, shared->pool, 0) == REBATCH_OK);
        HOLDS(shared, rbi_pool_is_valid(shared->pool));
        (void)nanosleep(&between, NULL);
    }
    return NULL;
}

static bool set_up(struct shared *shared, bool has_events)
{
    const rebatch_host_options host = {sizeof host, PAGE};
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.events = has_events ? 100 : 0;
    if (rebatch_device_open_host(&shared->device, CAPACITY, &host) ||
        rebatch_pool_create(&shared->pool, shared->device, &options) ||
        rebatch_pool_add_pressure(shared->pool, give_up, shared))
        return false;
    return pthread_barrier_init(&shared->barrier, NULL, THREADS) == 0;
}

/* Nothing is left, and all sums hold. */
static void check_end(struct shared *shared)
{
    while (give_up(0, shared) > 0) {
    }
    rebatch_pool_stats stats;
    HOLDS(shared, rebatch_pool_get_stats(&stats, shared->pool) == REBATCH_OK);
    HOLDS(shared, stats.live_bytes == 0 && stats.blocks == 0 && stats.deferred_bytes == 0);
    HOLDS(shared, stats.allocations == stats.frees + stats.rolled_back_blocks);
    HOLDS(shared, stats.pressure_calls > 0);
    HOLDS(shared, rbi_pool_is_valid(shared->pool));
    size_t released;
    HOLDS(shared, rebatch_pool_trim(shared->pool, 0, &released) == REBATCH_OK);
    printf("%llu allocations, %llu times out of memory\n", (unsigned long long)stats.allocations,
           (unsigned long long)atomic_load(&shared->ooms));
}

/* 0 when all held, 1 when not, 2 when it could not be tried. */
static int run(bool has_events)
{
    struct shared shared = {.pool = NULL};
    static struct worker workers[THREADS];
    pthread_t threads[THREADS], watcher;
    if (!set_up(&shared, has_events)) {
        fprintf(stderr, "setting up: %s\n", rebatch_last_error());
        return 2;
    }
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.shared = &shared, .number = i, .random = i + 1};
        if (rebatch_stream_create(&workers[i].stream, shared.device) ||
            pthread_create(&threads[i], NULL, work, &workers[i]) != 0) {
            fputs("no stream or thread to be had\n", stderr);
            exit(2);
        }
    }
    if (pthread_create(&watcher, NULL, watch, &shared) != 0)
        exit(2);
    for (unsigned i = 0; i < THREADS; i++)
        (void)pthread_join(threads[i], NULL);
    atomic_store(&shared.done, 1);
    (void)pthread_join(watcher, NULL);
    check_end(&shared);
    rebatch_pool_destroy(shared.pool);
    for (unsigned i = 0; i < THREADS; i++)
        rebatch_stream_destroy(shared.device, workers[i].stream);
    rebatch_device_close(shared.device);
    (void)pthread_barrier_destroy(&shared.barrier);
    return atomic_load(&shared.failures) == 0 ? 0 : 1;
}

int main(void)
{
    const int status = run(false);
    return status ? status : run(true);
}
