/* Owns the table of a trace's IDs.
 * Must not know what a line of a trace looks like. */
#include <stdlib.h>
#include <sys/random.h>

#include "cli/replay.h"

#define LEAST_CAPACITY ((size_t)1 << 12)

/* The finaliser of SplitMix64: every bit of `id` and of the seed counts in every bit. */
static uint64_t mix(uint64_t id, uint64_t seed)
{
    uint64_t x = id ^ seed;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static struct rbi_replay_id *probe(struct rbi_replay_id *entries, size_t capacity, uint64_t id,
                                   uint64_t seed)
{
    size_t at = (size_t)mix(id, seed) & (capacity - 1);
    while (entries[at].line != 0 && entries[at].id != id)
        at = (at + 1) & (capacity - 1);
    return &entries[at];
}

static bool grow(struct rbi_replay_ids *ids)
{
    const size_t capacity = ids->capacity ? 2 * ids->capacity : LEAST_CAPACITY;
    struct rbi_replay_id *entries = calloc(capacity, sizeof *entries);
    if (!entries)
        return false;
    if (!ids->entries && getrandom(&ids->seed, sizeof ids->seed, GRND_NONBLOCK) < 0)
        ids->seed = 0; /* without a random one the table is right as well */
    for (size_t i = 0; i < ids->capacity; i++)
        if (ids->entries[i].line != 0)
            *probe(entries, capacity, ids->entries[i].id, ids->seed) = ids->entries[i];
    free(ids->entries);
    ids->entries = entries;
    ids->capacity = capacity;
    return true;
}

struct rbi_replay_id *rbi_replay_ids_find(struct rbi_replay_ids *ids, uint64_t id)
{
    if (2 * (ids->used + 1) > ids->capacity && !grow(ids))
        return NULL;
    return probe(ids->entries, ids->capacity, id, ids->seed);
}

void rbi_replay_ids_free(struct rbi_replay_ids *ids)
{
    free(ids->entries);
    *ids = (struct rbi_replay_ids){NULL, 0, 0, 0};
}
