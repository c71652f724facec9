/** @file step.h
 *  Training steps that recover when device memory runs out.
 *
 *  @code
 *  rebatch_open(&rb, device, NULL);
 *  for (...)
 *      status = rebatch_step(rb, &ops, batch, &model, NULL);   // ops: the callbacks below
 *  rebatch_close(rb);
 *  @endcode
 *
 *  rebatch cuts the effective batch into micro-batches. When a micro-batch runs out of memory,
 *  rebatch takes back what the attempt allocated, halves the micro-batch size, and continues with
 *  the same samples. docs/contract.md and the pages it names are the contract.
 *
 *  Words: the effective batch is the samples of one optimizer update; a micro-batch is the samples
 *  of one call of forward_backward; an attempt is one try at a micro-batch; OOM means out of device
 *  memory. A session is used by one thread at a time, except where a function is thread-safe. */
#ifndef REBATCH_STEP_H
#define REBATCH_STEP_H

#include "rebatch/device.h"
#include "rebatch/group.h"
#include "rebatch/pool.h"
#include "rebatch/status.h"

/** A session: a pool, a micro-batch size, and what was learned about memory. One thread at a time
 *  uses it. Other threads may use its pool at any time. A thread that works for a callback calls
 *  rebatch_join(), and finishes its work for the callback before the callback returns. */
typedef struct rebatch rebatch;

/** One attempt at a part of the effective batch. */
typedef struct rebatch_microbatch {
    uint64_t step;         /**< number of the effective batch, from 0 */
    size_t first;          /**< first sample: the samples are [first, first + count) */
    size_t count;          /**< number of samples, at least 1 */
    size_t batch;          /**< samples in the effective batch, on all ranks together; the weight of
                                a sample is 1/batch */
    uint32_t attempt;      /**< how many attempts at these samples were made before */
    bool probing;          /**< a trial of a probe: its results are discarded */
    rebatch_pool *pool;    /**< allocate from this pool: what the callback's thread allocates, or a
                                thread that joined (rebatch_join()), is taken back when the attempt
                                fails. What other threads allocate stays. Before it frees a block
                                that another stream uses, the callback calls rebatch_pool_use_on(),
                                or lets the block's stream wait for the other one */
    rebatch_stream stream; /**< the session's stream */
    size_t rank_batch;     /**< samples of this rank in the effective batch; without a group the
                                same as `batch` */
    bool is_abandoned;     /**< with rebatch_options.lockstep: this rank has failed, and only takes
                                part in the collectives (rebatch_step_ops.forward_backward) */
} rebatch_microbatch;

/** Bits of rebatch_step_ops.flags. */
enum rebatch_step_flags {
    /** forward_backward and optimizer_step call rebatch_mutating() each time before they change
     *  accumulators or parameters. zero_grad need not.
     *
     *  Without this bit, rebatch assumes that a callback changes them from its first line, until
     *  the callback has called rebatch_mutating() and succeeded once.
     *
     *  With this bit:
     *  - A forward_backward that succeeds without the call ends the step with REBATCH_E_STATE,
     *    while no forward_backward of the session ever has made it: otherwise samples would count
     *    twice after an OOM. Trials of a probe are exempt.
     *  - So the first micro-batch calls it even if its samples contribute nothing; later ones
     *    need not.
     *  - An optimizer_step may skip its update. The first one that succeeds without the call, while
     *    none has ever made it, is reported as an event, REBATCH_EVENT_UNDECLARED. */
    REBATCH_DECLARES_MUTATION = 1,
    /** The weight of a sample does not depend on rebatch_microbatch.batch, for example 1/tokens of
     *  the whole effective batch. rebatch_check() then does not look at weights. */
    REBATCH_OWN_WEIGHTS = 2,
    /** What forward_backward, or a map's `run`, has allocated from the pool and not freed is freed
     *  when it returns REBATCH_OK: for code that allocates all its memory in its first call and
     *  keeps it. Guarded pointers to the beginning of what is freed become NULL, so that such code
     *  allocates again; other pointers it sets to NULL itself. Memory that is to stay is allocated
     *  elsewhere. Not with reclaim off. */
    REBATCH_SCOPED_MEMORY = 4,
    /** forward_backward is launched once in a CUDA graph for each size of micro-batch, and then the
     *  graph is replayed: on a GPU that saves launches and the gaps between kernels.
     *
     *  forward_backward then
     *  - enqueues its work on the session's stream, which is not the default one, does not wait for
     *    it, and does nothing else: what it does on the host is not done in a replay;
     *  - allocates and frees no memory: it uses the buffers of `resize`;
     *  - reads what differs between micro-batches of one size from device memory, which `inputs`
     *    has filled: the samples, the first sample, the step;
     *  - changes no device memory that outlives it but what is watched (rebatch_watch()).
     *
     *  In the third step of a size rebatch captures it; in a later one it runs other samples by
     *  themselves and as a replay of the same state, and compares all that is watched bit for bit.
     *  From then on it is replayed. Where the comparison or the capture fails, micro-batches run as
     *  without the flag, and an event says why (REBATCH_EVENT_NOT_CAPTURED). A graph is captured
     *  again after a callback that failed, resize, lighten, and where the batch has another size or
     *  what is watched has moved. Other memory that forward_backward reads stays where it is, or a
     *  step without the flag comes after it has moved. Not with lockstep. */
    REBATCH_STEP_CAPTURED = 8
};

/** The callbacks of a training step. Each receives as `user` the pointer passed to rebatch_step().
 *
 *  A callback returns REBATCH_OK, REBATCH_OOM, or another status, which ends the step and is passed
 *  through unchanged. It must not return REBATCH_E_EXHAUSTED, REBATCH_E_TORN, or a number that is
 *  not a status: the step then ends with REBATCH_E_STATE. So it does when a callback leaves a scope
 *  open that it opened. A callback must return: no exception and no longjmp() may leave it, except
 *  by rebatch_escape(). */
