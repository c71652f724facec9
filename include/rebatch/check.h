/** @file check.h
 *  Finding mistakes in a training step before it trains.
 *
 *  Some mistakes show only when memory runs out, and then as a wrong result without an error: a
 *  state that is not guarded, a pointer that is kept, rebatch_mutating() called too late.
 *  rebatch_check() runs the step in many ways, and compares what the program has named.
 *
 *  @code
 *  rebatch_watch(rb, "gradients", gradients, bytes, REBATCH_GUARD_DEVICE, REBATCH_F32);
 *  rebatch_watch(rb, "loss", &loss, sizeof loss, REBATCH_GUARD_HOST, REBATCH_F64);
 *  rebatch_check(rb, &ops, batch, &model, NULL, &report);
 *  @endcode
 *
 *  A program that calls rebatch_watch() is checked as it is by `rebatch run --check -- ./train`, or
 *  with REBATCH_CHECK=1 in the environment (docs/check.md). */
#ifndef REBATCH_CHECK_H
#define REBATCH_CHECK_H

#include "rebatch/step.h"

/** What memory that is watched holds. */
typedef enum rebatch_number {
    REBATCH_BYTES = 0, /**< integers, flags, RNG state: every bit must be equal */
    REBATCH_F32,       /**< float */
    REBATCH_F64,       /**< double */
    REBATCH_F16,       /**< IEEE half precision */
    REBATCH_BF16       /**< bfloat16 */
} rebatch_number;

/** What a check finds: X(name, is a mistake).
 *
 *  NOT_REPEATABLE: the same samples gave something else when they ran again.
 *  NOT_CLEARED: something else came out when the batch ran again from zero_grad.
 *  FREED: it depends on memory that was freed before.
 *  UNINITIALIZED: it depends on memory that was allocated and not written.
 *  STALE: memory that was taken back is written: a pointer is kept across attempts.
 *  CUT: it depends on the size of the micro-batches.
 *  EARLY: it had changed before rebatch_mutating() was called, and no guard restored it.
 *  AFTER_OOM: something else came out after an OOM.
 *  FAILED: the step ended with a failure that was not an OOM, or did not recover from one.
 *  ROUNDING: bits depend on the size of the micro-batches, within the tolerance.
 *  COPED: a callback returned REBATCH_OK although an allocation had failed, with the right result.
 *  WEIGHT: it doubles when the batch does: samples are not weighted by 1/batch.
 *  UNWATCHED: the program names nothing, and what zero_grad clears in the pool was compared by
 *  itself; or this batch adds nothing to what is compared.
 *  SWALLOWED: a callback returned REBATCH_OK although an allocation had failed, and the result is
 *  wrong.
 *  NOT_A_NUMBER: it is infinite or no number, in every run or where micro-batches are small.
 *  CHANGED: each run changes it, though it is older than the step, and zero_grad does not clear it.
 *  OUTGROWN: memory beyond an allocation was written when a large micro-batch followed a small one.
 *  LEAK: each micro-batch leaves memory allocated.
 *  THREAD: a thread that did not call rebatch_join() works for the callback.
 *  UNCOMPARED: nothing that forward_backward changes was there to compare. */
#define REBATCH_FINDINGS(X)                                                                        \
    X(NOT_REPEATABLE, true)                                                                        \
    X(NOT_CLEARED, true)                                                                           \
    X(FREED, true)                                                                                 \
    X(UNINITIALIZED, true)                                                                         \
    X(STALE, true)                                                                                 \
    X(CUT, true)                                                                                   \
    X(EARLY, true)                                                                                 \
    X(AFTER_OOM, true)                                                                             \
    X(FAILED, true)                                                                                \
    X(ROUNDING, false)                                                                             \
    X(COPED, false)                                                                                \
    X(WEIGHT, false)                                                                               \
    X(UNWATCHED, false)                                                                            \
    X(SWALLOWED, true)                                                                             \
    X(NOT_A_NUMBER, true)                                                                          \
    X(CHANGED, true)                                                                               \
    X(OUTGROWN, true)                                                                              \
    X(LEAK, true)                                                                                  \
    X(THREAD, true)                                                                                \
    X(UNCOMPARED, true)

/** What a check finds. */
typedef enum rebatch_finding_kind {
#define REBATCH_FINDING_(name, is_mistake) REBATCH_FINDING_##name,
    REBATCH_FINDINGS(REBATCH_FINDING_)
#undef REBATCH_FINDING_
        REBATCH_FINDING_COUNT /**< number of kinds */
} rebatch_finding_kind;

/** The most findings of one check. */
#define REBATCH_CHECK_FINDINGS 32

/** One finding. */
typedef struct rebatch_finding {
    rebatch_finding_kind kind; /**< what was found */
    bool is_mistake;           /**< false: a note, which may be as it should be */
    char name[64];             /**< of what is watched, the first where it is about several;
                                    "block 12" for memory of the pool without a name; "" when it
                                    is not about one */
    char text[512];            /**< one sentence, with callback, allocation and name */
} rebatch_finding;

/** Options of a check. */
typedef struct rebatch_check_options {
    size_t struct_size; /**< sizeof(rebatch_check_options) */
    uint32_t most_ooms; /**< the most allocations that fail, each in a run of its own, spread evenly
                               over the allocations of the step; 0: 100 */
    uint32_t max_seconds; /**< no run begins after that many seconds; 0: 300 */
    double tolerance; /**< the largest difference that counts as rounding, as a part of the largest
                               value of what is watched; 0: 1e-4 for float and double, 0.01 for F16
                               and BF16, and beyond them what the check measures of the program's
                               own rounding (docs/check.md). Differences beyond it are mistakes */
    rebatch_toggle exact; /**< on: any bit that differs is a mistake; default off */
} rebatch_check_options;
/** Default options of a check. */
#define REBATCH_CHECK_OPTIONS_INIT                                                                 \
    {                                                                                              \
        sizeof(rebatch_check_options), 0, 0, 0, REBATCH_DEFAULT                                    \
    }

