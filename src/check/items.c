/* Owns the list of what is compared, where each item is, and copies of their values.
 * Must not know why they were made. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "check/check.h"
#include "device/device.h"

/* ---- where it is ---- */

/* The block that zero_grad allocated in the run. */
static void *made(const struct rbi_items *items, const struct rbi_item *item)
{
    const struct rbi_stale_list *live = &items->stale->live;
    rbi_assert(item->made_nth > 0);
    for (size_t i = 0; i < live->count; i++) {
        const struct rbi_stale_block *const block = &live->blocks[i];
        if (block->place.which == RBI_ZERO_GRAD && block->place.number == item->made_nth &&
            block->bytes == item->bytes)
            return (void *)(uintptr_t)block->address;
    }
    return NULL;
}

/* A pointer counts only if it points to a block in use that is large enough. */
void *rbi_item_place(const struct rbi_items *items, const struct rbi_item *item)
{
    if (item->made_nth)
        return made(items, item);
    if (!item->where && !item->is_old)
        return item->pointer;
    size_t bytes = 0;
    void *pointer = item->pointer;
    if (item->where)
        memcpy(&pointer, item->where, sizeof pointer);
    const rebatch_status status =
        pointer ? rebatch_pool_block_bytes(&bytes, rebatch_get_pool(items->rb), pointer)
                : REBATCH_OK;
    return !status && bytes >= item->bytes ? pointer : NULL;
}

/* ---- the list ---- */

rebatch_status rbi_items_add(struct rbi_items *items, const struct rbi_item *item)
{
    if (items->count == items->room) {
        const size_t room = items->room ? 2 * items->room : 16;
        void *list = rbi_heap_resize(items->list, room, sizeof *items->list);
        if (!list)
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory to list what is compared");
        items->list = list;
        items->room = room;
    }
    rbi_assert(items->count < items->room);
    items->list[items->count++] = *item;
    return REBATCH_OK;
}

rebatch_status rbi_items_add_names(struct rbi_items *items)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, items->rb);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < count && !status; i++) {
        struct rbi_item item = {.has_name = true,
                                .pointer = watched[i].pointer,
                                .where = watched[i].where,
                                .bytes = watched[i].bytes,
                                .kind = watched[i].kind,
                                .number = watched[i].number,
                                .is_compared = true};
        struct rbi_text t = {item.name, sizeof item.name, 0};
        const void *block;
        char what[96];
        rbi_text_add(&t, "%s", watched[i].name);
        (void)snprintf(what, sizeof what, "what is watched as \"%s\"", item.name);
        status = rbi_items_add(items, &item);
        if (!status && !item.where)
            status = rbi_pool_find_block(&block, rebatch_get_pool(items->rb), item.pointer,
                                         item.bytes, what);
    }
    return status;
}

bool rbi_items_are_in(const struct rbi_items *items, const char *address, size_t bytes)
{
    for (size_t i = 0; i < items->count; i++) {
        const char *const place = rbi_item_place(items, &items->list[i]);
        if (place >= address && place < address + bytes)
            return true;
    }
    return false;
}

rebatch_status rbi_items_add_made(struct rbi_items *items)
{
    const struct rbi_stale_list *live = &items->stale->live;
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < live->count && !status; i++) {
        const struct rbi_stale_block *const block = &live->blocks[i];
        struct rbi_item item = {.made_nth = block->place.number,
                                .bytes = block->bytes,
                                .kind = REBATCH_GUARD_DEVICE,
                                .is_compared = true};
        if (block->place.which != RBI_ZERO_GRAD ||
            rbi_items_are_in(items, block->address, block->bytes))
            continue;
        struct rbi_text t = {item.name, sizeof item.name, 0};
        rbi_text_add(&t, "allocation %" PRIu64 " of zero_grad", item.made_nth);
        status = rbi_items_add(items, &item);
    }
    return status;
}

void rbi_items_drop_missing(struct rbi_items *items)
{
    for (size_t i = 0; i < items->count; i++)
        items->list[i].is_settled |= items->list[i].made_nth && !made(items, &items->list[i]);
}

