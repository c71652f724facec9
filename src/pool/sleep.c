/* Owns sleep and wake: whose blocks keep their memory, whose contents are copied, and who waits.
 * Must not know chunks, nor where copies lie. */
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "pool/pool.h"

bool rbi_pool_sleeps(const rebatch_pool *pool)
{
    return rbi_pool_is_asleep(pool);
}

/* ---- waiting ---- */

static void tell_waiting(rebatch_pool *pool)
{
    void (*const on_wait)(void *user) = pool->sleep.on_wait;
    void *const user = pool->sleep.user;
    pool->sleep.on_wait = NULL;
    if (!on_wait)
        return;
    rbi_pool_give_lock(pool);
    on_wait(user);
    rbi_lock_take(&pool->lock);
}

/* One that is interrupted wakes the pool, so that what it was at can be undone. */
rebatch_status rbi_pool_await_wake(rebatch_pool *pool)
{
    static const struct timespec turn = {.tv_nsec = 100000000};
    rbi_assert(rbi_lock_is_held(&pool->lock));
    tell_waiting(pool);
    while (atomic_load(&pool->is_asleep)) {
        bool (*const is_interrupted)(void *user) = pool->sleep.is_interrupted;
        void *const user = pool->sleep.interrupt_user;
        rbi_pool_give_lock(pool);
        (void)syscall(SYS_futex, &pool->is_asleep, FUTEX_WAIT_PRIVATE, 1,
                      is_interrupted ? &turn : NULL, NULL, 0);
        if (is_interrupted && atomic_load(&pool->is_asleep) && is_interrupted(user) &&
            rebatch_pool_wake(pool)) {
            char why[256];
            (void)snprintf(why, sizeof why, "%s", rebatch_last_error());
            return rbi_error(REBATCH_E_STATE, "interrupted while the pool sleeps: %s", why);
        }
        rbi_lock_take(&pool->lock);
    }
    return REBATCH_OK;
}

rebatch_status rbi_pool_wait_awake(rebatch_pool *pool)
{
    rebatch_status status = REBATCH_OK;
    if (rbi_pool_is_asleep(pool) && !(status = rbi_pool_take_lock_awake(pool)))
        rbi_pool_give_lock(pool);
    return status;
}

rebatch_status rebatch_pool_set_interrupt(rebatch_pool *pool, bool (*is_interrupted)(void *user),
                                          void *user)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    pool->sleep.is_interrupted = is_interrupted;
    pool->sleep.interrupt_user = user;
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

