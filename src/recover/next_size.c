/* Owns which size comes next, by whoever asks: the rules of the table in recover.h.
 * Must not know when somebody asks. */
#include "recover/recover.h"

/* Short of double the size a line is followed a quarter less far than it says; what that leaves is
 * looked at again. */
#define SHORT_OF_LINE 4
/* Beyond the line a stride is a thirty-second of the size: at most so much is lost at the end. */
#define STRIDES 32
/* An eighth of the size is far. */
#define FAR 8
/* A prediction that did not hold is rarely off by more. */
#define NEAR 16

/* ---- what there is room for ---- */

typedef bool predict_bytes(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten);

/* Beside what is held for such an attempt already; `unknown` where nobody can tell. */
static bool finds_room(const rebatch *rb, size_t size, unsigned lighten, uint64_t available,
                       predict_bytes *predict, bool unknown)
{
    uint64_t need;
    if (!predict(&need, rb, size, lighten))
        return unknown;
    return need - rbi_min(need, rbi_need_held(rb, size)) <= available;
}

static uint64_t available_or(const rebatch *rb, uint64_t unknown)
{
    size_t available;
    return rbi_available(&available, rb) == REBATCH_OK ? available : unknown;
}

bool rbi_size_may_fit(const rebatch *rb, size_t size, unsigned lighten)
{
    return finds_room(rb, size, lighten, available_or(rb, 0), rbi_need_predict, true);
}

static bool is_predicted_to_fit(const rebatch *rb, size_t size, uint64_t available)
{
    return finds_room(rb, size, rb->lighten, available, rbi_need_predict, false);
}

size_t rbi_size_largest(const rebatch *rb, size_t most, uint64_t available_bytes)
{
    const size_t from = rbi_need_known_from(rb);
    const size_t least = rb->run.by_cost ? 1 : rbi_round_size_up(&rb->options, 1);
    size_t fits = rbi_max(least, from);
    if (!from || fits > most || !is_predicted_to_fit(rb, fits, available_bytes))
        return 0;
    while (fits < most) {
        const size_t middle = fits + (most - fits + 1) / 2;
        if (is_predicted_to_fit(rb, middle, available_bytes))
            fits = middle;
        else
            most = middle - 1;
    }
    return rbi_size_allowed(rb, fits);
}

/* ---- larger ---- */

/* By cost, what uncuts this batch: a model takes its time to say what a size far beyond needs. */
static size_t upper_size(const rebatch *rb)
{
    if (!rb->run.by_cost)
        return rbi_micro_upper(rb, rb->run.batch);
    const size_t twice = rb->sizes.budget > SIZE_MAX / 2 ? SIZE_MAX : rb->sizes.budget * 2;
    return rbi_max(rbi_size_of(rb, 0, rb->run.batch), twice);
}

/* Or the next that is allowed. */
static size_t doubled(const rebatch *rb, size_t size, size_t upper)
{
    const size_t twice = size > upper / 2 ? upper : rbi_max(size * 2, 1);
    const size_t allowed = rbi_size_allowed(rb, twice);
    if (rb->run.by_cost || allowed > size)
        return allowed;
    const size_t next = rbi_round_size_up(&rb->options, size + 1);
    return next && next <= upper ? next : size;
}

static size_t halfway(const rebatch *rb, size_t size, size_t larger)
{
    const size_t middle = size + (rbi_max(larger, size) - size) / 2;
    return rbi_max(rbi_size_allowed(rb, middle), size);
}

/* `larger`, or halfway to it, and so on, until whole steps are predicted to find room. What did not
 * is not asked about again with no more memory. */
static size_t fitting(rebatch *rb, size_t size, size_t larger, uint64_t available)
{
    if (!rbi_need_has_model(rb, rb->lighten) || !rb->sizes.model.fits)
        return larger;
    rbi_assert(larger >= size);
    while (larger > size && !rb->sizes.model.fits(rb->sizes.model.user, rb, larger)) {
        rbi_size_note_failed(rb, larger, available);
        larger = halfway(rb, size, larger);
    }
    return larger;
}

void rbi_size_note_failed(rebatch *rb, size_t size, uint64_t available_bytes)
{
    rb->sizes.growth.failed_size = size;
    rb->sizes.growth.failed_by_cost = rb->run.by_cost;
    rb->sizes.growth.failed_available = available_bytes;
}

