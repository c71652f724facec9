/* The session's struct, and what the files of this folder give each other.
 * Must not know how memory is found. */
#ifndef RBI_RECOVER_H
#define RBI_RECOVER_H

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>

#include "device/device.h"
#include "recover/asked.h"
#include "recover/captured.h"
#include "recover/interface.h"

/* ---- what is known of memory (meter.c) ---- */

/* What a callback has used. */
struct rbi_used {
    uint64_t live_before;    /* in use when it began */
    uint64_t peak_bytes;     /* that it added to that, at the most */
    uint64_t asked_bytes;    /* of a meter: the request that failed; 0: not known */
    uint64_t reserved_bytes; /* of a meter: what was reserved beyond live_before, at the most */
    bool keeps_blocks;       /* more is in use than when it began */
};
struct rbi_memory {
    uint64_t live_bytes, step_peak_bytes, reserved_bytes;
};

/* REBATCH_E_INVALID with its text for a meter that is not whole. */
rebatch_status rbi_meter_check(const rebatch_options *o);
/* Before a callback, and what one that has run used (rb->run.use). False: nothing was measured. */
void rbi_meter_begin(rebatch *rb, rebatch_phase phase);
bool rbi_meter_end(struct rbi_used *out, rebatch *rb);
void rbi_memory_get(struct rbi_memory *out, const rebatch *rb);
uint64_t rbi_memory_step_peak(const rebatch *rb);
rebatch_status rbi_memory_available(size_t *out, const rebatch *rb);
/* The same, with what another size would free: the buffers that resize has made. */
rebatch_status rbi_available(size_t *out, const rebatch *rb);
/* What those buffers hold; 0: none that another size would change. */
uint64_t rbi_resize_bytes(const rebatch *rb);
/* As rbi_pool_admit(). */
rebatch_status rbi_memory_admit(rebatch *rb, size_t bytes);
/* What others hold of the device, and may give back; 0: none, or a limit of one's own comes first.
 */
uint64_t rbi_memory_outside(const rebatch *rb);
/* Returns cached memory to the device: how much. */
size_t rbi_memory_release(rebatch *rb);

/* ---- sizes for a batch (size_limits.c) ---- */

/* The size that the next micro-batch begins with. */
size_t rbi_micro_size(const rebatch *rb, size_t batch);

/* ---- sizes, in cost where the step has one, else in samples (cost.c) ---- */

/* That is in force. */
size_t rbi_size_now(const rebatch *rb);
/* Of at most `size`; 0: none. By cost any is. */
size_t rbi_size_allowed(const rebatch *rb, size_t size);
/* Whether a larger size would make a difference to the batch. */
bool rbi_size_is_cut(const rebatch *rb);
/* Whether fewer samples are allowed. */
bool rbi_size_can_shrink(const rebatch *rb, size_t samples);

/* ---- cutting (cost.c) ---- */

/* How many samples the micro-batch has that begins with `first`. */
size_t rbi_cut(rebatch *rb, size_t first);
/* By cost, with a resize: finds what the budget in force makes of the batch, for which buffers are
 * made (run.cut.most_samples, most_cost). */
void rbi_cut_survey(rebatch *rb);
/* The budget, for reports: 0 where there is none, or no bound. */
uint64_t rbi_budget(const rebatch *rb);
/* When a step begins: the longest part of its batch bounds the size. */
void rbi_parts_begin(rebatch *rb);
/* Whether it goes by cost, and with which budget. */
void rbi_budget_begin(rebatch *rb);

/* ---- guards (guard.c) ---- */

struct rbi_guard {
    void *state; /* the user's */
    size_t bytes;
    rebatch_guard_kind kind;
    void *at_step;         /* copy from before zero_grad */
    void *at_attempt;      /* copy from before the callback that runs; of sums: at_step */
    void *before_callback; /* of host state: copy from before lighten or resize */
    void *before_pressure; /* of host state: copy from before a pressure callback */
    const void *block;     /* of the pool, that has it; NULL: it is other memory */
};

/* What lighten or resize changes, and what pressure changes, which may come within them. */
enum rbi_guard_change { RBI_CHANGE_CALLBACK, RBI_CHANGE_PRESSURE };

/* Around a pressure callback, lighten and resize, which change guarded host state for good: an
 * attempt or a step that is undone later does not undo that. The state is compared word by word: a
 * pointer is never half old, half new. Not kept: the state is put back at once, but for what a
 * pressure callback within it has changed. */
void rbi_guards_begin_change(rebatch *rb, enum rbi_guard_change change);
void rbi_guards_end_change(rebatch *rb, enum rbi_guard_change change, bool is_kept);
/* Whether host state has since such a beginning of a callback. */
bool rbi_guards_have_changed(const rebatch *rb);
/* While lighten or resize of a session runs: whether a copy, which may be put back, has that
 * pointer. */
bool rbi_guards_bring_back(void *rb, const void *address);
/* Guarded pointers to blocks of a scope, which are about to be freed, become NULL. */
void rbi_guards_clear(rebatch *rb, rebatch_scope scope);
void rbi_guards_release(rebatch *rb);
/* While callbacks can run, what pressure callbacks change in guarded state is kept. */
void rbi_guards_watch_pressure(rebatch *rb);
void rbi_guards_unwatch_pressure(rebatch *rb);

