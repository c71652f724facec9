/* Owns which request of a run fails, and whose it was.
 * Must not know what is compared. */
#include <inttypes.h>

#include "check/check.h"

bool rbi_strike_asked(void *user)
{
    struct rbi_strike_plan *plan = user;
    plan->requests++;
    plan->place.number++;
    if (plan->requests != plan->fails_at)
        return false;
    plan->has_struck = true;
    plan->struck = plan->place;
    plan->ooms_at_strike = rbi_pool_oom_count(rebatch_get_pool(plan->rb)) + 1;
    return true;
}

static bool has_injected(const void *user)
{
    const struct rbi_strike_plan *plan = user;
    return plan->has_struck &&
           rbi_pool_oom_count(rebatch_get_pool(plan->rb)) == plan->ooms_at_strike;
}

static void callback_begins(void *user, enum rbi_callback which, const rebatch_microbatch *mb)
{
    struct rbi_strike_plan *plan = user;
    if (plan->has_failed)
        plan->was_taken_back(plan->user);
    plan->has_failed = false;
    plan->place = (struct rbi_place){.which = which,
                                     .first = mb ? mb->first : 0,
                                     .count = mb ? mb->count : 0,
                                     .serial = plan->place.serial + 1};
    if (which == RBI_FORWARD_BACKWARD && !plan->has_struck)
        plan->attempt_begins(plan->user);
}

static void callback_ended(void *user, rebatch_status result)
{
    struct rbi_strike_plan *plan = user;
    plan->has_failed = result != REBATCH_OK;
    if (!plan->has_struck || plan->struck_bytes)
        return;
    rebatch_oom_report oom = {0};
    rbi_pool_last_own_oom(&oom, rebatch_get_pool(plan->rb));
    plan->struck_bytes = rbi_max(oom.asked_bytes, 1);
    plan->was_swallowed = result == REBATCH_OK;
}

struct rbi_drill_watch rbi_strike_watch(struct rbi_strike_plan *plan)
{
    return (struct rbi_drill_watch){callback_begins, callback_ended, has_injected, plan};
}

void rbi_strike_begin(struct rbi_strike_plan *plan, uint64_t fails_at)
{
    plan->requests = 0;
    plan->fails_at = fails_at;
    plan->has_failed = false;
    plan->has_struck = false;
    plan->was_swallowed = false;
    plan->struck_bytes = 0;
}

void rbi_place_add(struct rbi_text *t, const struct rbi_place *place, uint64_t bytes)
{
    rbi_text_add(t, "allocation %" PRIu64 " (", place->number);
    rbi_text_add_bytes(t, bytes);
    rbi_text_add(t, ") of %s", rbi_callback_name(place->which));
    if (place->count == 1)
        rbi_text_add(t, " of sample %zu", place->first);
    else if (place->count)
        rbi_text_add(t, " of samples %zu-%zu", place->first, place->first + place->count - 1);
}