typedef struct rebatch_step_ops {
    size_t struct_size; /**< sizeof(rebatch_step_ops) */
    /** Set the accumulators (gradients, loss, token counts) to zero. It may run again at any time
     *  before the update, with the same effect. It may allocate the accumulators in its first run;
     *  guard the pointers to them (rebatch_guard()), so that it allocates them again after rebatch
     *  has taken them back. NULL: the program clears guarded accumulators before each step, or
     *  keeps momentum in them (rebatch_guard_sums()). */
    rebatch_status (*zero_grad)(void *user);
    /** Run samples [first, first + count) forward and backward, and add their contributions, each
     *  weighted by 1/batch. Recommended order: allocate, rebatch_reserve() what the rest needs,
     *  call rebatch_mutating(), accumulate. Then an OOM costs this micro-batch at most.
     *
     *  With rebatch_options.lockstep it may call collectives. It calls rebatch_mutating_together()
     *  after the last of them, in place of rebatch_mutating(). If it fails before that, what it has
     *  allocated is taken back, and it is called again with `is_abandoned`: it then takes part,
     *  with any values, in the collectives of the micro-batch that it has not called yet, and
     *  returns; its results are not used. So it counts its collectives. This also happens where the
     *  micro-batch could not begin on this rank: then it has called none of them yet. */
    rebatch_status (*forward_backward)(const rebatch_microbatch *microbatch, void *user);
    /** Apply the update. Recommended order: allocate and reserve, call rebatch_mutating(), change
     *  parameters. A failure after rebatch_mutating(), OOM or not, leaves the parameters partly
     *  updated: check everything that can be refused before that call. */
    rebatch_status (*optimizer_step)(void *user);
    /** Optional. From now on use less memory for each sample, for example by recomputing
     *  activations: level 0 is the normal mode, 1 saves least. Results must not change. Return
     *  REBATCH_E_UNSUPPORTED when there is no such level.
     *
     *  After REBATCH_OK the level stays in effect whatever happens to the step: what lighten
     *  allocated, and what it changed in guarded host state, stays, and what it freed is free
     *  immediately. After a failure its allocations, its frees and its changes of guarded host
     *  state are undone. */
    rebatch_status (*lighten)(unsigned level, void *user);
    uint32_t flags; /**< bits of rebatch_step_flags */
    /** Optional. The cost of samples [first, first + count) of this effective batch as one
     *  micro-batch, in a unit of your choice in which memory is roughly linear, for example padded
     *  tokens: count times the longest sample.
     *
     *  With a cost, rebatch cuts micro-batches so that the cost of each stays within a budget, and
     *  the budget takes the place of the micro-batch size: rebatch learns memory as a function of
     *  cost, and predicts, halves and grows the budget. So one long sequence does not make all
     *  micro-batches small. The limits on the micro-batch size apply as well; a micro-batch of the
     *  smallest size runs whatever it costs. Samples stay in order.
     *
     *  The cost must not fall when `count` rises, and may depend only on its arguments and the
     *  batch. A wrong cost causes OOMs, never a wrong result. 0 counts as 1. The function is called
     *  about twenty times for each micro-batch, with at most twice its samples, and must not call
     *  the session. */
    uint64_t (*cost)(size_t first, size_t count, void *user);
    /** Optional. Allocate the buffers for micro-batches of up to `micro_batch` samples, for example
     *  activations, which forward_backward then uses without allocating them each time. Code that
     *  allocates its buffers once, before training, moves here unchanged.
     *
     *  It is called before zero_grad of the first step, and then only when the size of the
     *  micro-batch or the level of lighten changes. A micro-batch with fewer samples uses the
     *  buffers that are there: the last one of an effective batch, and those of a smaller batch.
     *
     *  What it allocates from the pool, or with cudaMalloc under wrap.h, belongs to the size.
     *  rebatch takes it back before it calls resize for another size, so resize need not free it.
     *  It may, at any moment of the call: no new block begins at the address of an old buffer, and
     *  a free of such an address is ignored. With caching off, resize frees old buffers before it
     *  allocates, or not at all; with several trainers, or sessions on a pool, not at all. What a
     *  call that fails has allocated is taken back; then resize is called for a smaller size.
     *  Buffers from before the first step may be freed in resize too: what a call frees of older
     *  memory is free at once, also when the call fails, unless guarded state points to it.
     *  Contents stay from one callback to the next, but not across a resize.
     *
     *  An OOM leaves resize at the request that failed, and it runs again for a smaller size. What
     *  it did in host memory by then stays done, but for guarded state, and its local variables are
     *  gone. So store a host pointer that realloc() may have moved where the program keeps it
     *  before the next request, or make all requests first; a copy of a layer that is stored at the
     *  end is lost. What a call that succeeds changes in guarded host state stays changed. resize
     *  may run again for the same size, in a probe and while `learn` is on, and must not call
     *  rebatch_mutating().
     *
     *  An OOM in zero_grad or optimizer_step, too, can make the size smaller, since that frees
     *  memory. So does a limit of the pool that is lowered below what it holds, when the next step
     *  begins: it counts as an OOM in resize. With `cost` the buffers are for as many samples as
     *  the budget allows in a micro-batch of this effective batch, and micro-batches are cut by
     *  both. */
    rebatch_status (*resize)(size_t micro_batch, void *user);
    /** Required with rebatch_options.group, unless lockstep is on; otherwise not called. Sum the
     *  accumulators over all ranks. Without lockstep it is the only callback that may call
     *  collectives of the program. It runs when this rank
     *  has accumulated all its samples, so that the ranks' micro-batches may differ in size and
     *  number, and a rank that runs out of memory repeats its samples while the others wait here.
     *
     *  Allocate first: an OOM before the first collective frees memory and calls reduce again.
     *  Return no REBATCH_OOM after it, and no other status before it: after that reduce is not
     *  called again in the step, and the other ranks wait in the collectives of this one.
     *
     *  With `is_abandoned` this rank has failed, and its accumulators are undefined; zero_grad may
     *  not have run, and what the step has allocated may be taken back. It takes part in the same
     *  collectives, with any values, so that no rank waits for it; no rank will use the result. So
     *  reduce keeps what it needs from before the step, or returns REBATCH_OOM before its first
     *  collective; the other ranks' collectives then end by their own timeout. So they do when
     *  reduce itself fails with another status: it is not called again. */
    rebatch_status (*reduce)(bool is_abandoned, void *user);
    /** Optional. Samples from `first` on that are left in its part of the batch, such as a loader's
     *  batch: no micro-batch goes beyond. 0 counts as 1. As cost, but not with lockstep. */
    size_t (*part)(size_t first, void *user);
    /** Optional. Enqueue on the session's stream, before each forward_backward and each replay of
     *  it (REBATCH_STEP_CAPTURED), the writes to device memory of what differs between
     *  micro-batches. It belongs to the attempt as if forward_backward began with it, and does not
     *  change accumulators. */
    rebatch_status (*inputs)(const rebatch_microbatch *microbatch, void *user);
} rebatch_step_ops;
/** Step operations without callbacks: set the first three, and the optional ones as needed. */
#define REBATCH_STEP_OPS_INIT                                                                      \
    {                                                                                              \
        sizeof(rebatch_step_ops), NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL          \
    }

