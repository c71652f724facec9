/* What the layers above call of a session, and what they give it.
 * Must not know the session's struct. */
#ifndef RBI_RECOVER_INTERFACE_H
#define RBI_RECOVER_INTERFACE_H

#include "base/base.h"
#include "pool/interface.h"
#include "rebatch/check.h"
#include "rebatch/step.h"
#include "recover/size_limits.h"

struct rebatch_probe_options;
struct rbi_launch;
struct rbi_sizes;

/* ---- what it is (session_access.c) ---- */

/* REBATCH_E_STATE, for `function`, while callbacks can run. */
rebatch_status rbi_session_check_idle(const rebatch *rb, const char *function);
/* As they hold: every zero is replaced by its default, but for on_oom, whose default depends on
 * what is known, and for the level of events, whose default depends on who gets them. */
const rebatch_options *rbi_session_options(const rebatch *rb);
rebatch_device *rbi_session_device(const rebatch *rb);
/* Whose buffers, by rbi_residents_enter(), a step of another size takes back; 0: nobody's. */
unsigned rbi_session_buffers(const rebatch *rb);
/* The number of the effective batch, and its samples while callbacks can run. */
uint64_t rbi_session_step(const rebatch *rb);
size_t rbi_session_batch(const rebatch *rb);
/* Whether the step has a cost. */
bool rbi_session_is_by_cost(const rebatch *rb);
/* The lighten level that is in force. */
unsigned rbi_session_level(const rebatch *rb);
/* Whether an attempt begins only when the memory that it is known to need is there. */
bool rbi_session_admits(const rebatch *rb);
/* Of the blocks that hold its copies of guarded state. */
rebatch_tag rbi_session_guard_tag(const rebatch *rb);
/* Whether an update may have run, which makes what an optimizer keeps. */
bool rbi_session_has_updated(const rebatch *rb);

/* What is known about an OOM when its attempt was taken back. */
struct rbi_failure {
    rebatch_phase phase;
    uint64_t asked_bytes;     /* 0: the pool did not fail, something else did */
    uint64_t need_bytes;      /* what the attempt would have held at least; 0: not known */
    uint64_t available_bytes; /* now */
    uint64_t released_bytes;  /* given back to the device for others */
    uint64_t left_bytes;      /* of the micro-batches before it, in use when it began */
    bool is_unexplained;      /* a callback says so; no allocation is known to have failed */
    bool is_injected;         /* there was memory: the step goes on as if there were none */
    bool is_peers;            /* another rank's, which chooses what is next */
};

/* Of the last OOM. */
const struct rbi_failure *rbi_session_failure(const rebatch *rb);

/* ---- sizes (size_limits.c, cost.c) ---- */

/* The largest micro-batch for a batch: the limits, but not what memory allows. A batch that is
 * smaller than every allowed size is a rest, and stays whole. */
size_t rbi_micro_upper(const rebatch *rb, size_t batch);
/* A micro-batch's size is its cost where the step has one, else its samples. What is known about
 * memory, and what is chosen by it, goes by size. */
size_t rbi_size_of(const rebatch *rb, size_t first, size_t count);
/* The largest allowed number of samples from `first` on that costs at most `budget`; 0: none. */
size_t rbi_cut_to(const rebatch *rb, size_t first, size_t budget);
/* The size, in cost where the step has one, that the session goes on with. */
void rbi_size_set(rebatch *rb, size_t size);
/* Of the micro-batch that runs, or ran last. */
size_t rbi_size_get(const rebatch *rb);

/* ---- guards (guard.c) ---- */

bool rbi_guards_exist(const rebatch *rb);
/* Whether the byte at an address is guarded. */
bool rbi_guards_hold(const rebatch *rb, const void *address);
rebatch_status rbi_guards_save(rebatch *rb, rebatch_guard_point point);
rebatch_status rbi_guards_restore(rebatch *rb, rebatch_guard_point point);
/* Whether a pointer to `address` is in guarded host state now. */
bool rbi_guards_know(const rebatch *rb, const void *address);
/* Whether a pointer to `address` is in guarded host state now, where the copy has another value:
 * put back, nobody would know the block. */
bool rbi_guards_forget(const rebatch *rb, const void *address, rebatch_guard_point point);

/* ---- what is known about memory (need.c) ---- */

