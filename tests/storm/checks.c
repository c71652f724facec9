/* Owns what must hold of the program under test at any time.
 * Must not know where trouble comes from. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "storm.h"

void storm_fail(struct storm *s, const char *format, ...)
{
    if (s->has_failed)
        return;
    s->has_failed = true;
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(s->failure, sizeof s->failure, format, arguments);
    va_end(arguments);
    storm_say(s, "*** %s", s->failure);
}

void storm_say(const struct storm *s, const char *format, ...)
{
    if (!s->is_verbose)
        return;
    va_list arguments;
    va_start(arguments, format);
    (void)vprintf(format, arguments);
    va_end(arguments);
    (void)putchar('\n');
    (void)fflush(stdout); /* before what may be a crash */
}

size_t storm_rounded(size_t bytes)
{
    return (bytes + REBATCH_POOL_UNIT_BYTES - 1) / REBATCH_POOL_UNIT_BYTES *
           REBATCH_POOL_UNIT_BYTES;
}

bool storm_same_bits(const double *a, const double *b, size_t count)
{
    return memcmp(a, b, count * sizeof *a) == 0;
}

/* ---- blocks ---- */

/* The bytes that a block takes; it is live, and of the right size. */
static uint64_t look_at_block(struct storm *s, const void *block, size_t bytes, const char *what,
                              const char *where)
{
    size_t has = 0;
    if (!block)
        return 0;
    const rebatch_status status = rebatch_pool_block_bytes(&has, s->pool, block);
    const bool is_rounded_up = s->plan.options.pool.rounding_divisions != 0;
    if (status != REBATCH_OK)
        storm_fail(s, "%s: %s is at %p, which is no block in use", where, what, block);
    else if (has < bytes || (!is_rounded_up && has != storm_rounded(bytes)))
        storm_fail(s, "%s: the block of %s has %zu bytes for %zu", where, what, has, bytes);
    return has;
}

static void look_at_table(struct storm *s, const struct storm_cache *cache, size_t i,
                          const char *where)
{
    for (size_t k = 0; cache->table && k < cache->count; k++)
        if (cache->table[k] != storm_entry(i, k)) {
            storm_fail(s, "%s: entry %zu of cache %zu is wrong", where, k, i);
            return;
        }
}

static void look_at_spare(struct storm *s, const struct storm_spare *spare, size_t i,
                          const char *where)
{
    if (spare->block && !storm_is_filled(spare->block, spare->bytes, storm_spare_marker(s, i)))
        storm_fail(s, "%s: spare block %zu was overwritten", where, i);
}

uint64_t storm_held(struct storm *s, const char *where)
{
    const struct storm_keep *const keep = &s->keep;
    const size_t numbers = STORM_PARAMETERS * sizeof(double);
    uint64_t held = look_at_block(s, keep->moments, numbers, "the moments", where);
    held += look_at_block(s, keep->gradients, numbers, "the gradients", where);
    for (size_t i = 0; i < STORM_CACHES && !s->has_failed; i++) {
        const struct storm_cache *const cache = &keep->caches[i];
        held += look_at_block(s, cache->table, cache->count * sizeof(double), "a cache", where);
    }
    for (size_t i = 0; i < STORM_SPARES && !s->has_failed; i++)
        held += look_at_block(s, keep->spares[i].block, keep->spares[i].bytes, "a spare", where);
    for (size_t i = 0; i < STORM_CACHES && !s->has_failed; i++)
        look_at_table(s, &keep->caches[i], i, where);
    for (size_t i = 0; i < STORM_SPARES && !s->has_failed; i++)
        look_at_spare(s, &keep->spares[i], i, where);
    return held;
}

void storm_check_memory(struct storm *s, const char *where)
{
    rebatch_pool_stats stats;
    if (s->has_failed)
        return;
    const uint64_t buffers = storm_buffers_held(s, &s->buffers) +
                             storm_buffers_held(s, &s->map_buffers) +
                             storm_buffers_held(s, &s->neighbour.buffers);
    const uint64_t held = storm_held(s, where) + buffers + s->other_bytes;
    (void)rebatch_pool_get_stats(&stats, s->pool);
    if (!s->has_failed && !s->is_probing && stats.live_bytes - stats.deferred_bytes != held)
        storm_fail(s,
                   "%s: %" PRIu64 " bytes live, %" PRIu64
                   " of them freed until the step ends, and the program holds %" PRIu64,
                   where, stats.live_bytes, stats.deferred_bytes, held);
}

/* As long as the step may be undone, what it was at its beginning is there. */
void storm_check_waiting(struct storm *s, const char *where)
{
    const struct storm_keep *const then = &s->at_step;
    if (!s->plan.reclaims) /* what is freed is free at once */
        return;
    for (size_t i = 0; i < STORM_CACHES && !s->has_failed; i++)
        if (then->caches[i].table != s->keep.caches[i].table)
            look_at_table(s, &then->caches[i], i, where);
    for (size_t i = 0; i < STORM_SPARES && !s->has_failed; i++)
        if (then->spares[i].block != s->keep.spares[i].block)
            look_at_spare(s, &then->spares[i], i, where);
}