/* State that functions save and restore. */
struct rbi_saver {
    rebatch_guard_ops ops;
    void *user;
};

/* ---- what is known about memory (need.c) ---- */

#define RBI_KNOWN_SIZES 64

/* An attempt ran to its end. */
void rbi_need_learn(rebatch *rb, size_t size, uint64_t bytes);
/* The same of one that added up to `peak_bytes` to what lived, and may have left blocks with
 * sequences in [kept_from, kept_to). What an earlier one of that size has left counts as needed
 * too. */
struct rbi_run_need {
    uint64_t peak_bytes;
    uint64_t reserved_bytes;     /* 0: not known */
    uint64_t kept_from, kept_to; /* equal: it left none */
};
void rbi_need_learn_run(rebatch *rb, size_t size, const struct rbi_run_need *run);
/* What is held for an attempt of that size already, of what it is known to need. */
uint64_t rbi_need_held(const rebatch *rb, size_t size);
/* What a size surely needs, so that an attempt without it can be refused. False: not known. */
bool rbi_need_predict_surely(uint64_t *bytes, const rebatch *rb, size_t size);
/* What a size will need: known, or the memory model's, or put together from sizes that are known.
 * False, and 0: nothing is known. */
bool rbi_need_predict(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten);
/* The same in bytes that are in use: at least that much, whatever lies in pieces. */
bool rbi_need_predict_live(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten);
/* Whether an attempt of that size ran to its end, at the level in force. */
bool rbi_need_has_run(const rebatch *rb, size_t size);
/* Whether the memory model is about the step's kind of size and that level. */
bool rbi_need_has_model(const rebatch *rb, unsigned lighten);
/* Whether a size can be chosen by prediction: there is that model, or enough ran by cost. */
bool rbi_need_can_choose(const rebatch *rb);
/* The least size of which a prediction says something; 0: nothing is known. */
size_t rbi_need_known_from(const rebatch *rb);

/* Nothing is known any more of sizes that ran. */
void rbi_need_forget(rebatch *rb);
/* Nothing is known any more of what sizes in samples need. */
void rbi_sizes_forget(struct rbi_sizes *sizes);
/* The memory model was wrong about its level: it is not asked any longer. */
void rbi_need_refute_model(rebatch *rb);

/* ---- which size comes next (next_size.c) ---- */

/* Sizes are allowed by the limits; by cost any is. A size "fits" when it is predicted to find its
 * memory now (need.c), beside what is held for it.
 *
 *   who asks                        | the next size
 *   --------------------------------|---------------------------------------------------------
 *   GROWS: clean steps; learning    | the largest that fits, at most double without a model,
 *     without tuner or meter        |   halfway to what failed with as much memory (by a meter
 *                                   |   within a 16th), and to what whole steps do not fit;
 *                                   |   nothing known: double
 *   OVERRULES: clean steps, against | double
 *     a prediction                  |
 *   FOLLOWS_LINE: learning by meter | as GROWS; short of double a quarter less far
 *   LEAVES_LINE: the same, where    | after an OOM halfway to what failed, if that is an eighth
 *     that gives none               |   away; else a 32nd more, if its bytes in use fit
 *   AFTER_OOM in what depends on    | the largest below that fits; less than one that was
 *     the size                      |   predicted, a 16th at least; the one before the last
 *                                   |   growth, if larger than half; half
 *   AFTER_OOM_ELSEWHERE: an update  | the same, without what is predicted
 *   THRASHES                        | a quarter less
 *   HALVES: an update that the host | half
 *     has served                    |
 *
 * A tuner has rules of its own (probe/choose.c). Where nothing has run yet: the whole batch,
 * micro_start, or with learning the smallest size. */
enum rbi_why {
    RBI_GROWS,
    RBI_OVERRULES,
    RBI_FOLLOWS_LINE,
    RBI_LEAVES_LINE,
    RBI_AFTER_OOM,
    RBI_AFTER_OOM_ELSEWHERE,
    RBI_THRASHES,
    RBI_HALVES
};

/* What comes after `size`. Who wants a larger one gets 0 where there is none; who wants a smaller
 * one gets the smallest, by cost perhaps 0. After an OOM, what was predicted is noted in
 * rb->run.ooms, and growth's previous size is forgotten. */
size_t rbi_next_size(rebatch *rb, enum rbi_why why, size_t size);
/* The largest allowed size of at most `most` that fits in `available_bytes`; 0 when none does, or
 * nothing is known. */
size_t rbi_size_largest(const rebatch *rb, size_t most, uint64_t available_bytes);
/* With `available_bytes` there was no room for it. */
void rbi_size_note_failed(rebatch *rb, size_t size, uint64_t available_bytes);
/* Whether nothing tells that it does not fit. */
bool rbi_size_may_fit(const rebatch *rb, size_t size, unsigned lighten);

/* ---- thrashing (thrashing.c) ---- */

struct rbi_thrashing {
    struct rbi_pool_traffic before; /* the attempt */
    uint32_t row;                   /* micro-batches in a row that thrashed */
    size_t largest;                 /* size of the step's micro-batches */
    size_t most_samples;            /* of them */
    uint64_t most_bytes;            /* that one of them needs */
};