static void set_asleep(rebatch_pool *pool, bool is_asleep)
{
    atomic_store(&pool->is_asleep, is_asleep);
    rbi_pool_set_floor(pool);
    if (!is_asleep)
        (void)syscall(SYS_futex, &pool->is_asleep, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static struct rbi_pool_look look(const rebatch_pool *pool)
{
    return (struct rbi_pool_look){rbi_vm_bytes(&pool->vm), pool->stats.live_bytes,
                                  pool->given_bytes, pool->page_bytes};
}

static void begin(rebatch_pool *pool)
{
    const struct rbi_pool_look found = look(pool);
    pool->sleep.reserved_bytes = found.reserved_bytes;
    pool->sleep.live_bytes = found.live_bytes;
    pool->sleep.given_bytes = found.given_bytes;
    pool->sleep.is_at_work = true;
}

/* The floor is there again where the pool is awake, as far as there is memory. */
static void end(rebatch_pool *pool)
{
    size_t missing;
    rbi_pool_keep_limit(pool);
    (void)rbi_pool_take_floor(&missing, pool);
    pool->sleep.is_at_work = false;
    rbi_pool_give_lock(pool);
}

struct rbi_pool_look rbi_pool_look(rebatch_pool *pool)
{
    while (!rbi_lock_try(&pool->lock)) {
        if (pool->sleep.is_at_work)
            return (struct rbi_pool_look){pool->sleep.reserved_bytes, pool->sleep.live_bytes,
                                          pool->sleep.given_bytes, pool->page_bytes};
        (void)usleep(100);
    }
    const struct rbi_pool_look found = look(pool);
    rbi_pool_give_lock(pool);
    return found;
}

/* ---- what becomes of a chunk ---- */

enum fate { FATE_FREE, FATE_DROPPED, FATE_COPIED, FATE_KEPT };

/* Of the blocks of a tag. */
struct fates {
    uint8_t of[RBI_POOL_TAGS]; /* enum fate */
};

static rebatch_status read_tags(struct fates *fates, const rebatch_pool *pool, const char *name,
                                const rebatch_tag *tags, size_t count, enum fate fate)
{
    if (count && !tags)
        return rbi_error(REBATCH_E_INVALID, "rebatch_sleep_options.%s is NULL: expected %zu tags",
                         name, count);
    for (size_t i = 0; i < count; i++) {
        if (tags[i] >= pool->tag_count)
            return rbi_error(REBATCH_E_INVALID,
                             "rebatch_sleep_options.%s has tag %u: expected one from "
                             "rebatch_pool_tag(), 0 to %zu",
                             name, (unsigned)tags[i], pool->tag_count - 1);
        if (fates->of[tags[i]] != FATE_COPIED && fates->of[tags[i]] != fate)
            return rbi_error(REBATCH_E_INVALID,
                             "tag \"%s\" is in `keep` and in `drop`: expected it in one of them",
                             pool->tags[tags[i]].name);
        fates->of[tags[i]] = (uint8_t)fate;
    }
    return REBATCH_OK;
}

static rebatch_status read_fates(struct fates *fates, const rebatch_pool *pool,
                                 const rebatch_sleep_options *options)
{
    memset(fates->of, FATE_COPIED, sizeof fates->of);
    const rebatch_status status =
        read_tags(fates, pool, "keep", options->keep, options->keep_count, FATE_KEPT);
    return status
               ? status
               : read_tags(fates, pool, "drop", options->drop, options->drop_count, FATE_DROPPED);
}

static enum fate fate_of(const struct fates *fates, const struct rbi_block *block)
{
    switch (block->state) {
    case RBI_BLOCK_FREE:
    case RBI_BLOCK_QUICK:
        return FATE_FREE;
    case RBI_BLOCK_LIVE:
    case RBI_BLOCK_DEFERRED:
        return (enum fate)fates->of[block->tag];
    default:
        return FATE_KEPT; /* memory that cannot be unmapped, or is in somebody's hands */
    }
}

/* Chunks are of one fate, that of the block in them which needs most. */
static rebatch_status add_range(rebatch_pool *pool, const struct fates *fates,
                                const struct rbi_range *range, size_t from)
{
    rebatch_status status = REBATCH_OK;
    size_t page = 0, pages;
    for (const struct rbi_block *b = range->first; b && status == REBATCH_OK;) {
        char *const at = range->address + page * pool->page_bytes;
        if (at >= b->address + b->bytes) {
            b = b->after;
            continue;
        }
        if (at < b->address || !rbi_map_is_mapped(range->map, at)) { /* a hole, whole pages */
            page = (size_t)(b->address + b->bytes - range->address) / pool->page_bytes;
            continue;
        }
        pages = rbi_map_chunk_pages(range->map, at);
        enum fate fate = FATE_FREE;
        for (const struct rbi_block *c = b; c && c->address < at + pages * pool->page_bytes;
             c = c->after)
            fate = rbi_max(fate, fate_of(fates, c));
        if (fate != FATE_KEPT && !rbi_asleep_has(&pool->vm, range->map, page))
            status = rbi_asleep_add(&pool->vm, from, range->map, page, pages, fate == FATE_COPIED);
        page += pages;
    }
    return status;
}

static rebatch_status add_all(rebatch_pool *pool, const struct fates *fates, size_t from)
{
    rebatch_status status = REBATCH_OK;
    for (const struct rbi_range *r = pool->heap.first_range; r && !status; r = r->next)
        if (!r->is_shared) /* what other processes have */
            status = add_range(pool, fates, r, from);
    return status;
}

/* ---- sleep ---- */

static rebatch_status check_sleep(rebatch_pool *pool)
{
    if (!pool->has_space)
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "the pool has no virtual memory, or does not cache: expected both");
    if (pool->pressing)
        return rbi_error(REBATCH_E_STATE, "a pressure callback of the pool is running: expected "
                                          "rebatch_pool_sleep() after it");
    for (size_t i = 0; i < pool->depth && pool->sleep.allowed_to != rbi_thread_number(); i++)
        if (pool->scopes[i].is_phase)
            return rbi_error(REBATCH_E_STATE, "a session's step is running on the pool: expected "
                                              "rebatch_pool_sleep() between two steps");
    if (!rbi_pool_may_wait(pool))
        return rbi_error(REBATCH_E_STATE,
                         "a graph is being captured: expected rebatch_pool_sleep() after it");
    const rebatch_status status = rbi_pool_await(pool, ++pool->progress.frees);
    return status ? status : rbi_pool_await_all(pool);
}

/* Free pages go back first, so that no chunk is looked at that holds nothing; and then those that
 * large chunks had held. */
static rebatch_status put_to_sleep(rebatch_pool *pool, const struct fates *fates)
{
    size_t released;
    const size_t from = pool->vm.asleep.count;
    rebatch_status status = rbi_pool_trim_cache(pool, 0, NULL, &released);
    if (status == REBATCH_OK)
        status = add_all(pool, fates, from);
    if (status == REBATCH_OK)
        status = rbi_asleep_save(&pool->vm, from);
    if (status != REBATCH_OK) {
        rbi_asleep_forget(&pool->vm, from);
        return status;
    }
    rbi_asleep_unmap(&pool->vm);
    return rbi_pool_trim_cache(pool, 0, NULL, &released);
}

static uint64_t kept_bytes(const rebatch_pool *pool, const struct fates *fates)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < pool->tag_count; i++)
        bytes += fates->of[i] == FATE_KEPT ? pool->tags[i].live_bytes : 0;
    return bytes;
}

