/* Owns the buffers that a resize has made: what is written into them, when the old ones are freed,
 * and whether they are there. Must not know whose they are. */
#include <string.h>

#include "storm.h"

static uint64_t marker_of(const struct storm_buffers *b, size_t i)
{
    return storm_hash(b->salt, 100 * b->made + i);
}

enum storm_frees storm_frees_draw(const struct storm *s, uint64_t *dice)
{
    const enum storm_frees manner = (enum storm_frees)storm_below(dice, STORM_FREES);
    return s->plan.options.pool.caching == REBATCH_OFF ? STORM_FREES_NOTHING : manner;
}

/* What is of before the first step is free for good, whatever becomes of the resize. */
static void free_old(struct storm *s, struct storm_buffers *b, size_t i, void *old)
{
    storm_free(s, old);
    if (b->older[i] == old)
        b->older[i] = NULL;
}

static bool replace(struct storm *s, struct storm_buffers *b, size_t i, size_t bytes)
{
    void *const old = b->blocks[i];
    if (b->manner == STORM_FREES_BEFORE)
        free_old(s, b, i, old);
    void *const block = storm_alloc(s, bytes);
    if (!block)
        return false;
    if (b->manner == STORM_FREES_AFTER)
        free_old(s, b, i, old);
    storm_fill(block, bytes, marker_of(b, i));
    b->blocks[i] = block;
    b->bytes[i] = bytes;
    return true;
}

bool storm_buffers_make(struct storm *s, struct storm_buffers *b, size_t samples)
{
    b->are_there = false;
    b->made++;
    for (size_t i = 0; i < STORM_BUFFERS && b->manner == STORM_FREES_FIRST; i++)
        free_old(s, b, i, b->blocks[i]);
    for (size_t k = 0; k < STORM_BUFFERS; k++) {
        const size_t i = b->is_backwards ? STORM_BUFFERS - 1 - k : k;
        if (!replace(s, b, i, 1 + samples * s->plan.unit_bytes * (i + 1)))
            return false;
    }
    b->samples = samples;
    b->are_there = true;
    return true;
}

bool storm_buffers_make_before(struct storm *s, struct storm_buffers *b)
{
    for (size_t i = 0; i < STORM_BUFFERS; i++) {
        b->blocks[i] = b->older[i] = storm_alloc(s, 1 + s->plan.unit_bytes * (i + 1));
        if (!b->older[i]) {
            storm_fail(s, "no memory for the first buffers");
            return false;
        }
    }
    return true;
}

/* The bytes of a buffer that is a block in use with its contents; 0: it is not. */
static size_t look(const struct storm *s, const struct storm_buffers *b, size_t i)
{
    size_t bytes = 0;
    const bool is_live =
        b->blocks[i] && rebatch_pool_block_bytes(&bytes, s->pool, b->blocks[i]) == REBATCH_OK;
    return is_live && bytes >= b->bytes[i] &&
                   storm_is_filled(b->blocks[i], b->bytes[i], marker_of(b, i))
               ? bytes
               : 0;
}

void storm_buffers_check(struct storm *s, const struct storm_buffers *b, size_t samples,
                         const char *where)
{
    if (!b->are_there || samples > b->samples)
        storm_fail(s, "%s: %zu samples in buffers for %zu", where, samples,
                   b->are_there ? b->samples : 0);
    for (size_t i = 0; i < STORM_BUFFERS && !s->has_failed; i++)
        if (look(s, b, i) == 0)
            storm_fail(s, "%s: buffer %zu at %p is gone, or was overwritten", where, i,
                       b->blocks[i]);
}

uint64_t storm_buffers_held(struct storm *s, const struct storm_buffers *b)
{
    uint64_t held = 0;
    for (size_t i = 0; i < STORM_BUFFERS && b->are_there; i++)
        held += look(s, b, i);
    for (size_t i = 0; i < STORM_BUFFERS; i++) {
        size_t bytes = 0;
        if (b->older[i] && rebatch_pool_block_bytes(&bytes, s->pool, b->older[i]) != REBATCH_OK)
            storm_fail(s, "buffer %zu of before the first step is gone", i);
        held += bytes;
    }
    return held;
}

void storm_buffers_find(struct storm *s, struct storm_buffers *b)
{
    b->are_there = b->are_there && look(s, b, 0) > 0;
}