/* After an attempt that failed, and after one of `count` samples that succeeded, by rb->run.use. */
void rbi_thrashing_begin(rebatch *rb);
void rbi_thrashing_end(rebatch *rb, size_t count, uint64_t needed_bytes);
/* The effective batch begins, or begins again. */
void rbi_thrashing_restart(rebatch *rb);
/* At the end of a step that succeeded: true when it thrashed, and the next one is cut smaller. */
bool rbi_thrashing_step_done(rebatch *rb);

/* ---- growth (growth.c) ---- */

struct rbi_growth {
    uint32_t wait;      /* clean steps before the next growth */
    uint32_t clean;     /* steps since the last OOM or growth */
    bool on_trial;      /* grew, and not yet `wait` clean steps ago */
    bool is_overruling; /* so it did against a prediction */
    bool is_of_level;   /* it left a lighter level, and the size stayed */
    /* The size before the last growth, as long as an OOM may lead back to it. */
    size_t previous; /* 0: none */
    bool previous_by_cost;
    /* The last size that a growth to it failed at, or by a meter any attempt that needed nearly all
     * that there was; and what there was. */
    size_t failed_size; /* 0: none */
    bool failed_by_cost;
    uint64_t failed_available;
};

/* At the end of a step that succeeded. */
void rbi_growth_step_done(rebatch *rb);
/* Whether a growth against a prediction is on trial, by which no attempt is to be refused then. */
bool rbi_growth_overrules(const rebatch *rb);
/* The size has run, and is about to grow: an OOM may lead back to it. */
void rbi_growth_keep_previous(rebatch *rb);
/* The size did not hold, with `available_bytes` there: a growth on trial has failed, and clean
 * steps count anew. */
void rbi_growth_set_back(rebatch *rb, uint64_t available_bytes);

/* ---- learning (learning.c) ---- */

/* What becomes of the size in the step that runs.
 *
 *   state     | what happens                                        | next
 *   ----------|-----------------------------------------------------|---------
 *   OFF       | rbi_learn_start()                                   | SEARCHES
 *   any on    | a step begins, its batch is within `upper` / is not | WAITS / SEARCHES
 *   SEARCHES  | no other size is to run, `upper` is 0 / is not      | FOUND / WAITS
 *   SEARCHES  | an OOM, after which the fallback chooses            | RETREATS
 *   RETREATS  | a micro-batch ends otherwise                        | FOUND
 *   any on    | an OOM that tells nothing, or with `upper`          | OFF
 *   any on    | another lighten level, thrashing, a probe, the end  | OFF
 *   ----------|- the update is done: -------------------------------|---------
 *   WAITS     | the whole batch runs at its largest size / less     | WAITS / OFF
 *   SEARCHES  | no micro-batch had the size that was asked for      | OFF
 *   other     | there is a size to try                              | the next step SEARCHES
 *   other     | none, and a larger batch may have / has none        | the next step WAITS / OFF
 */
enum rbi_learn_state {
    RBI_LEARN_OFF,
    RBI_LEARN_SEARCHES,
    RBI_LEARN_RETREATS,
    RBI_LEARN_FOUND,
    RBI_LEARN_WAITS /* for a batch that is larger than `upper` */
};

/* What is learned from the micro-batch that runs. */
enum rbi_learn_attempt {
    RBI_ATTEMPT_PLAIN,
    RBI_ATTEMPT_WATCHED, /* by the tuner */
    RBI_ATTEMPT_FRESH    /* what is reserved: cached memory was returned before it */
};

struct rbi_learning {
    enum rbi_learn_state state;
    enum rbi_learn_attempt attempt;
    bool has_stepped; /* a step was done meanwhile */
    size_t chosen;    /* size of the micro-batch to learn from; 0: none */
    size_t upper;     /* what limits and batch allowed, and fitted; 0: learning is not over */
    unsigned lighten; /* the level when it began */
    struct rbi_tuner tuner;

    /* by a meter */
    size_t begun;      /* the size with which the step that runs began */
    size_t fresh;      /* the size that ran so last */
    size_t failed;     /* the size that ran out of memory; 0: none did */
    uint32_t squeezed; /* steps in a row at the size in which the meter counted retries */
};

static inline bool rbi_learn_is_on(const struct rbi_learning *learning)
{
    return learning->state != RBI_LEARN_OFF;
}

/* Whether sizes approach the largest from below, by a meter's figures. */
bool rbi_learn_goes_by_meter(const rebatch *rb);
/* The session begins to learn from `tuner`, which it takes over. */
void rbi_learn_start(rebatch *rb, const struct rbi_tuner *tuner);
/* A step begins. */
void rbi_learn_begin_step(rebatch *rb);
/* Before a micro-batch is cut, when `left` samples are yet to run: sets its size. In the first step
 * memory is taken for no more than they need. */
void rbi_learn_choose(rebatch *rb, size_t left);
/* Whether the tuner records a micro-batch of `count` samples that comes next. */
bool rbi_learn_will_watch(const rebatch *rb, size_t count);
/* Around an attempt of `count` samples. */
void rbi_learn_begin(rebatch *rb, size_t count);
void rbi_learn_end(rebatch *rb, size_t count, rebatch_status status);
/* It was not started for want of memory. */
void rbi_learn_refused(rebatch *rb, size_t count);
/* At the end of a step that succeeded: true while learning goes on, and sizes are its own. */
bool rbi_learn_step_done(rebatch *rb);

/* ---- the buffers of the micro-batch's size (resize.c) ---- */

