/* Owns the program's memory: blocks and what is written into them, caches, and what pressure gives
 * up. Must not know when callbacks run. */
#include <string.h>

#include "storm.h"

/* ---- blocks ---- */

/* Too large to be looked at as a whole: a word in every so many, and the last. */
#define LOOK_AT_ALL 4096
#define STRIDE 61

void storm_fill(void *block, size_t bytes, uint64_t marker)
{
    unsigned char *const b = block;
    memset(b, 0xff, bytes);
    for (size_t at = 0; at + 8 <= bytes; at += bytes > LOOK_AT_ALL ? 8 * STRIDE : 8)
        memcpy(b + at, &marker, 8);
}

bool storm_is_filled(const void *block, size_t bytes, uint64_t marker)
{
    const unsigned char *const b = block;
    for (size_t at = 0; at + 8 <= bytes; at += bytes > LOOK_AT_ALL ? 8 * STRIDE : 8)
        if (memcmp(b + at, &marker, 8) != 0)
            return false;
    return bytes % 8 == 0 || b[bytes - 1] == 0xff;
}

void *storm_alloc(struct storm *s, size_t bytes)
{
    void *block = NULL;
    const rebatch_status status = rebatch_pool_alloc(&block, s->pool, bytes, NULL, 0);
    if (status != REBATCH_OK && status != REBATCH_OOM)
        storm_fail(s, "alloc answered %s: %s", rebatch_status_name(status), rebatch_last_error());
    if ((status == REBATCH_OK) != (block != NULL))
        storm_fail(s, "alloc answered %s and gave %p", rebatch_status_name(status), block);
    if (block) /* whoever still reads what was there before gets nonsense */
        memset(block, 0xff, bytes);
    return block;
}

void storm_free(struct storm *s, void *pointer)
{
    const rebatch_status status = rebatch_pool_free(s->pool, pointer);
    if (status != REBATCH_OK)
        storm_fail(s, "free of %p answered %s: %s", pointer, rebatch_status_name(status),
                   rebatch_last_error());
}

uint64_t storm_spare_marker(const struct storm *s, size_t i)
{
    return storm_hash(s->seed, 1000 + i);
}

void *storm_temp(struct storm *s, size_t bytes)
{
    if (s->temp_count == STORM_TEMPS) {
        storm_fail(s, "too many temporary blocks");
        return NULL;
    }
    void *const block = storm_alloc(s, bytes);
    if (!block)
        return NULL;
    storm_fill(block, bytes, storm_hash(s->temp_count, bytes));
    s->temps[s->temp_count] = block;
    s->temp_bytes[s->temp_count++] = bytes;
    return block;
}

void storm_temps_free(struct storm *s)
{
    while (s->temp_count > 0) {
        const size_t i = --s->temp_count;
        if (s->temps[i])
            storm_free(s, s->temps[i]);
    }
}

void storm_memory_leave(struct storm *s)
{
    if (s->plan.reclaims)
        return;
    storm_temps_free(s);
    if (s->samples)
        storm_free(s, s->samples);
    s->samples = NULL;
}

bool storm_temps_hold(const struct storm *s)
{
    for (size_t i = 0; i < s->temp_count; i++)
        if (s->temps[i] &&
            !storm_is_filled(s->temps[i], s->temp_bytes[i], storm_hash(i, s->temp_bytes[i])))
            return false;
    return true;
}

/* ---- caches ---- */

static double *make_table(struct storm *s, size_t cache, size_t count)
{
    double *const table = storm_alloc(s, count * sizeof *table);
    for (size_t i = 0; table && i < count; i++)
        table[i] = storm_entry(cache, i);
    return table;
}

/* A block that pressure may free meanwhile is looked at again after each allocation. */
rebatch_status storm_cache_ensure(struct storm *s, size_t cache, size_t count)
{
    struct storm_cache *const c = &s->keep.caches[cache];
    if (!c->table || c->count < count) {
        count += storm_below(&s->dice, 8);
        if (s->plan.frees_first && c->table) {
            storm_free(s, c->table);
            *c = (struct storm_cache){NULL, 0};
        }
        double *const table = make_table(s, cache, count);
        if (!table)
            return REBATCH_OOM;
        if (c->table)
            storm_free(s, c->table);
        *c = (struct storm_cache){table, count};
    }
    s->is_pinned[cache] = true;
    return REBATCH_OK;
}

void storm_cache_done(struct storm *s, size_t cache)
{
    if (s->plan.unpins)
        s->is_pinned[cache] = false;
}

void storm_cache_drop(struct storm *s, size_t cache)
{
    storm_free(s, s->keep.caches[cache].table);
    s->keep.caches[cache] = (struct storm_cache){NULL, 0};
}

double storm_cache_look_up(struct storm *s, size_t cache, size_t index)
{
    const struct storm_cache *const c = &s->keep.caches[cache];
    if (!c->table || index >= c->count) {
        storm_fail(s, "cache %zu has no entry %zu", cache, index);
        return 0;
    }
    return c->table[index];
}

/* ---- pressure ---- */

/* What is freed here stays freed, and the pointer stays NULL, whatever is undone. */
static size_t give_up_spare(struct storm *s, size_t i)
{
    struct storm_spare *const spare = &s->keep.spares[i];
    const size_t bytes = spare->bytes;
    memset(spare->block, 0xff, bytes);
    storm_free(s, spare->block);
    *spare = s->at_step.spares[i] = s->at_callback.spares[i] = (struct storm_spare){NULL, 0};
    return bytes;
}

static size_t give_up_cache(struct storm *s, size_t i)
{
    struct storm_cache *const cache = &s->keep.caches[i];
    const size_t bytes = cache->count * sizeof *cache->table;
    memset(cache->table, 0xff, bytes);
    storm_free(s, cache->table);
    *cache = s->at_step.caches[i] = s->at_callback.caches[i] = (struct storm_cache){NULL, 0};
    return bytes;
}

size_t storm_give_up(size_t wanted_bytes, void *user)
{
    struct storm *const s = user;
    size_t given = 0;
    s->counts->pressed++;
    const size_t from = storm_below(&s->dice, STORM_SPARES + STORM_CACHES);
    for (size_t k = 0; k < STORM_SPARES + STORM_CACHES && given < wanted_bytes; k++) {
        const size_t i = (from + k) % (STORM_SPARES + STORM_CACHES);
        const bool is_cache = i >= STORM_SPARES;
        if (storm_one_in(&s->dice, 4))
            break;
        if (is_cache && s->keep.caches[i - STORM_SPARES].table && !s->is_pinned[i - STORM_SPARES])
            given += give_up_cache(s, i - STORM_SPARES);
        else if (!is_cache && s->keep.spares[i].block)
            given += give_up_spare(s, i);
    }
    storm_say(s, "    pressure for %zu bytes: gave %zu", wanted_bytes, given);
    return given;
}
