/* Owns a device whose streams lag as a test wants it.
 * Must not know pools. */
#include "unit/lazy_device.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { USES = 256 };
/* Dry addresses begin at 2^52; pages are counted from there. */
#define FIRST_ADDRESS ((uintptr_t)1 << 52)
#define PAGES ((size_t)1 << 26)

struct rebatch_stream_object {
    bool is_open;
    uint64_t enqueued, done;
};

/* Work on a stream: done when the stream has come to its number. */
struct use {
    uintptr_t from, to;
    struct rebatch_stream_object *stream, *owner; /* that may use the memory again at once */
    uint64_t number;
};

/* Reached when each stream has come to its number. */
struct rbi_event_object {
    uint64_t numbers[LAZY_STREAMS];
};

static struct lazy {
    const struct rbi_device_ops *dry;
    struct rbi_device_ops ops;
    size_t page_bytes;
    struct rebatch_stream_object streams[LAZY_STREAMS]; /* [0]: the default one */
    struct use uses[USES];
    size_t use_count;
    unsigned char *mapped; /* by page */
    uint64_t event_calls;
    size_t events; /* made and not destroyed */
} lazy;

static struct rebatch_stream_object *stream_of(rebatch_stream stream)
{
    return stream ? stream : &lazy.streams[0];
}

/* ---- work ---- */

static void come_to(struct rebatch_stream_object *stream, uint64_t number)
{
    if (stream->done >= number)
        return;
    stream->done = number;
    for (size_t i = lazy.use_count; i-- > 0;)
        if (lazy.uses[i].stream == stream && lazy.uses[i].number <= number)
            lazy.uses[i] = lazy.uses[--lazy.use_count];
}

void lazy_read(rebatch_stream stream, rebatch_stream owner, const void *memory, size_t bytes)
{
    struct rebatch_stream_object *s = stream_of(stream);
    if (lazy.use_count == USES)
        come_to(lazy.uses[0].stream, lazy.uses[0].stream->enqueued);
    const uintptr_t from = (uintptr_t)memory;
    lazy.uses[lazy.use_count++] =
        (struct use){from, from + bytes, s, stream_of(owner), ++s->enqueued};
}

void lazy_use(rebatch_stream stream, const void *memory, size_t bytes)
{
    lazy_read(stream, stream, memory, bytes);
}

void lazy_go_on(rebatch_stream stream, unsigned share)
{
    struct rebatch_stream_object *s = stream_of(stream);
    come_to(s, s->done + (s->enqueued - s->done) * share / 8);
}

/* The number of the first page of [from, from + bytes), and of the first behind it. */
static void pages_of(size_t *first, size_t *end, const void *from, size_t bytes)
{
    const uintptr_t offset = (uintptr_t)from - FIRST_ADDRESS;
    *first = offset / lazy.page_bytes;
    *end = (offset + bytes - 1) / lazy.page_bytes + 1;
    cr_assert(*end <= PAGES && *first < *end);
}

void lazy_check_fresh(rebatch_stream stream, const void *memory, size_t bytes)
{
    size_t first, end;
    pages_of(&first, &end, memory, bytes);
    for (size_t i = first; i < end; i++)
        cr_assert(lazy.mapped[i] == 1, "a block without memory");
    const uintptr_t from = (uintptr_t)memory;
    for (size_t i = 0; i < lazy.use_count; i++) {
        const struct use *use = &lazy.uses[i];
        cr_assert(use->stream == stream_of(stream) || use->owner == stream_of(stream) ||
                      use->to <= from || from + bytes <= use->from,
                  "memory that another stream still uses is given out");
    }
}

/* ---- memory ---- */

static void note(const void *memory, size_t bytes, bool is_mapped)
{
    size_t first, end;
    pages_of(&first, &end, memory, bytes);
    for (size_t i = first; i < end; i++) {
        cr_assert(lazy.mapped[i] == !is_mapped, "mapped twice, or unmapped twice");
        lazy.mapped[i] = is_mapped;
    }
    const uintptr_t from = (uintptr_t)memory;
    for (size_t i = 0; i < lazy.use_count; i++)
        cr_assert(is_mapped || lazy.uses[i].to <= from || from + bytes <= lazy.uses[i].from,
                  "memory is taken from under work");
}

static rebatch_status lazy_alloc(void *self, void **out, size_t bytes)
{
    const rebatch_status status = lazy.dry->alloc(self, out, bytes);
    if (status == REBATCH_OK)
        note(*out, bytes, true);
    return status;
}

static rebatch_status lazy_free(void *self, void *memory, size_t bytes)
{
    note(memory, bytes, false);
    return lazy.dry->free(self, memory, bytes);
}

static rebatch_status lazy_map(void *self, void *address, size_t bytes, rbi_physical physical)
{
    note(address, bytes, true);
    return lazy.dry->map(self, address, bytes, physical);
}

static rebatch_status lazy_unmap(void *self, void *address, size_t bytes)
{
    note(address, bytes, false);
    return lazy.dry->unmap(self, address, bytes);
}

