/* The session, and what the files of this folder give each other.
 * Must not know how memory is found. */
#ifndef RBI_RECOVER_H
#define RBI_RECOVER_H

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>

#include "base/base.h"
#include "device/device.h"
#include "pool/pool.h"
#include "rebatch/step.h"
#include "recover/limits.h"

/* ---- sizes for a batch (limits.c) ---- */

/* The largest micro-batch for a batch: the limits, but not what memory allows. A batch that is
 * smaller than every allowed size is a rest, and stays whole. */
size_t rbi_micro_upper(const rebatch *rb, size_t batch);
/* The size that the next micro-batch begins with. */
size_t rbi_micro_size(const rebatch *rb, size_t batch);

/* ---- cutting (cost.c) ---- */

/* A micro-batch's size is its cost where the step has one, else its samples. What is known about
 * memory, and what is chosen by it, goes by size. */
size_t rbi_size_of(const rebatch *rb, size_t first, size_t count);
/* How many samples the micro-batch has that begins with `first`. */
size_t rbi_cut(rebatch *rb, size_t first);
/* The largest allowed number of samples from `first` on that costs at most `budget`; 0: none. */
size_t rbi_cut_to(const rebatch *rb, size_t first, size_t budget);
/* The budget, for reports: 0 where there is none, or no bound. */
uint64_t rbi_budget(const rebatch *rb);
/* When a step begins: whether it goes by cost, and with which budget. */
void rbi_budget_begin(rebatch *rb);

/* ---- guards (guard.c) ---- */

#define RBI_MAX_GUARDS 64

struct rbi_guard {
    void *state; /* the user's */
    size_t bytes;
    rebatch_guard_kind kind;
    void *at_step;         /* copy from before zero_grad */
    void *at_attempt;      /* copy from before the callback that runs */
    void *before_lighten;  /* of host state: copy from before lighten */
    void *before_pressure; /* of host state: copy from before a pressure callback */
};

enum rbi_guard_point { RBI_GUARD_STEP, RBI_GUARD_ATTEMPT };
/* Pressure may come within lighten. */
enum rbi_guard_change { RBI_CHANGE_LIGHTEN, RBI_CHANGE_PRESSURE };

rebatch_status rbi_guards_save(rebatch *rb, enum rbi_guard_point point);
rebatch_status rbi_guards_restore(rebatch *rb, enum rbi_guard_point point);
/* Around a pressure callback and lighten, which change guarded host state for good: an attempt or a
 * step that is undone later does not undo that. Aligned words change as a whole, so that a pointer
 * is what it was or what it is. Not kept: the state is put back at once, but for what a pressure
 * callback within lighten has changed. */
void rbi_guards_begin_change(rebatch *rb, enum rbi_guard_change change);
void rbi_guards_end_change(rebatch *rb, enum rbi_guard_change change, bool is_kept);
/* Whether a pointer to `address` is in guarded host state now. */
bool rbi_guards_know(const rebatch *rb, const void *address);
/* Whether a pointer to `address` is in guarded host state now, where the copy has another value:
 * put back, nobody would know the block. */
bool rbi_guards_forget(const rebatch *rb, const void *address, enum rbi_guard_point point);
void rbi_guards_release(rebatch *rb);

/* ---- what is known about memory (need.c) ---- */

#define RBI_KNOWN_SIZES 64

/* What an attempt of a size at a lighten level adds to what lives in the pool. */
struct rbi_need {
    size_t size; /* 0: the entry is empty */
    bool by_cost;
    unsigned lighten;
    bool is_exact; /* it ran to its end; else it needed at least this */
    uint64_t bytes;
};

/* An attempt ran to its end. */
void rbi_need_learn(rebatch *rb, size_t size, uint64_t bytes);
/* An attempt failed when it would have needed that much; what is known to be more stays known. */
void rbi_need_learn_least(rebatch *rb, size_t size, uint64_t bytes);
/* NULL when that size never ran. */
const struct rbi_need *rbi_need_find(const rebatch *rb, size_t size, unsigned lighten);
/* What a size will need, as surely as an attempt is to be refused by it. False: not known. */
bool rbi_need_foretell(uint64_t *bytes, const rebatch *rb, size_t size);
/* What a size will need: known, or foretold, or put together from sizes that are known. False, and
 * 0: nothing is known. */