/* What resize has allocated. */
struct rbi_buffers {
    size_t size; /* in samples; 0: there are none */
    uint64_t bytes;
    size_t budget;    /* by cost: that was in force */
    unsigned lighten; /* the level they were made at */
    rebatch_status (*resize)(size_t micro_batch, void *user);
    void *user;
    bool is_new;    /* made in the step that runs */
    bool is_of_map; /* a map has made them, and no step has used them */
    size_t found;   /* the size that the map has found; SIZE_MAX: none yet */
};

/* Takes them back where resize is to be called next, or is to be recorded: so that admission finds
 * their memory. */
void rbi_resize_prepare(rebatch *rb, bool is_recorded);
/* A map begins: buffers of training that it has the same resize for are its own, as large as they
 * are, unless the limits ask for more; without a resize, none are. */
void rbi_resize_begin_map(rebatch *rb);
/* A step begins: where nothing is known of its size, it is that which a map has found for the same
 * buffers. */
void rbi_resize_begin_step(rebatch *rb);
/* How many of their bytes are beyond the pool's limit, which was lowered, where there may be
 * smaller ones; else 0. */
uint64_t rbi_resize_excess(const rebatch *rb);
/* The samples that the buffers in force are for: those that are there, or that resize is to be
 * called for next; 0: the function has none that another size would change. */
size_t rbi_resize_size(const rebatch *rb);

/* ---- callbacks (attempt.c) ---- */

/* rbi_callback_run() in its parts: after REBATCH_OK the callback counts as running, rb->callback,
 * until rbi_callback_end() gets its result. What runs is rbi_callback_call(), or the program's own
 * code. */
rebatch_status rbi_callback_begin(rebatch *rb, enum rbi_callback which,
                                  const rebatch_microbatch *mb);
rebatch_status rbi_callback_call(rebatch *rb);
rebatch_status rbi_callback_end(rebatch *rb, rebatch_status result);

/* Runs resize. REBATCH_OK: what it allocated is of the size; else it has changed nothing. */
rebatch_status rbi_callback_resize(rebatch *rb, size_t size);

/* Runs lighten. Once it has returned REBATCH_OK the level is in force, rb->lighten, and what it
 * allocated and freed stays so whatever becomes of the step; also where an error that surfaces late
 * ends the step. Else it has changed nothing. rb->run.ooms.failure stays as it is. */
rebatch_status rbi_callback_lighten(rebatch *rb, unsigned level);

/* Waits for the work that callbacks have enqueued. */
rebatch_status rbi_callback_wait(rebatch *rb);

/* ---- what a callback returned (result.c) ---- */

struct rbi_call {
    enum rbi_callback which;
    const rebatch_microbatch *mb; /* of forward_backward */
    size_t level;                 /* of lighten; of resize: the size */
    /* when it began (attempt.c) */
    uint64_t error_changes; /* rbi_error_changes() */
    uint64_t pool_ooms;
    rebatch_scope scope; /* its own */
};

/* What the step goes by: the result itself, or REBATCH_E_STATE for one that no callback may return.
 * Sets the sentence of a failure. */
rebatch_status rbi_result_check(const rebatch *rb, const struct rbi_call *call,
                                rebatch_status result);
/* Sets the sentence of a failure, "step 0: zero_grad VERB 1007", unless what was said during the
 * call is about that status, or the sentence was cleared. */
void rbi_result_say(const rebatch *rb, const struct rbi_call *call, rebatch_status status,
                    const char *verb);
/* The same for `function` of rebatch_guard_with(), "step 0: save of rebatch_guard_with() returned
 * 1007"; `error_changes` is rbi_error_changes() when it began. */
void rbi_result_say_guard(const rebatch *rb, const char *function, rebatch_status status,
                          uint64_t error_changes);
/* The callback succeeded, and `status` was in the device's last error. */
void rbi_result_say_left(const rebatch *rb, const struct rbi_call *call, rebatch_status status);
/* REBATCH_E_STATE: it did not keep REBATCH_DECLARES_MUTATION. */
rebatch_status rbi_result_say_undeclared(const rebatch *rb, const struct rbi_call *call);
/* An update that had begun, or may have, failed with `status`, which is no OOM, and is said: adds
 * that. */
void rbi_result_say_torn(const rebatch *rb, rebatch_status status);

/* ---- what is done about an OOM (fallback.c) ---- */

/* What an OOM has interrupted. */
struct rbi_interrupted {
    const rebatch_microbatch *mb; /* NULL outside forward_backward */
    size_t redone_samples;
    uint64_t lost_ns;
};

/* Chooses the next fallback stage: once more, smaller, lighter. REBATCH_OK when it is worth trying
 * again (micro-batch and lighten level are set), else REBATCH_E_EXHAUSTED, REBATCH_E_TORN, or what
 * lighten returned. Counts and reports it. */
rebatch_status rbi_fallback_next(rebatch *rb, const struct rbi_interrupted *interrupted);

/* ---- the process's session (current.c) ---- */

/* The session is about to go. */
void rbi_current_forget(rebatch *rb);

/* ---- the log (log.c) ---- */

/* Where events are written: file >= 0, or to_stderr, or nowhere. */
struct rbi_log {
    int file;
    bool to_stderr;
    rebatch_log_level level;
    rebatch_log_format format;
};

/* REBATCH_E_IO when the file cannot be opened. */
rebatch_status rbi_log_open(struct rbi_log *log, const rebatch_options *options);
void rbi_log_close(struct rbi_log *log);

