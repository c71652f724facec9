/* Owns the buffer between what writes a snapshot and where it goes.
 * Must not know what is written. */
#include <string.h>

#include "inspect/inspect.h"

void rbi_sink_flush(struct rbi_sink *sink)
{
    if (sink->length > 0 && sink->status == REBATCH_OK)
        sink->status = sink->write(sink->buffer, sink->length, sink->user);
    sink->length = 0;
}

void rbi_sink_put(struct rbi_sink *sink, const void *data, size_t size)
{
    const char *from = data;
    while (size > 0) {
        const size_t part = rbi_min(size, sizeof sink->buffer - sink->length);
        memcpy(sink->buffer + sink->length, from, part);
        sink->length += part;
        from += part;
        size -= part;
        if (sink->length == sizeof sink->buffer)
            rbi_sink_flush(sink);
    }
}

void rbi_sink_print(struct rbi_sink *sink, const char *format, ...)
{
    char text[256];
    struct rbi_text t = {text, sizeof text, 0};
    va_list arguments;
    va_start(arguments, format);
    rbi_text_add_v(&t, format, arguments);
    va_end(arguments);
    rbi_sink_put(sink, text, rbi_min(t.length, sizeof text - 1));
}
