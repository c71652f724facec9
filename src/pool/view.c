/* Owns what reports read of a pool. Must not know what is made of that. */
#include "pool/pool.h"

void rbi_view_open(rebatch_pool *pool)
{
    rbi_pool_take_lock(pool);
    rbi_pool_callbacks++;
}

void rbi_view_close(rebatch_pool *pool)
{
    rbi_pool_callbacks--;
    rbi_pool_give_lock(pool);
}

/* ---- memory ---- */

static enum rbi_view_state state_of(const struct rbi_block *block)
{
    switch (block->state) {
    case RBI_BLOCK_LIVE:
        return RBI_VIEW_LIVE;
    case RBI_BLOCK_DEFERRED:
        return RBI_VIEW_DEFERRED;
    case RBI_BLOCK_PENDING:
        return RBI_VIEW_PENDING;
    case RBI_BLOCK_LOST:
        return RBI_VIEW_LOST;
    default:
        return RBI_VIEW_FREE;
    }
}

static struct rbi_view_piece piece_of(const struct rbi_block *block, const char *address,
                                      size_t bytes)
{
    struct rbi_view_piece piece = {.address = address,
                                   .bytes = bytes,
                                   .stream = rbi_stream_of(block)->stream,
                                   .tag = block->tag,
                                   .state = state_of(block)};
    if (rbi_view_is_in_use(&piece)) {
        piece.requested_bytes = block->requested_bytes;
        piece.allocation = block->sequence;
    }
    return piece;
}

static void step_to(struct rbi_view_walk *walk, const struct rbi_block *block)
{
    walk->block = block;
    walk->at = block ? block->address : NULL;
}

static void enter(struct rbi_view_walk *walk, const struct rbi_range *range)
{
    walk->range = range;
    step_to(walk, range ? range->first : NULL);
    walk->is_mapped = range && range->map;
}

bool rbi_view_has(const rebatch_pool *pool, const char *address)
{
    const struct rbi_range *range = pool->heap.first_range;
    while (range && (address < range->address || address >= range->address + range->bytes))
        range = range->next;
    return range;
}

struct rbi_view_walk rbi_view_ranges(const rebatch_pool *pool)
{
    struct rbi_view_walk walk = {.page_bytes = pool->page_bytes};
    enter(&walk, pool->heap.first_range);
    return walk;
}

void rbi_view_next_range(struct rbi_view_walk *walk)
{
    rbi_assert(walk->range);
    enter(walk, walk->range->next);
}

/* Moves to the end of the page, or of the block where that is before it; says whether the
 * page is there. */
static bool pass_page(struct rbi_view_walk *walk)
{
    const struct rbi_range *range = walk->range;
    const size_t number = (size_t)(walk->at - range->address) / walk->page_bytes;
    const size_t end = (number + 1) * walk->page_bytes;
    const size_t block_end = (size_t)(walk->block->address - range->address) + walk->block->bytes;
    walk->at = range->address + rbi_min(end, block_end);
    return rbi_map_is_mapped(range->map, range->address + number * walk->page_bytes);
}

/* A piece of a block that has pages at some of its addresses. */
static bool next_part(struct rbi_view_piece *piece, struct rbi_view_walk *walk)
{
    const struct rbi_block *const block = walk->block;
    const char *const end = block->address + block->bytes;
    const char *address = walk->at;
    size_t bytes = 0;
    while (walk->at < end) {
        const char *const from = walk->at;
        if (pass_page(walk)) {
            bytes += (size_t)(walk->at - from);
        } else if (bytes > 0) {
            walk->at = from;
            break;
        } else {
            address = walk->at;
        }
    }
    if (walk->at == end)
        step_to(walk, block->after);
    *piece = piece_of(block, address, bytes);
    return bytes > 0;
}

bool rbi_view_next(struct rbi_view_piece *piece, struct rbi_view_walk *walk)
{
    while (walk->block) {
        const struct rbi_block *const block = walk->block;
        const bool gap = block->state == RBI_BLOCK_HOLE;
        const bool torn = block->state == RBI_BLOCK_LOST || block->state == RBI_BLOCK_HELD;
        if (walk->is_mapped && torn) {
            if (next_part(piece, walk))
                return true;
            continue;
        }
        step_to(walk, block->after);
        if (gap)
            continue;
        *piece = piece_of(block, block->address, block->bytes);
        return true;
    }
    return false;
}

/* Blocks in use stand in the order in which they were allocated: an extent is the end of the list,
 * but for those from outside. */
void rbi_view_each_live(const rebatch_pool *pool, const struct rbi_extent *extent,
                        void (*show)(void *user, const struct rbi_view_piece *block), void *user)
{
    const struct rbi_block *const ring = &pool->by_sequence;
    const struct rbi_block *block = ring;
    while (block->previous != ring && block->previous->sequence >= extent->first_sequence)
        block = block->previous;
    for (; block != ring; block = block->next) {
        if (block->outside && extent->leaves_out)
            continue;
        const struct rbi_view_piece piece = piece_of(block, block->address, block->bytes);
        show(user, &piece);
    }
}

/* ---- counters, options, events ---- */

void rbi_view_get_facts(struct rbi_view_facts *out, const rebatch_pool *pool)
{
    rbi_assert(rbi_lock_is_held(&pool->lock));
    *out = (struct rbi_view_facts){.spare_bytes = pool->vm.spare_pages * pool->page_bytes,
                                   .taken_bytes = pool->vm.taken_bytes,
                                   .given_bytes = pool->vm.given_bytes,
                                   .stages = pool->stages,
                                   .limit_bytes =
                                       rbi_min(pool->limit_bytes, pool->device->others.bytes),
                                   .others_bytes = pool->device->others.bytes,
                                   .others_variable = pool->device->others.variable,
                                   .floor_bytes = pool->vm.floor_pages * pool->page_bytes,
                                   .asleep_bytes = pool->vm.asleep.pages * pool->page_bytes,
                                   .log = &pool->log};
}

size_t rbi_view_tag_count(const rebatch_pool *pool)
{
    return pool->tag_count;
}

const char *rbi_view_tag_name(const rebatch_pool *pool, rebatch_tag tag)
{
    return pool->tags[tag].name;
}
