/** @file step_in_place.h
 *  A step written where it runs, in blocks.
 *
 *  @code
 *  REBATCH_STEP (rb, batch, part, 0) {
 *      if (part.first == 0)
 *          zero_gradients();
 *      forward(part.first, part.count);
 *      backward(part.first, part.count);
 *  }
 *  REBATCH_UPDATE (rb)
 *      update();
 *  status = rebatch_step_end(rb, NULL);
 *  @endcode
 *
 *  The first block runs once for each micro-batch, and the second once for the update. When memory
 *  runs out in one, rebatch_escape(), rebatch_alloc_or_escape() and the checks of wrap.h come back
 *  to its head, and it runs again: the first with the same samples, fewer at once. All that step.h
 *  says of the callbacks forward_backward and optimizer_step holds for the blocks: what is undone,
 *  rebatch_mutating(), rebatch_reserve(), guards. Messages call the blocks by these names.
 *
 *  A block ends at its end, or with `continue`. One that is left by break, return, goto or an
 *  exception ends the step with REBATCH_E_STATE: it is undone, its update does not run, and
 *  rebatch_step_end() says so. Without this call no other step begins after one that has failed.
 *
 *  A local variable of the function that a block changes has no certain value after an OOM in it
 *  (setjmp() in C), unless it is volatile or guarded (rebatch_guard()). Those that a block declares
 *  are new each time. In C++ no object with a destructor may be alive between the head of a block
 *  and the check that leaves it: there, and for exceptions, rebatch_wrap_step() of wrap.h takes
 *  lambdas.
 *
 *  The blocks cannot be called, so rebatch_check() and rebatch_probe(), and `rebatch run --check`
 *  and `rebatch probe`, need callbacks. So does rebatch_options.lockstep. */
#ifndef REBATCH_STEP_IN_PLACE_H
#define REBATCH_STEP_IN_PLACE_H

#include <setjmp.h>

#include "rebatch/step.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Begin a step whose micro-batches the program runs itself. After a failure there is nothing to
 *  run, and rebatch_step_end() returns the same status: each step needs it, to tell that it failed.
 *  A step that is done is ended by the next one.
 *  @code
 *  const rebatch_microbatch *mb;
 *  rebatch_status status = rebatch_step_begin(rb, NULL, batch, NULL);
 *  while ((mb = rebatch_step_next(rb, status)))
 *      status = forward_backward(mb);
 *  while (rebatch_step_updates(rb, status))
 *      status = update();
 *  status = rebatch_step_end(rb, NULL);
 *  @endcode
 *  @param rb     the session
 *  @param ops    copied; forward_backward is NULL. optimizer_step may be set: it then runs when the
 *                step ends. The others are as in rebatch_step(). NULL: no callbacks, and no flags
 *  @param batch  as for rebatch_step()
 *  @param user   passed to the callbacks
 *  @return REBATCH_OK, or as rebatch_step(); REBATCH_E_STATE also while the last step runs, or
 *          has failed and rebatch_step_end() has not said so;
 *          REBATCH_E_UNSUPPORTED in lockstep */
REBATCH_API rebatch_status rebatch_step_begin(rebatch *rb, const rebatch_step_ops *ops,
                                              size_t batch, void *user);

/** Say how the samples that ran have ended, and get those that run next.
 *  @param rb      the session
 *  @param status  what forward_backward would return for them: after REBATCH_OOM the same samples
 *                 come again, fewer at once; another failure ends the step. Nothing in the first
 *                 call
 *  @return the session's, until the next call; NULL: all samples are accumulated, or the step has
 *          failed */
REBATCH_API const rebatch_microbatch *rebatch_step_next(rebatch *rb, rebatch_status status);

/** Say how the update has ended, and whether it is to run now: once, and again after REBATCH_OOM
 *  where nothing was changed yet.
 *  @param rb      the session
 *  @param status  what optimizer_step would return for the update that ran. Nothing in the first
 *                 call
 *  @return true: run the update; false: it is done, or the step has failed */
REBATCH_API bool rebatch_step_updates(rebatch *rb, rebatch_status status);

/** End a step that rebatch_step_begin() or REBATCH_STEP() began. A step that is not done fails. One
 *  without rebatch_step_updates() is done when all samples are accumulated: the update is then the
 *  program's, after this call, and what it allocates is not guarded against an OOM.
 *  @param rb      the session
 *  @param report  filled in on success and failure; may be NULL
 *  @return as rebatch_step(); REBATCH_E_STATE for a block that was left, for a step that is not
 *          done, and where none has begun */
REBATCH_API_CHECKED rebatch_status rebatch_step_end(rebatch *rb, rebatch_step_report *report);

