/* What the tests of ranks assert of all of them.
 * Must not know more of the library than its public headers say. */
#ifndef RANK_ASSERTS_H
#define RANK_ASSERTS_H

#include "rank_threads.h"
#include "rig.h"

static inline void open_ranks(struct ranks *ranks, uint32_t size, const rebatch_options *options)
{
    cr_assert(ranks_open(ranks, size, options, 0), "%s", rebatch_last_error());
}

static inline void assert_all(const struct ranks *ranks, rebatch_status status)
{
    for (uint32_t i = 0; i < ranks->size; i++)
        cr_assert_eq(ranks->rank[i].status, status, "rank %u: %d, %s", i, ranks->rank[i].status,
                     ranks->rank[i].error);
}

#endif
