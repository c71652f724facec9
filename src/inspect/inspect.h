/* Reports about a pool: what their files share, and what tests call beyond the public header.
 * Must not know the pool's structs. */
#ifndef RBI_INSPECT_H
#define RBI_INSPECT_H

#include "pool/view.h"

/* ---- where bytes go (sink.c) ---- */

#define RBI_SINK_BYTES 4096

/* Collects what is written into pieces of this size, so that the heap is not needed. After the
 * first failure of `write` nothing is written any more. */
struct rbi_sink {
    rebatch_status (*write)(const void *data, size_t size, void *user);
    void *user;
    rebatch_status status;
    size_t length;
    char buffer[RBI_SINK_BYTES];
};
/* Writes what is collected. */
void rbi_sink_flush(struct rbi_sink *sink);
void rbi_sink_put(struct rbi_sink *sink, const void *data, size_t size);
/* Of at most 255 bytes. */
void rbi_sink_print(struct rbi_sink *sink, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- the forms (snapshot_csv.c); while the view is open ---- */

void rbi_snapshot_blocks(struct rbi_sink *sink, const rebatch_pool *pool);
void rbi_snapshot_events(struct rbi_sink *sink, const rebatch_pool *pool);

#endif
