/* Owns the list of the pool's blocks that are older than the step, and which of them a run changes.
 * Must not know what a change means. */
#include <inttypes.h>

#include "check/check.h"
#include "device/device.h"
#include "pool/view.h"

/* Contents are read in chunks of this size. */
#define CHUNK_BYTES ((size_t)1 << 20)
/* Blocks without a name are compared up to this total: they are copied to host memory. */
#define MOST_BYTES ((uint64_t)1 << 30)

/* ---- the list ---- */

struct walk {
    struct rbi_old_blocks *blocks;
    size_t count;
    rebatch_tag guards;
};

/* Runs with the pool's lock held. */
static void show(void *user, const struct rbi_view_piece *piece)
{
    struct walk *walk = user;
    if (piece->state != RBI_VIEW_LIVE || piece->tag == walk->guards || !piece->requested_bytes)
        return;
    rbi_assert(walk->count == 0 || walk->count > walk->blocks->room ||
               walk->blocks->list[walk->count - 1].allocation < piece->allocation);
    if (walk->count < walk->blocks->room)
        walk->blocks->list[walk->count] = (struct rbi_old_block){.address = piece->address,
                                                                 .bytes = piece->requested_bytes,
                                                                 .allocation = piece->allocation};
    walk->count++;
}

static size_t look(struct rbi_old_blocks *blocks)
{
    rebatch_pool *pool = rebatch_get_pool(blocks->rb);
    struct walk walk = {blocks, 0, rbi_session_guard_tag(blocks->rb)};
    rbi_view_open(pool);
    rbi_view_each_live(pool, &(struct rbi_extent){0, false}, show, &walk);
    rbi_view_close(pool);
    return walk.count;
}

/* A part that has a name stands for its block. */
static void leave_out_names(struct rbi_old_blocks *blocks, const struct rbi_items *named)
{
    size_t kept = 0;
    for (size_t i = 0; i < blocks->count; i++)
        if (!rbi_items_are_in(named, blocks->list[i].address, blocks->list[i].bytes))
            blocks->list[kept++] = blocks->list[i];
    rbi_assert(kept <= blocks->count);
    blocks->count = kept;
}

rebatch_status rbi_older_open(struct rbi_old_blocks *blocks, const struct rbi_items *named)
{
    if (!rbi_device_has_contents(rbi_session_device(blocks->rb)))
        return REBATCH_OK;
    blocks->room = look(blocks);
    if (blocks->room == 0)
        return REBATCH_OK;
    blocks->list = rbi_heap_calloc(blocks->room, sizeof *blocks->list);
    blocks->chunk = rbi_heap_calloc(1, CHUNK_BYTES);
    if (!blocks->list || !blocks->chunk)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to list what is compared");
    blocks->count = rbi_min(look(blocks), blocks->room); /* other threads may allocate */
    leave_out_names(blocks, named);
    return REBATCH_OK;
}

void rbi_older_close(struct rbi_old_blocks *blocks)
{
    rbi_heap_free(blocks->list);
    rbi_heap_free(blocks->chunk);
    blocks->list = NULL;
    blocks->chunk = NULL;
    blocks->count = blocks->room = 0;
}

/* ---- contents ---- */

rebatch_status rbi_older_save(char ***out, const struct rbi_old_blocks *blocks)
{
    rebatch_status status = REBATCH_OK;
    *out = rbi_heap_calloc(rbi_max(blocks->count, 1), sizeof **out);
    for (size_t i = 0; i < blocks->count && *out && !status; i++) {
        const struct rbi_old_block *const block = &blocks->list[i];
        if (!((*out)[i] = rbi_heap_calloc(1, block->bytes)))
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy what is in use");
        status = rbi_check_copy(blocks->rb, REBATCH_GUARD_DEVICE, (*out)[i], block->address,
                                block->bytes);
    }
    if (!*out)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy what is in use");
    return status;
}

struct look {
    struct rbi_old_blocks *blocks;
    size_t at;
};

