/* Owns the runs in which freed or new memory holds no numbers.
 * Must not know what else is run. */
#include "check/check.h"

static void set(struct rbi_check *c, uint8_t freed, uint8_t allocated, bool pads)
{
    c->stale.pads = pads;
    rbi_pool_set_fill(c->pool, &(struct rbi_pool_fill){true, freed, allocated, pads});
}

void rbi_fill_set(struct rbi_check *c, uint8_t freed, uint8_t allocated)
{
    set(c, freed, allocated, false);
}

void rbi_fill_pad(struct rbi_check *c, uint8_t allocated)
{
    set(c, 0, allocated, true);
}

/* In all runs before these, freed and new memory is 0. */
rebatch_status rbi_fill_run(struct rbi_check *c)
{
    static const struct {
        uint8_t freed, allocated;
        rebatch_finding_kind kind;
        const char *when, *advice;
    } runs[] = {
        {RBI_NO_NUMBER, 0, REBATCH_FINDING_FREED, "when freed memory is overwritten",
         "a pointer is used after its memory was freed"},
        {0, RBI_NO_NUMBER, REBATCH_FINDING_UNINITIALIZED, "when new memory is not 0",
         "memory is read that was allocated and not written"},
    };
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof runs / sizeof *runs && !status && rbi_check_has_time(c); i++) {
        size_t ran;
        rbi_fill_set(c, runs[i].freed, runs[i].allocated);
        status = rbi_check_run(c, c->base, 0, &ran);
        status = status ? rbi_check_fail(c, runs[i].when, status)
                        : rbi_compare(c, &(struct rbi_comparison){runs[i].kind, runs[i].when,
                                                                  runs[i].advice, &c->reference,
                                                                  .is = &c->now});
        const rebatch_status undone = rbi_check_undo(c);
        status = status ? status : undone;
    }
    rbi_fill_set(c, 0, 0);
    return status;
}
