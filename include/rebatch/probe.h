/** @file probe.h
 *  Finding the largest micro-batch that fits, by prediction.
 *
 *  A probe runs two or three small micro-batches, and records the sizes and the order of their
 *  allocations and frees. From these it derives every size as a function of the micro-batch size.
 *  It then replays the calls for any micro-batch size on a copy of the session's pool without
 *  memory, which shows whether that size fits. The size found runs once before it is used, on
 *  gradients that other micro-batches have accumulated.
 *
 *  The result can be kept in a file: a resumed training then starts with the size of the last
 *  probe, and runs it once to verify it. docs/probe.md describes the file. */
#ifndef REBATCH_PROBE_H
#define REBATCH_PROBE_H

#include "rebatch/pool.h"
#include "rebatch/status.h"
#include "rebatch/step.h"

/** Which of the sizes that fit a probe chooses. */
typedef enum rebatch_probe_choice {
    REBATCH_PROBE_LARGEST = 0, /**< the largest */
    /** The smallest size within 2 % of the best throughput. The probe measures the largest size,
     *  three quarters, half and a quarter of it, twice each. A GPU often runs no faster beyond some
     *  size, and the memory saved is then available for other uses. */
    REBATCH_PROBE_FASTEST
} rebatch_probe_choice;

/** Options of a probe. Zero means default. */
typedef struct rebatch_probe_options {
    size_t struct_size;  /**< sizeof(rebatch_probe_options) */
    uint32_t max_trials; /**< most calls of forward_backward, failed ones included; 0: 5, and 8 more
                              to measure which size is fastest */
    /** Memory that is not allocated yet but will be, in bytes: what the first update allocates and
     *  keeps, for example AdamW's two moments, and later allocations outside the pool. The probe
     *  takes it from the pool after its first trial, so that the size found leaves room for it. Do
     *  not include the state of updates that have already run: it is in the pool. If this is the
     *  sum of block sizes, each rounded up to 512 bytes, the probe also knows how many blocks there
     *  are. */
    size_t reserve_bytes;
    /** File that keeps results, in an existing folder; borrowed during the call; NULL: none; "" is
     *  refused. An entry applies only to the same key, device, memory, driver, library version and
     *  settings, and its size runs once before it is used. A file that cannot be used is ignored,
     *  with an event that gives the reason. */
    const char *file;
    /** Name of the model in that file, 1 to 255 bytes, for example "gpt2-124M T=1024 bf16". Include
     *  everything that changes the memory of a sample. */
    const char *key;
    /** No trial starts later than this many seconds after the probe began; the result is then the
     *  best size that ran. 0: no bound. */
    uint32_t max_seconds;
    rebatch_probe_choice choose; /**< which size is chosen */
} rebatch_probe_options;
/** Default options of a probe. */
#define REBATCH_PROBE_OPTIONS_INIT                                                                 \
    {                                                                                              \
        sizeof(rebatch_probe_options), 0, 0, NULL, NULL, 0, REBATCH_PROBE_LARGEST                  \
    }

/** How certain a result is: X(name, in words). */
#define REBATCH_CONFIDENCES(X)                                                                     \
    X(NONE, "nothing was found")                                                                   \
    X(MEASURED, "it ran; its memory was not predicted beforehand")                                 \
    X(AFFINE, "it ran; its memory was predicted, but not to the byte")                             \
    X(EXACT, "it ran, and its memory was predicted to the byte")

/** How certain a result is. */
typedef enum rebatch_confidence {
#define REBATCH_CONFIDENCE_(name, text) REBATCH_CONFIDENCE_##name,
    REBATCH_CONFIDENCES(REBATCH_CONFIDENCE_)
#undef REBATCH_CONFIDENCE_
} rebatch_confidence;

/** What the probe found in the file of results: X(name, in words). */
#define REBATCH_SAVED_SIZES(X)                                                                     \
    X(NONE, "no file was given")                                                                   \
    X(ABSENT, "the file has no entry for this model and these settings")                           \
    X(HELD, "the size in the file was run and is the result")                                      \
    X(REPLACED, "the size in the file was run, and another one was found")                         \
    X(IGNORED, "the file cannot be used")

/** What the probe found in the file of results. */
typedef enum rebatch_saved_size {
#define REBATCH_SAVED_SIZE_(name, text) REBATCH_SAVED_##name,
    REBATCH_SAVED_SIZES(REBATCH_SAVED_SIZE_)
#undef REBATCH_SAVED_SIZE_
} rebatch_saved_size;

/** The result of a probe. Live memory includes everything in the pool, with parameters and
 *  reserve_bytes. */
typedef struct rebatch_probe_report {
    rebatch_status status;         /**< what rebatch_probe() returned */
    size_t size;                   /**< the micro-batch size found, in samples; for a step with
                                        rebatch_step_ops.cost, the cost budget; 0: none */
    size_t predicted_size;         /**< the largest size predicted to fit, at the end */
    uint64_t predicted_peak_bytes; /**< predicted peak of live memory at `size`; 0: no prediction */
    uint64_t measured_peak_bytes;  /**< measured peak of live memory at `size` */
    uint64_t twice_bytes;          /**< predicted peak of live memory at twice `size`; 0: unknown */
    uint64_t available_bytes;      /**< memory that a micro-batch could use, at the end */
    uint32_t trials;               /**< sizes that ran */
    uint32_t microbatches;         /**< calls of forward_backward, failed ones included */
    uint32_t ooms;                 /**< calls of forward_backward that ran out of memory */
    rebatch_confidence confidence; /**< how certain the result is */
    rebatch_oom_report oom;        /**< the pool's last OOM in this probe; asked_bytes is 0 without
                                        one */
    rebatch_saved_size saved;      /**< what the file of results had */
    size_t saved_size;             /**< the size in the file; 0: none */
    size_t largest_size;           /**< the largest size that ran and fits: `size`, unless the
                                        fastest was chosen */
    double samples_per_second;     /**< throughput of `size`, if the fastest was chosen; else 0 */
} rebatch_probe_report;

