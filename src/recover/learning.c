/* Owns the learning of the micro-batch size from real micro-batches: when which size runs, and when
 * it is over. Must not know how memory is modelled. */
#include "recover/recover.h"

/* ---- beginning and end ---- */

void rbi_learn_start(rebatch *rb, const struct rbi_tuner *tuner)
{
    rbi_assert(!rbi_learn_is_on(&rb->sizes.learning));
    rb->sizes.learning.tuner = *tuner;
    rb->sizes.learning.state = RBI_LEARN_SEARCHES;
    rb->sizes.micro = rbi_round_size_up(&rb->options, 1);
}

/* Without one, sizes double as long as there is room. */
static void drop_tuner(struct rbi_learning *learning)
{
    if (learning->tuner.user)
        learning->tuner.destroy(learning->tuner.user);
    learning->tuner.user = NULL;
    if (learning->attempt == RBI_ATTEMPT_WATCHED)
        learning->attempt = RBI_ATTEMPT_PLAIN;
}

void rbi_learn_stop(rebatch *rb)
{
    drop_tuner(&rb->sizes.learning);
    rb->sizes.learning = (struct rbi_learning){.state = RBI_LEARN_OFF};
}

/* ---- which size ---- */

static void set_size(rebatch *rb, size_t size)
{
    rebatch_event event = rbi_event_begin(rb, REBATCH_EVENT_LEARN);
    rbi_size_set(rb, size);
    rbi_event_end(&event, rb);
    if (event.micro_before != event.micro_after || event.cost_before != event.cost_after)
        rbi_event_emit(rb, &event);
}

/* 0: there is no tuner, or it has failed just now, or it needs no other size. Its failure does not
 * fail the step, so the error text is cleared. */
static size_t ask_tuner(rebatch *rb, size_t left)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    size_t size = 0;
    if (!learning->tuner.user)
        return 0;
    const size_t upper = rbi_micro_upper(rb, rb->run.batch);
    if (learning->tuner.next(&size, learning->tuner.user, upper, rb->run.batch, left)) {
        rebatch_clear_error();
        drop_tuner(learning);
        return 0;
    }
    /* What a smaller batch had as a whole may be none that is allowed in this one. */
    return size == upper || rbi_round_size(&rb->options, size) == size ? size : 0;
}

static void prepare_pool(struct rbi_learning *learning)
{
    const struct rbi_tuner *tuner = &learning->tuner;
    rbi_assert(learning->chosen > 0);
    if (!tuner->user || !tuner->prepare(tuner->user, learning->chosen))
        return;
    rebatch_clear_error();
    drop_tuner(learning);
}

static bool has_run(const rebatch *rb)
{
    return rb->sizes.known[rb->sizes.known_last].size != 0;
}

bool rbi_learn_goes_by_meter(const rebatch *rb)
{
    const struct rbi_learning *learning = &rb->sizes.learning;
    return rbi_learn_is_on(learning) && !learning->tuner.user && rbi_meter_is_set(rb) &&
           !rb->run.by_cost;
}

/* A step in which the allocator returns cached memory to serve a request is squeezed. Memory may
 * settle; after SQUEEZED_MOST such steps in a row there is no room left. */
#define SQUEEZED_MOST 3

/* From below: the size that is in force where that has not run yet, or no whole step has; 0: no
 * other in this step. After a step `left` is 0. Before the first micro-batch of a step gradients
 * are not there yet, which the others find. */
static size_t approach(rebatch *rb, size_t left)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    const size_t size = rbi_size_now(rb);
    if (left == rb->run.batch || learning->fresh != size)
        return size;
    const size_t next = learning->failed ? 0 : rbi_next_size(rb, RBI_FOLLOWS_LINE, size);
    if (left)
        return next <= left ? next : size;
    if (next)
        return next;
    if (learning->begun != size || rb->run.report.ooms)
        return size;
    if (rb->run.meter.retries)
        return ++learning->squeezed < SQUEEZED_MOST ? size : 0;
    learning->squeezed = 0;
    return rbi_next_size(rb, RBI_LEAVES_LINE, size);
}

