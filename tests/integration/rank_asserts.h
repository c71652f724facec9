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

/* Steps in which the n-th request of `only` one rank, or of all, finds no memory, for every n, with
 * what `check` asserts of each rank. Gives how many steps there were. */
static inline uint64_t fail_every_request(struct ranks *ranks, uint32_t only, bool is_of_all,
                                          void (*check)(const struct ranks *, const struct rank *))
{
    uint64_t steps = 0, requests = 1;
    for (uint64_t nth = 1; nth <= requests; nth++) {
        requests = 0;
        for (uint32_t i = 0; i < ranks->size; i++)
            ranks->rank[i].fail_request = is_of_all || i == only ? nth : 0;
        ranks_step(ranks);
        assert_all(ranks, REBATCH_OK);
        cr_assert(ranks_have_stepped(ranks, ++steps), "request %lu", (unsigned long)nth);
        for (uint32_t i = 0; i < ranks->size; i++) {
            const struct rank *const r = &ranks->rank[i];
            if (is_of_all || i == only)
                requests = r->requests > requests ? r->requests : requests;
            cr_assert_eq(r->report.ooms, r->fail_request && nth <= r->requests, "rank %u", i);
            check(ranks, r);
        }
    }
    return steps;
}

#endif
