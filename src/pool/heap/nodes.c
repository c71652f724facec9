/* Owns the recycling of the pool's small structs.
 * Must not know what they are. */
#include <string.h>

#include "pool/heap/heap.h"

#define CHUNK_NODES 64

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

size_t rbi_nodes_made_with(const struct rbi_nodes *nodes, size_t count)
{
    const size_t lacking = count > nodes->spare ? count - nodes->spare : 0;
    return nodes->made + (lacking + CHUNK_NODES - 1) / CHUNK_NODES * CHUNK_NODES;
}

bool rbi_nodes_prepare(struct rbi_nodes *nodes, size_t count)
{
    while (nodes->spare < count) {
        char *chunk = rbi_heap_calloc_lines(1, RBI_LINE_BYTES + CHUNK_NODES * nodes->node_bytes);
        if (!chunk)
            return false;
        write_link(chunk, nodes->chunks);
        nodes->chunks = chunk;
        /* Behind the link, on the next line of the cache. */
        char *first = chunk + RBI_LINE_BYTES;
        for (size_t i = CHUNK_NODES; i-- > 0;)
            rbi_nodes_put(nodes, first + i * nodes->node_bytes);
        nodes->made += CHUNK_NODES;
    }
    return true;
}

void *rbi_nodes_take(struct rbi_nodes *nodes)
{
    void *node = rbi_nodes_take_as_is(nodes);
    memset(node, 0, nodes->node_bytes);
    return node;
}

void rbi_nodes_destroy(struct rbi_nodes *nodes)
{
    while (nodes->chunks) {
        void *chunk = nodes->chunks;
        nodes->chunks = read_link(chunk);
        rbi_heap_free(chunk);
    }
}