bool rbi_need_predict(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten);
/* Whether the oracle is about the step's kind of size and that level. */
bool rbi_need_has_oracle(const rebatch *rb, unsigned lighten);
/* Whether there is a model to choose a size by: that, or enough that ran by cost. */
bool rbi_need_has_model(const rebatch *rb);
/* The largest allowed size of at most `most` that is predicted to find its memory in
 * `available_bytes`; 0 when none is, or nothing is known. */
size_t rbi_need_largest(const rebatch *rb, size_t most, uint64_t available_bytes);

#define RBI_MADE_MOST 64

/* A probe has taken back blocks of these sizes that the next step will make again before its first
 * micro-batch: predictions count them until a step has succeeded. */
void rbi_need_set_made(rebatch *rb, const size_t *bytes, size_t count);

/* Somebody who knows what sizes need that never ran: a memory model. It must not need the heap, as
 * it is asked while an OOM is handled. */
struct rbi_oracle {
    /* What a size adds to what lives in the pool, rounded as the pool does; never falls with it. */
    uint64_t (*need)(void *user, size_t size);
    void (*destroy)(void *user);
    void *user;
    unsigned lighten; /* the level that it is about */
    bool by_cost;     /* what its sizes are */
    /* Whether steps would find room for a size, pieces and all, within a step that has succeeded:
     * takes the time of a dry run, and the heap. NULL: only `need` is known. */
    bool (*fits)(void *user, rebatch *rb, size_t size);
};
/* Takes the oracle over, and destroys the one before; NULL: none from here on. */
void rbi_need_set_oracle(rebatch *rb, const struct rbi_oracle *oracle);
/* What the oracle says of its level is not gone by any longer. */
void rbi_need_refute_oracle(rebatch *rb);

/* ---- crawling (crawl.c) ---- */

struct rbi_crawl {
    struct rbi_pool_traffic before; /* the attempt */
    uint32_t row;                   /* micro-batches in a row that thrashed */
    size_t largest;                 /* size of the step's micro-batches */
    size_t most_samples;            /* of them */
};

/* After an attempt that failed, and after one of `count` samples that succeeded. */
void rbi_crawl_begin(rebatch *rb);
void rbi_crawl_end(rebatch *rb, size_t count, uint64_t needed_bytes);
/* The effective batch begins, or begins again. */
void rbi_crawl_restart(rebatch *rb);
/* At the end of a step that succeeded: true when it thrashed, and the next one is cut smaller. */
bool rbi_crawl_step_done(rebatch *rb);

/* ---- growth (growth.c) ---- */

struct rbi_growth {
    uint32_t wait;      /* clean steps before the next growth */
    uint32_t clean;     /* steps since the last OOM or growth */
    bool on_trial;      /* grew, and not yet `wait` clean steps ago */
    bool is_overruling; /* so it did against a prediction */
    bool is_of_level;   /* it left a lighter level, and the size stayed */
    size_t
        held; /* the size before the last growth, as long as an OOM may lead back to it; 0: none */
    bool held_by_cost;
    /* The last growth that failed: to which size, and what there was then. */
    size_t failed_size; /* 0: none */
    bool failed_by_cost;
    uint64_t failed_available;
};

/* At the end of a step that succeeded. */
void rbi_growth_step_done(rebatch *rb, size_t batch);
/* Whether a growth against a prediction is on trial, by which no attempt is to be refused then. */
bool rbi_growth_overrules(const rebatch *rb);
/* A larger size that has room; the same where there is none. */
size_t rbi_growth_larger(rebatch *rb);
/* The size before the last growth, where it is less than the `failed` one; 0: none. Asked once. */
size_t rbi_growth_take_held(rebatch *rb, size_t failed);
/* The size did not hold, with `available_bytes` there: a growth on trial has failed, and clean
 * steps count anew. */