/* In the first step a tuner takes no more memory than what is left needs. Without one an OOM leads
 * back to what ran. */
static size_t choose(rebatch *rb, size_t left)
{
    const struct rbi_learning *learning = &rb->sizes.learning;
    size_t size = ask_tuner(rb, learning->has_stepped ? 0 : left);
    if (learning->tuner.user)
        return size;
    const size_t now = rbi_size_now(rb);
    if (rbi_learn_goes_by_meter(rb))
        size = approach(rb, left);
    else
        size = has_run(rb) ? rbi_next_size(rb, RBI_GROWS, now) : now;
    if (size > now)
        rbi_growth_keep_previous(rb);
    return size;
}

/* Where the tuner is done for now, what it has found. */
static size_t largest_found(const rebatch *rb)
{
    const struct rbi_tuner *tuner = &rb->sizes.learning.tuner;
    return tuner->user ? tuner->largest(tuner->user) : 0;
}

/* Whether a micro-batch has run and its meter has measured nothing. */
static bool is_blind(const rebatch *rb)
{
    const size_t size = rbi_size_now(rb);
    return rb->run.by_cost ? rbi_meter_is_set(rb) && rb->run.report.learned && !has_run(rb)
                           : rbi_learn_goes_by_meter(rb) && rb->sizes.learning.fresh == size &&
                                 !rbi_need_has_run(rb, size);
}

void rbi_learn_choose(rebatch *rb, size_t left)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    learning->chosen = 0;
    if (learning->state != RBI_LEARN_SEARCHES && learning->state != RBI_LEARN_RETREATS)
        return;
    if (learning->state == RBI_LEARN_RETREATS) { /* what the fallback chose tells something too */
        const size_t found = largest_found(rb);
        if (found > rbi_micro_size(rb, rb->run.batch))
            set_size(rb, found);
        learning->chosen = rbi_micro_size(rb, rb->run.batch);
        return;
    }
    if (is_blind(rb)) { /* as without learning, whose first size is the batch */
        set_size(rb, rb->run.by_cost ? SIZE_MAX : rbi_micro_upper(rb, rb->run.batch));
        rbi_learn_stop(rb);
        return;
    }
    learning->chosen = choose(rb, left);
    if (learning->chosen)
        prepare_pool(learning);
    else
        learning->state = learning->upper ? RBI_LEARN_WAITS : RBI_LEARN_FOUND;
    const size_t size = learning->chosen ? learning->chosen : largest_found(rb);
    if (size)
        set_size(rb, size);
}

/* ---- what runs ---- */

void rbi_learn_begin_step(rebatch *rb)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    if (!rbi_learn_is_on(learning))
        return;
    learning->begun = rbi_micro_size(rb, rb->run.batch);
    learning->state = rbi_micro_upper(rb, rb->run.batch) <= learning->upper ? RBI_LEARN_WAITS
                                                                            : RBI_LEARN_SEARCHES;
    if (rb->run.by_cost) /* whose samples differ: a line over cost tells enough of them */
        drop_tuner(learning);
    if (rb->lighten != learning->lighten)
        rbi_learn_stop(rb);
}

bool rbi_learn_will_watch(const rebatch *rb, size_t count)
{
    const struct rbi_learning *learning = &rb->sizes.learning;
    return learning->chosen && learning->tuner.user && learning->chosen == count;
}

void rbi_learn_begin(rebatch *rb, size_t count)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    rbi_assert(learning->attempt == RBI_ATTEMPT_PLAIN);
    if (rbi_learn_will_watch(rb, count)) {
        learning->attempt = RBI_ATTEMPT_WATCHED;
        learning->tuner.begin(learning->tuner.user, count);
    }
    if (!rbi_learn_goes_by_meter(rb) || learning->chosen != count || learning->fresh == count)
        return;
    learning->attempt = RBI_ATTEMPT_FRESH;
    learning->fresh = count;
    (void)rbi_memory_release(rb);
}

