/** @file probe.h
 *  Find the largest micro-batch that fits, by prediction instead of trial.
 *
 *  rebatch records what two small micro-batches allocate, in which order and when they free it,
 *  and takes every size as a function of the micro-batch. Run dry through a pool like the
 *  session's, that tells for any size whether it fits. The size found is run once, on gradients
 *  that other micro-batches have accumulated, before it is believed.
 *
 *  What was found can be kept in a file, so that a run that resumes begins with the size that the
 *  last one found and tries it once. docs/probe.md has the file and its rules. */
#ifndef REBATCH_PROBE_H
#define REBATCH_PROBE_H

#include "rebatch/pool.h"
#include "rebatch/status.h"
#include "rebatch/step.h"

/** Which of the sizes that fit is chosen. */
typedef enum rebatch_probe_choice {
    REBATCH_PROBE_LARGEST = 0, /**< the largest */
    /** The smallest of those within 2 % of the best throughput: the largest, three quarters, half
     *  and a quarter of it are measured, twice each. Work on a GPU often runs no faster beyond some
     *  size, and what is left of memory is then of use elsewhere. */
    REBATCH_PROBE_FASTEST
} rebatch_probe_choice;

/** Options of a probe. Zero means default. */
typedef struct rebatch_probe_options {
    size_t struct_size;  /**< sizeof(rebatch_probe_options) */
    uint32_t max_trials; /**< runs of forward_backward, in vain or not; 0: 5, and 8 more to measure
                              which size is fastest */
    /** Memory that is not there yet and will be, in bytes: what the first update allocates and
     *  keeps, AdamW's two moments for example, and what comes in outside the pool. It is held from
     *  the pool after the first run, so that the size found leaves room for it. State that an
     *  update has already made counts by itself. As a sum of blocks, each rounded up to 512 bytes,
     *  it also tells how they are cut. */
    size_t reserve_bytes;
    /** A file that keeps what probes have found, in a folder that is there; borrowed for the call;
     *  NULL: none; "" is refused. An entry counts only for the same key, device, memory, driver,
     *  library version and settings, and its size is run before it is believed. A file that cannot
     *  be used is left out, with an event that says why, and the probe runs as it would without. */
    const char *file;
    /** Names the model in that file, 1 to 255 bytes: "gpt2-124M T=1024 bf16", for example. What
     *  changes the memory of a sample belongs in it. */
    const char *key;
    /** No run begins later than that, looked at between runs; the answer is then the best that ran.
     *  0: no bound. */
    uint32_t max_seconds;
    rebatch_probe_choice choose;
} rebatch_probe_options;
#define REBATCH_PROBE_OPTIONS_INIT                                                                 \
    {                                                                                              \
        sizeof(rebatch_probe_options), 0, 0, NULL, NULL, 0, REBATCH_PROBE_LARGEST                  \
    }

/** How sure a result is: X(name, in words). */
#define REBATCH_CONFIDENCES(X)                                                                     \
    X(NONE, "nothing was found")                                                                   \
    X(MEASURED, "it ran; its memory was not predicted beforehand")                                 \
    X(AFFINE, "it ran; its memory was predicted, but not to the byte")                             \
    X(EXACT, "it ran, and its memory was predicted to the byte")

typedef enum rebatch_confidence {
#define REBATCH_CONFIDENCE_(name, text) REBATCH_CONFIDENCE_##name,
    REBATCH_CONFIDENCES(REBATCH_CONFIDENCE_)
#undef REBATCH_CONFIDENCE_
} rebatch_confidence;

/** What the file of results had to say: X(name, in words). */
#define REBATCH_SAVED_SIZES(X)                                                                     \
    X(NONE, "no file was given")                                                                   \
    X(ABSENT, "the file has no size for this")                                                     \
    X(HELD, "the size in the file was run, and is the one")                                        \
    X(REPLACED, "the size in the file was run, and another one was found")                         \
    X(IGNORED, "the file cannot be used")

typedef enum rebatch_saved_size {
#define REBATCH_SAVED_SIZE_(name, text) REBATCH_SAVED_##name,
    REBATCH_SAVED_SIZES(REBATCH_SAVED_SIZE_)
#undef REBATCH_SAVED_SIZE_
} rebatch_saved_size;

/** What a probe found. Bytes live in the pool count everything that lives there, parameters and
 *  reserve_bytes as well. */