void rbi_growth_set_back(rebatch *rb, uint64_t available_bytes);

/* ---- learning (learn.c) ---- */

/* Somebody who makes a memory model of micro-batches that he watches, and says which size tells him
 * most. Sizes are in samples; all that fit are below all that do not. */
struct rbi_teacher {
    /* Which size is to run next, at most `upper` of a batch of `batch`, and no larger than it must
     * be for the `left` samples of the step to run in as few micro-batches (0: does not matter).
     * *out is 0: the largest that ran and fits now is the answer. Any failure ends his teaching. */
    rebatch_status (*next)(size_t *out, void *user, size_t upper, size_t batch, size_t left);
    /* Readies the pool for a size that next() has said. Any failure ends his teaching. */
    rebatch_status (*prepare)(void *user, size_t size);
    /* A micro-batch of `count` samples begins, and ends. */
    void (*begin)(void *user, size_t count);
    rebatch_status (*end)(void *user, size_t count, rebatch_status status);
    /* One that was not watched ran out of memory, or was not started for want of it. */
    void (*failed)(void *user, size_t count);
    /* The largest that ran and fits now; 0: none. */
    size_t (*largest)(const void *user);
    /* No other size can be told from what will run. */
    bool (*is_done)(const void *user, size_t upper);
    /* Leaves the session what he knows. */
    void (*destroy)(void *user);
    void *user; /* NULL: there is none */
};
/* Models are the layer above: this one call of it, defined there, is how a session that learns gets
 * its teacher. */
rebatch_status rbi_teacher_create(struct rbi_teacher *out, rebatch *rb);

struct rbi_learning {
    bool is_on;
    bool is_settled;  /* no other size is looked for in this step */
    bool has_failed;  /* an OOM in this step: the ladder chooses */
    bool is_watched;  /* the micro-batch that runs */
    bool has_stepped; /* a step was done meanwhile */
    size_t chosen;    /* size of the micro-batch to learn from; 0: none */
    size_t upper;     /* what limits and batch allowed, and fitted; 0: learning is not over */
    unsigned lighten; /* the level when it began */
    struct rbi_teacher teacher;
};

/* The session begins to learn. */
rebatch_status rbi_learn_start(rebatch *rb);
/* The size is known, or not to be known. */
void rbi_learn_stop(rebatch *rb);
/* A step begins. */
void rbi_learn_begin_step(rebatch *rb);
/* Before a micro-batch is cut, when `left` samples are yet to run: sets its size. In the first step
 * memory is taken for no more than they need. */
void rbi_learn_choose(rebatch *rb, size_t left);
/* Around an attempt of `count` samples. */
void rbi_learn_begin(rebatch *rb, size_t count);
void rbi_learn_end(rebatch *rb, size_t count, rebatch_status status);
/* It was not started for want of memory. */
void rbi_learn_refused(rebatch *rb, size_t count);
/* At the end of a step that succeeded: true while learning goes on, and sizes are its own. */
bool rbi_learn_step_done(rebatch *rb);

/* ---- callbacks (attempt.c) ---- */

enum rbi_callback {
    RBI_ZERO_GRAD,
    RBI_FORWARD_BACKWARD,
    RBI_OPTIMIZER,
    RBI_LIGHTEN,
    RBI_CALLBACKS
};

/* Runs one callback in a scope of its own. REBATCH_OK: the scope is committed. Else it was rolled
 * back, except after a failure within the update, of which nothing is undone: report.torn is set.
 * A REBATCH_OOM has left no stale error behind, the stream is idle, and rb->failure is filled in.
 */
rebatch_status rbi_callback_run(rebatch *rb, enum rbi_callback which, const rebatch_microbatch *mb);

/* Runs lighten. Once it has answered REBATCH_OK the level is in force, rb->lighten, and what it
 * allocated and freed stays so whatever becomes of the step; also where an error that surfaces late
 * ends the step. Else it has changed nothing. rb->failure stays as it is. */