/* ---- events (event.c) ---- */

bool rbi_event_is_oom(rebatch_event_kind kind);
/* "forward_backward, before accumulating". */
const char *rbi_phase_text(rebatch_phase phase);
/* An event of a change: with how large micro-batches are before it, and then after it. */
rebatch_event rbi_event_begin(const rebatch *rb, rebatch_event_kind kind);
void rbi_event_end(rebatch_event *event, const rebatch *rb);
/* "samples 0-7", "sample 3". */
void rbi_text_add_samples(struct rbi_text *t, size_t first, size_t count);
/* " needs at least 1.50 MiB"; " needed 1.50 MiB so far" where that would fit now: it is the need up
 * to the request that failed. */
void rbi_text_add_need(struct rbi_text *t, const char *verb, uint64_t needed, uint64_t available);
/* "1.50 MiB", for people who read what is needed before it; "2.00 KiB less" where the two would
 * read the same. */
void rbi_text_add_available(struct rbi_text *t, uint64_t needed, uint64_t available);

/* ---- what is known of a function's sizes ---- */

/* Of the step, or of a function of rebatch_map(). */
struct rbi_sizes {
    size_t micro;    /* SIZE_MAX: as large as the limits allow */
    size_t budget;   /* of cost; SIZE_MAX: no bound */
    bool has_budget; /* there was a step by cost */
    bool by_memory;  /* it was made smaller since it began, or is being learned */
    struct rbi_growth growth;
    struct rbi_need known[RBI_KNOWN_SIZES];
    size_t known_next;  /* the entry to give up next */
    size_t known_last;  /* the entry learned last */
    uint32_t retry_row; /* steps in a row that ran something once more at its size */
    struct rbi_thrashing thrashing;
    struct rbi_learning learning;
    struct rbi_memory_model model; /* need is NULL: there is none */
    double model_factor;   /* the most that was needed, as a multiple of its prediction, by cost */
    bool model_is_refuted; /* a size ran in steps for which it said there was no room */
    bool shares_buffers;   /* a map's: what is known leaves out the buffers, which are the step's */
    size_t made[RBI_MADE_MOST]; /* what the next step will make before its first micro-batch */
    size_t made_count;
};

void rbi_sizes_init(struct rbi_sizes *sizes, const rebatch_options *options);

/* ---- an update that host memory has served (update_overflow.c) ---- */

/* The update has begun to change parameters: its allocations must not fail from here on. */
void rbi_overflow_begin(rebatch *rb);
/* The update's callback has returned. */
void rbi_overflow_end(rebatch *rb);
/* Whether the host has the memory that an update needs and the device has not, and nothing could be
 * made smaller for it. */
bool rbi_overflow_serves(const rebatch *rb, size_t bytes);
/* The step is done: what lies in host memory moves to the device, as far as the next step can do
 * without that memory, with smaller micro-batches if need be. */
rebatch_status rbi_overflow_step_done(rebatch *rb);

/* ---- memory that is never freed (leak.c) ---- */

struct rbi_leak {
    bool has_stepped;
    uint32_t row;                      /* steps in a row that left more than they found */
    uint64_t live_bytes;               /* after the last step */
    uint64_t grown_bytes, least_bytes; /* by these steps, and by one of them */
    uint64_t kept_bytes;  /* that callbacks of this step have allocated to work in later */
    uint64_t update_from; /* sequence of the first block that the last update can have made */
    /* blocks that the last step left */
    size_t blocks, in_update;
    uint64_t largest_bytes;
    rebatch_tag tag; /* of the largest */
    const char *tag_name;
};
void rbi_leak_update_begins(rebatch *rb);
/* A step has succeeded, whose blocks have sequences from `first_sequence` on. Steps of other sizes
 * than the one before do not count. */
void rbi_leak_step_done(rebatch *rb, uint64_t first_sequence, bool is_same_size);
/* Whether an OOM is likely its doing. */
bool rbi_leak_is_likely(const rebatch *rb);
/* "each of the last 3 steps left more memory allocated, ..." */
void rbi_leak_add(struct rbi_text *t, const rebatch *rb);

/* ---- what the program names (watch.c) ---- */

void rbi_watched_release(rebatch *rb);

/* ---- functions over samples (map.c) ---- */

void rbi_maps_release(rebatch *rb);
/* rbi_sizes_forget() for the sizes of all of them. */
void rbi_maps_forget(rebatch *rb);

/* ---- what steps and maps are made of (step.c) ---- */

/* What a run is about; rb->run begins with it. */
struct rbi_task {
    const rebatch_step_ops *ops; /* must outlive the run */
    void *user;
    size_t batch;
    size_t most; /* samples in a micro-batch; SIZE_MAX: any */
    enum rbi_callback samples_callback;
};
/* From here on callbacks can run, until rbi_step_end(). */
void rbi_run_begin(rebatch *rb, const struct rbi_task *task);

/* Fills in what is known at the end of rb->run.report. */
void rbi_step_report(rebatch *rb, rebatch_status status);
/* The report, which may be NULL, of a call that runs nothing; `rb` may be NULL. */
void rbi_step_report_refused(rebatch_step_report *out, const rebatch *rb, rebatch_status status);

