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
    rbi_assert(count > 0 && parts->count < parts->room);
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

bool rbi_injection_fails(void *user, size_t bytes)
{
    struct rbi_injection *injection = user;
    injection->requests++;
    injection->place.number++;
    injection->place.is_helpers = !pthread_equal(injection->thread, pthread_self());
    if (injection->requests != injection->fails_at)
        return false;
    rbi_assert(!injection->is_done); /* one request of a run fails */
    injection->is_done = true;
    injection->injected = injection->place;
    injection->injected_bytes = bytes;
    injection->ooms_at_injection = rbi_pool_oom_count(rebatch_get_pool(injection->rb)) + 1;
    return true;
}

static bool has_injected(const void *user)
{
    const struct rbi_injection *injection = user;
    return injection->is_done &&
           rbi_pool_oom_count(rebatch_get_pool(injection->rb)) == injection->ooms_at_injection;
}

/* With the pool's lock, as other threads that allocate read this. NULL: no callback runs. */
static void set_running(struct rbi_injection *injection, const struct rbi_place *place)
{
    rebatch_pool *pool = rebatch_get_pool(injection->rb);
    rbi_view_open(pool);
    injection->is_running = place != NULL;
    injection->thread = pthread_self();
    if (place)
        injection->place = *place;
    rbi_view_close(pool);
}

static void callback_begins(void *user, enum rbi_callback which, const rebatch_microbatch *mb)
{
    struct rbi_injection *injection = user;
    if (injection->has_failed)
        injection->was_taken_back(injection->user);
    injection->has_failed = false;
    if (which == RBI_ZERO_GRAD)
        injection->done.count = 0;
    if ((which == RBI_FORWARD_BACKWARD || which == RBI_OPTIMIZER) && !injection->is_done)
        injection->attempt_begins(injection->user);
    injection->ooms = rbi_pool_oom_count(rebatch_get_pool(injection->rb));
    set_running(injection, &(struct rbi_place){.which = which,
                                               .first = mb ? mb->first : 0,
                                               .count = mb ? mb->count : 0,
                                               .serial = injection->place.serial + 1});
}

/* An OOM for which the callback has returned REBATCH_OK. */
static void note_swallowed(struct rbi_injection *injection, uint64_t bytes)
{
    const bool is_own = injection->is_done && injection->injected.serial == injection->place.serial;
    injection->was_swallowed = true;
    injection->swallowed = is_own ? injection->injected : injection->place;
    injection->swallowed_bytes = bytes;
}

static void note_succeeded(struct rbi_injection *injection)
{
    injection->is_short |=
        !rbi_parts_add(&injection->done, injection->place.first, injection->place.count);
    injection->succeeded++;
}

static void callback_ended(void *user, rebatch_status result)
{
    struct rbi_injection *injection = user;
    rebatch_pool *pool = rebatch_get_pool(injection->rb);
    rbi_assert(injection->is_running);
    set_running(injection, NULL);
    injection->has_failed = result != REBATCH_OK;
    if (rbi_pool_oom_count(pool) != injection->ooms) {
        rebatch_oom_report oom = {0};
        rbi_pool_last_own_oom(&oom, pool);
        if (result == REBATCH_OK && !injection->was_swallowed)
            note_swallowed(injection, rbi_max(oom.asked_bytes, 1));
    }
    if (result == REBATCH_OK && injection->place.which == RBI_FORWARD_BACKWARD)
        note_succeeded(injection);
    if (result == REBATCH_OK && injection->place.which == RBI_ZERO_GRAD)
        injection->was_cleared(injection->user);
}

struct rbi_dry_step_watch rbi_injection_watch(struct rbi_injection *injection)
{
    return (struct rbi_dry_step_watch){callback_begins, callback_ended, has_injected, injection};
}

void rbi_injection_begin(struct rbi_injection *injection, uint64_t fails_at)
{
    injection->requests = 0;
    injection->fails_at = fails_at;
    injection->has_failed = false;
    if (injection->is_done)
        injection->runs_since = 1;
    else if (injection->runs_since)
        injection->runs_since++;
    injection->is_done = false;
    injection->was_swallowed = false;
    injection->done.count = 0;
}

void rbi_place_add(struct rbi_text *t, const struct rbi_place *place, uint64_t bytes)
{
    rbi_text_add(t, "allocation %" PRIu64 " (", place->number);
    rbi_text_add_bytes(t, bytes);
    rbi_text_add(t, ") of %s", rbi_callback_name(place->which));
    rbi_samples_add(t, place);
    if (place->is_helpers)
        rbi_text_add(t, ", made by a helper thread,");
}

void rbi_samples_add(struct rbi_text *t, const struct rbi_place *place)
{
    if (place->count == 1)
        rbi_text_add(t, " of sample %zu", place->first);
    else if (place->count)
        rbi_text_add(t, " of samples %zu-%zu", place->first, place->first + place->count - 1);
}
