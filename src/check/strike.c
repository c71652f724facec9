/* Owns which request of a run fails, and whose it was; which micro-batches a run is made of.
 * Must not know what is compared. */
#include <inttypes.h>
#include <string.h>

#include "check/check.h"
#include "pool/view.h"

/* ---- micro-batches ---- */

bool rbi_parts_add(struct rbi_parts *parts, size_t first, size_t count)
{
    if (parts->count == parts->room) {
        const size_t room = parts->room ? 2 * parts->room : 64;
        void *list = rbi_heap_resize(parts->list, room, sizeof *parts->list);
        if (!list)
            return false;
        parts->list = list;
        parts->room = room;
    }
    parts->list[parts->count++] = (struct rbi_part){first, count};
    return true;
}

bool rbi_parts_copy(struct rbi_parts *to, const struct rbi_parts *from)
{
    to->count = 0;
    for (size_t i = 0; i < from->count; i++)
        if (!rbi_parts_add(to, from->list[i].first, from->list[i].count))
            return false;
    return true;
}

bool rbi_parts_equal(const struct rbi_parts *a, const struct rbi_parts *b)
{
    if (a->count != b->count)
        return false;
    for (size_t i = 0; i < a->count; i++)
        if (a->list[i].first != b->list[i].first || a->list[i].count != b->list[i].count)
            return false;
    return true;
}

void rbi_parts_release(struct rbi_parts *parts)
{
    rbi_heap_free(parts->list);
    *parts = (struct rbi_parts){NULL, 0, 0};
}

/* ---- requests ---- */

bool rbi_strike_asked(void *user)
{
    struct rbi_strike_plan *plan = user;
    plan->requests++;
    plan->place.number++;
    plan->place.is_helpers = !pthread_equal(plan->thread, pthread_self());
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

/* Other threads that allocate look at this, with the pool's lock. NULL: no callback runs. */
static void set_running(struct rbi_strike_plan *plan, const struct rbi_place *place)
{
    rebatch_pool *pool = rebatch_get_pool(plan->rb);
    rbi_view_open(pool);
    plan->is_running = place != NULL;
    plan->thread = pthread_self();
    if (place)
        plan->place = *place;
    rbi_view_close(pool);
}

static void callback_begins(void *user, enum rbi_callback which, const rebatch_microbatch *mb)
{
    struct rbi_strike_plan *plan = user;
    if (plan->has_failed)
        plan->was_taken_back(plan->user);
    plan->has_failed = false;
    if (which == RBI_ZERO_GRAD)
        plan->done.count = 0;
    if (which == RBI_FORWARD_BACKWARD && !plan->has_struck)
        plan->attempt_begins(plan->user);
    plan->ooms = rbi_pool_oom_count(rebatch_get_pool(plan->rb));
    set_running(plan, &(struct rbi_place){.which = which,
                                          .first = mb ? mb->first : 0,
                                          .count = mb ? mb->count : 0,
                                          .serial = plan->place.serial + 1});
}

/* An OOM for which the callback has returned REBATCH_OK. */
static void note_swallowed(struct rbi_strike_plan *plan, uint64_t bytes)
{
    const bool is_struck = plan->has_struck && plan->struck.serial == plan->place.serial;
    plan->was_swallowed = true;
    plan->swallowed = is_struck ? plan->struck : plan->place;
    plan->swallowed_bytes = bytes;
}

static void note_succeeded(struct rbi_strike_plan *plan)
{
    plan->is_short |= !rbi_parts_add(&plan->done, plan->place.first, plan->place.count);
    plan->succeeded++;
}

static void callback_ended(void *user, rebatch_status result)
{
    struct rbi_strike_plan *plan = user;
    rebatch_pool *pool = rebatch_get_pool(plan->rb);
    set_running(plan, NULL);
    plan->has_failed = result != REBATCH_OK;
    if (rbi_pool_oom_count(pool) != plan->ooms) {
        rebatch_oom_report oom = {0};
        rbi_pool_last_own_oom(&oom, pool);
        const uint64_t bytes = rbi_max(oom.asked_bytes, 1);
        if (plan->has_struck && !plan->struck_bytes)
            plan->struck_bytes = bytes;
        if (result == REBATCH_OK && !plan->was_swallowed)
            note_swallowed(plan, bytes);
    }
    if (result == REBATCH_OK && plan->place.which == RBI_FORWARD_BACKWARD)
        note_succeeded(plan);
    if (result == REBATCH_OK && plan->place.which == RBI_ZERO_GRAD)
        plan->was_cleared(plan->user);
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
    plan->done.count = 0;
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
    if (place->is_helpers)
        rbi_text_add(t, ", made by a helper thread,");
}
