/** @file step.h
 *  Wrap a training step so that it survives running out of device memory.
 *
 *  @code
 *  rebatch_open(&rb, device, NULL);
 *  for (...)
 *      status = rebatch_step(rb, &ops, batch, &model, NULL);   // ops: the three callbacks below
 *  rebatch_close(rb);
 *  @endcode
 *
 *  rebatch cuts the effective batch into micro-batches, and when one of them runs out of memory it
 *  takes back what the attempt had allocated, halves the micro-batch and goes on with the same
 *  samples. docs/contract.md is the whole contract, with the test that holds each sentence. */
#ifndef REBATCH_STEP_H
#define REBATCH_STEP_H

#include "rebatch/device.h"
#include "rebatch/pool.h"
#include "rebatch/status.h"

/** A session: a pool, a micro-batch size and what was learned about memory. Used by one thread at a
 *  time. Other threads may use its pool at any time. Those that work for callbacks say so with
 *  rebatch_join(), and are done with what they do for one before it returns. */
typedef struct rebatch rebatch;

/** One try at a part of the effective batch. */
typedef struct rebatch_microbatch {
    uint64_t step;         /**< number of the effective batch, from 0 */
    size_t first;          /**< its samples are [first, first + count) */
    size_t count;          /**< at least 1 */
    size_t batch;          /**< samples in the effective batch; the weight of a sample is 1/batch */
    uint32_t attempt;      /**< how often these samples were tried before */
    bool probing;          /**< a trial: the results are thrown away */
    rebatch_pool *pool;    /**< allocate from here: it is all taken back when the attempt fails.
                                What other threads allocate is theirs, unless they joined
                                (rebatch_join()) */
    rebatch_stream stream; /**< the session's stream */
} rebatch_microbatch;

/** Bits of rebatch_step_ops.flags. */
enum {
    /** forward_backward and optimizer_step call rebatch_mutating() before they change accumulators
     *  or parameters, each time; zero_grad need not. Without this bit rebatch learns it of a
     *  callback when it first succeeds, and until then takes it to change them from its first line.
     *
     *  With it, a forward_backward that succeeds when none of the session has ever called it ends
     *  the step with REBATCH_E_STATE, except in a trial (probing): after an OOM samples would count
     *  twice. So the first micro-batch has to declare even where its samples contribute nothing;
     *  later ones need not. An optimizer_step may skip its update, so the first that succeeds when
     *  none has called it is an event of level WARN, UNDECLARED. */
    REBATCH_DECLARES_MUTATION = 1
};

/** The user's step. A callback answers REBATCH_OK, REBATCH_OOM, or another status, which ends the
 *  step and is passed through unchanged. REBATCH_E_EXHAUSTED and REBATCH_E_TORN say what a step
 *  has done, and are not a callback's to answer, nor is a number that is no status: the step's is
 *  REBATCH_E_STATE then. It closes every scope that it opens (REBATCH_E_STATE).
 *  It must return: no exception may leave it, and no longjmp but rebatch_escape().
 *  `user` is the pointer given to rebatch_step(). */