/** What rebatch_map() runs. The rules for results of callbacks apply (rebatch_step_ops). */
typedef struct rebatch_map_ops {
    size_t struct_size; /**< sizeof(rebatch_map_ops) */
    /** Run samples [first, first + count) of `batch` samples in all. */
    rebatch_status (*run)(const rebatch_microbatch *samples, void *user);
    /** Optional. As rebatch_step_ops.resize. With the same function and the same `user` as the
     *  training step, `run` uses the step's buffers, and a call has no more samples than they are
     *  made for, unless the limits on the size ask for more. A first step after it begins with the
     *  size that the map has found. With another one, the step's buffers are taken back, and made
     *  again in the next step. NULL: `run` does not use any. */
    rebatch_status (*resize)(size_t samples, void *user);
    size_t largest;  /**< most samples in one call; 0: all */
    const void *key; /**< the session learns a size for each key; NULL: for each `run` */
    uint32_t flags;  /**< 0, or REBATCH_SCOPED_MEMORY */
} rebatch_map_ops;
/** Map operations without functions: set run. */
#define REBATCH_MAP_OPS_INIT                                                                       \
    {                                                                                              \
        sizeof(rebatch_map_ops), NULL, NULL, 0, NULL, 0                                            \
    }

/** Where an OOM occurs: X(name, in words). */
#define REBATCH_PHASES(X)                                                                          \
    X(ZERO_GRAD, "zero_grad")                                                                      \
    X(ADMISSION, "admission")                                                                      \
    X(FORWARD, "forward_backward, before accumulating")                                            \
    X(BACKWARD, "forward_backward, while accumulating")                                            \
    X(OPTIMIZER, "optimizer_step, before updating")                                                \
    X(UPDATE, "optimizer_step, while updating")                                                    \
    X(RESIZE, "resize")                                                                            \
    X(MAP, "map")                                                                                  \
    X(REDUCE, "reduce")

/** Where an OOM occurs. */
typedef enum rebatch_phase {
#define REBATCH_PHASE_(name, text) REBATCH_PHASE_##name,
    REBATCH_PHASES(REBATCH_PHASE_)
#undef REBATCH_PHASE_
        REBATCH_PHASE_COUNT /**< number of phases */
} rebatch_phase;

/** Events: X(name, level, in words). */
#define REBATCH_EVENTS(X)                                                                          \
    X(STEP, DEBUG, "step done")                                                                    \
    X(RETRY, WARN, "out of memory")                                                                \
    X(SHRINK, WARN, "out of memory")                                                               \
    X(LIGHTEN, WARN, "out of memory")                                                              \
    X(GROW, INFO, "there is room to grow")                                                         \
    X(GROWTH_FAILED, INFO, "the last growth failed")                                               \
    X(EXHAUSTED, ERROR, "out of memory, and nothing smaller or lighter is left to run,")           \
    X(TORN, ERROR, "out of memory, and some parameters are changed,")                              \
    X(TRIAL, INFO, "a probe's trial")                                                              \
    X(PROBE_FILE, WARN, "the probe's file of results:")                                            \
    X(THRASHING, WARN, "every micro-batch returns memory to the device and allocates it again")    \
    X(LEARN, INFO, "the micro-batch size was predicted from earlier micro-batches")                \
    X(SWALLOWED, WARN, "an allocation failed")                                                     \
    X(LEAK, WARN, "memory grows:")                                                                 \
    X(UNDECLARED, WARN,                                                                            \
      "optimizer_step returned without calling rebatch_mutating(), which "                         \
      "REBATCH_DECLARES_MUTATION promises: correct only if it changed nothing")                    \
    X(CUT, WARN, "the loss depends on how memory cuts the batch:")                                 \
    X(OVERFLOW, WARN, "the update took host memory:")                                              \
    X(NOT_CAPTURED, WARN, "micro-batches run without a graph:")

/** The importance of an event. */
typedef enum rebatch_log_level {
    REBATCH_LOG_DEFAULT = 0, /**< REBATCH_LOG_WARN on standard error, else REBATCH_LOG_INFO */
    REBATCH_LOG_QUIET,       /**< nothing is reported */
    REBATCH_LOG_ERROR,       /**< the step failed */
    REBATCH_LOG_WARN,        /**< memory ran out, or something needs attention */
    REBATCH_LOG_INFO,        /**< the micro-batch size changed, or a probe made progress */
    REBATCH_LOG_DEBUG        /**< every step */
} rebatch_log_level;

/** How events are written. */
typedef enum rebatch_log_format {
    REBATCH_LOG_TEXT = 0, /**< lines for people, as rebatch_event_format() writes them */
    REBATCH_LOG_JSON      /**< one JSON object a line */
} rebatch_log_format;

/** What an event reports. */
typedef enum rebatch_event_kind {
#define REBATCH_EVENT_(name, level, text) REBATCH_EVENT_##name,
    REBATCH_EVENTS(REBATCH_EVENT_)
#undef REBATCH_EVENT_
} rebatch_event_kind;

/** An event. Valid during rebatch_options.on_event. */
typedef struct rebatch_event {
    rebatch_event_kind kind;  /**< what it reports */
    rebatch_log_level level;  /**< its importance */
    uint64_t step;            /**< number of the effective batch */
    rebatch_phase phase;      /**< of an OOM event: where the OOM occurred */
    uint32_t attempt;         /**< number of the attempt at these samples, from 0 */
    size_t first;             /**< first sample of the attempt; 0 outside forward_backward */
    size_t count;             /**< samples of the attempt; 0 outside forward_backward */
    size_t batch;             /**< samples in the effective batch */
    size_t micro_before;      /**< micro-batch size before the event */
    size_t micro_after;       /**< micro-batch size after it */
    unsigned lighten_before;  /**< lighten level before the event */
    unsigned lighten_after;   /**< lighten level after it */
    size_t redone_samples;    /**< samples that ran and must run again because of this OOM */
    uint64_t lost_ns;         /**< time that those samples took, in nanoseconds */
    uint64_t asked_bytes;     /**< size of the request that failed; 0: it was not the pool's */
    uint64_t needed_bytes;    /**< least memory that the attempt needs; 0: not known */
    uint64_t available_bytes; /**< memory available after the attempt was taken back */
    uint64_t peak_bytes;      /**< of a STEP or TRIAL: highest live memory of the pool; 0 for a
                                   trial that ran out of memory */
    const char *text;         /**< of PROBE_FILE: the file, and why it is not used; of RETRY: after
                                   which wait, or NULL; of LEAK: what grows; of OVERFLOW: how
                                   much; of NOT_CAPTURED: why; of an OOM event of a map whose
                                   phase is ADMISSION or RESIZE: "(in map)"; of EXHAUSTED: "(in
                                   lockstep)" there; else NULL */
    uint64_t cost;            /**< cost of the samples of the attempt; 0: the step has no cost */
    uint64_t cost_before;     /**< cost budget before the event; 0: none, or no bound */
    uint64_t cost_after;      /**< cost budget after it; 0: none, or no bound */
    bool is_unexplained; /**< of an OOM event: a callback returned REBATCH_OOM, but no allocation
                                   is known to have failed */
    bool is_injected;    /**< of an OOM event: the request failed on purpose (`rebatch run`) */
} rebatch_event;

