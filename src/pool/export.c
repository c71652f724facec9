/* Owns what of an arena another process gets: the chunks at its addresses, as descriptors.
 * Must not know processes, nor how descriptors are made. */
#include <unistd.h>

#include "pool/pool.h"

rebatch_status rebatch_arena_create_shared(rebatch_arena **out, rebatch_pool *pool)
{
    return rbi_arena_create(out, pool, true);
}

static void close_all(const rebatch_export_piece *pieces, size_t count)
{
    for (size_t i = 0; i < count; i++)
        (void)close(pieces[i].fd);
}

/* Fills the pieces that there is room for; *count has them all. */
static rebatch_status export_locked(rebatch_export_piece *pieces, size_t room, size_t *count,
                                    const rebatch_arena *arena)
{
    const struct rbi_map *const map = arena->range->map;
    const char *const begin = arena->range->address;
    const char *const end = arena->tail ? arena->tail->address : begin + arena->range->bytes;
    const size_t page = arena->pool->page_bytes;
    for (const char *at = begin; at < end; at += page) {
        const rbi_physical chunk = rbi_map_chunk(map, at);
        if (!chunk)
            continue;
        if (*count < room) {
            rebatch_export_piece *const piece = &pieces[*count];
            piece->offset = (size_t)(at - begin);
            piece->bytes = rbi_map_chunk_pages(map, at) * page;
            const rebatch_status status = rbi_device_export(arena->pool->device, &piece->fd, chunk);
            if (status) {
                close_all(pieces, *count);
                *count = 0;
                return status;
            }
        }
        ++*count;
    }
    return REBATCH_OK;
}

rebatch_status rebatch_arena_export(const void **begin, rebatch_export_piece *pieces, size_t room,
                                    size_t *count, rebatch_arena *arena)
{
    if (begin)
        *begin = NULL;
    if (count)
        *count = 0;
    if (!begin || !count || !arena || (room && !pieces))
        return rbi_error(REBATCH_E_INVALID, "%s is NULL",
                         !begin   ? "begin"
                         : !count ? "count"
                         : !arena ? "arena"
                                  : "pieces");
    if (!arena->range->is_shared)
        return rbi_error(REBATCH_E_STATE, "the arena is not shared: expected one of "
                                          "rebatch_arena_create_shared()");
    rbi_lock_take(&arena->pool->lock);
    rebatch_status status = export_locked(pieces, room, count, arena);
    rbi_pool_give_lock(arena->pool);
    if (!status && *count > room) {
        close_all(pieces, room);
        status = rbi_error(REBATCH_E_INVALID, "room is %zu: expected %zu, one for each piece", room,
                           *count);
    }
    if (!status)
        *begin = arena->range->address;
    return status;
}
