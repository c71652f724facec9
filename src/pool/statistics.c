/* Owns the counting: statistics, tags, peaks, and the mark of the layers above.
 * Must not know how memory is found. */
#include <string.h>

#include "pool/pool.h"

void rbi_tags_init(rebatch_pool *pool)
{
    static const char untagged[] = "untagged";
    memcpy(pool->tags[0].name, untagged, sizeof untagged);
    pool->tag_count = 1;
}

void rbi_pool_get_stats(rebatch_pool_stats *out, const rebatch_pool *pool)
{
    const struct rbi_vm *const vm = &pool->vm;
    *out = pool->stats;
    out->reserved_bytes = rbi_vm_bytes(vm);
    out->reserved_peak_bytes = vm->peak_bytes;
    out->device_allocations = vm->allocations;
    out->device_frees = vm->frees;
    out->quarantined_bytes = vm->quarantined_bytes;
    out->overflow_bytes = vm->overflow.bytes;
    out->overflow_peak_bytes = vm->overflow.peak_bytes;
    out->overflow_total_bytes = vm->overflow.total_bytes;
    out->driver_creates = vm->calls.creates;
    out->driver_maps = vm->calls.maps;
    out->driver_accesses = vm->calls.accesses;
    out->driver_unmaps = vm->calls.unmaps;
    out->driver_releases = vm->calls.releases;
    out->driver_pieces = vm->calls.pieces;
    out->driver_ns = vm->calls.ns;
    out->allocations = pool->sequence;
    out->frees = pool->sequence - out->blocks - out->rolled_back_blocks;
    out->allocated_total_bytes = out->freed_total_bytes + out->live_bytes;
}

rebatch_status rebatch_pool_get_stats(rebatch_pool_stats *out, rebatch_pool *pool)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the statistics");
    *out = (rebatch_pool_stats){0};
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    rbi_pool_get_stats(out, pool);
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

rebatch_status rebatch_pool_reset_peaks(rebatch_pool *pool)
{
    const rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    pool->stats.live_peak_bytes = pool->stats.live_bytes;
    rbi_vm_reset_peak(&pool->vm);
    pool->stats.blocks_peak = pool->stats.blocks;
    rbi_pool_set_quiet(pool);
    pool->peak_number++;
    for (size_t i = 0; i < pool->tag_count; i++)
        pool->tags[i].peak_bytes = pool->tags[i].live_bytes;
    rbi_pool_give_lock(pool);
    return REBATCH_OK;
}

/* ---- tags ---- */

static rebatch_status tag_locked(rebatch_tag *out, rebatch_pool *pool, const char *name)
{
    const size_t length = strnlen(name, sizeof pool->tags[0].name - 1);
    for (size_t i = 0; i < pool->tag_count; i++) {
        if (strlen(pool->tags[i].name) == length && !memcmp(pool->tags[i].name, name, length)) {
            *out = (rebatch_tag)i;
            return REBATCH_OK;
        }
    }
    if (pool->tag_count == RBI_POOL_TAGS)
        return rbi_error(REBATCH_E_UNSUPPORTED, "tag \"%.31s\": %d tags exist: expected no more",
                         name, RBI_POOL_TAGS - 1);
    struct rbi_tag *tag = &pool->tags[pool->tag_count];
    memcpy(tag->name, name, length);
    *out = (rebatch_tag)pool->tag_count++;
    return REBATCH_OK;
}

rebatch_status rebatch_pool_tag(rebatch_tag *out, rebatch_pool *pool, const char *name)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the tag");
    *out = 0;
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    if (!name || !name[0])
        return rbi_error(REBATCH_E_INVALID, "name is %s: expected a tag's name",
                         name ? "empty" : "NULL");
    rbi_lock_take(&pool->lock);
    status = tag_locked(out, pool, name);
    rbi_pool_give_lock(pool);
    return status;
}

void rbi_tag_get_usage(const rebatch_pool *pool, size_t tag, rebatch_tag_usage *out)
{
    const struct rbi_tag *from = &pool->tags[tag];
    memcpy(out->name, from->name, sizeof out->name);
    out->live_bytes = from->live_bytes;
    out->peak_bytes = from->peak_bytes;
    out->at_peak_bytes =
        from->peak_number == pool->peak_number ? from->at_peak_bytes : from->live_bytes;
}

rebatch_status rebatch_pool_get_tag_usage(rebatch_tag_usage *out, rebatch_pool *pool,
                                          rebatch_tag tag)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL: expected where to put the usage");
    memset(out, 0, sizeof *out);
    rebatch_status status = rbi_pool_check(pool);
    if (status != REBATCH_OK)
        return status;
    rbi_lock_take(&pool->lock);
    if (tag < pool->tag_count)
        rbi_tag_get_usage(pool, tag, out);
    else
        status = rbi_error(REBATCH_E_INVALID, "tag is %u: expected 0 to %zu", (unsigned)tag,
                           pool->tag_count - 1);
    rbi_pool_give_lock(pool);
    return status;
}

/* ---- the mark ---- */

uint64_t rbi_pool_mark_peak(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const uint64_t live = pool->mark_peak_bytes = pool->stats.live_bytes;
    rbi_pool_set_quiet(pool);
    rbi_pool_give_lock(pool);
    return live;
}

uint64_t rbi_pool_peak_since_mark(rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    const uint64_t peak = pool->mark_peak_bytes;
    rbi_pool_give_lock(pool);
    return peak;
}

struct rbi_pool_traffic rbi_pool_traffic(const rebatch_pool *pool)
{
    return (struct rbi_pool_traffic){pool->vm.taken_bytes, pool->vm.given_bytes -
                                                               pool->asked_back_bytes -
                                                               pool->vm.broken_bytes};
}

void rbi_pool_read_traffic(struct rbi_pool_traffic *out, rebatch_pool *pool)
{
    rbi_lock_take(&pool->lock);
    *out = rbi_pool_traffic(pool);
    rbi_pool_give_lock(pool);
}

uint64_t rbi_pool_oom_count(const rebatch_pool *pool)
{
    return __atomic_load_n(&pool->own_ooms, __ATOMIC_RELAXED);
}