/* Both lists are in the order of allocation. Runs with the pool's lock held. */
static void mark_there(void *user, const struct rbi_view_piece *piece)
{
    struct look *look = user;
    struct rbi_old_blocks *blocks = look->blocks;
    while (look->at < blocks->count && blocks->list[look->at].allocation < piece->allocation)
        look->at++;
    if (look->at < blocks->count && blocks->list[look->at].allocation == piece->allocation)
        blocks->list[look->at].is_gone = piece->state != RBI_VIEW_LIVE;
}

static void find_gone(struct rbi_old_blocks *blocks)
{
    struct look look = {blocks, 0};
    rebatch_pool *pool = rebatch_get_pool(blocks->rb);
    for (size_t i = 0; i < blocks->count; i++)
        blocks->list[i].is_gone = true;
    rbi_view_open(pool);
    rbi_view_each_live(pool, &(struct rbi_extent){0, false}, mark_there, &look);
    rbi_view_close(pool);
}

static bool is_gone(const struct rbi_old_blocks *blocks, const void *address)
{
    for (size_t i = 0; i < blocks->count; i++)
        if (blocks->list[i].address == address)
            return blocks->list[i].is_gone;
    return true;
}

void rbi_older_drop_gone(struct rbi_items *items, struct rbi_old_blocks *blocks)
{
    if (blocks->count)
        find_gone(blocks);
    for (size_t i = 0; i < items->count; i++) {
        struct rbi_item *const item = &items->list[i];
        if (!item->is_old || !item->pointer || !is_gone(blocks, item->pointer))
            continue;
        item->pointer = NULL;
        item->is_settled = true;
    }
}

rebatch_status rbi_older_note(struct rbi_old_blocks *blocks)
{
    rebatch_status status = REBATCH_OK;
    find_gone(blocks);
    for (size_t i = 0; i < blocks->count && !status; i++) {
        struct rbi_old_block *const block = &blocks->list[i];
        uint64_t digest;
        if (block->is_gone)
            continue;
        status = rbi_check_digest(&digest, blocks->rb, block->address, block->bytes, blocks->chunk,
                                  CHUNK_BYTES);
        block->has_changed = !status && digest != block->digest;
        block->digest = digest;
    }
    return status;
}

bool rbi_older_find_changed(struct rbi_text *t, struct rbi_old_blocks *blocks)
{
    const rebatch_status status = rbi_older_note(blocks);
    for (size_t i = 0; i < blocks->count && !status; i++) {
        const struct rbi_old_block *const block = &blocks->list[i];
        if (block->is_gone || !block->has_changed || rbi_guards_hold(blocks->rb, block->address))
            continue;
        rbi_text_add(t, "block %" PRIu64 " (", block->allocation);
        rbi_text_add_bytes(t, block->bytes);
        rbi_text_add(t, ")");
        return true;
    }
    return false;
}

rebatch_status rbi_older_add_changed(struct rbi_items *items, const struct rbi_old_blocks *blocks,
                                     uint64_t *left_out)
{
    uint64_t bytes = 0;
    rebatch_status status = REBATCH_OK;
    *left_out = 0;
    for (size_t i = 0; i < blocks->count && !status; i++) {
        const struct rbi_old_block *const block = &blocks->list[i];
        struct rbi_item item = {.is_old = true,
                                .pointer = (void *)(uintptr_t)block->address,
                                .bytes = block->bytes,
                                .kind = REBATCH_GUARD_DEVICE};
        if (block->is_gone || !block->has_changed)
            continue;
        rbi_assert(block->bytes > 0);
        if (bytes + block->bytes > MOST_BYTES) {
            *left_out += block->bytes;
            continue;
        }
        bytes += block->bytes;
        struct rbi_text t = {item.name, sizeof item.name, 0};
        rbi_text_add(&t, "block %" PRIu64, block->allocation);
        status = rbi_items_add(items, &item);
    }
    return status;
}