/** What to do about an OOM that would occur again at the same micro-batch size. */
typedef enum rebatch_on_oom {
    REBATCH_ON_OOM_DEFAULT = 0, /**< REBATCH_ON_OOM_FIT with the memory model of a probe, or of
                                     `learn`; else REBATCH_ON_OOM_HALVE */
    REBATCH_ON_OOM_HALVE,       /**< halve the micro-batch that failed. A growth that failed returns
                                     to the size before the growth, if that is more than half */
    REBATCH_ON_OOM_STOP,        /**< end the step with REBATCH_E_EXHAUSTED */
    REBATCH_ON_OOM_FIT          /**< use the largest size that is predicted to fit in the available
                                     memory, from a probe's memory model or from sizes that ran;
                                     slightly less after a prediction that failed; half after two
                                     that failed, or where nothing is known */
} rebatch_on_oom;

/** What a meter reads. All sizes are in bytes. */
typedef struct rebatch_meter_reading {
    uint64_t live_bytes;     /**< memory in use */
    uint64_t peak_bytes;     /**< highest value of live_bytes since `begin`; 0: not measured */
    uint64_t reserved_bytes; /**< memory held from the device */
    uint64_t asked_bytes;    /**< size of the last request that failed since `begin`; 0: none, or
                                  not known */
    /** Highest value of reserved_bytes since `begin`; 0: not measured. `learn` chooses sizes by it:
     *  what an allocator reserves, pieces between blocks too, is what runs out. */
    uint64_t reserved_peak_bytes;
    uint64_t retries; /**< requests since `begin` that were served only after cached memory was
                           returned to the device; 0: none, or not known */
} rebatch_meter_reading;

/** Figures of an allocator that is not a rebatch pool, for example PyTorch's. With a meter the
 *  session goes by these figures wherever it would go by those of its pool: for admission, `learn`,
 *  growth, prediction and reports. The functions run in the thread of the step. */
typedef struct rebatch_meter {
    size_t struct_size; /**< sizeof(rebatch_meter) */
    /** A callback begins: peak_bytes counts from here. `phase` is where an OOM in it would occur,
     *  and `size` the samples of a micro-batch, or their cost; 0: it is none. */
    void (*begin)(rebatch_phase phase, size_t size, void *user);
    /** Read the figures: after a failed callback when it has returned and has freed its memory.
     *  @return REBATCH_OK; any other status: the figures are not known */
    rebatch_status (*read)(rebatch_meter_reading *out, void *user);
    /** How many bytes could be allocated in addition to what is in use; UINT64_MAX: not bounded.
     *  @return REBATCH_OK; any other status: not known, and nothing is refused */
    rebatch_status (*available)(uint64_t *out, void *user);
    /** Return cached memory to the device. It is called after an OOM, and while the session learns
     *  before the first micro-batch of each size.
     *  @return bytes returned */
    uint64_t (*release)(void *user);
    void *user; /**< passed to the functions; borrowed until rebatch_close() */
    /** Optional. After an OOM: how much of the device's memory others hold, who may give it back.
     *  @return bytes; 0: none, or a limit of one's own is what is short */
    uint64_t (*outside)(void *user);
    /** Optional. Where this points to the size of a micro-batch, `settled` is its reading, and that
     *  of callbacks without one: begin and read are not called. SIZE_MAX: any size, 0: none. */
    const size_t *settled_size;
    const rebatch_meter_reading *settled; /**< may change like that while a call runs */
} rebatch_meter;
/** A meter without functions: set the first four. */
#define REBATCH_METER_INIT                                                                         \
    {                                                                                              \
        sizeof(rebatch_meter), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL                      \
    }

/** The most sizes in rebatch_options.micro_allowed. */
#define REBATCH_ALLOWED_SIZES 32

/** Options of a session. Zero means default.
 *
 *  Every micro-batch size is at least micro_smallest, at most micro_largest, a multiple of
 *  micro_multiple_of, and in the list micro_allowed. This applies to every size that rebatch
 *  chooses: at the start, after an OOM, by prediction, growth or probe. The last micro-batch of an
 *  effective batch has the remaining samples. Where the limits do not allow so few, the
 *  micro-batches before it become smaller, so that it is allowed, and are as few as can be: with
 *  micro_smallest 2, 33 samples of which 16 fit are 11 + 11 + 11. Only where no such cut exists may
 *  it be smaller. */
