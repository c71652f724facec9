/* What reports read of a pool: its blocks, its counters, its last events. Nothing here changes it.
 * Must not know what is made of that. */
#ifndef RBI_POOL_VIEW_H
#define RBI_POOL_VIEW_H

#include "pool/event_log.h"
#include "pool/interface.h"

struct rbi_block;
struct rbi_range;

/* The pool stays as it is from open to close, and other threads wait. What runs meanwhile must not
 * call the pool, and rebatch_escape() refuses to leave it. */
void rbi_view_open(rebatch_pool *pool);
void rbi_view_close(rebatch_pool *pool);

/* ---- memory; between open and close ---- */

enum rbi_view_state {
    RBI_VIEW_FREE,
    RBI_VIEW_LIVE,
    RBI_VIEW_DEFERRED, /* in use: its free waits for a scope's commit */
    RBI_VIEW_PENDING,  /* freed, but another stream's work may still use it */
    RBI_VIEW_LOST      /* quarantined: the device did not unmap it */
};

/* Memory of one block: all of it, except of one that has memory at some of its addresses only. */
struct rbi_view_piece {
    const char *address;
    size_t bytes;
    size_t requested_bytes; /* of a block in use, else 0 */
    uint64_t allocation;    /* of a block in use: the number of its allocation */
    rebatch_stream stream;
    rebatch_tag tag;
    enum rbi_view_state state;
};
static inline bool rbi_view_is_in_use(const struct rbi_view_piece *piece)
{
    return piece->state == RBI_VIEW_LIVE || piece->state == RBI_VIEW_DEFERRED;
}

/* A walk over the ranges of addresses, and over the pieces of each in the order of their
 * addresses. A copy walks on its own. */
struct rbi_view_walk {
    const struct rbi_range *range; /* NULL: the end */
    const struct rbi_block *block; /* within it; NULL: its end */
    const char *at;                /* within that */
    size_t page_bytes;
    bool is_mapped; /* memory is mapped into the range; else it is one plain allocation */
};
/* At the first range. */
struct rbi_view_walk rbi_view_ranges(const rebatch_pool *pool);
void rbi_view_next_range(struct rbi_view_walk *walk);
/* False at the end of the range. */
bool rbi_view_next(struct rbi_view_piece *piece, struct rbi_view_walk *walk);

/* Whether it is an address of the pool's. Takes no lock: a handler of a signal may ask. */
bool rbi_view_has(const rebatch_pool *pool, const char *address);

/* Shows every block in use that is of an extent, oldest first. */
void rbi_view_each_live(const rebatch_pool *pool, const struct rbi_extent *extent,
                        void (*show)(void *user, const struct rbi_view_piece *block), void *user);

/* ---- counters, options, events; between open and close ---- */

struct rbi_view_facts {
    size_t spare_bytes;                /* held, and mapped nowhere */
    uint64_t taken_bytes, given_bytes; /* from and to the device, since create */
    const uint64_t *stages;            /* how often each was tried, by rebatch_pool_stage */
    const struct rbi_event_log *log;
    size_t limit_bytes, others_bytes; /* SIZE_MAX: none; the second is of a variable of others */
    const char *others_variable;
    uint64_t floor_bytes, asleep_bytes;
};
void rbi_view_get_facts(struct rbi_view_facts *out, const rebatch_pool *pool);
/* With those that are worked out. */
void rbi_pool_get_stats(rebatch_pool_stats *out, const rebatch_pool *pool);
size_t rbi_view_tag_count(const rebatch_pool *pool);
const char *rbi_view_tag_name(const rebatch_pool *pool, rebatch_tag tag);
void rbi_tag_get_usage(const rebatch_pool *pool, size_t tag, rebatch_tag_usage *out);

#endif