/* What an attempt of a size at a lighten level needs. Some of it may be held already: an attempt of
 * that size has left blocks in use, as sums of gradients; in later steps zero_grad makes them anew.
 *
 *   |<------------------- bytes ------------------->|
 *   |<-- held: found by the run -->|<- added_bytes ->|    added_bytes <= bytes
 *
 * What is held for the next attempt (rbi_need_held()), so that it adds bytes - held:
 *   held = min(bytes, max(left, min(made, bytes - added_bytes)))
 *   left = live bytes of blocks with sequences in [kept_from, kept_to)
 *   made = live bytes of this step's zero_grad - zeroed_bytes, at least 0 */
struct rbi_need {
    size_t size; /* 0: the entry is empty */
    bool by_cost;
    unsigned lighten;
    bool is_exact; /* it ran to its end; else it needed at least this */
    uint64_t bytes;
    uint64_t reserved_bytes;     /* that an allocator in pieces reserved for it; 0: not known */
    uint64_t added_bytes;        /* by the run that was learned last, to what lived in the pool */
    uint64_t kept_from, kept_to; /* sequences of the blocks that it left; equal: none */
    uint64_t zeroed_bytes;       /* live of the step's zero_grad, when it left them */
    bool has_memory; /* it ran last in memory that was allocated before, and needs no other */
};

/* The size has run in memory that was allocated before it. */
void rbi_need_has_memory(rebatch *rb, size_t size);

/* An attempt failed when it would have needed that much; what is known to be more stays known. */
void rbi_need_learn_least(rebatch *rb, size_t size, uint64_t bytes);
/* NULL when that size never ran. */
const struct rbi_need *rbi_need_find(const rebatch *rb, size_t size, unsigned lighten);

#define RBI_MADE_MOST 64

/* A probe has taken back blocks of these sizes that the next step will make again before its first
 * micro-batch: predictions count them until a step has succeeded. */
void rbi_need_set_made(rebatch *rb, const size_t *bytes, size_t count);
/* How many there are; *bytes are the session's. */
size_t rbi_need_get_made(const size_t **bytes, const rebatch *rb);

/* A memory model: what sizes need that never ran. need() must not use the heap, as it is called
 * while an OOM is handled. */
