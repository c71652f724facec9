/* Owns the segments of a snapshot: memory without a gap.
 * Must not know in what form they are written. */
#include <time.h>

#include "inspect/inspect.h"

static void add_piece(struct rbi_segment *segment, const struct rbi_view_piece *piece)
{
    segment->count++;
    segment->bytes += piece->bytes;
    if (rbi_view_is_in_use(piece)) {
        segment->live_bytes += piece->bytes;
        segment->requested_bytes += piece->requested_bytes;
    } else if (piece->state == RBI_VIEW_PENDING) {
        segment->pending_bytes += piece->bytes;
    }
}

/* Of what is left of a range. */
static bool next_in_range(struct rbi_segment *segment, struct rbi_view_walk *walk)
{
    struct rbi_view_piece piece;
    *segment = (struct rbi_segment){.pieces = *walk};
    if (!rbi_view_next(&piece, walk))
        return false;
    segment->address = piece.address;
    for (;;) {
        add_piece(segment, &piece);
        struct rbi_view_walk ahead = *walk;
        if (!rbi_view_next(&piece, &ahead) || piece.address != segment->address + segment->bytes)
            return true;
        *walk = ahead;
    }
}

bool rbi_segment_next(struct rbi_segment *segment, struct rbi_view_walk *walk)
{
    for (; walk->range; rbi_view_next_range(walk))
        if (next_in_range(segment, walk))
            return true;
    return false;
}

int64_t rbi_snapshot_epoch_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 - (int64_t)(rbi_now_ns() / 1000);
}