/* One failed, and there is no more memory than then. The allocator behind a meter may have what is
 * there in pieces: near that size, and with hardly more memory, it would fail too. */
static bool would_fail(const rebatch *rb, size_t size, uint64_t available)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    const bool is_rough = rbi_meter_is_set(rb);
    return growth->failed_size && growth->failed_by_cost == rb->run.by_cost &&
           growth->failed_available != UINT64_MAX && /* there nobody counts memory */
           size >= growth->failed_size - (is_rough ? growth->failed_size / NEAR : 0) &&
           available - (is_rough ? available / NEAR : 0) <= growth->failed_available;
}

/* Points of one's own do not say what is far beyond them. */
static size_t grown(rebatch *rb, size_t size)
{
    const uint64_t available = available_or(rb, 0);
    size_t upper = upper_size(rb);
    if (!rbi_need_can_choose(rb)) {
        size_t larger = doubled(rb, size, upper);
        if (rbi_meter_is_set(rb) && would_fail(rb, larger, available))
            larger = halfway(rb, size, rb->sizes.growth.failed_size);
        if (rbi_size_may_fit(rb, larger, rb->lighten))
            return larger;
        return rb->run.by_cost ? rbi_size_largest(rb, larger, available) : size;
    }
    if (!rbi_need_has_model(rb, rb->lighten))
        upper = doubled(rb, size, upper);
    size_t larger = rbi_size_largest(rb, upper, available);
    if (would_fail(rb, larger, available))
        larger = halfway(rb, size, rb->sizes.growth.failed_size);
    return fitting(rb, size, rbi_max(larger, size), available);
}

static size_t along_line(rebatch *rb, size_t size)
{
    const size_t larger = grown(rb, size);
    if (larger <= size || larger / 2 >= size)
        return larger;
    const size_t less = rbi_size_allowed(rb, larger - (larger - size) / SHORT_OF_LINE);
    return less > size ? less : larger;
}

/* An OOM has shown where the end is. Where it came far from a size that ran, the line was wrong
 * between them; without what was reserved it is nothing to go by, nor where this size was not
 * measured. */
static size_t near_failed(const rebatch *rb, size_t size, size_t failed)
{
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    if (failed <= size || failed - size <= rbi_max(size / FAR, 1) || !known ||
        !known->reserved_bytes)
        return 0;
    return halfway(rb, size, failed);
}

static size_t beyond_line(const rebatch *rb, size_t size)
{
    const size_t next = rbi_round_size_up(&rb->options, size + rbi_max(size / STRIDES, 1));
    return next && next <= upper_size(rb) &&
                   finds_room(rb, next, rb->lighten, available_or(rb, 0), rbi_need_predict_live,
                              false)
               ? next
               : 0;
}

/* ---- smaller ---- */

/* Or the smallest that is allowed. */
static size_t lowered(const rebatch *rb, size_t size)
{
    const size_t allowed = rbi_size_allowed(rb, size);
    return allowed || rb->run.by_cost ? allowed : rbi_round_size_up(&rb->options, 1);
}

/* The size before the last growth, unless something tells that it does not fit; 0: none. What was
 * reserved when it ran may have been all there was. */
static size_t previous_of(const rebatch *rb, size_t failed)
{
    const struct rbi_growth *growth = &rb->sizes.growth;
    const size_t size = growth->previous_by_cost == rb->run.by_cost ? growth->previous : 0;
    return size && size < failed &&
                   finds_room(rb, size, rb->lighten, available_or(rb, UINT64_MAX),
                              rbi_need_predict_live, true)
               ? size
               : 0;
}

/* Less than a prediction that did not hold, by as much as was missing and a sixteenth at least. */
static size_t refit(const rebatch *rb, size_t failed)
{
    rbi_assert(failed > 0);
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    size_t size = failed - rbi_max(failed / NEAR, 1);
    if (failure->need_bytes > failure->available_bytes)
        size = rbi_min(size, rbi_saturate((double)failed * (double)failure->available_bytes /
                                          (double)failure->need_bytes));
    return rbi_size_allowed(rb, size);
}