struct rbi_memory_model {
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
/* Takes the model over, and destroys the one before; NULL: none from here on. */
void rbi_need_set_model(rebatch *rb, const struct rbi_memory_model *model);
/* NULL: there is none. */
const struct rbi_memory_model *rbi_need_get_model(const rebatch *rb);

/* ---- learning (learning.c) ---- */

/* A tuner makes a memory model of the micro-batches that it watches, and says which size tells it
 * most. Sizes are in samples; all that fit are below all that do not. */
struct rbi_tuner {
    /* Which size is to run next, at most `upper` of a batch of `batch`, and no larger than it must
     * be for the `left` samples of the step to run in as few micro-batches (0: does not matter).
     * *out is 0: the largest that ran and fits now is the answer. Any failure ends the tuning. */
    rebatch_status (*next)(size_t *out, void *user, size_t upper, size_t batch, size_t left);
    /* Readies the pool for a size that next() has said. Any failure ends the tuning. */
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
    /* Leaves the session its model. */
    void (*destroy)(void *user);
    void *user; /* NULL: there is none */
};
/* The size is known, or not to be known. */
void rbi_learn_stop(rebatch *rb);

/* ---- callbacks (attempt.c) ---- */

enum rbi_callback {
    RBI_ZERO_GRAD,
    RBI_FORWARD_BACKWARD,
    RBI_OPTIMIZER,
    RBI_LIGHTEN,
    RBI_RESIZE,
    RBI_MAP,
    RBI_REDUCE,
    RBI_CALLBACKS
};

/* Opens a scope of what the session runs; one that only counts, where reclaim is off. */
rebatch_status rbi_scope_open(rebatch *rb, rebatch_scope *out);

/* As users know it: "forward_backward". */
const char *rbi_callback_name(enum rbi_callback which);
/* Runs one callback in a scope of its own. REBATCH_OK: the scope is committed. Else it was rolled
 * back, except after a failure within the update, of which nothing is undone: report.torn is set.
 * A REBATCH_OOM has left no stale error behind, the stream is idle, and rbi_session_failure() is
 * about it. */
rebatch_status rbi_callback_run(rebatch *rb, enum rbi_callback which, const rebatch_microbatch *mb);
/* Whether it promises to call rebatch_mutating(), and has never done so. */
bool rbi_callback_breaks_promise(const rebatch *rb, enum rbi_callback which);
/* Whether a callback of `rb`, which may be NULL, is running in this thread. */
bool rbi_callback_is_running(const rebatch *rb);
/* Whether what this thread does is the running callback's: also in a thread that has joined. */
bool rbi_callback_includes_thread(const rebatch *rb);
/* Whether a request of the callback that runs may be made to fail, so that the step still ends:
 * what is tried once more at its size has nothing smaller to try, as a rule, and a batch that each
 * failure runs again as a whole comes to its end by chance alone. */
bool rbi_callback_may_fail(const rebatch *rb);

/* ---- the buffers of the micro-batch's size (resize.c) ---- */

/* Before any callback but lighten: calls resize where the buffers for the size that is in force are
 * not there; in a probe those for any size will do. An OOM is as any callback's. */
rebatch_status rbi_resize_ready(rebatch *rb);
/* Takes back what resize has allocated. */
void rbi_resize_release(rebatch *rb);
/* Runs forward_backward of the batch's first `count` samples, which have that size, as a trial,
 * with buffers of its own: resize before it, and what that allocated is taken back after it. */
rebatch_status rbi_callback_run_trial(rebatch *rb, size_t count, size_t size);
/* From here on, till the step's end, callbacks are a probe's. */
void rbi_step_is_probe(rebatch *rb);

/* Takes back all that was allocated since the step, the map or the dry run began, and undoes its
 * frees; then puts guarded state back, so that what guards restore exists (undo.c). */
rebatch_status rbi_step_undo(rebatch *rb);

/* ---- what every call that runs callbacks begins and ends with (step.c) ---- */

/* Checks the arguments of `function` and copies the table, what an older and shorter
 * struct does not have is NULL or 0. */
rebatch_status rbi_step_check(rebatch_step_ops *out, const rebatch *rb,
                              const rebatch_step_ops *given, size_t batch, const char *function);
/* The same, whichever callbacks there are. */
rebatch_status rbi_step_check_arguments(rebatch_step_ops *out, const rebatch *rb,
                                        const rebatch_step_ops *given, size_t batch,
                                        const char *function);
/* From here on callbacks can run. `ops` must outlive it. */
void rbi_step_begin(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user);
/* Callbacks cannot run any more. */
void rbi_step_end(rebatch *rb);
/* The pool's last OOM since then; where there was none, *out stays. */
void rbi_step_get_oom(rebatch_oom_report *out, const rebatch *rb);

/* ---- dry steps (dry_step.c) ---- */

/* A dry step runs a step up to its update, again and again, and leaves the session as it was. */
struct rbi_dry_step_watch {
    /* Around every callback; `mb` is that of forward_backward, else NULL. */
    void (*callback_begins)(void *user, enum rbi_callback which, const rebatch_microbatch *mb);
    void (*callback_ended)(void *user, rebatch_status result);
    /* Whether the pool's last failure was injected. */
    bool (*has_injected)(const void *user);
    void *user;
};
/* What it puts back in the end. */
struct rbi_dry_step {
    struct rbi_sizes *sizes;
    struct rbi_launch *launch;
    rebatch_on_oom on_oom;
    uint32_t max_attempts, max_ooms_in_row;
    void (*on_event)(const rebatch_event *event, void *user);
    rebatch_log_level log_level;
    struct rbi_dry_step_watch watch;
};
/* `ops` must outlive it. Its runs learn sizes of their own, and report no events.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_dry_step_begin(struct rbi_dry_step *dry_step, rebatch *rb,
                                  const rebatch_step_ops *ops, size_t batch, void *user,
                                  const struct rbi_dry_step_watch *watch);
/* zero_grad, and all samples in micro-batches of at most `size`. What it did stays until
 * rbi_step_undo(). *ran is the size of the largest; less than `size` after an OOM. */
rebatch_status rbi_dry_step_run(rebatch *rb, size_t size, size_t *ran);
/* resize alone, for micro-batches of `size`; without that callback nothing. */
rebatch_status rbi_dry_step_resize(rebatch *rb, size_t size);
/* zero_grad, and these micro-batches as parts of a batch of that size, without recovery. */
struct rbi_part {
    size_t first, count;
};
rebatch_status rbi_dry_step_run_parts(rebatch *rb, const struct rbi_part *parts, size_t count,
                                      size_t batch);
/* optimizer_step after rbi_dry_step_run(), for good: the next run is of the step that follows. */
rebatch_status rbi_dry_step_update(rebatch *rb);
void rbi_dry_step_end(struct rbi_dry_step *dry_step, rebatch *rb);

/* ---- what the program names (watch.c) ---- */

#define RBI_WATCHED_MOST 64

/* Memory whose contents are a result of a step. */
struct rbi_watched {
    char *name; /* the session's */
    void *pointer;
    const void *where; /* else NULL: of the variable that holds the pointer */
    size_t bytes;
    rebatch_guard_kind kind;
    rebatch_number number;
};
/* How many there are; *out are the session's. */
size_t rbi_watched_get(const struct rbi_watched **out, const rebatch *rb);

/* ---- events (log.c) ---- */

void rbi_event_emit(const rebatch *rb, rebatch_event *event);
/* From now on events of REBATCH_LOG_INFO, and what is logged already, go there, and none to
 * standard error. */
void rbi_event_redirect(rebatch *rb, void (*on_event)(const rebatch_event *event, void *user),
                        void *user);

/* ---- who is asked for memory while sessions use it (asked.c) ---- */

enum rbi_turn {
    RBI_TURN_BEGINS, /* a step, a map, or a probe */
    RBI_TURN_ENDS,   /* what began has ended, with its report filled in */
    RBI_TURN_CLOSES  /* the session goes */
};
struct rbi_asker {
    /* In the thread of the step, where no callback runs. */
    void (*on_turn)(rebatch *rb, enum rbi_turn turn);
    /* Nothing smaller or lighter is left to run, and `missing_bytes` are short, at least a page.
     *  @return whether there is more now */
    bool (*lift)(rebatch *rb, uint64_t missing_bytes);
};
/* What the run that ends has come to. */
const rebatch_step_report *rbi_session_report(const rebatch *rb);
/* Whether its pool was there before it. */
bool rbi_session_borrows_pool(const rebatch *rb);
/* One in the process; NULL: none. */
void rbi_asker_set(const struct rbi_asker *asker);
/* What the pool must hold for a run to go on with its smallest micro-batch, as far as it is known,
 * and for its update: what is in use now, and what they add, in whole pages. While callbacks can
 * run. */
uint64_t rbi_session_needs(const rebatch *rb);

/* ---- what a session is given when it is opened (session.c) ---- */

/* What the environment asks for in a session: a probe instead of training, a cap, failures on
 * purpose. */
struct rbi_launch {
    /* The session is open, but for this. */
    rebatch_status (*begin)(void *user, rebatch *rb);
    /* A step, or a probe that the program makes, is about to begin. It does not come back when the
     * program is only to be probed. */
    void (*step_begins)(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user);
    void (*probe_begins)(void *user, const rebatch_step_ops *ops, size_t batch, void *step_user,
                         const struct rebatch_probe_options *options);
    void (*step_ended)(void *user, const rebatch_step_report *report);
    void (*map_ended)(void *user, const rebatch_step_report *report);
    /* Whether the pool's last failure was injected. */
    bool (*has_injected)(const void *user);
    void (*destroy)(void *user);
    void *user; /* NULL: nothing is asked for */
};

/* What the layers above give a session; who opens it passes the table. */
struct rbi_session_parts {
    /* For a session that learns: makes its tuner.
     *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
    rebatch_status (*create_tuner)(struct rbi_tuner *out, rebatch *rb);
    /* Reads what the environment asks for, lowers the limit in `options`, and sets the level of
     * events there.
     *  @return REBATCH_OK; REBATCH_E_PARSE for a variable that cannot be read;
     *          REBATCH_E_HOST_OOM */
    rebatch_status (*open_launch)(struct rbi_launch *out, rebatch_options *options);
};
/* rebatch_open() with the parts; `parts` may go when it returns. */
rebatch_status rbi_session_open(rebatch **out, rebatch_device *device,
                                const rebatch_options *options,
                                const struct rbi_session_parts *parts);

/* From here on rebatch_close() closes the device as well. */
void rbi_session_own_device(rebatch *rb);
/* Whether the process has, or has had, a session (current.c). */
bool rbi_current_was_set(void);

/* REBATCH_E_UNSUPPORTED, for `function`, which goes by what the pool does, runs forward_backward
 * without the other ranks, or takes back. */
rebatch_status rbi_session_check_records(const rebatch *rb, const char *function);
rebatch_status rbi_session_check_alone(const rebatch *rb, const char *function);
rebatch_status rbi_session_check_reclaims(const rebatch *rb, const char *function);
/* A probe that the program makes is about to begin: tells the launch. */
void rbi_session_probe_begins(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                              const struct rebatch_probe_options *options);

#endif