typedef struct rebatch_options {
    size_t struct_size;        /**< sizeof(rebatch_options) */
    rebatch_pool_options pool; /**< options of the session's pool; with struct_size 0: defaults */
    rebatch_stream stream;     /**< passed to the callbacks; borrowed; NULL: the default stream */

    size_t micro_start;    /**< first micro-batch size; 0: the effective batch, or what `learn`
                                finds. With rebatch_step_ops.cost, the first budget is the cost of
                                that many samples of the first batch */
    size_t micro_smallest; /**< smallest micro-batch size; 0: 1 */
    size_t micro_largest;  /**< largest micro-batch size; 0: the effective batch */

    rebatch_on_oom
        on_oom; /**< what to do after an OOM; default: fit where a memory model is known */
    rebatch_toggle admission; /**< do not start an attempt whose memory is known not to be
                                   available; default on */
    rebatch_toggle lighten;   /**< call the step's lighten when the smallest micro-batch does not
                                   fit; default on */
    uint32_t max_attempts;    /**< most failed attempts in one step, those that admission refuses
                                   included and those that fail on purpose (rebatch run) not,
                                   before it ends with REBATCH_E_EXHAUSTED; at most 65536; 0: 64 */

    rebatch_toggle growth; /**< grow the micro-batch again after steps without an OOM; default on */
    uint32_t grow_after;   /**< steps without an OOM before the micro-batch grows; at most
                                 grow_wait_max; 0: 16 */
    uint32_t grow_wait_max; /**< a failed growth doubles the wait, up to this many steps; a
                                 successful growth resets it. A prediction that has prevented growth
                                 for this many more steps without an OOM is overruled. 0: 1024 */

    rebatch_log_level log_level; /**< less important events are not reported; default: WARN on
                                      standard error, INFO for on_event and log_file */
    /** Receives events, in the thread of the step; NULL: events are written to log_file or, when
     *  there is none, to standard error, a line each. It must not call this session. */
    void (*on_event)(const rebatch_event *event, void *user);
    void *on_event_user; /**< passed to on_event; borrowed until rebatch_close() */

    size_t micro_multiple_of; /**< micro-batch sizes are multiples of this; 0: 1 */
    size_t micro_allowed[REBATCH_ALLOWED_SIZES]; /**< allowed micro-batch sizes in any order, up to
                                                      the first 0; none: any size */
    uint32_t max_ooms_in_row; /**< most OOMs in one step, without a micro-batch or an update that
                                   succeeds between them, before the step ends with
                                   REBATCH_E_EXHAUSTED; attempts that admission refuses do not
                                   count; at most 65536; 0: only max_attempts applies */
    rebatch_toggle learn; /**< start with the smallest micro-batch size, and learn from the first
                               micro-batches how large they can be; default off. After a few sizes
                               that grow, the session uses the largest that is predicted to fit, and
                               predicts again after the first update, when all permanent memory is
                               allocated. Unlike in rebatch_probe(), every micro-batch counts in the
                               update: there are no trials. Learning ends when a size is found, or
                               with a probe. Needs micro_start 0 */
    rebatch_toggle environment; /**< on: read settings as rebatch_config_load() does with path NULL.
                                     What the file named by REBATCH_CONFIG or a REBATCH_* variable
                                     sets overrides these options. Default off */
    rebatch_log_format log_format; /**< how events are written to standard error or log_file */
    const char *log_file; /**< append events to this file, whether or not there is an on_event, and
                               not to standard error. Made when it is not there; several sessions
                               and processes may have the same. NULL: no file. A line that cannot
                               be written, because the disk is full for example, is lost. Borrowed
                               by rebatch_open() */
    rebatch_toggle reclaim;      /**< off: rebatch takes back nothing, for languages that count
                                 references. A callback that fails frees what it has allocated, and
                                 an effective batch that runs again frees it in zero_grad; a free is
                                 effective immediately, and is not undone. Every thread that
                                 allocates during a callback counts as the callback's; nobody needs
                                 rebatch_join(). Not with resize or rebatch_check(). Default on */
    rebatch_pool *existing_pool; /**< use this pool instead of a pool of the session's own; `pool`
                                      must be its default. Borrowed until rebatch_close(), which
                                      keeps the pool, and takes back what resize has allocated.
                                      Several sessions may use one pool, 127 with reclaim on; their
                                      steps run in one thread at a time. NULL: the session has its
                                      own */
    const rebatch_meter *meter;  /**< copied; go by the figures of another allocator. reclaim must
                                      be off. Not with rebatch_probe(). NULL: go by the pool's */
    const rebatch_group *group;  /**< copied; the ranks that train one model together, each with its
                                      own session. NULL: this process alone */
    uint32_t group_timeout_ms;   /**< longest wait for another rank in a vote, in milliseconds. A
                                      rank that repeats samples makes the others wait, so it is
                                      longer than the slowest step. 0: 300,000 */
    rebatch_toggle lockstep;     /**< on: forward_backward may call collectives, so all ranks run
                                      the same number of micro-batches of the same sizes, as large
                                      as the rank with the least memory can run. All ranks have the
                                      same number of samples, and the same limits on sizes but for
                                      micro_start and micro_largest. A micro-batch that fails on one
                                      rank runs again on all. Needs `group`. Not with `learn`, cost,
                                      rebatch_probe() or rebatch_check(). Default off */
    uint32_t oom_wait_ms;        /**< longest wait in a step for memory of others, in milliseconds:
                                      where nothing smaller or lighter is left, and it would
                                      suffice, it is tried up to five times more. In a group below
                                      a quarter of group_timeout_ms. Most 3,600,000; 0: 10,000 */
    size_t floor_bytes;          /**< of rebatch_pool_set_floor(); for a new pool. 0: none */
} rebatch_options;
/** Default options of a session. */
#define REBATCH_OPTIONS_INIT                                                                       \
    {                                                                                              \
        sizeof(rebatch_options), REBATCH_POOL_OPTIONS_INIT, NULL, 0, 0, 0, REBATCH_ON_OOM_DEFAULT, \
            REBATCH_DEFAULT, REBATCH_DEFAULT, 0, REBATCH_DEFAULT, 0, 0, REBATCH_LOG_DEFAULT, NULL, \
            NULL, 0, {0}, 0, REBATCH_DEFAULT, REBATCH_DEFAULT, REBATCH_LOG_TEXT, NULL,             \
            REBATCH_DEFAULT, NULL, NULL, NULL, 0, REBATCH_DEFAULT, 0, 0                            \
    }

/** What one call of rebatch_step() did. */
typedef struct rebatch_step_report {
    uint64_t step;                         /**< number of the effective batch, from 0 */
    rebatch_status status;                 /**< what rebatch_step() returned */
    uint32_t microbatches;                 /**< micro-batches in the update: accumulation steps */
    uint32_t attempts;                     /**< calls of forward_backward */
    uint32_t ooms;                         /**< OOMs in total */
    uint32_t ooms_in[REBATCH_PHASE_COUNT]; /**< OOMs in each rebatch_phase */
    size_t micro_before;                   /**< micro-batch size at the start of the step */
    size_t micro_after;                    /**< micro-batch size at the end */
    unsigned lighten_level;                /**< lighten level at the end */
    size_t redone_samples;   /**< samples that ran again, counted once for each repetition */
    uint64_t lost_ns;        /**< what the OOMs cost, in nanoseconds: the time of the step beyond
                                  the median of the last five without an OOM that had as many
                                  samples. Where there was none, as in a first step, and where the
                                  step failed: the time of the discarded attempts, a lower bound */
    uint64_t peak_bytes;     /**< highest live memory of the pool during the step; with a meter 0
                                  where it did not measure every forward-backward and update */
    uint64_t reserved_bytes; /**< memory held from the device at the end */
    rebatch_oom_report oom;  /**< the pool's last OOM in this step; asked_bytes is 0 without one */
    uint64_t cost_before; /**< cost budget of a micro-batch at the start; 0: the step has no cost,
                                  or the budget has no bound yet */
    uint64_t cost_after;  /**< cost budget at the end */
    uint32_t thrashed;    /**< micro-batches for which the pool returned a quarter or more of their
                                  memory to the device and allocated it again, with less than twice
                                  their need available. If all did, the next step's are smaller */
    uint32_t learned;     /**< micro-batches in the update from which the session learned
                                  (rebatch_options.learn) */
    size_t micro;         /**< largest size of the micro-batches in the update; 0 after a failure */
    bool torn; /**< optimizer_step failed, with whatever status, after it had begun to change
                    parameters: some are new, some are old, and nothing was undone */
    uint64_t overflow_bytes; /**< host memory that the update took, because the device had no more
                                  after it had begun to change parameters */
} rebatch_step_report;

/** Where guarded state is. */
typedef enum rebatch_guard_kind {
    REBATCH_GUARD_HOST = 1,  /**< host memory; callbacks wait for enqueued work that changes it */
    REBATCH_GUARD_DEVICE = 2 /**< device memory, copied on the session's stream */
} rebatch_guard_kind;

/** The moments whose state is kept. */
typedef enum rebatch_guard_point {
    REBATCH_GUARD_STEP = 0,   /**< before zero_grad of the effective batch */
    REBATCH_GUARD_ATTEMPT = 1 /**< before the callback that runs */
} rebatch_guard_point;