/* ---- guarded state ---- */

void storm_check_keep(struct storm *s, const struct storm_keep *should, double running,
                      const char *where)
{
    const struct storm_keep *const is = &s->keep;
    struct storm_keep own = *is; /* what is not guarded is as the program has left it */
    own.rng = should->rng;
    memcpy(own.spares, should->spares, sizeof own.spares);
    if (!s->plan.reclaims)
        should = &own;
    if (is->rng != should->rng)
        storm_fail(s, "%s: the random state is not what it should be", where);
    if (memcmp(s->running, &running, sizeof running) != 0)
        storm_fail(s, "%s: the running statistic is %.17g: expected %.17g", where, *s->running,
                   running);
    if (is->moments != should->moments || is->moments_are != should->moments_are)
        storm_fail(s, "%s: the moments are at %p, %d: expected %p, %d", where, (void *)is->moments,
                   (int)is->moments_are, (void *)should->moments, (int)should->moments_are);
    if (is->gradients != should->gradients)
        storm_fail(s, "%s: the gradients are at %p: expected %p", where, (void *)is->gradients,
                   (void *)should->gradients);
    if (is->level != should->level)
        storm_fail(s, "%s: the level is %d: expected %d", where, (int)is->level,
                   (int)should->level);
    for (size_t i = 0; i < STORM_CACHES; i++)
        if (is->caches[i].table != should->caches[i].table ||
            is->caches[i].count != should->caches[i].count)
            storm_fail(s, "%s: cache %zu is %p of %d: expected %p of %d", where, i,
                       (void *)is->caches[i].table, (int)is->caches[i].count,
                       (void *)should->caches[i].table, (int)should->caches[i].count);
    for (size_t i = 0; i < STORM_SPARES; i++)
        if (is->spares[i].block != should->spares[i].block ||
            is->spares[i].bytes != should->spares[i].bytes)
            storm_fail(s, "%s: spare %zu is %p: expected %p", where, i, is->spares[i].block,
                       should->spares[i].block);
}

/* ---- cuts and results ---- */

void storm_check_cut(struct storm *s, const rebatch_microbatch *mb)
{
    const rebatch_options *const o = &s->plan.options;
    const bool is_over_again = s->is_checked && mb->batch % s->batch == 0;
    if (mb->count == 0 || mb->first + mb->count > s->batch ||
        (mb->batch != s->batch && !is_over_again))
        storm_fail(s, "a micro-batch of [%zu, %zu) of %zu in a batch of %zu", mb->first,
                   mb->first + mb->count, mb->batch, s->batch);
    if (mb->probing != (s->is_probing && !s->is_checked) || mb->step != s->step ||
        mb->pool != s->pool)
        storm_fail(s, "a micro-batch of step %d in step %d", (int)mb->step, (int)s->step);
    const bool is_last = mb->first + mb->count == s->batch;
    if (!storm_is_allowed(o, mb->count) &&
        !(is_last && (o->micro_largest == 0 || mb->count <= o->micro_largest)))
        storm_fail(s, "a micro-batch of %zu samples of %zu, which is not allowed", mb->count,
                   s->batch);
    if (s->is_calm && !s->is_probing && !s->plan.has_cost && o->learn != REBATCH_ON && is_last &&
        !storm_is_allowed(o, mb->count) &&
        storm_can_cut(o, s->batch, rebatch_get_micro(s->rb, s->batch)))
        storm_fail(s, "the last micro-batch of %zu samples has %zu, and need not", s->batch,
                   mb->count);
    if (!s->is_probing && mb->first != s->next)
        storm_fail(s, "a micro-batch begins with sample %zu: expected %zu", mb->first, s->next);
}

void storm_check_numbers(struct storm *s, const struct storm_numbers *should, const char *where)
{
    const double *const moments = s->keep.moments_are == 1 ? s->keep.moments : s->moments_on_host;
    if (s->has_failed)
        return;
    if (!storm_same_bits(s->parameters, should->parameters, STORM_PARAMETERS))
        storm_fail(s, "%s: the parameters are not those of the reference", where);
    if (s->keep.moments_are && !storm_same_bits(moments, should->moments, STORM_PARAMETERS))
        storm_fail(s, "%s: the moments are not those of the reference", where);
    if (s->keep.rng != should->rng)
        storm_fail(s, "%s: the random state is not that of the reference", where);
    if (!storm_same_bits(s->running, &should->running, 1))
        storm_fail(s, "%s: the running statistic is not that of the reference", where);
}