typedef struct rebatch_step_ops {
    size_t struct_size; /**< sizeof(rebatch_step_ops), as REBATCH_STEP_OPS_INIT has it */
    /** Set the accumulators (gradients, loss, token counts) to zero. May run again at any time
     *  before the update, and must then have the same effect. It may allocate the accumulators when
     *  it runs for the first time; a guard on their pointer is then what has it do so again when
     *  they were taken back (rebatch_guard()). */
    rebatch_status (*zero_grad)(void *user);
    /** Run samples [first, first + count) forward and backward and add what each contributes,
     *  weighted by 1/batch. Allocate, rebatch_reserve() what the rest needs, rebatch_mutating(),
     *  accumulate: in this order an OOM costs no more than this micro-batch. */
    rebatch_status (*forward_backward)(const rebatch_microbatch *microbatch, void *user);
    /** Apply the update. Allocate and reserve first, rebatch_mutating(), then change parameters.
     *  What fails after that leaves them torn, be it an OOM or not: what can be refused is to be
     *  refused before. */
    rebatch_status (*optimizer_step)(void *user);
    /** Optional. Use less memory a sample from now on, for example by recomputing activations:
     *  0 is none, 1 the mildest. Must not change the results. Once it has returned REBATCH_OK the
     *  level is in force, whatever becomes of the step: what lighten allocated and what it changed
     *  in guarded host state stays, and what it freed is free at once. One that fails changes
     *  nothing: its allocations, its frees and guarded host state are undone.
     *  @return REBATCH_OK; REBATCH_E_UNSUPPORTED when there is no such level. */
    rebatch_status (*lighten)(unsigned level, void *user);
    uint32_t flags; /**< bits of REBATCH_DECLARES_MUTATION */
    /** Optional. What samples [first, first + count) of this effective batch cost as one
     *  micro-batch, in a unit of the step's own in which memory is nearly a straight line: padded
     *  tokens, count times the longest, for example. Where it is given, micro-batches are cut so
     *  that each stays within a budget of cost, which takes the place of the micro-batch size: what
     *  is learned of memory, predicted, halved after an OOM, and grown again is cost, so that one
     *  long sequence does not make all micro-batches small. Limits on the size hold as well, and a
     *  micro-batch of the smallest size runs whatever it costs. Samples stay in order.
     *
     *  It must not fall when `count` rises, and depends on its arguments and the batch alone; a
     *  wrong cost costs OOMs, never the result. 0 counts as 1. It is called some twenty times a
     *  micro-batch, for at most twice its samples, and must not call the session. */
    uint64_t (*cost)(size_t first, size_t count, void *user);
} rebatch_step_ops;
/** No callbacks: the first three are then set one by one, and what else there is. */
#define REBATCH_STEP_OPS_INIT                                                                      \
    {                                                                                              \
        sizeof(rebatch_step_ops), NULL, NULL, NULL, NULL, 0, NULL                                  \
    }

/** Where an OOM struck: X(name, in words). */
#define REBATCH_PHASES(X)                                                                          \
    X(ZERO_GRAD, "zero_grad")                                                                      \
    X(ADMISSION, "admission")                                                                      \
    X(FORWARD, "forward_backward, before accumulating")                                            \
    X(BACKWARD, "forward_backward, while accumulating")                                            \
    X(OPTIMIZER, "optimizer_step, before updating")                                                \
    X(UPDATE, "optimizer_step, while updating")

typedef enum rebatch_phase {
#define REBATCH_PHASE_(name, text) REBATCH_PHASE_##name,
    REBATCH_PHASES(REBATCH_PHASE_)
#undef REBATCH_PHASE_
        REBATCH_PHASE_COUNT
} rebatch_phase;

/** What happened: X(name, level, in words). */
#define REBATCH_EVENTS(X)                                                                          \
    X(STEP, DEBUG, "step done")                                                                    \
    X(RETRY, WARN, "out of memory")                                                                \
    X(SHRINK, WARN, "out of memory")                                                               \
    X(LIGHTEN, WARN, "out of memory")                                                              \
    X(GROW, INFO, "there is room to grow")                                                         \
    X(GROWTH_FAILED, INFO, "the last growth did not hold")                                         \
    X(EXHAUSTED, ERROR, "out of memory, and nothing is left to try,")                              \
    X(TORN, ERROR, "out of memory, and some parameters are changed,")                              \
    X(TRIAL, INFO, "a probe's trial")                                                              \
    X(PROBE_FILE, WARN, "the probe's file of results:")                                            \
    X(THRASHING, WARN, "memory goes back to the device and comes again in every micro-batch")      \
    X(LEARN, INFO, "the memory of those that ran says how large micro-batches may be")             \
    X(UNDECLARED, WARN,                                                                            \
      "optimizer_step returned without rebatch_mutating(), which REBATCH_DECLARES_MUTATION "       \
      "promises: right only if it changed nothing")

typedef enum rebatch_log_level {
    REBATCH_LOG_DEFAULT = 0, /**< INFO */
    REBATCH_LOG_QUIET,
    REBATCH_LOG_ERROR,
    REBATCH_LOG_WARN,
    REBATCH_LOG_INFO,
    REBATCH_LOG_DEBUG
} rebatch_log_level;