/** The memory that a micro-batch size is predicted to need. Bytes include everything in the pool,
 *  and reserve_bytes. */
typedef struct rebatch_prediction {
    size_t size;         /**< the size that was asked about */
    bool fits;           /**< whether whole steps of that size run in the memory available now */
    uint64_t peak_bytes; /**< peak of live memory */
    uint64_t
        reserved_bytes;     /**< peak of memory held from the device, with the present cache; 0 when
                                  the size does not fit */
    uint64_t limit_bytes;   /**< the most memory that the pool could hold from the device now */
    uint64_t failing_bytes; /**< the first request that would fail; 0 when the size fits */
} rebatch_prediction;

#ifdef __cplusplus
extern "C" {
#endif

/** Find the largest micro-batch size that fits. The next step starts with it.
 *
 *  The probe calls forward_backward with `probing` set, for sizes from micro_smallest to
 *  micro_largest, and zero_grad before and after, so that accumulators end at zero. It never calls
 *  optimizer_step or lighten. A step with rebatch_step_ops.cost is probed by cost with the first
 *  samples of the batch, and the result is the cost budget.
 *
 *  Guarded state, step number and growth waits are unchanged. What a callback allocates in its
 *  first run and keeps stays allocated.
 *  @param rb       the session
 *  @param ops      borrowed during the call
 *  @param batch    samples in the effective batch, at least 1
 *  @param user     passed to the callbacks
 *  @param options  copied; NULL: defaults
 *  @param report   filled in on success and failure; may be NULL
 *  @return REBATCH_OK; REBATCH_E_EXHAUSTED when the smallest size does not fit in one or two tries,
 *          or zero_grad or reserve_bytes do not fit; any status that a callback returned;
 *          REBATCH_E_STATE from within a callback; REBATCH_E_INVALID, REBATCH_E_HOST_OOM,
 *          REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. After a failure the micro-batch size is
 *          unchanged, and nothing of the failed trial is still allocated */
REBATCH_API_CHECKED rebatch_status rebatch_probe(rebatch *rb, const rebatch_step_ops *ops,
                                                 size_t batch, void *user,
                                                 const rebatch_probe_options *options,
                                                 rebatch_probe_report *report);

/** Predict the memory that steps with micro-batches of `size` need in the pool as it is now. Uses
 *  the memory model of the session's last rebatch_probe(), or what rebatch_options.learn learned.
 *  Buffers of `resize` count with their bytes for `size`, not with those that are there now. Calls
 *  no callback. reserve_bytes are taken from the pool during the call.
 *  @param[out] out  zeroed on failure
 *  @param rb        the session
 *  @param size      at least 1; may exceed the batch and the session's limits; a cost if the probe
 *                   was by cost
 *  @param batch     samples in the effective batch, at least 1
 *  @param options   options of the probe, of which only reserve_bytes applies; NULL: defaults
 *  @return REBATCH_OK; REBATCH_E_STATE when there is no model, because the session has run one size
 *          at most, and from within a callback; REBATCH_E_INVALID, REBATCH_E_HOST_OOM,
 *          REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API rebatch_status rebatch_predict(rebatch_prediction *out, rebatch *rb, size_t size,
                                           size_t batch, const rebatch_probe_options *options);

/** Learn from a micro-batch that the program has cut and run by itself, in no step of this session,
 *  and get the budget of the next one: for samplers that make micro-batches. Memory is what the
 *  session's meter reads: the micro-batch has needed peak_bytes beyond live_bytes, or failed there
 *  with a request of asked_bytes. The budget follows the rules of a step with
 *  rebatch_step_ops.cost: with `learn` it grows as long as more is predicted to fit, then after
 *  grow_after micro-batches without an OOM; it falls after an OOM, and where less memory is
 *  available than it is predicted to need. A micro-batch of half the budget or less never raises
 *  it, and an OOM of one beyond the budget, which was cut before the budget fell, does not lower it
 *  again within grow_after micro-batches.
 *  @param rb              the session, which has rebatch_options.meter
 *  @param key             what the micro-batch is one of, for example the class of its longest
 *                         sample: each key has a budget and a memory model of its own. A number or
 *                         an address that is never read; not one of a rebatch_map()
 *  @param cost            of the micro-batch; 0: none has run, but less may be available
 *  @param result          REBATCH_OK: it ran; REBATCH_OOM
 *  @param[in,out] budget  in: what a key begins with that is new, at least 1; and while it grows by
 *                         `learn`, what is known from elsewhere to fit. Out: the most that the next
 *                         micro-batch may cost, at least 1. Unchanged on failure
 *  @return REBATCH_OK; REBATCH_E_STATE from within a callback; REBATCH_E_INVALID,
 *          REBATCH_E_HOST_OOM */
REBATCH_API rebatch_status rebatch_learn_cost(rebatch *rb, const void *key, size_t cost,
                                              rebatch_status result, size_t *budget);

/** A confidence in words. Thread-safe.
 *  @param confidence  any number
 *  @return a static string */
REBATCH_API const char *rebatch_confidence_text(rebatch_confidence confidence);

/** What the file of results had, in words. Thread-safe.
 *  @param saved  any number
 *  @return a static string */
REBATCH_API const char *rebatch_saved_size_text(rebatch_saved_size saved);

#ifdef __cplusplus
}
#endif
#endif