/* ---- streams and events ---- */

static rebatch_status lazy_stream_create(void *self, rebatch_stream *out)
{
    (void)self;
    for (size_t i = 1; i < LAZY_STREAMS; i++) {
        if (lazy.streams[i].is_open)
            continue;
        lazy.streams[i].is_open = true;
        *out = &lazy.streams[i];
        return REBATCH_OK;
    }
    return rbi_error(REBATCH_E_UNSUPPORTED, "%d streams are open", LAZY_STREAMS);
}

static void lazy_stream_destroy(void *self, rebatch_stream stream)
{
    (void)self;
    come_to(stream, stream->enqueued);
    stream->is_open = false;
}

static bool lazy_stream_is_valid(void *self, rebatch_stream stream)
{
    (void)self;
    return stream->is_open;
}

static rebatch_status lazy_stream_synchronize(void *self, rebatch_stream stream)
{
    (void)self;
    lazy_go_on(stream, 8);
    return REBATCH_OK;
}

static rebatch_status lazy_synchronize(void *self)
{
    for (size_t i = 0; i < LAZY_STREAMS; i++)
        (void)lazy_stream_synchronize(self, &lazy.streams[i]);
    return REBATCH_OK;
}

static rebatch_status lazy_event_create(void *self, rbi_event *out)
{
    (void)self;
    lazy.event_calls++;
    *out = calloc(1, sizeof **out);
    lazy.events += *out != NULL;
    return *out ? REBATCH_OK : REBATCH_E_HOST_OOM;
}

static void lazy_event_destroy(void *self, rbi_event event)
{
    (void)self;
    lazy.events -= event != NULL;
    free(event);
}

static rebatch_status lazy_event_record(void *self, rbi_event event)
{
    (void)self;
    lazy.event_calls++;
    for (size_t i = 0; i < LAZY_STREAMS; i++)
        event->numbers[i] = lazy.streams[i].enqueued;
    return REBATCH_OK;
}

static rebatch_status lazy_event_refuse(void *self, rbi_event event)
{
    (void)self;
    (void)event;
    return REBATCH_E_UNSUPPORTED;
}

void lazy_set_events(bool are_there)
{
    lazy.ops.event_record = are_there ? lazy_event_record : lazy_event_refuse;
}

static rebatch_status lazy_event_query(void *self, rbi_event event, bool *done)
{
    (void)self;
    lazy.event_calls++;
    *done = true;
    for (size_t i = 0; i < LAZY_STREAMS; i++)
        *done = *done && lazy.streams[i].done >= event->numbers[i];
    return REBATCH_OK;
}

static rebatch_status lazy_event_synchronize(void *self, rbi_event event)
{
    (void)self;
    lazy.event_calls++;
    for (size_t i = 0; i < LAZY_STREAMS; i++)
        come_to(&lazy.streams[i], event->numbers[i]);
    return REBATCH_OK;
}

size_t lazy_under_way(void)
{
    return lazy.use_count;
}

uint64_t lazy_event_calls(void)
{
    return lazy.event_calls;
}

/* ---- life ---- */

rebatch_device *lazy_open(size_t capacity_bytes, size_t page_bytes, bool has_virtual_memory)
{
    rebatch_device *device;
    cr_assert_eq(rbi_device_open_dry(&device, capacity_bytes, page_bytes, has_virtual_memory),
                 REBATCH_OK, "%s", rebatch_last_error());
    memset(&lazy, 0, sizeof lazy);
    lazy.dry = device->ops;
    lazy.page_bytes = page_bytes;
    lazy.streams[0].is_open = true;
    lazy.mapped = calloc(PAGES, 1); /* touched only where something was mapped */
    cr_assert_not_null(lazy.mapped);
    lazy.ops = *device->ops;
    lazy.ops.alloc = lazy_alloc;
    lazy.ops.free = lazy_free;
    lazy.ops.map = has_virtual_memory ? lazy_map : NULL;
    lazy.ops.unmap = has_virtual_memory ? lazy_unmap : NULL;
    lazy.ops.stream_create = lazy_stream_create;
    lazy.ops.stream_destroy = lazy_stream_destroy;
    lazy.ops.stream_is_valid = lazy_stream_is_valid;
    lazy.ops.stream_synchronize = lazy_stream_synchronize;
    lazy.ops.event_create = lazy_event_create;
    lazy.ops.event_destroy = lazy_event_destroy;
    lazy.ops.synchronize = lazy_synchronize;
    lazy.ops.event_query = lazy_event_query;
    lazy.ops.event_synchronize = lazy_event_synchronize;
    lazy_set_events(true);
    device->ops = &lazy.ops;
    return device;
}

void lazy_close(rebatch_device *device)
{
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(device, &info), REBATCH_OK);
    cr_assert_eq(info.used_bytes, 0, "%zu bytes are left", (size_t)info.used_bytes);
    cr_assert_eq(lazy.events, 0, "%zu events are left", lazy.events);
    free(lazy.mapped);
    device->ops = lazy.dry;
    rebatch_device_close(device);
}
