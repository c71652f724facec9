/* Owns the recycling of the pool's small structs.
 * Must not know what they are. */
#include <string.h>

#include "pool/pool.h"

#define CHUNK_NODES 64
#define CHUNK_HEADER_BYTES 16 /* the link, padded to the alignment of a node */

static void *read_link(const void *from)
{
    void *link;
    memcpy(&link, from, sizeof link);
    return link;
}

static void write_link(void *at, void *link)
{
    memcpy(at, &link, sizeof link);
}

bool rbi_nodes_prepare(struct rbi_nodes *nodes, size_t count)
{
    while (nodes->spare < count) {
        char *chunk = rbi_heap_calloc(1, CHUNK_HEADER_BYTES + CHUNK_NODES * nodes->node_bytes);
        if (!chunk)
            return false;
        write_link(chunk, nodes->chunks);
        nodes->chunks = chunk;
        for (size_t i = CHUNK_NODES; i-- > 0;)
            rbi_nodes_put(nodes, chunk + CHUNK_HEADER_BYTES + i * nodes->node_bytes);
    }
    return true;
}

void *rbi_nodes_take_as_is(struct rbi_nodes *nodes)
{
    void *node = nodes->free;
    nodes->free = read_link(node);
    nodes->spare--;
    return node;
}

void *rbi_nodes_take(struct rbi_nodes *nodes)
{
    void *node = rbi_nodes_take_as_is(nodes);
    memset(node, 0, nodes->node_bytes);
    return node;
}

void rbi_nodes_put(struct rbi_nodes *nodes, void *node)
{
    write_link(node, nodes->free);
    nodes->free = node;
    nodes->spare++;
}

void rbi_nodes_destroy(struct rbi_nodes *nodes)
{
    while (nodes->chunks) {
        void *chunk = nodes->chunks;
        nodes->chunks = read_link(chunk);
        rbi_heap_free(chunk);
    }
}
