/* Where the blocks of a phase lie, so that they take as little memory as their lifetimes allow.
 * Must not know pools: lifetimes in, offsets out. */
#ifndef RBI_PLAN_LAYOUT_H
#define RBI_PLAN_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* A block that is in use from call `from` until before call `to`. */
struct rbi_lifetime {
    uint32_t units;
    uint32_t from, to;
    uint32_t tried;  /* the offset in the layout that is tried */
    uint32_t offset; /* out, in units: no two lifetimes that meet overlap */
};

/* A layout takes a time that grows with the square of this: 0.1 to 0.3 s for this many. */
#define RBI_LAYOUT_MOST 16384

/* Sets the offsets, and may reorder the lifetimes. `room` has space for as many pointers, `in_use`
 * are the most units in use at once. Gives the units that all of them take together. */
uint64_t rbi_layout_pack(struct rbi_lifetime *lifetimes, const struct rbi_lifetime **room,
                         size_t count, uint64_t in_use);

#endif
