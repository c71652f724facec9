/* Owns the key that a session stands for in the file of results, and when it is read and written.
 * Must not know the file's format, or how a size is found. */
#include "probe/saved.h"

#include <inttypes.h>
#include <string.h>

#include "device/device.h"
#include "rebatch/version.h"

#define KEY_BYTES_MOST 255

/* Which micro-batch is the largest that fits depends on these: X(name, value) of a session `rb`,
 * its options `s`, its pool's options `p`, the probe's options `o`, and the batch. An option that
 * changes what fits belongs here. */
#define SETTINGS(X)                                                                                \
    X("batch", batch)                                                                              \
    X("smallest", s->micro_smallest)                                                               \
    X("largest", s->micro_largest)                                                                 \
    X("multiple_of", s->micro_multiple_of)                                                         \
    X("allowed", rbi_limits_digest(s))                                                             \
    X("by_cost", rbi_session_is_by_cost(rb))                                                       \
    X("admission", rbi_is_on(s->admission))                                                        \
    X("stop", s->on_oom == REBATCH_ON_OOM_STOP)                                                    \
    X("lighten", rbi_session_level(rb))                                                            \
    X("reserve_bytes", o->reserve_bytes)                                                           \
    X("choose", o->choose)                                                                         \
    X("limit_bytes", p->limit_bytes)                                                               \
    X("limit_permille", p->limit_permille)                                                         \
    X("headroom_bytes", p->headroom_bytes)                                                         \
    X("caching", rbi_is_on(p->caching))                                                            \
    X("keep_room_permille", p->keep_room_permille)                                                 \
    X("rounding_divisions", p->rounding_divisions)

/* "cuda:3 NVIDIA H200" is the same card as "cuda:0 NVIDIA H200". */
static void add_device(struct rbi_text *t, const char *name)
{
    static const char cuda[] = "cuda:";
    const size_t kind = sizeof cuda - 1;
    if (strncmp(name, cuda, kind) == 0)
        rbi_text_add(t, "cuda%s", name + kind + strspn(name + kind, "0123456789"));
    else
        rbi_text_add(t, "%s", name);
}

static void write_key(struct rbi_saved *saved, const rebatch_probe_options *o, size_t batch,
                      uint64_t total_bytes)
{
    const rebatch *rb = saved->rb;
    const rebatch_device *device = rbi_session_device(rb);
    const rebatch_options *s = rbi_session_options(rb);
    const rebatch_pool_options *p = &s->pool;
    struct rbi_text t = {saved->key, sizeof saved->key, 0};
    rbi_text_add(&t, "%s | ", o->key);
    add_device(&t, device->name);
    rbi_text_add(&t, " | total_bytes=%" PRIu64 " | driver %s | rebatch %s |", total_bytes,
                 device->driver, rebatch_version());
#define ADD(name, value) rbi_text_add(&t, " " name "=%" PRIu64, (uint64_t)(value));
    SETTINGS(ADD)
#undef ADD
    rbi_assert(t.length < t.size);
}

/* The library's own last sentence becomes an event: the probe goes on. */
static void warn(const struct rbi_saved *saved)
{
    char text[512];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "%s", rebatch_last_error());
    rebatch_clear_error();
    rebatch_event event = {.kind = REBATCH_EVENT_PROBE_FILE, .text = text};
    rbi_event_emit(saved->rb, &event);
}

static rebatch_status make_key(struct rbi_saved *saved, const rebatch_probe_options *options,
                               size_t batch)
{
    if (options->file[0] == '\0')
        return rbi_error(REBATCH_E_INVALID,
                         "file is \"\": expected a name for the file of results, or NULL");
    const size_t length = options->key ? strlen(options->key) : 0;
    if (length == 0 || length > KEY_BYTES_MOST)
        return rbi_error(REBATCH_E_INVALID,
                         "key has %zu bytes: expected 1 to %d, the model's name in %.200s", length,
                         KEY_BYTES_MOST, options->file);
    rebatch_memory_info memory;
    const rebatch_status status = rebatch_device_memory(rbi_session_device(saved->rb), &memory);
    if (!status)
        write_key(saved, options, batch, memory.total_bytes);
    return status;
}

static rebatch_status look_at_found(struct rbi_saved *saved, const struct rbi_store_result *found,
                                    size_t least, size_t most)
{
    size_t available;
    const rebatch_status status = rebatch_pool_available(&available, rebatch_get_pool(saved->rb));
    if (status)
        return status;
    saved->room_bytes = available;
    if (found->size < least || found->size > most) /* 0: there is none */
        return REBATCH_OK;
    saved->state = REBATCH_SAVED_HELD;
    saved->size = found->size;
    if (saved->room_bytes <= found->room_bytes)
        saved->too_large = found->too_large;
    return REBATCH_OK;
}

rebatch_status rbi_saved_open(struct rbi_saved *saved, rebatch *rb,
                              const rebatch_probe_options *options, size_t least, size_t most,
                              size_t batch)
{
    *saved = (struct rbi_saved){.rb = rb};
    if (!options->file)
        return REBATCH_OK;
    const rebatch_status status = make_key(saved, options, batch);
    if (status)
        return status;
    saved->path = options->file;
    saved->state = REBATCH_SAVED_ABSENT;
    struct rbi_store_result found;
    if (rbi_store_find(&found, saved->path, saved->key)) {
        warn(saved);
        saved->state = REBATCH_SAVED_IGNORED;
    }
    return look_at_found(saved, &found, least, most);
}

void rbi_saved_close(struct rbi_saved *saved, const rebatch_probe_report *report, size_t too_large)
{
    struct rbi_store_result result = {.size = report->size};
    if (too_large != SIZE_MAX) {
        result.too_large = too_large;
        result.room_bytes = saved->room_bytes;
    }
    const bool is_known = too_large == SIZE_MAX || too_large == saved->too_large;
    if (!saved->path || (report->size == saved->size && is_known))
        return;
    if (saved->size && report->size != saved->size)
        saved->state = REBATCH_SAVED_REPLACED;
    if (rbi_store_put(saved->path, saved->key, &result))
        warn(saved);
}
