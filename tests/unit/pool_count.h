/* A naive count of what is asked of a pool, which its statistics are held against: of blocks,
 * scopes and tags. Whoever asks keeps the blocks. Must not know where blocks lie. */
#ifndef POOL_COUNT_H
#define POOL_COUNT_H

#include "pool/pool.h"

#define COUNT_DEPTH 8
#define COUNT_TAGS 5

/* What is known of a block. */
struct counted {
    size_t bytes, rounded;
    uint64_t sequence;
    size_t deferred_in; /* depth of the scope in which its free waits; 0: none */
    rebatch_tag tag;
};

struct count_scope {
    rebatch_scope handle;
    uint64_t first_sequence;
    int64_t live_at_begin, peak;
};

struct count {
    struct count_scope scopes[COUNT_DEPTH];
    size_t depth;
    uint64_t sequence, tag_bytes[COUNT_TAGS];
    rebatch_pool_stats want; /* those that are counted; the caller's are ooms and late_frees */
};

/* The tags that blocks may have, from 1 on. */
void count_make_tags(rebatch_pool *pool);

/* The pool gave a block: it is born. */
void count_alloc(struct count *count, struct counted *block);
/* Its free would wait for the innermost scope's end, for it is older than that. */
bool count_must_wait(const struct count *count, const struct counted *block);
/* A block, whose free does not wait already, is freed. Those below too say whether it is gone. */
bool count_free(struct count *count, struct counted *block);

/* Nothing when COUNT_DEPTH are open. */
void count_begin(struct count *count, rebatch_pool *pool);
/* Commits the innermost scope, then is asked for every block. */
void count_commit(struct count *count, rebatch_pool *pool);
bool count_is_gone_by_commit(struct count *count, struct counted *block);
/* Rolls back to a depth below, then is asked for every block. */
void count_rollback(struct count *count, rebatch_pool *pool, size_t to);
bool count_is_gone_by_rollback(struct count *count, struct counted *block);

/* The pool says what was counted. Peaks may be high by `beyond_bytes`. */
void count_compare(const struct count *count, rebatch_pool *pool, size_t beyond_bytes);

#endif