/** Fail the step if one of its blocks runs in this thread. REBATCH_STEP() calls it.
 *  @param rb  the session, or NULL */
REBATCH_API void rebatch_step_leave(rebatch *rb);

/** Where rebatch_escape() leaves the block that runs to. Without it a block cannot be left.
 *  REBATCH_STEP() calls it.
 *  @param rb       the session
 *  @param way_out  set by setjmp() before the block begins; borrowed until it has ended */
REBATCH_API void rebatch_escape_to(rebatch *rb, jmp_buf *way_out);

#ifdef __cplusplus
}
#endif

/** What a block runs. */
typedef struct rebatch_part {
    size_t first; /**< first sample: the samples are [first, first + count) */
    size_t count; /**< number of samples; 0 in REBATCH_UPDATE() */
    /** @cond internal */
    rebatch *rb;
    bool runs;
    jmp_buf way_out;
    /** @endcond */
} rebatch_part;

/** @cond internal */
static inline rebatch_part rebatch_part_begin(rebatch *rb, const rebatch_step_ops *ops,
                                              size_t batch, void *user)
{
    rebatch_part part;
    part.first = part.count = 0;
    part.rb = rebatch_step_begin(rb, ops, batch, user) ? NULL : rb;
    part.runs = false;
    return part;
}

static inline rebatch_part rebatch_part_begin_with(rebatch *rb, uint32_t flags, size_t batch)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.flags = flags;
    return rebatch_part_begin(rb, &ops, batch, NULL);
}

static inline rebatch_part rebatch_part_of_update(rebatch *rb)
{
    rebatch_part part;
    part.first = part.count = 0;
    part.rb = rb;
    part.runs = false;
    return part;
}

static inline bool rebatch_part_next(rebatch_part *part)
{
    const rebatch_microbatch *const mb = rebatch_step_next(part->rb, REBATCH_OK);
    part->runs = mb != NULL;
    if (!mb)
        return false;
    part->first = mb->first;
    part->count = mb->count;
    rebatch_escape_to(part->rb, &part->way_out);
    return true;
}

static inline bool rebatch_part_updates(rebatch_part *part)
{
    part->runs = rebatch_step_updates(part->rb, REBATCH_OK);
    if (part->runs)
        rebatch_escape_to(part->rb, &part->way_out);
    return part->runs;
}

static inline void rebatch_part_leave(rebatch_part *part)
{
    if (part->runs)
        rebatch_step_leave(part->rb);
}

#ifdef __cplusplus
struct rebatch_part_in_scope : rebatch_part {
    explicit rebatch_part_in_scope(const rebatch_part &part) : rebatch_part(part)
    {
    }
    rebatch_part_in_scope(const rebatch_part_in_scope &) = delete;
    rebatch_part_in_scope &operator=(const rebatch_part_in_scope &) = delete;
    ~rebatch_part_in_scope()
    {
        rebatch_part_leave(this);
    }
};
#define REBATCH_PART_(name, begin) rebatch_part_in_scope name(begin)
#else
#define REBATCH_PART_(name, begin)                                                                 \
    __attribute__((cleanup(rebatch_part_leave))) rebatch_part name = begin
#endif

#define REBATCH_BLOCK_(name, begin, next)                                                          \
    for (REBATCH_PART_(name, begin); next(&name);)                                                 \
        if (setjmp(name.way_out)) {                                                                \
        } else
/** @endcond */

/** Run the block that follows once for each micro-batch of a step, which REBATCH_UPDATE() and
 *  rebatch_step_end() complete.
 *  @param rb     the session
 *  @param batch  samples in the effective batch
 *  @param part   a name: within the block, part.first and part.count are its samples
 *  @param flags  bits of rebatch_step_flags, which hold for the update too. Without
 *                REBATCH_DECLARES_MUTATION the blocks count as changing state from their first
 *                line, also where they call rebatch_mutating() */
#define REBATCH_STEP(rb, batch, part, flags)                                                       \
    REBATCH_BLOCK_(part, rebatch_part_begin_with(rb, flags, batch), rebatch_part_next)

/** The same with callbacks, for example resize.
 *  @param rb     as above
 *  @param ops    as for rebatch_step_begin()
 *  @param batch  as above
 *  @param user   passed to the callbacks
 *  @param part   as above */
#define REBATCH_STEP_WITH(rb, ops, batch, user, part)                                              \
    REBATCH_BLOCK_(part, rebatch_part_begin(rb, ops, batch, user), rebatch_part_next)

/** Run the block that follows as the step's update, once all its samples are accumulated. */
#define REBATCH_UPDATE(rb)                                                                         \
    REBATCH_BLOCK_(rebatch_update_, rebatch_part_of_update(rb), rebatch_part_updates)

#endif