static rebatch_status sleep_locked(rebatch_pool *pool, const rebatch_sleep_options *options,
                                   rebatch_sleep_report *report)
{
    struct fates fates;
    rebatch_status status = read_fates(&fates, pool, options);
    if (status != REBATCH_OK || (status = check_sleep(pool)) != REBATCH_OK)
        return status;
    const bool was_asleep = rbi_pool_is_asleep(pool);
    const uint64_t before = rbi_vm_device_bytes(&pool->vm);
    const size_t copied = pool->vm.asleep.copied_pages;
    pool->promised_bytes = 0;
    set_asleep(pool, true);
    status = put_to_sleep(pool, &fates);
    if (status != REBATCH_OK) {
        set_asleep(pool, was_asleep);
        return status;
    }
    pool->sleep.on_wait = options->on_wait;
    pool->sleep.user = options->user;
    const uint64_t held = rbi_vm_device_bytes(&pool->vm);
    *report = (rebatch_sleep_report){.released_bytes = before - held,
                                     .copied_bytes =
                                         (pool->vm.asleep.copied_pages - copied) * pool->page_bytes,
                                     .held_bytes = held,
                                     .kept_bytes = kept_bytes(pool, &fates)};
    return REBATCH_OK;
}

rebatch_status rebatch_pool_sleep(rebatch_pool *pool, const rebatch_sleep_options *options,
                                  rebatch_sleep_report *report)
{
    rebatch_sleep_report unused, *const out = report ? report : &unused;
    *out = (rebatch_sleep_report){0};
    rebatch_sleep_options ours = REBATCH_SLEEP_OPTIONS_INIT;
    rebatch_status status = rbi_pool_check(pool);
    if (status == REBATCH_OK)
        status = rbi_options_copy(&ours, sizeof ours, RBI_SIZE_TO(rebatch_sleep_options, user),
                                  options, "rebatch_sleep_options");
    if (status != REBATCH_OK)
        return status;
    rbi_pool_take_lock(pool);
    begin(pool);
    status = sleep_locked(pool, &ours, out);
    end(pool);
    return status;
}

/* ---- wake ---- */

/* What was freed meanwhile needs no memory; then all that is left must have some. */
static rebatch_status wake_locked(rebatch_pool *pool)
{
    size_t room, released;
    rebatch_status status = rbi_pool_await_all(pool);
    if (status == REBATCH_OK)
        status = rbi_pool_trim_cache(pool, 0, NULL, &released);
    if (status == REBATCH_OK)
        status = rbi_pool_room(&room, pool, NULL);
    if (status != REBATCH_OK)
        return status;
    const size_t bytes = pool->vm.asleep.pages * pool->page_bytes;
    if (bytes > room)
        return rbi_error(REBATCH_OOM,
                         "the blocks in use need %zu bytes of the device: expected as many free "
                         "within limit and headroom, and there are %zu",
                         bytes, room);
    status = rbi_asleep_wake(&pool->vm);
    if (status == REBATCH_OK) {
        pool->plan.has_woken = true;
        set_asleep(pool, false);
    }
    return status;
}

rebatch_status rebatch_pool_wake(rebatch_pool *pool)
{
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK ||
        (status = rbi_pool_check_caller(pool, "rebatch_pool_wake")) != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    begin(pool);
    const bool is_asleep = rbi_pool_is_asleep(pool);
    if (is_asleep && !rbi_pool_may_wait(pool)) {
        status = rbi_error(REBATCH_E_STATE,
                           "a graph is being captured: expected rebatch_pool_wake() after it");
    } else {
        pool->given_bytes = SIZE_MAX;
        if (is_asleep)
            status = wake_locked(pool);
    }
    end(pool);
    return status;
}
