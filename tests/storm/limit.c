/* Owns the limit on the pool: when it moves, and what must hold under it.
 * Must not know what the program does. */
#include <inttypes.h>

#include "storm.h"

void storm_limit_set(struct storm *s, size_t bytes)
{
    s->limit = bytes;
    if (rebatch_pool_set_limit(s->pool, bytes) != REBATCH_OK)
        storm_fail(s, "a limit was refused: %s", rebatch_last_error());
    storm_say(s, "  limit: %zu bytes", bytes);
}

void storm_limit_move(struct storm *s)
{
    rebatch_pool_stats stats;
    if (s->plan.limits == 0 || !storm_one_in(&s->dice, s->plan.limits))
        return;
    (void)rebatch_pool_get_stats(&stats, s->pool);
    const size_t most = 1 + 2 * (size_t)stats.reserved_bytes;
    storm_limit_set(
        s, storm_one_in(&s->dice, 3) ? 0 : s->plan.page_bytes + storm_below(&s->dice, most));
}

/* Of the device; 0: that is within the limit. */
static uint64_t beyond(const struct storm *s)
{
    rebatch_pool_stats stats;
    (void)rebatch_pool_get_stats(&stats, s->pool);
    const uint64_t held = stats.reserved_bytes - stats.overflow_bytes;
    return s->limit && held > s->limit ? held - s->limit : 0;
}

/* What a reservation has promised stays, and what a plan has served until the next call. */
void storm_limit_check(struct storm *s, const char *where)
{
    size_t released = 0;
    void *block;
    if (s->plan.reserves || s->has_failed || beyond(s) == 0 ||
        rebatch_pool_alloc(&block, s->pool, 1, NULL, 0) != REBATCH_OK)
        return;
    storm_free(s, block);
    const uint64_t excess = beyond(s);
    if (excess == 0)
        return;
    (void)rebatch_pool_trim(s->pool, 0, &released);
    if (released)
        storm_fail(s, "%s: %" PRIu64 " bytes beyond the limit, and %zu of them cached", where,
                   excess, released);
}

void storm_limit_check_buffers(struct storm *s)
{
    const rebatch_options *const o = &s->plan.options;
    bool is_smallest = true;
    for (size_t size = 1; size < s->buffers.samples; size++)
        is_smallest &= !storm_is_allowed(o, size);
    if (s->plan.has_resize && s->buffers.made == s->made_at_step && !s->has_moved_limit &&
        !is_smallest && beyond(s))
        storm_fail(s,
                   "a step begins with buffers for %zu samples, %" PRIu64 " bytes beyond the limit",
                   s->buffers.samples, beyond(s));
}
