/* What the pool's tests share: a pool on a host device, and calls that must succeed. */
#ifndef POOL_HELP_H
#define POOL_HELP_H

#include <criterion/criterion.h>
#include <pthread.h>
#include <string.h>

#include "invariants/invariants.h"
#include "pool/pool.h"

#define PAGE ((size_t)65536)
#define UNIT ((size_t)REBATCH_POOL_UNIT_BYTES)
#define KIB ((size_t)1024)

struct rig {
    rebatch_device *device;
    rebatch_pool *pool;
};

static inline struct rig rig_open(size_t pages, const rebatch_pool_options *options)
{
    struct rig rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_host(&rig.device, pages * PAGE, NULL), REBATCH_OK);
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, options), REBATCH_OK);
    return rig;
}

/* As above, on a device that has no virtual memory: the pool then lives on plain allocations. */
static inline struct rig rig_open_plain(size_t pages, const rebatch_pool_options *options)
{
    static struct rbi_device_ops plain; /* each test is a process of its own */
    struct rig rig = {NULL, NULL};
    cr_assert_eq(rebatch_device_open_host(&rig.device, pages * PAGE, NULL), REBATCH_OK);
    plain = *rig.device->ops;
    plain.reserve = NULL;
    rig.device->ops = &plain;
    cr_assert_eq(rebatch_pool_create(&rig.pool, rig.device, options), REBATCH_OK);
    return rig;
}

/* Of a call that may fail, where only what it leaves matters. */
static inline void may_fail(rebatch_status status)
{
    (void)status;
}

static inline void assert_valid(rebatch_pool *pool)
{
    cr_assert(rbi_pool_is_valid(pool), "%s", rebatch_last_error());
}

static inline void assert_filled(const void *block, size_t bytes, int value)
{
    const unsigned char *at = block;
    for (size_t i = 0; i < bytes; i++)
        cr_assert_eq(at[i], value);
}

static inline void assert_oom(rebatch_pool *pool, size_t bytes)
{
    void *block;
    cr_assert_eq(rebatch_pool_alloc(&block, pool, bytes, NULL, 0), REBATCH_OOM);
    assert_valid(pool);
}

static inline size_t used_of(rebatch_device *device)
{
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    return info.used_bytes;
}

/* Closes both and makes sure that the device got everything back. */
static inline void rig_close(struct rig *rig)
{
    assert_valid(rig->pool);
    rebatch_pool_destroy(rig->pool);
    cr_assert_eq(used_of(rig->device), 0);
    rebatch_device_close(rig->device);
}

/* struct rig that closes itself at the end of its block. */
#define AUTO_RIG __attribute__((cleanup(rig_close))) struct rig

static inline void *take_on(rebatch_pool *pool, size_t bytes, rebatch_stream stream)
{
    void *pointer;
    cr_assert_eq(rebatch_pool_alloc(&pointer, pool, bytes, stream, 0), REBATCH_OK, "%s",
                 rebatch_last_error());
    return pointer;
}

static inline void *take(rebatch_pool *pool, size_t bytes)
{
    return take_on(pool, bytes, NULL);
}

static inline void give(rebatch_pool *pool, void *pointer)
{
    cr_assert_eq(rebatch_pool_free(pool, pointer), REBATCH_OK, "%s", rebatch_last_error());
}

/* Merges what was freed and not yet merged, so that the next blocks come by best fit. */
static inline void merge_freed(rebatch_pool *pool)
{
    rbi_pool_take_lock(pool);
    rbi_pool_flush_lists(pool);
    rbi_lock_give(&pool->lock);
}

static inline rebatch_pool_stats stats_of(rebatch_pool *pool)
{
    rebatch_pool_stats stats;
    cr_assert_eq(rebatch_pool_get_stats(&stats, pool), REBATCH_OK);
    return stats;
}

/* Makes as many allocations as a pool needs at least to know its needs. */
static inline void pass_beginning(rebatch_pool *pool)
{
    for (int i = 0; i < 1 << 14; i++)
        give(pool, take(pool, 512));
}

static inline rebatch_scope begin(rebatch_pool *pool)
{
    rebatch_scope scope;
    cr_assert_eq(rebatch_scope_begin(&scope, pool), REBATCH_OK);
    cr_assert_neq(scope, 0);
    return scope;
}

static inline void commit(rebatch_pool *pool, rebatch_scope scope)
{
    cr_assert_eq(rebatch_scope_commit(pool, scope), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
}

static inline void rollback(rebatch_pool *pool, rebatch_scope scope)
{
    cr_assert_eq(rebatch_scope_rollback(pool, scope), REBATCH_OK, "%s", rebatch_last_error());
    assert_valid(pool);
}

/* The calls that follow are made as another thread would make them: the pool knows threads by their
 * numbers. So a test decides in which order threads run. */
static inline void be_thread(uint64_t number)
{
    rbi_thread = number;
}

/* The thread whose calls a scope takes in, and one that it leaves out. */
enum { INSIDER = 21, OTHER = 22 };

static inline rebatch_scope begin_own(rebatch_pool *pool)
{
    rebatch_scope scope;
    be_thread(INSIDER);
    cr_assert_eq(rbi_scope_begin_phase(&scope, pool, false, 0), REBATCH_OK);
    return scope;
}

/* Of an open scope: what is live beyond its beginning, now and at the most. */
struct scope_stats {
    int64_t live_bytes, peak_bytes;
};

static inline struct scope_stats scope_stats(const rebatch_pool *pool, rebatch_scope scope)
{
    const struct rbi_scope *open = pool->scopes;
    while (open->handle != scope)
        open++;
    struct rbi_scope sum = *open;
    for (const struct rbi_scope *s = open + 1; s < pool->scopes + pool->depth; s++)
        rbi_scope_fold(&sum, s);
    return (struct scope_stats){(int64_t)(pool->stats.live_bytes - open->live_at_begin),
                                (int64_t)(sum.live_most - open->live_at_begin)};
}

/* The call is refused: with that status, and a text that has `words` in it. */
#define assert_refused(call, wanted, words)                                                        \
    do {                                                                                           \
        rebatch_clear_error();                                                                     \
        cr_assert_eq((call), (wanted));                                                            \
        cr_assert(strstr(rebatch_last_error(), (words)), "\"%s\" lacks \"%s\"",                    \
                  rebatch_last_error(), (words));                                                  \
    } while (0)

/* splitmix64: the tests' own generator, so that a seed means the same everywhere. */
static inline uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

#endif