typedef enum rebatch_event_kind {
#define REBATCH_EVENT_(name, level, text) REBATCH_EVENT_##name,
    REBATCH_EVENTS(REBATCH_EVENT_)
#undef REBATCH_EVENT_
} rebatch_event_kind;

/** One thing that happened. Valid during the callback. */
typedef struct rebatch_event {
    rebatch_event_kind kind;
    rebatch_log_level level;
    uint64_t step;
    rebatch_phase phase; /**< where the OOM struck; of OOM events */
    uint32_t attempt;    /**< of these samples, from 0 */
    size_t first, count; /**< the samples that were being tried; 0, 0 outside forward_backward */
    size_t batch;        /**< the effective batch */
    size_t micro_before, micro_after;       /**< the micro-batch size */
    unsigned lighten_before, lighten_after; /**< the lighten level */
    size_t redone_samples;    /**< samples that ran and will run again because of this */
    uint64_t lost_ns;         /**< the time that their running took */
    uint64_t asked_bytes;     /**< the request that failed; 0 when it was not the pool's */
    uint64_t needed_bytes;    /**< what the attempt would have held at least; 0: not known */
    uint64_t available_bytes; /**< what could be allocated after the attempt was taken back */
    uint64_t peak_bytes;      /**< of a TRIAL that ran: most live in the pool; 0: out of memory */
    const char *text;         /**< of PROBE_FILE: which file, and why it is not used; else NULL */
    uint64_t cost;            /**< of the samples that were being tried; 0: the step has no cost */
    uint64_t cost_before, cost_after; /**< the budget of cost a micro-batch; 0: none, or no bound */
} rebatch_event;

/** What to do first about an OOM that the same size would meet again. */
typedef enum rebatch_on_oom {
    REBATCH_ON_OOM_DEFAULT = 0, /**< halve */
    REBATCH_ON_OOM_HALVE,       /**< half of the micro-batch that failed; after a growth the size
                                     before it, where that is more */
    REBATCH_ON_OOM_STOP,        /**< nothing: the step ends with REBATCH_E_EXHAUSTED */
    REBATCH_ON_OOM_FIT /**< the largest that is predicted to fit in what there is then, from a
                            probe's memory model or from sizes that ran; a little less after a
                            prediction that did not hold, and half after two, or where nothing
                            is known */
} rebatch_on_oom;

/** How many sizes rebatch_options.micro_allowed has room for. */
#define REBATCH_ALLOWED_SIZES 32

/** Options of a session. Zero means default.
 *
 *  A micro-batch has at least micro_smallest and at most micro_largest samples, is a multiple of
 *  micro_multiple_of, and one of micro_allowed, whoever chooses it: start, halving, prediction,
 *  growth, probe. Exempt is the last micro-batch of an effective batch, which may be smaller: it
 *  has the samples that are left. */