void rbi_items_release(struct rbi_items *items)
{
    rbi_heap_free(items->list);
    items->list = NULL;
    items->count = items->room = 0;
}

void rbi_item_add(struct rbi_text *t, const struct rbi_item *item)
{
    rbi_text_add(t, item->has_name ? "\"%s\"" : "%s", item->name);
    if (item->has_name)
        return;
    rbi_text_add(t, " (");
    rbi_text_add_bytes(t, item->bytes);
    rbi_text_add(t, ")");
}

/* ---- copies ---- */

rebatch_status rbi_values_open(struct rbi_values *values, const struct rbi_items *items)
{
    rbi_assert(values->count <= items->count);
    void *copies =
        rbi_heap_resize(values->copies, rbi_max(items->count, 1), sizeof *values->copies);
    values->copies = copies ? copies : values->copies;
    for (size_t i = values->count; i < items->count && copies; i++) {
        if (!(values->copies[i] = rbi_heap_calloc(1, items->list[i].bytes)))
            break;
        values->count++;
    }
    return copies && values->count == items->count
               ? REBATCH_OK
               : rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy what is compared");
}

void rbi_values_close(struct rbi_values *values)
{
    for (size_t i = 0; i < values->count; i++)
        rbi_heap_free(values->copies[i]);
    rbi_heap_free(values->copies);
    *values = (struct rbi_values){NULL, 0};
}

rebatch_status rbi_check_copy(const rebatch *rb, rebatch_guard_kind kind, void *to,
                              const void *from, size_t bytes)
{
    if (kind == REBATCH_GUARD_HOST) {
        memcpy(to, from, bytes);
        return REBATCH_OK;
    }
    rebatch_device *device = rbi_session_device(rb);
    const rebatch_stream stream = rbi_session_options(rb)->stream;
    const rebatch_status status = rebatch_copy(device, to, from, bytes, stream);
    return status ? status : rebatch_stream_synchronize(device, stream);
}

/* FNV-1a over words of eight bytes. */
static uint64_t add_digest(uint64_t digest, const char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, rbi_min(sizeof word, count - i));
        digest = (digest ^ word) * UINT64_C(0x100000001b3);
        digest ^= digest >> 29;
    }
    return digest;
}

rebatch_status rbi_check_digest(uint64_t *out, const rebatch *rb, const char *address, size_t bytes,
                                char *chunk, size_t room)
{
    rebatch_status status = REBATCH_OK;
    *out = UINT64_C(0xcbf29ce484222325);
    for (size_t at = 0; at < bytes && !status; at += room) {
        const size_t count = rbi_min(bytes - at, room);
        status = rbi_check_copy(rb, REBATCH_GUARD_DEVICE, chunk, address + at, count);
        if (!status)
            *out = add_digest(*out, chunk, count);
    }
    return status;
}

/* What is enqueued may change host memory too. */
static rebatch_status wait_for_work(const struct rbi_items *items)
{
    return rbi_device_synchronize(rbi_session_device(items->rb));
}

rebatch_status rbi_values_read(struct rbi_values *values, const struct rbi_items *items)
{
    rebatch_status status = wait_for_work(items);
    rbi_assert(items->count <= values->count);
    for (size_t i = 0; i < items->count && !status; i++) {
        const struct rbi_item *const item = &items->list[i];
        const void *const place = rbi_item_place(items, item);
        if (place)
            status = rbi_check_copy(items->rb, item->kind, values->copies[i], place, item->bytes);
        else
            memset(values->copies[i], 0, item->bytes);
    }
    return status;
}

rebatch_status rbi_values_write(const struct rbi_values *values, const struct rbi_items *items)
{
    rebatch_status status = wait_for_work(items);
    rbi_assert(items->count <= values->count);
    for (size_t i = 0; i < items->count && !status; i++) {
        const struct rbi_item *const item = &items->list[i];
        void *const place = rbi_item_place(items, item);
        if (place && !item->made_nth)
            status = rbi_check_copy(items->rb, item->kind, place, values->copies[i], item->bytes);
    }
    return status;
}