/* A step's parts. After rbi_step_open() the run has begun; rbi_step_ready() saves what undoing it
 * goes back to, and clears the accumulators: REBATCH_OK, or why there is nothing to run.
 * rbi_step_close() ends the run with that status, or what its end comes to, which it gives. */
void rbi_step_open(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user);
rebatch_status rbi_step_ready(rebatch *rb);
rebatch_status rbi_step_close(rebatch *rb, rebatch_status status);

/* ---- where they begin, and begin again (undo.c) ---- */

/* Saves guarded state, and opens rb->run.scope: what rbi_step_undo() goes back to. */
rebatch_status rbi_step_open_scope(rebatch *rb);
/* zero_grad, and what is done about an OOM in it. */
rebatch_status rbi_zero_grad_run(rebatch *rb);

/* ---- the samples of a run (samples.c) ---- */

/* Runs rb->run.samples_callback over the batch, in micro-batches, and recovers from OOMs. */
rebatch_status rbi_samples_run(rebatch *rb);

/* One turn of it. `status` is how the callback has ended that runs, if one does, and then what the
 * samples have come to. True: rbi_callback_call(), or the program's block, runs rb->run.progress.mb
 * next. False: all samples are in the accumulators, or *status says why not. */
bool rbi_samples_next(rebatch *rb, rebatch_status *status);

/* What a loop over the samples is made of; where it stands is rb->run.progress. */

void rbi_samples_begin(rebatch *rb);
/* The next micro-batch. */
void rbi_samples_cut(rebatch *rb);
/* Sees to it that memory that an attempt is known to need is there before it starts. The last
 * resort is always allowed to try: what is known may be out of date. So is what is tried once more:
 * memory that was taken ahead, in one piece, may just have been in the way. */
rebatch_status rbi_samples_admit(rebatch *rb, const rebatch_microbatch *mb);
/* Admission, and an attempt. */
rebatch_status rbi_samples_try(rebatch *rb);
/* The micro-batch is in the accumulators. */
void rbi_samples_succeeded(rebatch *rb);
/* After an OOM, by rb->run.ooms.failure: chooses how to go on, and takes back what has to run
 * again. */
rebatch_status rbi_samples_recover(rebatch *rb);

/* ---- what follows the samples (update.c) ---- */

/* optimizer_step, and what is done about an OOM in it. */
rebatch_status rbi_update_run(rebatch *rb);
/* One turn of it, as rbi_samples_next(). */
bool rbi_update_next(rebatch *rb, rebatch_status *status);
/* With a group: reduce, the update's memory, and the vote on whether all ranks update. `own` is how
 * the samples have ended here. Without a group: `own`. */
rebatch_status rbi_update_settle(rebatch *rb, rebatch_status own);

/* ---- several ranks (group.c, vote.c) ---- */

#define RBI_RANKS_MOST (UINT32_C(1) << 17)
#define RBI_WHY_BYTES 200

struct rbi_group {
    rebatch_group table; /* size is 0: there is none */
    uint64_t timeout_ms;
    bool has_ended;
    char ended[400];                   /* why: what every later step says */
    char explained[RBI_WHY_BYTES + 1]; /* by the callback that runs, or failed */
    bool has_failed_in_reduce;         /* this rank, in this step */
    bool owes;                         /* an update failed here alone, and no rank knows yet */
    uint64_t owed_step;
};

/* REBATCH_E_INVALID with its text for a group that is not whole. */
rebatch_status rbi_group_check(const rebatch_options *o);
/* The same for what a step with a group needs, or cannot have. */
rebatch_status rbi_group_check_ops(const rebatch *rb, const rebatch_step_ops *ops);
void rbi_group_open(rebatch *rb, const rebatch_options *o);
/* REBATCH_E_PEER once a rank is missing, from then on with the same sentence. */
rebatch_status rbi_group_all_reduce(rebatch *rb, uint64_t *words, size_t count,
                                    rebatch_reduction reduction);

#define RBI_KEY_PIECES 4

/* Sums over all ranks that show whether their keys are equal. */
struct rbi_agreement {
    uint64_t sum[RBI_KEY_PIECES], sum_of_squares[RBI_KEY_PIECES];
};
/* The share of one rank. */
void rbi_agreement_set(struct rbi_agreement *words, uint64_t key);
bool rbi_agreement_holds(const struct rbi_agreement *words, uint32_t ranks);

/* What was said of a failure: here, and to the other ranks. */
struct rbi_said {
    rebatch_status status;
    char text[512];
    char why[RBI_WHY_BYTES + 1];
};
/* Of a failure with `status`, before anything else is said. REBATCH_OK: nothing. */
struct rbi_said rbi_said_take(rebatch *rb, rebatch_status status);

/* The vote when a step begins: sets the run's total. `own` is REBATCH_OK, or why this rank takes no
 * part, which is then the result. Without a group nothing happens. */
rebatch_status rbi_vote_begin(rebatch *rb, rebatch_status own);
/* The vote before the update. REBATCH_OK: all ranks update. `own` is how this rank has fared, which
 * is the result where it has failed. */
rebatch_status rbi_vote_end(rebatch *rb, rebatch_status own, const struct rbi_said *said);
/* The update has failed here after that vote: the other ranks hear of it in the next one. */
rebatch_status rbi_vote_owe(rebatch *rb, rebatch_status status);

/* The rounds after a vote in which a rank has failed: the lowest of them says why. `own` is how
 * this rank has fared, which is the result where it has failed; else REBATCH_E_PEER. */