rebatch_status rbi_callback_lighten(rebatch *rb, unsigned level);

/* Waits for the work that callbacks have enqueued. */
rebatch_status rbi_callback_wait(rebatch *rb);

/* Whether a callback of `rb`, which may be NULL, is running in this thread. */
bool rbi_callback_is_running(const rebatch *rb);

/* What is known about an OOM when its attempt was taken back. */
struct rbi_failure {
    rebatch_phase phase;
    uint64_t asked_bytes;     /* 0: the pool did not fail, something else did */
    uint64_t need_bytes;      /* what the attempt would have held at least; 0: not known */
    uint64_t available_bytes; /* now */
    uint64_t released_bytes;  /* given back to the device for others */
    bool is_injected;         /* there was memory: the step goes on as if there were none */
};

/* ---- what is said of answers (answer.c) ---- */

struct rbi_call {
    enum rbi_callback which;
    const rebatch_microbatch *mb; /* of forward_backward */
    unsigned level;               /* of lighten */
    uint64_t error_changes;       /* rbi_error_changes() when it began */
};

/* What the step goes by: the answer itself, or REBATCH_E_STATE for one that no callback may give.
 * Sets the sentence of a failure. */
rebatch_status rbi_answer_check(const rebatch *rb, const struct rbi_call *call,
                                rebatch_status answer);
/* Sets the sentence of a failure, "step 0: zero_grad VERB 1007", unless what was said during the
 * call is about that status, or the sentence was cleared. */
void rbi_answer_say(const rebatch *rb, const struct rbi_call *call, rebatch_status status,
                    const char *verb);
/* The callback succeeded, and `status` was in the device's last error. */
void rbi_answer_say_late(const rebatch *rb, const struct rbi_call *call, rebatch_status status);
/* REBATCH_E_STATE: it did not keep REBATCH_DECLARES_MUTATION. */
rebatch_status rbi_answer_say_undeclared(const rebatch *rb, const struct rbi_call *call);
/* An update that had begun, or may have, failed with `status`, which is no OOM, and is said: adds
 * that. */
void rbi_answer_say_torn(const rebatch *rb, rebatch_status status);

/* ---- what is asked for this run of the program ---- */

struct rebatch_probe_options;

/* Somebody who does in a session what the environment asks for: a probe instead of training, a cap,
 * failures on purpose. */
struct rbi_launch {
    /* The session is open, but for this. */
    rebatch_status (*begin)(void *user, rebatch *rb);
    /* A step, or a probe that the program makes, is about to begin. It does not come back when the
     * program is only to be probed. */
    void (*step_begins)(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user);
    void (*probe_begins)(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user,
                         const struct rebatch_probe_options *options);
    void (*step_ended)(void *user, const rebatch_step_report *report);
    /* Whether the pool's last failure was injected. */
    bool (*has_injected)(const void *user);
    void (*destroy)(void *user);
    void *user;       /* NULL: nothing is asked for */
    bool has_updated; /* an update has run before the probe */
};
/* The environment is read by the layer above: this one call of it, defined there, is how a session
 * gets what is asked for. Lowers the limit in `options`.
 *  @return REBATCH_OK; REBATCH_E_PARSE for a variable that cannot be read; REBATCH_E_HOST_OOM */
rebatch_status rbi_launch_open(struct rbi_launch *out, rebatch_options *options);

/* ---- what every call that runs callbacks begins and ends with (step.c) ---- */

/* Checks the arguments of `function` and copies the table, what an older and shorter
 * struct does not have is NULL or 0. */
rebatch_status rbi_step_check(rebatch_step_ops *out, const rebatch *rb,
                              const rebatch_step_ops *given, size_t batch, const char *function);
/* From here on callbacks can run. `ops` must outlive it; rb->ops = NULL ends it. */
void rbi_step_begin(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user);

/* ---- the ladder (ladder.c) ---- */

/* What was being done when an OOM struck. */
struct rbi_strike {
    const rebatch_microbatch *mb; /* NULL outside forward_backward */
    size_t redone_samples;
    uint64_t lost_ns;
};