/* A micro-batch ran out of memory, or would have, at a cost from which the session learns. */
static bool failed_by_cost(const rebatch *rb)
{
    const rebatch_phase phase = rb->run.ooms.failure.phase;
    return rb->run.by_cost && rbi_is_on(rb->options.learn) &&
           (phase == REBATCH_PHASE_FORWARD || phase == REBATCH_PHASE_BACKWARD ||
            phase == REBATCH_PHASE_ADMISSION);
}

/* A memory model says enough of other sizes, and so do those through which learning came to a size:
 * by cost, or by a meter to one at which steps have run. They are below it and near. Sizes that
 * merely ran do not. `previous`: the size before the growth to the one that failed; 0: steps have
 * run at that one. */
static bool goes_by_prediction(const rebatch *rb, size_t previous)
{
    const bool was_approached =
        failed_by_cost(rb) || (rbi_is_on(rb->options.learn) && rbi_meter_is_set(rb) && !previous);
    return rb->options.on_oom == REBATCH_ON_OOM_FIT ||
           (rb->options.on_oom == REBATCH_ON_OOM_DEFAULT &&
            (was_approached || rbi_need_has_model(rb, rb->lighten)));
}

/* 0: that is not to be known. Two predictions in a row that did not hold show that they are not to
 * be had here. */
static size_t fitted(rebatch *rb, size_t failed, size_t previous)
{
    struct rbi_run_ooms *ooms = &rb->run.ooms;
    const bool was_predicted = failed == ooms->fitted;
    if (!goes_by_prediction(rb, previous) || (was_predicted && ooms->refitted))
        return 0;
    ooms->fitted = was_predicted ? refit(rb, failed)
                                 : rbi_size_largest(rb, failed - 1, ooms->failure.available_bytes);
    if (failed_by_cost(rb)) /* a line through costs is rough near the one that failed */
        ooms->fitted = rbi_min(ooms->fitted, refit(rb, failed));
    ooms->refitted = was_predicted;
    return ooms->fitted;
}

/* Nearly all that there was by a meter was needed, so it will not do another time; learning goes by
 * rules of its own. */
static bool was_short_by_meter(const rebatch *rb)
{
    const struct rbi_failure *failure = &rb->run.ooms.failure;
    return rbi_meter_is_set(rb) && !rbi_is_on(rb->options.learn) &&
           failure->need_bytes >= failure->available_bytes - failure->available_bytes / NEAR;
}

/* By cost always less than before, also where cost falls with the samples. */
static size_t after_oom(rebatch *rb, size_t failed, bool is_sized)
{
    const size_t previous = previous_of(rb, failed), budget = rb->sizes.budget;
    const size_t held = rb->run.by_cost ? rbi_min(failed, budget) : failed;
    if (is_sized && was_short_by_meter(rb))
        rbi_size_note_failed(rb, failed, rb->run.ooms.failure.available_bytes);
    size_t next = is_sized ? fitted(rb, failed, previous) : 0;
    if (!next)
        next = lowered(rb, rbi_max(held / 2, previous));
    rb->sizes.growth.previous = 0;
    rbi_assert(rb->run.by_cost || (next > 0 && next < failed));
    return rb->run.by_cost ? rbi_min(next, budget - (budget > 0)) : next;
}

/* ---- who asks ---- */

size_t rbi_next_size(rebatch *rb, enum rbi_why why, size_t size)
{
    size_t next = 0;
    switch (why) {
    case RBI_AFTER_OOM:
    case RBI_AFTER_OOM_ELSEWHERE:
        return after_oom(rb, size, why == RBI_AFTER_OOM);
    case RBI_THRASHES:
        return lowered(rb, size - size / 4 - (size % 4 != 0));
    case RBI_HALVES:
        return lowered(rb, size / 2);
    case RBI_GROWS:
        next = grown(rb, size);
        break;
    case RBI_OVERRULES:
        next = doubled(rb, size, upper_size(rb));
        break;
    case RBI_FOLLOWS_LINE:
        next = along_line(rb, size);
        break;
    case RBI_LEAVES_LINE:
        next = rb->sizes.learning.failed ? near_failed(rb, size, rb->sizes.learning.failed)
                                         : beyond_line(rb, size);
        break;
    }
    return next > size ? next : 0;
}