/* What is available differs by less from step to step. */
#define NOTICEABLE 64

/* One that was to be learned from ran out of memory: false when learning is of no more use. A
 * second OOM tells of something else than the size. */
static bool fail_by_meter(rebatch *rb, size_t count)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    const uint64_t available = rb->run.ooms.failure.available_bytes;
    const bool is_first = !learning->failed;
    learning->failed = count;
    /* Growth is not to try it again with as much, whatever the figures say of it. */
    rbi_need_learn_least(rb, count, rbi_saturate((double)available * (1 + 1.0 / NOTICEABLE)));
    return is_first;
}

/* `is_of_use`: what it has failed with tells learning something. */
static void settle_after(rebatch *rb, rebatch_status status, bool is_of_use)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    learning->attempt = RBI_ATTEMPT_PLAIN;
    if (status == REBATCH_OOM && (!is_of_use || learning->upper))
        rbi_learn_stop(rb); /* the fallback and growth know as much */
    else if (status == REBATCH_OOM && learning->state == RBI_LEARN_SEARCHES)
        learning->state = RBI_LEARN_RETREATS;
    else if (status != REBATCH_OOM && learning->state == RBI_LEARN_RETREATS)
        learning->state = RBI_LEARN_FOUND;
}

void rbi_learn_end(rebatch *rb, size_t count, rebatch_status status)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    if (!rbi_learn_is_on(learning))
        return;
    if (status == REBATCH_OK)
        rb->run.report.learned +=
            learning->chosen != 0 && (rb->run.by_cost || learning->chosen == count);
    rbi_assert(learning->attempt != RBI_ATTEMPT_WATCHED || learning->tuner.user);
    if (learning->attempt == RBI_ATTEMPT_WATCHED) {
        if (learning->tuner.end(learning->tuner.user, count, status)) {
            rebatch_clear_error();
            drop_tuner(learning);
        }
    } else if (status == REBATCH_OOM && learning->tuner.user) {
        learning->tuner.failed(learning->tuner.user, count);
    }
    const bool approaches = rbi_learn_goes_by_meter(rb);
    const bool is_of_use = approaches && status == REBATCH_OOM ? fail_by_meter(rb, count)
                                                               : learning->tuner.user != NULL;
    settle_after(rb, status, is_of_use);
}

void rbi_learn_refused(rebatch *rb, size_t count)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    if (!rbi_learn_is_on(learning))
        return;
    if (learning->tuner.user)
        learning->tuner.failed(learning->tuner.user, count);
    settle_after(rb, REBATCH_OOM, learning->tuner.user != NULL);
}

/* ---- after the update ---- */

/* Whether the size would be the same for a larger batch. */
static bool is_done(const rebatch *rb)
{
    const struct rbi_learning *learning = &rb->sizes.learning;
    if (learning->tuner.user)
        return learning->tuner.is_done(learning->tuner.user, rbi_micro_upper(rb, rb->run.batch));
    return rbi_size_is_cut(rb);
}

bool rbi_learn_step_done(rebatch *rb)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    if (!rbi_learn_is_on(learning))
        return false;
    if (rb->lighten != learning->lighten) {
        rbi_learn_stop(rb);
        return false;
    }
    if (learning->state == RBI_LEARN_WAITS) {
        if (!rbi_size_is_cut(rb))
            return true;
        rbi_learn_stop(rb); /* what was found when there was less memory is growth's to better */
        return false;
    }
    if (learning->state == RBI_LEARN_SEARCHES && learning->chosen && !rb->run.report.learned) {
        rbi_learn_stop(rb); /* the cut of this batch has no micro-batch of the size it asks for */
        return false;
    }
    learning->upper = 0;
    learning->has_stepped = true;
    const size_t next = choose(rb, 0);
    const size_t size = next ? next : largest_found(rb);
    if (size)
        set_size(rb, size);
    if (next)
        return true;
    learning->upper = rbi_micro_upper(rb, rb->run.batch);
    if (is_done(rb))
        rbi_learn_stop(rb);
    return rbi_learn_is_on(learning);
}
