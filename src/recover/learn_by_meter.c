/* Owns how a session that learns by a meter comes to the largest size: from below, along a line
 * through what was reserved, and then in small strides. Must not know when a micro-batch runs. */
#include "recover/recover.h"

/* Short of double the size a line is followed a quarter less far than it says; what that leaves is
 * looked at again. */
#define SHORT_OF_LINE 4
/* Beyond the line a stride is a thirty-second of the size: at most so much is lost at the end. */
#define STRIDES 32
/* An eighth of the size is far. */
#define FAR 8
/* What is available differs by less from step to step. */
#define NOTICEABLE 64
/* A step in which the allocator returns cached memory to serve a request is squeezed. Memory may
 * settle; after SQUEEZED_MOST such steps in a row there is no room left. */
#define SQUEEZED_MOST 3

bool rbi_learn_goes_by_meter(const rebatch *rb)
{
    const struct rbi_learning *learning = &rb->sizes.learning;
    return rbi_learn_is_on(learning) && !learning->tuner.user && rbi_meter_is_set(rb) &&
           !rb->run.by_cost;
}

/* 0: it says that nothing larger fits. */
static size_t along_line(rebatch *rb, size_t size)
{
    const size_t larger = rbi_growth_larger(rb);
    if (larger <= size || larger / 2 >= size)
        return larger > size ? larger : 0;
    const size_t less = rbi_round_size(&rb->options, larger - (larger - size) / SHORT_OF_LINE);
    return less > size ? less : larger;
}

static size_t beyond_line(rebatch *rb, size_t size)
{
    size_t available;
    uint64_t need;
    const size_t next = rbi_round_size_up(&rb->options, size + rbi_max(size / STRIDES, 1));
    if (!next || next > rbi_micro_upper(rb, rb->run.batch))
        return 0;
    if (rbi_available(&available, rb) || !rbi_need_predict_live(&need, rb, next, rb->lighten))
        return 0;
    return need <= available ? next : 0;
}

/* An OOM has shown where the end is. Where it came far from a size that ran, the line was wrong
 * between them; without what was reserved it is nothing to go by, nor where this size was not
 * measured. */
static size_t halfway(const rebatch *rb, size_t size)
{
    const size_t failed = rb->sizes.learning.failed;
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    rbi_assert(failed > 0);
    if (failed <= size || failed - size <= rbi_max(size / FAR, 1) || !known ||
        !known->reserved_bytes)
        return 0;
    const size_t next = rbi_round_size(&rb->options, size + (failed - size) / 2);
    return next > size ? next : 0;
}

/* Before the first micro-batch of a step gradients are not there yet, which the others find. */
size_t rbi_learn_by_meter_next(rebatch *rb, size_t left)
{
    const size_t size = rbi_micro_size(rb, rb->run.batch);
    struct rbi_learning *learning = &rb->sizes.learning;
    if (left == rb->run.batch || learning->fresh != size)
        return size;
    const size_t next = learning->failed ? 0 : along_line(rb, size);
    if (left)
        return next <= left ? next : size;
    if (next)
        return next;
    if (learning->begun != size || rb->run.report.ooms)
        return size; /* a whole step is yet to run at it */
    if (rb->run.meter.retries)
        return ++learning->squeezed < SQUEEZED_MOST ? size : 0;
    learning->squeezed = 0;
    return learning->failed ? halfway(rb, size) : beyond_line(rb, size);
}

bool rbi_learn_by_meter_is_blind(const rebatch *rb)
{
    const size_t size = rbi_micro_size(rb, rb->run.batch);
    return rbi_learn_goes_by_meter(rb) && rb->sizes.learning.fresh == size &&
           !rbi_need_has_run(rb, size);
}

void rbi_learn_by_meter_begin(rebatch *rb, size_t count)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    if (learning->chosen != count || learning->fresh == count)
        return;
    learning->attempt = RBI_ATTEMPT_FRESH;
    learning->fresh = count;
    (void)rbi_memory_release(rb);
}

/* A second OOM tells of something else than the size. */
bool rbi_learn_by_meter_failed(rebatch *rb, size_t count)
{
    struct rbi_learning *learning = &rb->sizes.learning;
    const uint64_t available = rb->run.ooms.failure.available_bytes;
    const bool is_first = !learning->failed;
    learning->failed = count;
    /* Growth is not to try it again with as much, whatever the figures say of it. */
    rbi_need_learn_least(rb, count, rbi_saturate((double)available * (1 + 1.0 / NOTICEABLE)));
    return is_first;
}
