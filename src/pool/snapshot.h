/* What the files of the snapshot share: where bytes go, and the pool as segments and pieces.
 * Must not know how memory is found. */
#ifndef RBI_SNAPSHOT_H
#define RBI_SNAPSHOT_H

#include "pool/pool.h"

/* ---- where bytes go (snapshot.c) ---- */

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
void rbi_sink_put(struct rbi_sink *sink, const void *data, size_t size);
/* Of at most 255 bytes. */
void rbi_sink_print(struct rbi_sink *sink, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- what is there (snapshot.c); with the lock held ---- */

/* Memory of one block: all of it, except of a quarantined or held block, which may have granules at
 * some of its addresses only. */
struct rbi_piece {
    const struct rbi_block *block;
    const char *address;
    size_t bytes;
};
/* A walk over a range's pieces in the order of their addresses. */
struct rbi_pieces {
    const struct rbi_range *range;
    size_t granule_bytes;
    const struct rbi_block *block; /* NULL: the end */
    const char *at;                /* within it */
};
struct rbi_pieces rbi_pieces_of(const rebatch_pool *pool, const struct rbi_range *range);
/* False at the end. */
bool rbi_pieces_next(struct rbi_piece *piece, struct rbi_pieces *pieces);

/* Pieces one behind the other, without a gap.
 *   bytes == sum of the pieces' bytes */
struct rbi_segment {
    const char *address;
    size_t bytes;
    size_t live_bytes, requested_bytes; /* of blocks in use */
    size_t pending_bytes;
    struct rbi_pieces pieces; /* where they begin */
    size_t count;             /* how many there are */
};
bool rbi_segment_next(struct rbi_segment *segment, struct rbi_pieces *pieces);

static inline bool rbi_piece_is_live(const struct rbi_piece *piece)
{
    return piece->block->state == RBI_BLOCK_LIVE || piece->block->state == RBI_BLOCK_DEFERRED;
}

/* Microseconds since 1970 of rbi_now_ns() == 0. */
int64_t rbi_snapshot_epoch_us(void);

/* ---- the forms (snapshot_pickle.c, snapshot_csv.c); with the lock held ---- */

void rbi_snapshot_pickle(struct rbi_sink *sink, const rebatch_pool *pool);
void rbi_snapshot_blocks(struct rbi_sink *sink, const rebatch_pool *pool);
void rbi_snapshot_events(struct rbi_sink *sink, const rebatch_pool *pool);

#endif
