/* The walkers that check every equation of src/pool. They are of the tests, and of the library of a
 * check build (make CHECK=1) alone. */
#ifndef INVARIANTS_H
#define INVARIANTS_H

#include "pool/pool.h"

/* Walks everything and checks the equations of pool.h; false, with the error text set, when one
 * does not hold. */
bool rbi_pool_is_valid(rebatch_pool *pool);

/* Adds the chunks that are mapped, by size, and the pages that sleep; false when one is
 * malformed. */
bool rbi_map_count(const struct rbi_map *map, uint64_t chunks[static RBI_CHUNK_SIZES],
                   uint64_t *asleep);
/* Whether what is held is what the maps, `plain_bytes` of plain allocations and the vm say. */
bool rbi_vm_is_valid(const struct rbi_vm *vm, const uint64_t mapped[static RBI_CHUNK_SIZES],
                     uint64_t plain_bytes);

#endif