typedef struct rebatch_options {
    size_t struct_size;        /**< sizeof(rebatch_options) */
    rebatch_pool_options pool; /**< of the session's pool; its struct_size may be 0: all defaults */
    rebatch_stream stream;     /**< handed to the callbacks; borrowed; NULL: the default stream */

    size_t micro_start;    /**< first micro-batch size; 0: the effective batch, as one, or what
                                `learn` finds. With rebatch_step_ops.cost: as many samples of the
                                first batch give the first budget */
    size_t micro_smallest; /**< never cut smaller than this; 0: 1 sample */
    size_t micro_largest;  /**< never larger than this; 0: the effective batch */

    rebatch_on_oom on_oom;    /**< default: halve */
    rebatch_toggle admission; /**< do not start an attempt whose memory is known not to be there;
                                   default on */
    rebatch_toggle lighten; /**< call the step's lighten at the smallest micro-batch; default on */
    uint32_t max_attempts;  /**< callbacks run in vain in one step before it gives up; at most
                                   65536; 0: 64 */

    rebatch_toggle growth;  /**< grow again after clean steps; default on */
    uint32_t grow_after;    /**< steps without OOM before the micro-batch grows; at most
                                   grow_wait_max; 0: 16 */
    uint32_t grow_wait_max; /**< a failed growth doubles the wait, up to this. A growth that holds
                                 resets it. A prediction that has refused a growth for so many
                                 more clean steps is overruled; 0: 1024 */

    rebatch_log_level log_level; /**< events above this are not reported; default INFO */
    void (*on_event)(const rebatch_event *event, void *user); /**< NULL: none. It must not call
                                                                   this session */
    void *on_event_user;                                      /**< borrowed until rebatch_close() */

    size_t micro_multiple_of; /**< each micro-batch is a multiple of this; 0: of 1 */
    size_t micro_allowed[REBATCH_ALLOWED_SIZES]; /**< the sizes that a micro-batch may have, in any
                                                      order, up to the first 0; none: any size */
    uint32_t max_ooms_in_row; /**< OOMs in one step, without a micro-batch or an update in between
                                   that succeeded, with which it gives up; refused admissions do not
                                   count; at most 65536; 0: no bound but max_attempts */
    rebatch_toggle learn; /**< begin with the smallest micro-batch allowed, and learn from the first
                               ones how large they may be: default off. A few that grow, and then
                               the largest that is predicted to fit; predicted again after the first
                               update, when all that a training keeps is there. They are like any
                               other: each counts in the update, and nothing is run for a trial, as
                               it is in rebatch_probe(). It is over when a size is found, by a probe
                               too. Needs micro_start 0 */
} rebatch_options;
#define REBATCH_OPTIONS_INIT                                                                       \
    {                                                                                              \
        sizeof(rebatch_options), REBATCH_POOL_OPTIONS_INIT, NULL, 0, 0, 0, REBATCH_ON_OOM_DEFAULT, \
            REBATCH_DEFAULT, REBATCH_DEFAULT, 0, REBATCH_DEFAULT, 0, 0, REBATCH_LOG_DEFAULT, NULL, \
            NULL, 0, {0}, 0, REBATCH_DEFAULT                                                       \
    }

/** What one call of rebatch_step() did. */
typedef struct rebatch_step_report {
    uint64_t step;                         /**< number of the effective batch, from 0 */
    rebatch_status status;                 /**< what rebatch_step() answered */
    uint32_t microbatches;                 /**< that count in the update: the accumulation steps */
    uint32_t attempts;                     /**< runs of forward_backward, in vain or not */
    uint32_t ooms;                         /**< in all */
    uint32_t ooms_in[REBATCH_PHASE_COUNT]; /**< of them, by rebatch_phase */
    size_t micro_before;                   /**< micro-batch size with which the step began */
    size_t micro_after;                    /**< and ended */
    unsigned lighten_level;                /**< at the end */
    size_t redone_samples;                 /**< samples that had to run again, counted each time */
    uint64_t lost_ns;        /**< time that went into what was thrown away, and into recovering */
    uint64_t peak_bytes;     /**< most live in the pool during the step */
    uint64_t reserved_bytes; /**< held from the device at the end */
    rebatch_oom_report oom;  /**< the last OOM of the pool in this step; asked_bytes 0 when none */
    uint64_t cost_before; /**< budget of cost a micro-batch with which the step began; 0: the step
                                  has no cost, or the budget no bound yet */
    uint64_t cost_after;  /**< and ended */
    uint32_t thrashed;    /**< of the micro-batches that count, those in which at least a quarter of
                               what they needed went back to the device and came again. When all do,
                               the next step's are smaller */
    uint32_t learned;     /**< of the micro-batches that count, those that rebatch_options.learn has
                               chosen to learn from */
    bool torn; /**< optimizer_step failed, whatever it answered, after it had begun to change
                    parameters: some are new, some old, and nothing of it is undone */
} rebatch_step_report;

/** Where guarded state lives. */
typedef enum rebatch_guard_kind {
    REBATCH_GUARD_HOST = 1,  /**< host memory, copied with memcpy */
    REBATCH_GUARD_DEVICE = 2 /**< device memory, copied on the session's stream */
} rebatch_guard_kind;

