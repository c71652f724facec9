/* What the pool's small structs are made of (nodes.c).
 * Must not know what they are. */
#ifndef RBI_POOL_NODES_H
#define RBI_POOL_NODES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/base.h"

/* Nodes of one size, got from the heap in chunks and never given back before the end, so that calls
 * with a warm pool make no heap call. spare == nodes in the list `free`, made == all there are. */
struct rbi_nodes {
    void *free;   /* a list through each node's first word */
    void *chunks; /* a list through each chunk's first word */
    size_t spare, made;
    size_t node_bytes;
};
/* Makes sure of `count` spare nodes; false when the heap has none. */
bool rbi_nodes_prepare(struct rbi_nodes *nodes, size_t count);
/* How many there will be then. */
size_t rbi_nodes_made_with(const struct rbi_nodes *nodes, size_t count);
/* A zeroed node; one must be spare. */
void *rbi_nodes_take(struct rbi_nodes *nodes);
/* The same, not zeroed. */
static inline void *rbi_nodes_take_as_is(struct rbi_nodes *nodes)
{
    void *node = nodes->free;
    rbi_assert(node && nodes->spare > 0);
    memcpy(&nodes->free, node, sizeof nodes->free);
    nodes->spare--;
    return node;
}
static inline void rbi_nodes_put(struct rbi_nodes *nodes, void *node)
{
    rbi_assert(node);
    memcpy(node, &nodes->free, sizeof nodes->free);
    nodes->free = node;
    nodes->spare++;
}
void rbi_nodes_destroy(struct rbi_nodes *nodes);

#endif
