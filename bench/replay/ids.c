/* Owns the table of a trace's IDs.
 * Must not know what a line of a trace looks like. */
#include <stdlib.h>

#include "replay.h"

#define LEAST_CAPACITY ((size_t)1 << 12)

/* The finaliser of SplitMix64: every bit of `id` counts in every bit. */
static uint64_t mix(uint64_t id)
{
    uint64_t x = id;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static struct replay_id *probe(struct replay_id *entries, size_t capacity, uint64_t id)
{
    size_t at = (size_t)mix(id) & (capacity - 1);
    while (entries[at].line != 0 && entries[at].id != id)
        at = (at + 1) & (capacity - 1);
    return &entries[at];
}

static bool grow(struct replay_ids *ids)
{
    const size_t capacity = ids->capacity ? 2 * ids->capacity : LEAST_CAPACITY;
    struct replay_id *entries = calloc(capacity, sizeof *entries);
    if (!entries)
        return false;
    for (size_t i = 0; i < ids->capacity; i++)
        if (ids->entries[i].line != 0)
            *probe(entries, capacity, ids->entries[i].id) = ids->entries[i];
    free(ids->entries);
    ids->entries = entries;
    ids->capacity = capacity;
    return true;
}

struct replay_id *replay_ids_find(struct replay_ids *ids, uint64_t id)
{
    if (2 * (ids->used + 1) > ids->capacity && !grow(ids))
        return NULL;
    return probe(ids->entries, ids->capacity, id);
}

void replay_ids_free(struct replay_ids *ids)
{
    free(ids->entries);
    *ids = (struct replay_ids){NULL, 0, 0};
}