#ifdef __cplusplus
extern "C" {
#endif

/** Open a session and its pool.
 *  @param[out] out  owned by the caller, release with rebatch_close(); NULL on failure
 *  @param device    borrowed; must outlive the session
 *  @param options   copied; NULL means defaults
 *  Whoever starts the program may ask for more in the environment (docs/run.md), whatever the
 *  options are: a lower limit (REBATCH_MEMORY_LIMIT), failures on purpose (REBATCH_RUN_OOM and
 *  others), or a probe instead of the training (REBATCH_PROBE_ONLY).
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE;
 *          REBATCH_E_PARSE when one of those variables cannot be read;
 *          REBATCH_E_UNSUPPORTED when options->pool.guard is on, and options->pool.caching is off
 *          or the device has no virtual memory. Any thread. */
REBATCH_API rebatch_status rebatch_open(rebatch **out, rebatch_device *device,
                                        const rebatch_options *options);

/** Release the session, its pool and whatever is still allocated from it. NULL is allowed. Not from
 *  within a callback, nor while another thread is in a step: the session then stays open, and
 *  rebatch_last_error() says so. */
REBATCH_API void rebatch_close(rebatch *rb);

/** The session's pool: parameters and data may live there as well. Borrowed. */
REBATCH_API rebatch_pool *rebatch_get_pool(const rebatch *rb);

/** The micro-batch size with which the next step of `batch` samples begins, unless it is cut by
 *  cost. */
REBATCH_API size_t rebatch_get_micro(const rebatch *rb, size_t batch);

/** Set the number of the next effective batch, 0 in a new session: a run that resumes goes on
 *  counting where the last one stopped, for `step` is what data and dropout depend on.
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_STATE from within a callback. */
REBATCH_API rebatch_status rebatch_set_step(rebatch *rb, uint64_t step);

/** Run one effective batch and its update, whatever it takes. Where REBATCH_PROBE_ONLY is set it
 *  does not come back: it probes, prints what it has found, and ends the process (docs/probe.md).
 *  @param ops     borrowed for the call; lighten may be NULL
 *  @param batch   samples in the effective batch, at least 1, micro_multiple_of, and the smallest
 *                 of micro_allowed
 *  @param user    handed to the callbacks
 *  @param report  may be NULL; filled in on failure as well
 *  @return REBATCH_OK: every sample counted exactly once and the update was applied once.
 *          REBATCH_E_EXHAUSTED: no rung of the ladder is left; nothing of the failed attempt is
 *          still allocated, parameters are those before the step, accumulators hold the samples
 *          before the failed micro-batch, or, when the OOM struck while accumulating, something in
 *          between: the next step's zero_grad clears them.
 *          REBATCH_E_TORN: the OOM struck within the update: some parameters are new, some old;
 *          restore a checkpoint.
 *          REBATCH_E_INVALID, REBATCH_E_STATE (called from within a callback, or while another
 *          thread is in a step; or what the callbacks did, as rebatch_step_ops says),
 *          REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST; any status that a callback answered. Such a
 *          failure counts as a step that did not happen: parameters are those before it, guarded
 *          state is put back, and what is in the accumulators the next step's zero_grad clears.
 *          But an update that failed after rebatch_mutating() is torn whatever the status:
 *          report->torn says so, as does the sentence, and nothing is undone. To call again would
 *          apply it twice: restore a checkpoint.
 *          After any failure the next call has the same step number. */
REBATCH_API rebatch_status rebatch_step(rebatch *rb, const rebatch_step_ops *ops, size_t batch,
                                        void *user, rebatch_step_report *report);

/** From within a callback: make sure of the memory that the rest of it will need. When this answers
 *  REBATCH_OK, the callback can allocate `bytes` bytes without an OOM, in one block or in several,
 *  with caching on and guard off. With caching off the call looks whether the device has the room
 *  now, and with guard on it does nothing: both promise nothing.
 *  @param bytes  the sum of what will be allocated, each size rounded up by itself as the pool
 *                rounds it: to a multiple of REBATCH_POOL_UNIT_BYTES, and then to a step of
 *                rounding_divisions, if that is set. For one block its size is enough, for `bytes`
 *                is rounded up in the same way. For many small ones the sum of their sizes is not:
 *                1,000 blocks of 100 bytes take 512,000. What is freed meanwhile is not subtracted
 *  @return REBATCH_OK, REBATCH_OOM (return it from the callback), REBATCH_E_INVALID,
 *          REBATCH_E_STATE outside a callback, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. */
REBATCH_API rebatch_status rebatch_reserve(rebatch *rb, size_t bytes);

/** From within a callback: from here on it changes accumulators or parameters. An OOM before this
 *  costs one micro-batch; after it, the effective batch runs again from zero_grad. A failure of
 *  optimizer_step after it, OOM or not, leaves the update torn. With `rb` NULL, or outside of a
 *  callback, it does nothing but set rebatch_last_error(). Any thread that works for the callback.
 */
REBATCH_API void rebatch_mutating(rebatch *rb);

/** Have `bytes` bytes at `state` restored whenever work that may have changed them is thrown away:
 *  RNG state, running statistics, cursors, and pointers to memory that callbacks allocate and keep.
 *  State comes back to what it was before the attempt when its samples run again, and to what it
 *  was before zero_grad when the effective batch runs again or the step fails.
 *
 *  Memory goes with it. A batch that runs again, and a step that fails without being torn, takes
 *  back all that the step has allocated, in zero_grad and in micro-batches that succeeded too. What
 *  the step has freed of memory from before it is there again. So there is one safe way to keep
 *  memory that a callback allocates: guard its pointer, and allocate when the pointer is NULL.
 *
 *  What a pressure callback or lighten changes in guarded host state is not put back: what these
 *  free is free for good.
 *  @param state  borrowed until rebatch_close(); device memory for REBATCH_GUARD_DEVICE
 *  @return REBATCH_OK, REBATCH_OOM (device copies come from the pool), REBATCH_E_INVALID,
 *          REBATCH_E_HOST_OOM, REBATCH_E_STATE from within a callback, REBATCH_E_UNSUPPORTED when
 *          64 are guarded, and for device memory of a dry device, which cannot be copied. */
REBATCH_API rebatch_status rebatch_guard(rebatch *rb, void *state, size_t bytes,
                                         rebatch_guard_kind kind);

/** Have what this thread does with the session's pool be the running callback's, as if the
 *  callback's own thread did it. A thread that works for callbacks must say so, as one of a
 *  backward pass may be: what it allocates is taken back when the attempt fails, and a block from
 *  before the attempt that it frees is there again. Of any other thread, one that prepares batches
 *  beside the step for example, nothing is undone: what it allocates stays, what it frees is gone
 *  for the next attempt too; and where the callback frees a block of it, that is undone with the
 *  attempt. Nor do its failures count as the callback's, nor its memory as what a micro-batch
 *  needs, and what rebatch_reserve() promised is not given to it; but a probe, and a size that is
 *  learnt, takes it for the micro-batch's, so that they find more when such threads are idle.
 *  It holds for all callbacks of `rb`, until rebatch_leave(), or until the thread joins another
 *  session; leave before rebatch_close(). While a scope of the callback's own is open, such threads
 *  are within it. rebatch_escape() is for the callback's own thread all the same.
 *  @return REBATCH_OK, REBATCH_E_INVALID. Any thread. */
REBATCH_API rebatch_status rebatch_join(rebatch *rb);

/** What this thread does is its own again. @return as rebatch_join(); without it, nothing changes.
 */
REBATCH_API rebatch_status rebatch_leave(rebatch *rb);

/** Leave the running callback with `status`, by longjmp, from any depth of calls in the callback's
 *  thread: for code that checks errors by a macro that exits. What it held other than pool memory
 *  is not released.
 *  A callback that itself runs a step of another session must not be left from within that step.
 *  Nor can it be left from within a callback of a pool, pressure or a snapshot's `write`.
 *  @param status  what the callback is to have answered; REBATCH_OK counts as REBATCH_E_INVALID
 *  @return only when no callback of `rb` is running in this thread, or one of a pool is inside it:
 *          REBATCH_E_STATE. */
REBATCH_API rebatch_status rebatch_escape(rebatch *rb, rebatch_status status);

/** Write an event as one line, without a newline.
 *  @param text  may be NULL when `size` is 0; else ends in a zero byte, cut if too small
 *  @return the length of the whole text without its zero byte, as snprintf does. Any thread. */
REBATCH_API size_t rebatch_event_format(char *text, size_t size, const rebatch_event *event);

/** The words for a phase, "forward_backward, before accumulating" for example. Never freed. */
REBATCH_API const char *rebatch_phase_text(rebatch_phase phase);

#ifdef __cplusplus
}
#endif
#endif