rebatch_status rbi_vote_hear(rebatch *rb, rebatch_status own, const struct rbi_said *said);
/* Says again what was said of a failure, and gives its status. */
rebatch_status rbi_said_again(const struct rbi_said *said, rebatch_status status);

/* ---- a step written in place (step_in_place.c) ---- */

/*   state   | what happens                                                | next
 *   --------|-------------------------------------------------------------|--------
 *   NONE    | begins / is refused                                         | SAMPLES / OVER
 *   SAMPLES | next() gives a micro-batch / none, all are in               | SAMPLES / UPDATES
 *   UPDATES | updates() gives the update / it is done, or a callback is   | UPDATES / OVER
 *   any     | it fails, a block is left, or what comes next is left out   | OVER
 *   UPDATES | end(), without an update                                    | NONE
 *   OVER    | end(), or another one begins                                | NONE, SAMPLES
 */
enum rbi_in_place_state {
    RBI_IN_PLACE_NONE,
    RBI_IN_PLACE_SAMPLES,
    RBI_IN_PLACE_UPDATES,
    RBI_IN_PLACE_OVER /* its run has ended, with said.status */
};

struct rbi_in_place {
    enum rbi_in_place_state state;
    struct rbi_said said; /* of that status, which is said again */
    rebatch_step_ops ops;
};

/* ---- the same micro-batches on all ranks (lockstep.c) ---- */

enum rbi_lockstep_stage { RBI_LOCKSTEP_IDLE, RBI_LOCKSTEP_RUNS, RBI_LOCKSTEP_VOTED };

struct rbi_lockstep {
    enum rbi_lockstep_stage stage; /* of the attempt: RUNS until the ranks have voted on it */
    rebatch_status verdict;        /* of that vote */
    bool is_over;                  /* all ranks know that the step has failed, or one is missing */
    rebatch_status owed; /* after an attempt's vote it failed here: the next vote hears of it */
    struct rbi_failure owed_failure; /* of an OOM */
    struct rbi_said owed_said;       /* of any other status */
};

/* As rbi_samples_run(), with the same micro-batches on all ranks. `own` is REBATCH_OK, or why this
 * rank cannot begin, which is then the result and ends the step on all. */
rebatch_status rbi_lockstep_samples_run(rebatch *rb, rebatch_status own);

/* ---- the session (session.c) ---- */

/* So often a batch is made to run again as a whole, on purpose. */
#define RBI_INJECTED_BATCHES 16

/* An attempt that was not started. */
struct rbi_refusal {
    size_t size; /* 0: the last attempt was started */
    unsigned lighten;
    uint64_t available_bytes;
};

struct rbi_failed_range {
    size_t first, end;
};

/* Where the run's micro-batches are cut (cost.c). */
struct rbi_run_cut {
    size_t size;                    /* of the one that runs, or ran last */
    bool by_budget;                 /* one was */
    bool is_even;                   /* into fewer samples, lest the last one has too few */
    size_t part_first, part_end;    /* of the batch: where the last cut was; 0, 0: no cut yet */
    size_t even_size;               /* for which is_even was decided; 0: none */
    size_t most_samples, most_cost; /* of a micro-batch, by rbi_cut_survey(); 0: not known */
    size_t most_budget;             /* the budget for which they hold */
};

/* What a meter has said in the run (meter.c). */
struct rbi_run_meter {
    bool has_begun;
    bool peak_is_unknown; /* a callback was not measured */
    uint64_t peak;
    uint64_t retries;
};

/* The OOMs of the run, and what was done about them (fallback.c). */
struct rbi_run_ooms {
    struct rbi_failure failure; /* the last one */
    size_t failed_count;        /* <= rb->failed_room */
    uint32_t wasted;            /* that max_attempts bounds: those that were not made on purpose */
    uint32_t batches_failed;    /* on purpose, each of which runs the batch again as a whole */
    uint32_t in_row;            /* since something succeeded */
    size_t fitted;              /* the size that a prediction chose; 0: none did */
    bool refitted;              /* which was chosen after one that did not hold */
    struct rbi_refusal refusal;
    bool is_refused_again; /* at the same size, with the same memory */
    uint32_t retries;      /* micro-batches of the step that ran once more at their size */
    bool retried_same;     /* the stage "once more" is used up until something succeeds */
    uint32_t last_tries;   /* of the step, where nothing smaller or lighter was left */
    uint32_t wait_ms;      /* before the attempt that comes next */
    uint64_t first_live;   /* in use when the first micro-batch began */
};

/* Where its samples stand: [0, next) are in the accumulators. */
struct rbi_progress {
    size_t next;
    uint64_t began_ns;     /* when the first of them did */
    uint64_t attempt_ns;   /* when the attempt that runs began */
    bool is_recorded;      /* by the tuner */
    rebatch_microbatch mb; /* the one that runs, or ran last */
};

/* The step or map that runs, or ran last. rbi_run_begin() sets all of it, in one assignment;
 * between runs `most` is SIZE_MAX and `samples_callback` RBI_FORWARD_BACKWARD. */