/* Takes the next step of the ladder: REBATCH_OK when it is worth trying again (micro-batch and
 * lighten level are set), else REBATCH_E_EXHAUSTED, REBATCH_E_TORN, or what lighten answered.
 * Counts and reports it. */
rebatch_status rbi_ladder_next(rebatch *rb, const struct rbi_strike *strike);

/* ---- the process's session (current.c) ---- */

/* The session is about to go. */
void rbi_current_forget(rebatch *rb);

/* ---- events (event.c) ---- */

void rbi_event_emit(const rebatch *rb, rebatch_event *event);
/* An event of a change: with how large micro-batches are before it, and then after it. */
rebatch_event rbi_event_begin(const rebatch *rb, rebatch_event_kind kind);
void rbi_event_end(rebatch_event *event, const rebatch *rb);
/* "samples 0-7", "sample 3". */
void rbi_text_add_samples(struct rbi_text *t, size_t first, size_t count);

/* ---- the session (session.c) ---- */

/* REBATCH_E_STATE, for `function`, while callbacks can run. */
rebatch_status rbi_session_check_idle(const rebatch *rb, const char *function);

struct rbi_failed_range {
    size_t first, end;
};

struct rebatch {
    rebatch_device *device;
    rebatch_pool *pool;
    rebatch_options options; /* every zero replaced by its default */
    struct rbi_launch launch;

    uint64_t step;
    size_t micro;    /* SIZE_MAX: as large as the limits allow */
    size_t budget;   /* of cost; SIZE_MAX: no bound */
    bool has_budget; /* there was a step by cost */
    unsigned lighten;
    struct rbi_growth growth;
    struct rbi_need known[RBI_KNOWN_SIZES];
    size_t known_next; /* the entry to give up next */
    size_t known_last; /* the entry learned last */
    struct rbi_crawl crawl;
    struct rbi_learning learning;
    struct rbi_oracle oracle;   /* need is NULL: there is none */
    double oracle_factor;       /* the most that was needed for what it foretold, by cost */
    size_t made[RBI_MADE_MOST]; /* what the next step will make before its first micro-batch */
    size_t made_count;
    bool oracle_is_refuted; /* a size ran in steps for which it said there was no room */
    struct rbi_guard guards[RBI_MAX_GUARDS];
    size_t guard_count;
    rebatch_tag guard_tag;
    pthread_mutex_t changing; /* held during a pressure callback of the step */

    /* frees_waited <= frees */
    bool any_stream; /* what the pool gave may be in use on streams that it was not told of */
    _Atomic(uint64_t) frees;        /* with rebatch_free_on() */
    _Atomic(uint64_t) frees_waited; /* of them, before the session's stream was waited for */

    /* of the step that runs */
    const rebatch_step_ops *ops;
    void *user;
    size_t batch;
    bool by_cost;
    bool cut_by_budget; /* a micro-batch was */
    rebatch_step_report report;
    uint64_t pool_ooms;  /* of the pool, when the step began */
    rebatch_scope scope; /* what the step has allocated, and the frees that wait for its end */
    struct rbi_failure failure;
    struct rbi_failed_range *failed; /* room for options.max_attempts */
    size_t failed_count;
    size_t fitted;        /* the size that a prediction chose; 0: none did */
    bool refitted;        /* which was chosen after one that did not hold */
    uint32_t ooms_in_row; /* since something succeeded */
    bool retried_same;    /* the rung "once more" is used up until something succeeds */

    /* of the callback that runs */
    size_t size; /* of the micro-batch */
    bool running;
    bool mutated;
    pthread_t thread;
    unsigned pool_callbacks; /* of pools, that this thread was within when it began */
    jmp_buf escape;
    rebatch_status escape_status;
    /* Callbacks that have called rebatch_mutating() and succeeded, by the function's address. */
    void (*declares[RBI_CALLBACKS])(void);
    bool has_declared[RBI_CALLBACKS]; /* one of these has called rebatch_mutating(), once */
    bool warned;                      /* of an update that did not */
};

#endif