/** What a check did and found. */
typedef struct rebatch_check_report {
    rebatch_status status;                            /**< what rebatch_check() returned */
    uint32_t mistakes;                                /**< number of findings that are mistakes */
    uint32_t finding_count;                           /**< number of findings */
    rebatch_finding findings[REBATCH_CHECK_FINDINGS]; /**< in the order in which they were found */
    uint32_t watched;                                 /**< number of names that were compared */
    uint32_t runs;                                    /**< runs of the step up to its update */
    uint64_t allocations;                             /**< of one run */
    uint64_t ooms;         /**< of them, those that failed, each in a run of its own */
    size_t micro;          /**< the largest micro-batch that fits */
    size_t micro_smallest; /**< the smallest that ran */
    double seconds;        /**< time that the check took */
    bool is_cut_short;     /**< max_seconds had passed before the last run */
    uint32_t blocks;       /**< number of blocks without a name that were compared: those of the
                                pool that are older than the step, or made by zero_grad, and that
                                zero_grad clears */
    uint64_t block_bytes;  /**< their size */
    uint32_t updates;      /**< runs of optimizer_step, each in a copy of the process */
    uint64_t update_allocations; /**< of one of them */
    uint64_t update_ooms;        /**< of them, those that failed, each in a run of its own */
    const char *not_looked_at;   /**< a static string: what was not looked at, and why; NULL:
                                      nothing but memory outside the pool that has no name */
} rebatch_check_report;

#ifdef __cplusplus
extern "C" {
#endif

/** Name memory that is a result of the step, for rebatch_check(): gradients, the loss, running
 *  statistics, RNG state. What has a name already is replaced.
 *  @param rb       the session
 *  @param name     copied; for sentences
 *  @param pointer  borrowed until rebatch_close(); it is there in every step, so callbacks do not
 *                  allocate it
 *  @param bytes    size of the memory; a multiple of the size of a number
 *  @param kind     host or device memory
 *  @param number   what the memory holds
 *  @return REBATCH_OK; REBATCH_E_STATE from within a callback; REBATCH_E_UNSUPPORTED when 64 names
 *          are watched; REBATCH_E_INVALID, REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_watch(rebatch *rb, const char *name, void *pointer, size_t bytes,
                                         rebatch_guard_kind kind, rebatch_number number);

/** The same for memory that callbacks allocate from the session's pool, for example gradients that
 *  the first zero_grad makes.
 *  @param rb      the session
 *  @param name    as above
 *  @param where   address of the variable that holds its pointer, for example &model.gradients;
 *                 borrowed until rebatch_close(). There are no contents while the pointer is NULL
 *  @param bytes   as above
 *  @param number  as above
 *  @return as above */
REBATCH_API rebatch_status rebatch_watch_at(rebatch *rb, const char *name, const void *where,
                                            size_t bytes, rebatch_number number);

/** Run a step in many ways, and say what is wrong with it. The session, guarded
 *  state and what is watched are as before afterwards. What else the callbacks change is not.
 *
 *  The step runs uncut, three times; again from zero_grad; with freed memory and new memory
 *  overwritten; in micro-batches of other sizes; with the same samples twice; and once for each
 *  allocation, with an OOM there. After each run what is watched is compared with a run that must
 *  give the same, bit by bit, and so is memory of the pool that zero_grad clears, with or without a
 *  name. Where the batch does not fit as a whole, the largest size that fits takes the place of
 *  uncut. Some runs are of a batch of several times the size: samples stay within the batch, and
 *  mb->batch is larger.
 *
 *  On a host device optimizer_step runs as well, each time in a copy of the process (fork), so that
 *  the program itself does not see it: with an OOM at each of its allocations, it and the step that
 *  follows must come out the same. Elsewhere it does not run, and report->not_looked_at says so.
 *
 *  A program that a signal or a call of exit ends meanwhile says on standard error which request it
 *  did not survive; handlers of signals are as before afterwards.
 *  @param rb       the session
 *  @param ops      borrowed during the call; lighten is not called
 *  @param batch    as for rebatch_step()
 *  @param user     passed to the callbacks
 *  @param options  copied; NULL: defaults
 *  @param report   filled in on success and failure; may be NULL
 *  @return REBATCH_OK when there is no mistake; REBATCH_E_STATE when there is one, and
 *          rebatch_last_error() has the first; REBATCH_E_EXHAUSTED when not even the smallest
 *          micro-batch fits; REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE,
 *          REBATCH_E_DEVICE_LOST */
REBATCH_API_CHECKED rebatch_status rebatch_check(rebatch *rb, const rebatch_step_ops *ops,
                                                 size_t batch, void *user,
                                                 const rebatch_check_options *options,
                                                 rebatch_check_report *report);

/** Write a report as lines of text: each mistake, each note, and a summary. Thread-safe.
 *  @param[out] text  zero-terminated, truncated to `size` bytes; may be NULL when `size` is 0
 *  @param size       size of `text` in bytes
 *  @param report     the report
 *  @return length of the whole text without the terminating zero, as snprintf() returns */
REBATCH_API size_t rebatch_check_format(char *text, size_t size,
                                        const rebatch_check_report *report);

#ifdef __cplusplus
}
#endif
#endif
