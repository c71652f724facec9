/* Owns the table of a trace's IDs.
 * Must not know what a line of a trace looks like. */
#include <stdlib.h>

#include "cli/replay.h"

#define LEAST_CAPACITY ((size_t)1 << 12)

static struct rbi_replay_id *probe(struct rbi_replay_id *entries, size_t capacity, uint64_t id)
{
    /* Fibonacci hashing: IDs that follow each other are spread, and the upper bits are the good
     * ones. */
    size_t at = (size_t)((id * UINT64_C(0x9e3779b97f4a7c15)) >> 20) & (capacity - 1);
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
    for (size_t i = 0; i < ids->capacity; i++)
        if (ids->entries[i].line != 0)
            *probe(entries, capacity, ids->entries[i].id) = ids->entries[i];
    free(ids->entries);
    ids->entries = entries;
    ids->capacity = capacity;
    return true;
}

struct rbi_replay_id *rbi_replay_ids_find(struct rbi_replay_ids *ids, uint64_t id)
{
    if (2 * (ids->used + 1) > ids->capacity && !grow(ids))
        return NULL;
    return probe(ids->entries, ids->capacity, id);
}

void rbi_replay_ids_free(struct rbi_replay_ids *ids)
{
    free(ids->entries);
    *ids = (struct rbi_replay_ids){NULL, 0, 0};
}