/** Functions that save and restore a state, for state that is not a range of memory. They run in
 *  the thread of the step, outside callbacks, and must not call the session. A status other than
 *  REBATCH_OK ends the step with that status. They must not return REBATCH_OOM: allocate the copies
 *  beforehand. */
typedef struct rebatch_guard_ops {
    size_t struct_size; /**< sizeof(rebatch_guard_ops) */
    /** Keep the state of now as that of `point`. */
    rebatch_status (*save)(rebatch_guard_point point, void *user);
    /** Restore the state of `point`; it may be restored again later. */
    rebatch_status (*restore)(rebatch_guard_point point, void *user);
} rebatch_guard_ops;

#ifdef __cplusplus
extern "C" {
#endif

/** Open a session and its pool.
 *
 *  Without options, the session takes its settings from the file that the environment variable
 *  REBATCH_CONFIG names, and from REBATCH_* variables such as REBATCH_MEMORY_LIMIT or
 *  REBATCH_BATCH_START (docs/config.md); the groups device and probe do not apply. With options,
 *  it does so only if options->environment is on.
 *
 *  Other variables apply to any session for one run (docs/run.md): a lower limit
 *  (REBATCH_MEMORY_LIMIT), the level of events where options->on_event is NULL and log_level 0
 *  (REBATCH_LOG_LEVEL), failures on purpose (REBATCH_RUN_OOM and others), or a probe instead of
 *  training (REBATCH_PROBE_ONLY). Thread-safe.
 *  @param[out] out  owned by the caller, release with rebatch_close(); NULL on failure
 *  @param device    borrowed; must outlive the session
 *  @param options   copied; NULL: defaults and the settings of the environment
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE; REBATCH_E_PARSE
 *          for a wrong value in the file or in a variable, and REBATCH_E_IO for a file that cannot
 *          be read: rebatch_last_error() has file and line */
REBATCH_API_CHECKED rebatch_status rebatch_open(rebatch **out, rebatch_device *device,
                                                const rebatch_options *options);

/** Open a session and its device, for programs whose settings say which. Settings are those of
 *  `settings`; what the file of REBATCH_CONFIG or a REBATCH_* variable sets overrides them. Unless
 *  they set device.kind, the device is the first GPU, or CPU memory where device.capacity is set or
 *  there is no GPU: a program that computes on the CPU says "device.kind = host". Thread-safe.
 *  @code
 *  rebatch_open_default(&rb, "device.kind = host; device.capacity = 64MiB; batch.smallest = 4");
 *  @endcode
 *  @param[out] out   owned by the caller; rebatch_close() releases it and its device; NULL on
 *                    failure
 *  @param settings   KEY = VALUE with a semicolon or a newline between two of them, the keys of
 *                    docs/config.md and values as in variables; NULL: none
 *  @return as rebatch_open() without options, and as rebatch_config_open_device() */
REBATCH_API rebatch_status rebatch_open_default(rebatch **out, const char *settings);

/** Release a session, its pool, and all memory that is still allocated from it; with
 *  rebatch_open_default() also its device. The call is refused from within a callback, and while
 *  another thread is in a step: the session stays open, and rebatch_last_error() says so.
 *  @param rb  NULL is allowed */
REBATCH_API void rebatch_close(rebatch *rb);

/** The session's pool. Parameters and data may be allocated from it, too.
 *  @param rb  the session
 *  @return borrowed; valid until rebatch_close() */
REBATCH_API rebatch_pool *rebatch_get_pool(const rebatch *rb);

/** The samples of the effective batch that runs, for code in a callback that needs the weight of a
 *  sample and is not given the micro-batch. Thread-safe only in the threads of the callback.
 *  @param rb         the session, or NULL
 *  @param otherwise  what is returned outside of callbacks
 *  @return rebatch_microbatch.batch */
REBATCH_API size_t rebatch_get_batch(const rebatch *rb, size_t otherwise);

/** The micro-batch size with which the next step of `batch` samples starts, if it has no cost.
 *  @param rb     the session
 *  @param batch  samples in the effective batch
 *  @return the size in samples */
REBATCH_API size_t rebatch_get_micro(const rebatch *rb, size_t batch);

/** Set the number of the next effective batch, which is 0 in a new session. A resumed training sets
 *  the number at which it stopped, because data and dropout depend on it. With a group, all ranks
 *  set the same.
 *  @param rb    the session
 *  @param step  rebatch_microbatch.step of the next step
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_STATE from within a callback */
REBATCH_API rebatch_status rebatch_set_step(rebatch *rb, uint64_t step);

/** Set the level of rebatch_step_ops.lighten that is in effect, which is 0 in a new session. A
 *  resumed training that saved its level enters it itself, and then calls this function, which does
 *  not call lighten. Later steps go on from this level, up and down.
 *  @param rb     the session
 *  @param level  rebatch_step_report.lighten_level of the step after which the training was saved
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_STATE from within a callback */
REBATCH_API rebatch_status rebatch_set_lighten(rebatch *rb, unsigned level);

/** Run one effective batch and its update, and recover from OOMs.
 *
 *  With REBATCH_PROBE_ONLY set, this function does not return: it probes, prints the result, and
 *  ends the process (docs/probe.md).
 *
 *  With rebatch_options.group every rank calls it with its own samples, and the effective batch is
 *  all of them. Memory, micro-batch sizes and OOMs are each rank's own. The ranks vote twice: when
 *  the step begins, on the number of samples and on whether they agree (step number, flags, version
 *  of rebatch, size of the group); and before the update, on whether each rank has accumulated all
 *  its samples and has the memory that the update is known to need. If a rank fails before that
 *  vote ends, or its arguments are refused, no rank updates: it returns its own status, the others
 *  REBATCH_E_PEER with its number and sentence, and all may call rebatch_step() again. A rank that
 *  dies, or does not come within group_timeout_ms, ends the group: every later step returns
 *  REBATCH_E_PEER.
 *
 *  With rebatch_options.lockstep the ranks also vote on the size of the micro-batches, before the
 *  first one and after each that failed; at the end of each micro-batch, on whether it has
 *  succeeded everywhere (rebatch_mutating_together()); and after the last one.
 *
 *  If optimizer_step fails after the vote before the update, other ranks have updated and this one
 *  has not, or in part. The error message says so. The next step ends on all ranks: here with
 *  REBATCH_E_STATE, on the others with REBATCH_E_PEER. Restore a checkpoint on all ranks, and call
 *  rebatch_set_step().
 *
 *  After REBATCH_OK, every sample counted exactly once and the update was applied once. After any
 *  failure, the next call has the same step number, and:
 *  - If optimizer_step failed after rebatch_mutating(), with any status, parameters are partly
 *    updated and nothing was undone. report->torn and the error message say so. Restore a
 *    checkpoint: another call would apply the update twice.
 *  - Otherwise parameters and guarded state are as before the step, and what the callbacks
 *    allocated in the step is taken back (except by lighten). The accumulators hold the samples
 *    before the failed micro-batch, or, if the OOM occurred while accumulating, undefined values;
 *    zero_grad clears them in the next step.
 *  @param rb      the session
 *  @param ops     borrowed during the call; lighten and cost may be NULL
 *  @param batch   samples in the effective batch; at least 1, micro_multiple_of, and the smallest
 *                 size in micro_allowed
 *  @param user    passed to the callbacks
 *  @param report  filled in on success and failure; may be NULL
 *  @return REBATCH_OK; REBATCH_E_EXHAUSTED when the micro-batch does not fit and nothing is left to
 *          try; REBATCH_E_TORN when an OOM occurred within the update; any other status that a
 *          callback returned; REBATCH_E_STATE when called from within a callback, while another
 *          thread is in a step, or when a callback broke a rule of rebatch_step_ops;
 *          REBATCH_E_PEER when another rank failed or is missing, or the ranks disagree;
 *          REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API_CHECKED rebatch_status rebatch_step(rebatch *rb, const rebatch_step_ops *ops,
                                                size_t batch, void *user,
                                                rebatch_step_report *report);

/** Take part in the next step as a rank that has failed: for a program that cannot call
 *  rebatch_step(), for example because its data cannot be read. The other ranks' rebatch_step()
 *  returns REBATCH_E_PEER with `why`, instead of waiting until group_timeout_ms. Without a group
 *  nothing happens.
 *  @param rb   the session
 *  @param why  one sentence for the other ranks, in UTF-8; the first 200 bytes are sent
 *  @return REBATCH_OK; REBATCH_E_PEER when a rank is missing; REBATCH_E_STATE from within a
 *          callback; REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_abandon_step(rebatch *rb, const char *why);

/** Say why the running callback is about to fail, for callbacks whose errors have their text
 *  elsewhere, for example exceptions. The error text contains it, and so do the other ranks'
 *  messages. A callback that fails without saying so sends rebatch_last_error(). It has no effect
 *  when the callback returns REBATCH_OK or REBATCH_OOM. Outside a callback it only sets
 *  rebatch_last_error().
 *  @param rb   the session; NULL only sets rebatch_last_error()
 *  @param why  one sentence, in UTF-8; the first 200 bytes are sent */
REBATCH_API void rebatch_explain(rebatch *rb, const char *why);

/** rebatch_step() for functions that return nothing, and leave by rebatch_escape() on an OOM.
 *  @param rb         the session
 *  @param batch      samples in the effective batch
 *  @param zero_grad  clears the gradients; may be NULL, as rebatch_step_ops.zero_grad
 *  @param train      forward and backward of samples [first, first + count), with weight 1/batch
 *                    for each sample
 *  @param update     applies the update
 *  @param user       passed to the functions
 *  @param flags      bits of rebatch_step_flags. Without REBATCH_DECLARES_MUTATION the functions
 *                    count as changing state from their first line
 *  @param report     filled in on success and failure; may be NULL
 *  @return as rebatch_step() */
REBATCH_API rebatch_status rebatch_step_plain(rebatch *rb, size_t batch,
                                              void (*zero_grad)(void *user),
                                              void (*train)(size_t first, size_t count, void *user),
                                              void (*update)(void *user), void *user,
                                              uint32_t flags, rebatch_step_report *report);

/** Say that the buffers of `resize` are of no use any more, because what they depend on beside the
 *  micro-batch size has changed, for example the size of the images. They are taken back, and the
 *  next step calls resize: for the micro-batch size that is in force, or a smaller one where that
 *  does not fit. What the session has learned of the memory that sizes in samples need is
 *  forgotten; what it has learned by cost (rebatch_step_ops.cost) stays. Call it between steps, in
 *  place of the code that frees and allocates the buffers.
 *  @param rb  the session
 *  @return REBATCH_OK, also where there are no buffers; REBATCH_E_STATE from within a callback;
 *          REBATCH_E_INVALID */
REBATCH_API rebatch_status rebatch_remake_buffers(rebatch *rb);

/** Run a function over samples outside of training, for example evaluation, and recover from OOMs
 *  as rebatch_step() does: what a call that runs out of memory has allocated is taken back, guarded
 *  state is restored to its value before the call, and the same samples run again, fewer at once.
 *
 *  After REBATCH_OK, every sample was in exactly one call that succeeded, in ascending order. After
 *  any failure, what the calls allocated is taken back, and guarded state is as before
 *  rebatch_map(); results that the function has stored elsewhere stay. So the function stores one
 *  result for each sample, or adds to a sum that is guarded (rebatch_guard()), and adds the samples
 *  one by one, so that the cut does not change the result.
 *
 *  Training does not notice: the step number stays, and the session learns the size for each
 *  function apart from the step's. The size starts as large as allowed, and grows after
 *  grow_after calls without an OOM. The limits on the micro-batch size apply, micro_start and
 *  `learn` do not.
 *  @param rb      the session
 *  @param ops     borrowed during the call
 *  @param count   number of samples; 0: nothing happens
 *  @param user    passed to the functions
 *  @param report  filled in on success and failure; may be NULL. `microbatches` is the number of
 *                 calls that succeeded
 *  @return as for rebatch_step(), but never REBATCH_E_TORN; REBATCH_E_HOST_OOM */
REBATCH_API_CHECKED rebatch_status rebatch_map(rebatch *rb, const rebatch_map_ops *ops,
                                               size_t count, void *user,
                                               rebatch_step_report *report);

/** Reserve the memory that the rest of a callback needs. After REBATCH_OK the callback can allocate
 *  `bytes` bytes without an OOM, in one block or in several. With caching off, the call only checks
 *  whether the device has the memory now, and guarantees nothing. Call it from within a callback.
 *  @param rb     the session
 *  @param bytes  sum of the sizes that will be allocated, each rounded up as the pool does: to a
 *                multiple of REBATCH_POOL_UNIT_BYTES, and then to a step of rounding_divisions, if
 *                set. `bytes` itself is rounded up in the same way, so for one block its size is
 *                enough; 1,000 blocks of 100 bytes need 512,000. Blocks freed in the meantime do
 *                not reduce the sum
 *  @return REBATCH_OK; REBATCH_OOM, which the callback returns; REBATCH_E_STATE outside a callback;
 *          REBATCH_E_INVALID, REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST */
REBATCH_API_CHECKED rebatch_status rebatch_reserve(rebatch *rb, size_t bytes);

/** Declare that the running callback changes accumulators or parameters from now on. An OOM before
 *  this call costs one micro-batch; after it, the effective batch runs again from zero_grad. If
 *  optimizer_step fails after it, with any status, parameters are partly updated. Any thread that
 *  works for the callback may call it. Outside a callback it only sets rebatch_last_error().
 *  @param rb  the session; NULL only sets rebatch_last_error() */
REBATCH_API void rebatch_mutating(rebatch *rb);

/** Declare that the running callback works in memory that was allocated before it, as the replay
 *  of a CUDA graph does: what it allocates then says nothing of what its size needs, and no plan
 *  (rebatch_pool_options.replay) reserves memory for it.
 *  @param rb         as for rebatch_mutating()
 *  @param new_bytes  of such memory that this callback has allocated: they are no leak */
REBATCH_API void rebatch_works_in_kept_memory(rebatch *rb, size_t new_bytes);

/** rebatch_mutating() for a forward_backward that calls collectives (rebatch_options.lockstep).
 *  Wait until the micro-batch has run, or failed, on all ranks, and declare that this one changes
 *  accumulators from now on, if it has failed on none. Call it from the callback's own thread, once
 *  in a micro-batch, after the last collective. Reserve before it what accumulating needs: an OOM
 *  after it runs the effective batch again on all ranks. Without lockstep, and in a trial, it is
 *  rebatch_mutating().
 *  @param rb  the session
 *  @return REBATCH_OK; any other status must be returned at once, with the accumulators as they
 *          were: REBATCH_OOM, memory ran out on a rank, and the samples come again on all;
 *          REBATCH_E_PEER, another rank failed or is missing; REBATCH_E_STATE outside a callback,
 *          or when it is called again; REBATCH_E_INVALID */
REBATCH_API_CHECKED rebatch_status rebatch_mutating_together(rebatch *rb);

/** Restore `bytes` bytes at `state` whenever rebatch discards work that may have changed them: RNG
 *  state, running statistics, cursors, and pointers to memory that callbacks allocate and keep.
 *  When samples run again, the state is restored to its value before the attempt; when the
 *  effective batch runs again, or the step fails, to its value before zero_grad.
 *
 *  Memory is restored with it. When an effective batch runs again, or a step fails without being
 *  torn, rebatch takes back everything that the step allocated, also in zero_grad and in
 *  micro-batches that succeeded, and blocks from before the step that it freed are in use again. So
 *  there is one safe way to keep memory that a callback allocates: guard the pointer, and allocate
 *  when it is NULL.
 *
 *  Changes that a pressure callback or lighten makes to guarded host state are kept, because what
 *  these free stays free.
 *  @param rb     the session
 *  @param state  borrowed until rebatch_close(); device memory for REBATCH_GUARD_DEVICE
 *  @param bytes  size of the state
 *  @param kind   host or device memory
 *  @return REBATCH_OK; REBATCH_OOM (copies of device state are allocated from the pool);
 *          REBATCH_E_STATE from within a callback; REBATCH_E_UNSUPPORTED for device memory
 *          of a dry device; REBATCH_E_INVALID, REBATCH_E_HOST_OOM */
REBATCH_API_CHECKED rebatch_status rebatch_guard(rebatch *rb, void *state, size_t bytes,
                                                 rebatch_guard_kind kind);

/** rebatch_guard() for accumulators that zero_grad does not clear, for example gradients in which
 *  an optimizer keeps the momentum of earlier steps. They change only after rebatch_mutating(), so
 *  they are copied once a step, before zero_grad, and restored when the effective batch runs again
 *  or the step fails. zero_grad then leaves them as they are.
 *  @param rb     as for rebatch_guard()
 *  @param sums   as for rebatch_guard()
 *  @param bytes  as for rebatch_guard()
 *  @param kind   as for rebatch_guard()
 *  @return as rebatch_guard() */
REBATCH_API_CHECKED rebatch_status rebatch_guard_sums(rebatch *rb, void *sums, size_t bytes,
                                                      rebatch_guard_kind kind);

/** The same as rebatch_guard() for state that functions save and restore.
 *  @param rb    the session
 *  @param ops   copied
 *  @param user  passed to the functions; borrowed until rebatch_close()
 *  @return REBATCH_OK; REBATCH_E_STATE from within a callback; REBATCH_E_INVALID,
 *          REBATCH_E_HOST_OOM */
REBATCH_API_CHECKED rebatch_status rebatch_guard_with(rebatch *rb, const rebatch_guard_ops *ops,
                                                      void *user);

/** Attribute this thread's use of the session's pool to the running callback, as if the callback's
 *  own thread made the calls. A thread that works for callbacks must call this, for example a
 *  thread of a backward pass: then what it allocates is taken back when the attempt fails, and a
 *  block from before the attempt that it freed is in use again. It lasts for all callbacks of `rb`,
 *  until the thread joins another session or NULL: before rebatch_close(). Thread-safe.
 *
 *  Nothing that other threads do is undone, for example by a thread that prepares batches: what
 *  they allocate stays, and what they free is free for the next attempt too. If the callback frees
 *  one of their blocks, that is undone with the attempt. Their failures are not the callback's,
 *  admission does not count their memory as the micro-batch's, and they cannot use what
 *  rebatch_reserve() reserved. A probe and rebatch_options.learn do count their memory as the
 *  micro-batch's, and find larger sizes when such threads are idle.
 *
 *  A scope that the callback opens covers the threads that joined. Only the callback's own thread
 *  may call rebatch_escape().
 *  @param rb  the session; NULL: from here on this thread works for none
 *  @return REBATCH_OK */
REBATCH_API rebatch_status rebatch_join(rebatch *rb);

/** Leave the running callback by longjmp(), from any depth of calls in the callback's thread, for
 *  code whose error check cannot return a status. Resources of the skipped functions are not
 *  released, except memory of the pool.
 *
 *  It cannot leave a callback of a pool (a pressure callback, or `write` of a snapshot). Do not
 *  leave a callback from within a step of another session that it runs.
 *  @param rb      the session
 *  @param status  what the callback returns; REBATCH_OK counts as REBATCH_E_INVALID
 *  @return only on failure: REBATCH_E_STATE when this thread runs no callback of `rb`, or is in a
 *          callback of a pool inside it */
REBATCH_API rebatch_status rebatch_escape(rebatch *rb, rebatch_status status);

/** Whether rebatch_escape() could leave the running callback from here: this thread runs a callback
 *  of `rb`, and no callback of a pool inside it. Thread-safe.
 *  @param rb  the session, or NULL
 *  @return true when it could */
REBATCH_API bool rebatch_can_escape(const rebatch *rb);

/** Write an event as one line of text, without a newline. Thread-safe.
 *  @param[out] text  zero-terminated, truncated to `size` bytes; may be NULL when `size` is 0
 *  @param size       size of `text` in bytes
 *  @param event      the event
 *  @return length of the whole text without the terminating zero, as snprintf() returns */
REBATCH_API size_t rebatch_event_format(char *text, size_t size, const rebatch_event *event);

#ifdef __cplusplus
}
#endif
#endif
