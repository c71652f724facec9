/* The memory of what rollbacks took back (rolled_back.c).
 * Must not know blocks. */
#ifndef RBI_POOL_LATE_H
#define RBI_POOL_LATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rebatch/pool.h"

/* When more addresses than MOST are remembered, the oldest rollbacks are forgotten, but none of the
 * latest LEAST addresses, nor of the last rollback's. */
#define RBI_POOL_LATE_MOST 65536
#define RBI_POOL_LATE_LEAST 32768

struct rbi_late_entry {
    const char *address; /* NULL: empty */
    uint64_t rollback;   /* number of the one that took it back; 0: given out again */
    uint64_t owner;      /* of a resize whose old buffer began there; 0: none */
};

/* Addresses of blocks that a rollback took back, until they are given out again: frees of them come
 * late, and are no mistake. Open addressing, linear probing; at most half full. When it is full,
 * entries of no more use go, and older rollbacks if need be; all others move to `other`, so that a
 * rollback needs no heap. An address with an owner stays when it is given out again, until its
 * owner lets go of it.
 *   used == entries that are not empty; count == those of them with a rollback */
struct rbi_late {
    struct rbi_late_entry *entries, *other;
    size_t capacity; /* of either; a power of two, or 0 */
    size_t used, count;
    uint64_t rollback; /* number of the last one, from 1 */
    bool crowded;      /* it wants to be larger, when the heap can be asked */
    uint64_t owner;    /* whose resize runs; 0: none does */
};
/* Makes sure that one rollback can take back `blocks` blocks; grows beyond that for those before it
 * where the heap has memory. */
bool rbi_late_prepare(struct rbi_late *late, size_t blocks);
void rbi_late_add(struct rbi_late *late, const char *address);
void rbi_late_remove(struct rbi_late *late, const char *address);
bool rbi_late_has(const struct rbi_late *late, const char *address);
/* An old buffer of `owner` began there; who owns an address, 0: nobody; and the owner lets go of
 * all of its addresses, 0: all owners do. */
void rbi_late_own(struct rbi_late *late, const char *address, uint64_t owner);
uint64_t rbi_late_owner(const struct rbi_late *late, const char *address);
void rbi_late_disown(struct rbi_late *late, uint64_t owner);
void rbi_late_destroy(struct rbi_late *late);

#endif
