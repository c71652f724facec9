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

/* ---- what is there (segment.c); while the view is open ---- */

/* Pieces of a range one behind the other, without a gap.
 *   bytes == sum of the pieces' bytes */
struct rbi_segment {
    const char *address;
    size_t bytes;
    size_t live_bytes, requested_bytes; /* of blocks in use */
    size_t pending_bytes;
    struct rbi_view_walk pieces; /* where they begin */
    size_t count;                /* how many there are */
};
/* False at the end of all ranges. */
bool rbi_segment_next(struct rbi_segment *segment, struct rbi_view_walk *walk);

/* Microseconds since 1970 of rbi_now_ns() == 0. */
int64_t rbi_snapshot_epoch_us(void);

/* ---- the forms (snapshot_pickle.c, snapshot_csv.c); while the view is open ---- */

void rbi_snapshot_pickle(struct rbi_sink *sink, const rebatch_pool *pool);
void rbi_snapshot_blocks(struct rbi_sink *sink, const rebatch_pool *pool);
void rbi_snapshot_events(struct rbi_sink *sink, const rebatch_pool *pool);

/* ---- pickle (pickle.c) ---- */

/* Writes Python's pickle format, protocol 2, with the opcodes that PyTorch's memory viewer reads.
 * It needs no heap. */
void rbi_pickle_begin(struct rbi_sink *sink);
void rbi_pickle_end(struct rbi_sink *sink);

/* Between begin and end: a key, a value, a key, a value. */
void rbi_pickle_begin_dict(struct rbi_sink *sink);
void rbi_pickle_end_dict(struct rbi_sink *sink);
/* Then rbi_pickle_append() after each value. */
void rbi_pickle_list(struct rbi_sink *sink);
void rbi_pickle_append(struct rbi_sink *sink);
/* Makes the last two values a tuple. */
void rbi_pickle_pair(struct rbi_sink *sink);

void rbi_pickle_integer(struct rbi_sink *sink, int64_t number);
void rbi_pickle_unsigned(struct rbi_sink *sink, uint64_t number);
void rbi_pickle_float(struct rbi_sink *sink, double number);
void rbi_pickle_bool(struct rbi_sink *sink, bool value);
/* Bytes that are no UTF-8 become '?'. */
void rbi_pickle_text(struct rbi_sink *sink, const char *text);

/* Keeps the last value under a number, and gives it again: the same object, not a copy. */
void rbi_pickle_keep(struct rbi_sink *sink, uint32_t number);
void rbi_pickle_again(struct rbi_sink *sink, uint32_t number);

#endif