struct rbi_run {
    const rebatch_step_ops *ops; /* NULL: none runs */
    void *user;
    enum rbi_callback samples_callback; /* RBI_FORWARD_BACKWARD, or RBI_MAP */
    size_t batch;
    size_t total; /* samples of all ranks */
    size_t most;  /* samples in a micro-batch, by what is not this rank's memory or limits;
                     SIZE_MAX: any */
    bool by_cost;
    bool is_probe;
    bool buffers_are_fixed; /* a map's: no size of its own makes other buffers */
    bool has_reduced;       /* reduce has run, and may have called collectives */
    bool is_abandoned;      /* reduce runs for a rank that has failed */
    bool is_open;           /* what undoing it goes back to is saved */
    struct rbi_progress progress;
    struct rbi_lockstep lockstep;
    rebatch_step_report report;
    rebatch_scope scope;  /* what it has allocated, and the frees that wait for its end */
    uint64_t live_before; /* in use when it began */
    uint64_t pool_ooms;   /* of the pool, when it began */
    uint64_t began_ns;
    uint64_t zeroed_from, zeroed_to; /* sequences of the blocks that zero_grad made */
    struct rbi_scope_use use;        /* of the pool, by the last callback */
    struct rbi_run_cut cut;
    struct rbi_run_meter meter;
    struct rbi_run_ooms ooms;
};

/* The callback that runs, or ran last. Its start sets all of it, in one assignment. */
struct rbi_running {
    struct rbi_call call;
    jmp_buf *way_out; /* of rebatch_escape(); NULL: it has none */
    bool is_running;
    bool has_mutated; /* it has called rebatch_mutating() */
    bool is_updating; /* it is optimizer_step */
    bool needs_more;  /* it works in memory that was allocated before it */
    pthread_t thread;
    unsigned pool_callbacks; /* of pools, that this thread was within when it began */
    rebatch_status escape_status;
    uint64_t overflow_before; /* host memory that was ever taken before the update */
    uint64_t meter_live;      /* in use when it began */
    size_t meter_size;        /* of its micro-batch, as the meter has heard; 0: it has none */
};

/* What the pool goes back to when the step ends: another session's step may run around this one. */
struct rbi_outer {
    struct rbi_pool_pressure_watch watch;
    unsigned residents;
    bool overflow; /* its update's allocations must not fail */
};

/* Members live as long as the session, but for `run`, `callback` and `outer`. */
/* How long the last steps took that had no OOM and were all of as many samples. */
#define RBI_CLEAN_STEPS 5
struct rbi_clean_steps {
    size_t batch;
    unsigned count; /* steps since the batch has so many samples */
    uint64_t ns[RBI_CLEAN_STEPS];
};

struct rebatch {
    rebatch_device *device;
    rebatch_pool *pool;
    bool borrows_pool;       /* it was there before the session, and stays */
    bool owns_device;        /* it goes with the session */
    unsigned residents;      /* its number in the pool; 0: it takes nothing back */
    rebatch_meter meter;     /* read is NULL: the pool's figures hold */
    rebatch_options options; /* every zero replaced by its default */
    struct rbi_launch launch;
    struct rbi_log log;
    const struct rbi_dry_step_watch *dry_step; /* NULL: no dry step runs */
    struct rbi_clean_steps clean_steps;
    struct rbi_group group;

    /* of steps and maps */
    struct rbi_run run;
    struct rbi_outer outer;
    struct rbi_failed_range *failed; /* of the run: run.ooms.failed_count of them */
    size_t failed_room;              /* at least options.max_attempts */
    struct rbi_running callback;
    struct rbi_in_place in_place;

    /* what is learned and made */
    uint64_t step;
    double short_share;     /* rebatch_short_of_memory() */
    bool has_updated;       /* an update has run */
    uint64_t update_bytes;  /* that the next one will need; 0: not known */
    struct rbi_sizes sizes; /* of the function whose samples run: the step's, or a map's */
    struct rbi_map *maps;   /* the first; each has the sizes of one function */
    unsigned lighten;
    struct rbi_buffers buffers;
    struct rbi_captured captured;
    struct rbi_leak leak;
    /* Callbacks that have called rebatch_mutating() and succeeded, by the function's address. */
    void (*declares[RBI_CALLBACKS])(void);
    bool has_declared[RBI_CALLBACKS]; /* one of these has called rebatch_mutating(), once */
    bool has_warned_of_promise;       /* of an update that did not */

    /* what the program names */
    struct rbi_watched *watched;
    size_t watched_count;
    struct rbi_guard *guards;
    size_t guard_count;
    rebatch_tag guard_tag;
    struct rbi_saver *savers;
    size_t saver_count;
    pthread_mutex_t changing; /* held during pressure callbacks, and while guards copy */

    /* frees_waited <= frees */
    bool any_stream; /* what the pool gave may be in use on streams that it was not told of */
    _Atomic(uint64_t) frees;        /* with rebatch_free_on() */
    _Atomic(uint64_t) frees_waited; /* of them, before the session's stream was waited for */
};

/* ---- what every callback asks ---- */

/* Whether the session goes by a meter instead of its pool. */
static inline bool rbi_meter_is_set(const rebatch *rb)
{
    return rb->meter.read != NULL;
}

static inline bool rbi_group_is_set(const rebatch *rb)
{
    return rb->group.table.size > 0;
}

/* Whether all ranks run the same micro-batches in the step that runs. */
static inline bool rbi_group_is_in_lockstep(const rebatch *rb)
{
    return rb->options.lockstep == REBATCH_ON && rb->run.samples_callback == RBI_FORWARD_BACKWARD;
}

#endif
