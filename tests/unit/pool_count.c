/* Owns the naive count of what is asked of a pool. Must not know where blocks lie. */
#include "unit/pool_count.h"

#include "unit/pool_help.h"

void count_make_tags(rebatch_pool *pool)
{
    for (int i = 1; i < COUNT_TAGS; i++) {
        const char name[2] = {(char)('a' + i), 0};
        rebatch_tag tag;
        cr_assert_eq(rebatch_pool_tag(&tag, pool, name), REBATCH_OK);
    }
}

void count_alloc(struct count *count, struct counted *block)
{
    rebatch_pool_stats *want = &count->want;
    block->sequence = count->sequence++;
    want->allocations++;
    want->blocks++;
    want->live_bytes += block->rounded;
    want->requested_bytes += block->bytes;
    want->allocated_total_bytes += block->rounded;
    count->tag_bytes[block->tag] += block->rounded;
    want->live_peak_bytes = rbi_max(want->live_peak_bytes, want->live_bytes);
    want->blocks_peak = rbi_max(want->blocks_peak, want->blocks);
    for (size_t i = 0; i < count->depth; i++) {
        struct count_scope *s = &count->scopes[i];
        const int64_t live = (int64_t)want->live_bytes - s->live_at_begin;
        s->peak = live > s->peak ? live : s->peak;
    }
}

static void drop(struct count *count, const struct counted *block)
{
    rebatch_pool_stats *want = &count->want;
    want->live_bytes -= block->rounded;
    want->requested_bytes -= block->bytes;
    want->blocks--;
    want->freed_total_bytes += block->rounded;
    count->tag_bytes[block->tag] -= block->rounded;
}

bool count_must_wait(const struct count *count, const struct counted *block)
{
    return count->depth && block->sequence < count->scopes[count->depth - 1].first_sequence;
}

bool count_free(struct count *count, struct counted *block)
{
    if (count_must_wait(count, block)) {
        block->deferred_in = count->depth;
        count->want.deferred_bytes += block->rounded;
        return false;
    }
    drop(count, block);
    count->want.frees++;
    return true;
}

void count_begin(struct count *count, rebatch_pool *pool)
{
    if (count->depth < COUNT_DEPTH)
        count->scopes[count->depth++] =
            (struct count_scope){begin(pool), count->sequence, (int64_t)count->want.live_bytes, 0};
}

void count_commit(struct count *count, rebatch_pool *pool)
{
    count->depth--;
    cr_assert_eq(rebatch_scope_commit(pool, count->scopes[count->depth].handle), REBATCH_OK);
}

bool count_is_gone_by_commit(struct count *count, struct counted *block)
{
    if (block->deferred_in != count->depth + 1)
        return false;
    if (count_must_wait(count, block)) {
        block->deferred_in = count->depth;
        return false;
    }
    count->want.deferred_bytes -= block->rounded;
    drop(count, block);
    count->want.frees++;
    return true;
}

void count_rollback(struct count *count, rebatch_pool *pool, size_t to)
{
    cr_assert_eq(rebatch_scope_rollback(pool, count->scopes[to].handle), REBATCH_OK);
    count->want.rollbacks += count->depth - to;
    count->depth = to;
}

bool count_is_gone_by_rollback(struct count *count, struct counted *block)
{
    if (block->deferred_in > count->depth) {
        block->deferred_in = 0;
        count->want.deferred_bytes -= block->rounded;
    }
    if (block->sequence < count->scopes[count->depth].first_sequence)
        return false;
    drop(count, block);
    count->want.rolled_back_blocks++;
    return true;
}

static bool is_peak(int64_t got, int64_t want, size_t beyond)
{
    return want <= got && got <= want + (int64_t)beyond;
}

void count_compare(const struct count *count, rebatch_pool *pool, size_t beyond_bytes)
{
    const rebatch_pool_stats got = stats_of(pool), *want = &count->want;
#define SAME(name) cr_assert_eq(got.name, want->name, #name)
    SAME(live_bytes);
    SAME(requested_bytes);
    SAME(deferred_bytes);
    SAME(blocks);
    SAME(allocations);
    SAME(frees);
    SAME(allocated_total_bytes);
    SAME(freed_total_bytes);
    SAME(ooms);
    SAME(rollbacks);
    SAME(rolled_back_blocks);
    SAME(late_frees);
#undef SAME
    cr_assert(is_peak((int64_t)got.live_peak_bytes, (int64_t)want->live_peak_bytes, beyond_bytes));
    cr_assert(is_peak((int64_t)got.blocks_peak, (int64_t)want->blocks_peak, beyond_bytes / UNIT));
    for (size_t i = 0; i < count->depth; i++) {
        const struct count_scope *s = &count->scopes[i];
        const struct scope_stats stats = scope_stats(pool, s->handle);
        cr_assert_eq(stats.live_bytes, (int64_t)want->live_bytes - s->live_at_begin);
        cr_assert(is_peak(stats.peak_bytes, s->peak, beyond_bytes));
    }
    for (rebatch_tag t = 0; t < COUNT_TAGS; t++) {
        rebatch_tag_usage usage;
        cr_assert_eq(rebatch_pool_get_tag_usage(&usage, pool, t), REBATCH_OK);
        cr_assert_eq(usage.live_bytes, count->tag_bytes[t]);
    }
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(rebatch_pool_device(pool), &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, got.reserved_bytes);
}