typedef struct rebatch_probe_report {
    rebatch_status status;         /**< what rebatch_probe() answered */
    size_t size;                   /**< the micro-batch found, in samples; its cost where the step
                                        has rebatch_step_ops.cost; 0: none */
    size_t predicted_size;         /**< the largest that is predicted to fit, at the end */
    uint64_t predicted_peak_bytes; /**< most live at once at `size`; 0: nothing was predicted */
    uint64_t measured_peak_bytes;  /**< the same, when it ran */
    uint64_t twice_bytes;          /**< most live at once at twice `size`; 0: not known */
    uint64_t available_bytes;      /**< what a micro-batch could have at the end of the probe */
    uint32_t trials;               /**< sizes that were run */
    uint32_t microbatches;         /**< runs of forward_backward, in vain or not */
    uint32_t ooms;                 /**< of them, those that ran out of memory */
    rebatch_confidence confidence;
    rebatch_oom_report oom; /**< the last OOM of the pool in this probe; asked_bytes 0 when none */
    rebatch_saved_size saved;  /**< what the file of results had to say */
    size_t saved_size;         /**< the size that was in it; 0: none */
    size_t largest_size;       /**< the largest that ran and fits; `size`, unless the fastest was
                                   chosen */
    double samples_per_second; /**< of `size`, when the fastest was chosen; else 0 */
} rebatch_probe_report;

/** What a size is predicted to need. Bytes count everything that lives in the pool, reserve_bytes
 *  as well. */
typedef struct rebatch_prediction {
    size_t size;
    bool fits;               /**< whole steps of that size would run in the memory there is now */
    uint64_t peak_bytes;     /**< most live at once */
    uint64_t reserved_bytes; /**< most held from the device, the cache that is there now included;
                                  0 when it does not fit */
    uint64_t limit_bytes;    /**< what the pool could hold from the device, all in all, now */
    uint64_t failing_bytes;  /**< the request that fails first; 0 when it fits */
} rebatch_prediction;

#ifdef __cplusplus
extern "C" {
#endif

/** Find the largest micro-batch that fits and have the next step begin with it.
 *
 *  Runs forward_backward with `probing` set, within micro_smallest and micro_largest, and zero_grad
 *  before and after, so that accumulators are zero at the end; never optimizer_step or lighten.
 *  A step with rebatch_step_ops.cost is probed by cost, with the first samples of the batch, and
 *  what is found is the budget.
 *  Guarded state is as before; so are step number and waits of growth. What a callback allocates at
 *  first use and keeps stays.
 *  @param ops     borrowed for the call
 *  @param batch   samples in the effective batch, at least 1
 *  @param user    handed to the callbacks
 *  @param options copied; NULL means defaults
 *  @param report  may be NULL; filled in on failure as well
 *  @return REBATCH_OK; REBATCH_E_EXHAUSTED when not even the smallest size fits, after one try or
 *          two, or zero_grad or reserve_bytes do not; REBATCH_E_INVALID, REBATCH_E_STATE (called
 *          from within a callback), REBATCH_E_HOST_OOM, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST;
 *          any status that a callback answered. After a failure the micro-batch size is what it
 *          was, and nothing of a failed trial is still allocated. */
REBATCH_API rebatch_status rebatch_probe(rebatch *rb, const rebatch_step_ops *ops, size_t batch,
                                         void *user, const rebatch_probe_options *options,
                                         rebatch_probe_report *report);

/** Predict what steps of micro-batches of `size` need, by the memory model that the last
 *  rebatch_probe() of this session has made, in the pool as it is now. Runs no callback;
 *  reserve_bytes are taken from the pool for the time of the call.
 *  @param[out] out  zeroed on failure
 *  @param size      at least 1; may be larger than the batch or any limit of the session; a cost
 *                   where the probe went by cost
 *  @param batch     samples in the effective batch, at least 1
 *  @param options   of the probe: reserve_bytes counts, the others do not; NULL means defaults
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_STATE when there is no model: nothing was
 *          probed, or no more than one size was run; REBATCH_E_STATE from within a callback;
 *          REBATCH_E_HOST_OOM, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. */
REBATCH_API rebatch_status rebatch_predict(rebatch_prediction *out, rebatch *rb, size_t size,
                                           size_t batch, const rebatch_probe_options *options);

/** The words for a confidence. Never freed. Any thread. */
REBATCH_API const char *rebatch_confidence_text(rebatch_confidence confidence);
/** The words for what a file of results had to say. Never freed. Any thread. */
REBATCH_API const char *rebatch_saved_size_text(rebatch_saved_size saved);

#ifdef __cplusplus
}
#endif
#endif
