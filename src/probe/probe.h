/* What a micro-batch allocated, what another size would, and whether that fits: the structs and the
 * seams between the files of this folder. Must not know models of machine learning. */
#ifndef RBI_PROBE_H
#define RBI_PROBE_H

#include "base/base.h"
#include "pool/interface.h"
#include "rebatch/probe.h"

#define RBI_NO_BLOCK UINT32_MAX

/* ---- what a micro-batch did with the pool (trace.c) ---- */

enum rbi_trace_kind {
    RBI_TRACE_ALLOC,
    RBI_TRACE_FREE,          /* of a block of this trace */
    RBI_TRACE_FREE_PREVIOUS, /* of a block that the micro-batch before has kept */
    RBI_TRACE_FREE_OLDER,    /* of any other */
    RBI_TRACE_RESERVE
};

/* block: ALLOC, FREE: number of the allocation in this trace, from 0; FREE_PREVIOUS: in the one
 * before. */
struct rbi_trace_event {
    enum rbi_trace_kind kind;
    uint32_t block;
    void *address;         /* NULL for a reserve */
    size_t bytes;          /* as asked for; 0 of a free */
    rebatch_stream stream; /* of ALLOC and RESERVE */
};

/* The calls of one micro-batch in their order.
 *   blocks == number of ALLOC events; is_freed and is_passed have one entry a block */
struct rbi_trace {
    size_t count;  /* samples */
    size_t before; /* those of the micro-batch before it; 0: there was none */
    struct rbi_trace_event *events;
    size_t event_count, event_room;
    uint32_t blocks;
    bool *is_freed;
    bool *is_passed; /* what the next micro-batch has freed; that there was one: has_next */
    bool has_next;
    uint64_t peak_bytes;   /* on top of what lived before it; after an OOM, the least it needed */
    uint64_t live_bytes;   /* at the most, all in all */
    size_t outside_bytes;  /* of the device, held by others, at the most */
    size_t outside_before; /* when it began */
    rebatch_pool *pool;    /* while it is recorded */
    bool is_whole;         /* the micro-batch ran to its end */
    bool is_cut;           /* the host's memory did not suffice to record it */
};

/* Records the pool's calls until end; the trace is empty before. */
void rbi_trace_begin(struct rbi_trace *trace, rebatch_pool *pool, size_t count);
/* Stops, and pairs the frees with what they free. `before` may be NULL.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_trace_end(struct rbi_trace *trace, rebatch_pool *pool,
                             const struct rbi_trace *before);
/* Notes what the next one, a whole one, has freed of what the trace has kept. */
void rbi_trace_pass_on(struct rbi_trace *trace, const struct rbi_trace *next);
/* Adds the request that failed to a trace that has ended. */
void rbi_trace_add_failure(struct rbi_trace *trace, size_t asked_bytes);
void rbi_trace_release(struct rbi_trace *trace);

/* ---- bytes as a function of the samples (line.c) ---- */

/* A line through (count, bytes), rising by `rise` every `run` samples; the quotient is rounded up.
 * Elsewhere than at `count` there is `residual` more, by which a line did not explain a point. */
struct rbi_line {
    size_t count, run;
    int64_t bytes, rise;
    size_t residual;
};
size_t rbi_line_at(const struct rbi_line *line, size_t count);

struct rbi_point {
    size_t count, bytes;
};
#define RBI_POINTS_MOST 8
struct rbi_points {
    struct rbi_point at[RBI_POINTS_MOST];
    size_t count;
    size_t base; /* the point whose bytes come out exactly */
};
/* The line through the last point and the first, or the one before it, whichever is steeper, with a
 * residual up to the highest point above it. The points rise by count; one point: constant. */
struct rbi_line rbi_line_fit(const struct rbi_points *points);
/* Goes through the origin. */
struct rbi_line rbi_line_scale(const struct rbi_point *point);
struct rbi_line rbi_line_constant(size_t bytes);

/* How often something is done for a number of samples: `fixed` times, and once for every `step`. */
struct rbi_turns {
    int64_t fixed;
    size_t step;
};
size_t rbi_turns_at(const struct rbi_turns *turns, size_t count);
/* Whether that many turns a point (in its `bytes`) are made when a turn is for `step` samples. */
bool rbi_turns_explain(struct rbi_turns *out, size_t step, const struct rbi_point *points,
                       size_t count);

/* ---- what another size would do (trace_alignment.c, model_build.c, model.c) ---- */

/* What a reserve asks for where that was reckoned from what is to come: all that is allocated till
 * the next one, as asked for, or each in whole units. */
enum rbi_rest { RBI_REST_NONE, RBI_REST_SUM, RBI_REST_SUM_UNITS };

struct rbi_model_event {
    enum rbi_trace_kind kind; /* ALLOC, FREE, FREE_PREVIOUS, RESERVE */
    enum rbi_rest rest;       /* RESERVE */
    uint32_t slot;            /* the list that an allocation's block goes to */
    bool is_queued;           /* FREE: the oldest of the list, else the newest */
    bool is_last_first;       /* FREE in turns: the block of the last turn of the other loop */
    struct rbi_line line;     /* of the bytes; of FREE: those of the allocation */
    struct rbi_line last;     /* in turns: those of the last turn, over the samples left for it */
    rebatch_stream stream;
};

/* Events that are done in turns. */
struct rbi_model_loop {
    size_t first, length; /* events */
    struct rbi_turns turns;
    bool is_ragged; /* the last turn may be smaller */
};

/* What the last micro-batch has kept. */
struct rbi_kept {
    uint32_t slot;
    void *address;
};

/* What the first of the traces has kept: a block of it. */
struct rbi_kept_first {
    uint32_t slot, block;
};

/* Either events, or, when traces have no common form, a line for the peak as a whole. */
struct rbi_model {
    struct rbi_model_event *events;
    size_t event_count;
    struct rbi_model_loop *loops; /* in the order of their events, which they do not share */
    size_t loop_count;
    struct rbi_kept *kept; /* oldest first */
    size_t kept_count;
    struct rbi_kept_first *first; /* oldest first */
    size_t first_count;
    uint32_t slots;
    struct rbi_line peak;
    struct rbi_line outside; /* of the device, held by others */
    size_t outside_fixed;    /* of that, what they held before the first trial */
    bool is_rough;           /* not all of it is a straight line of whole bytes a sample */
    bool has_events;
    bool keeps;         /* a micro-batch leaves something to the next, which frees it */
    rebatch_pool *pool; /* whose rounding it is; may be NULL */
};

/* The traces that a model is made of. */
#define RBI_TRACES_MOST (RBI_POINTS_MOST - 1)
struct rbi_traces {
    const struct rbi_trace *whole[RBI_TRACES_MOST]; /* by rising count */
    size_t count;
    const struct rbi_trace *latest; /* one of them: what it has kept lives */
    const struct rbi_trace *cut;    /* of a larger size that ran into an OOM; may be NULL */
};

/* Puts a model together from at least one trace. From one alone everything is in proportion, which
 * no size that also has a fixed part exceeds; what the micro-batch kept is then taken to have been
 * made once.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_model_make(struct rbi_model *out, const struct rbi_traces *traces);
/* Brings the traces into the form of the largest whole one and fills in what has_events is about.
 * REBATCH_OK also when there is no common form. */
rebatch_status rbi_model_build(struct rbi_model *out, const struct rbi_traces *traces);
/* What one micro-batch does and the next does not: a buffer made at first use, which then stays. */
bool rbi_trace_is_one_off(const struct rbi_trace *trace, const struct rbi_trace_event *event);
void rbi_model_release(struct rbi_model *model);

/* Goes through what `count` samples do, turn by turn. Set model and count, and the rest to zero. */
struct rbi_cursor {
    const struct rbi_model *model;
    size_t count;
    size_t event, loop, turn;
    size_t bytes; /* out: of the event */
};
/* NULL at the end. */
const struct rbi_model_event *rbi_model_next(struct rbi_cursor *cursor);

/* The most bytes live at once on top of what lives already, rounded as the pool does, pieces not
 * considered. Uses no heap. */
uint64_t rbi_model_need(const struct rbi_model *model, size_t count);
/* What lives in the pool, but for the buffers that resize has made, which are in the model. */
rebatch_status rbi_live_beside(uint64_t *out, rebatch_pool *pool);
/* The most bytes live at once, with what lives already, and without what is only reserved. */
rebatch_status rbi_model_peak(uint64_t *out, const struct rbi_model *model, size_t count);

/* ---- whether it fits (forecast.c) ---- */

struct rbi_reserve_block {
    void *address;
    size_t bytes;
};

/* What is copied for a dry run, and what is done with it. */
struct rbi_setting {
    rebatch_pool *pool;
    rebatch_stream stream; /* the session's */
    /* Held during the probe for what the first update will take. */
    struct rbi_reserve_block *reserve;
    size_t reserve_count;
    size_t least;        /* of all sizes */
    uint32_t runs_left;  /* trials that may yet be run */
    size_t admits_above; /* larger attempts start only when their memory is there */
    /* The pool as it was when the probe began, a copy, and what its first trial did: sizes must
     * also run in a session that begins so. NULL: not known. */
    rebatch_pool *fresh;
    rebatch_device *fresh_device;
    const struct rbi_trace *first;
    bool is_work;     /* real micro-batches run, not trials: a size must fit without a retry */
    bool has_stepped; /* steps before the probe allocated what is allocated once */
};

/* ---- reserve_bytes (reserve_blocks.c) ---- */

/* The pieces that `bytes` will be taken in: like the blocks that live now.
 *  @return REBATCH_OK; REBATCH_OOM when there is less, REBATCH_E_HOST_OOM, or what the device says:
 *          there are none */
rebatch_status rbi_reserve_plan(struct rbi_setting *setting, size_t bytes);
/* Takes them from the pool.
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_HOST_OOM, or what the device says: none is held */
rebatch_status rbi_reserve_hold(struct rbi_setting *setting);
/* What those that are not held will add to what lives. */
uint64_t rbi_reserve_missing(const struct rbi_setting *setting);
void rbi_reserve_release(struct rbi_setting *setting);

/* ---- what is run dry ---- */

struct rbi_forecast {
    bool fits;
    uint64_t peak_bytes;     /* live, all in all */
    uint64_t reserved_bytes; /* at the most */
    uint64_t failing_bytes;  /* asked for by what does not fit */
    bool is_admitted;        /* fits when its memory is taken beforehand */
    bool needs_trim;         /* fits only when the cache is given back before */
    /* Fits only when micro-batches of `before` samples run before the trial, and of `after` samples
     * after it; 0: none. */
    size_t before, after;
};

/* What is run on a copy of the pool, as it is now. */
struct rbi_plan {
    size_t count;
    bool has_trial;    /* a micro-batch of the probe */
    bool has_training; /* what comes after: two steps, and an update between them */
    size_t batch;
};
/* The peaks are those of the trial.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM, or what the dry pool says that is no OOM */
rebatch_status rbi_forecast_run(struct rbi_forecast *out, const struct rbi_model *model,
                                const struct rbi_setting *setting, const struct rbi_plan *plan);
/* The largest size in [least, most] that fits with all of it; 0 when none does. */
rebatch_status rbi_forecast_largest(size_t *out, const struct rbi_model *model,
                                    const struct rbi_setting *setting, size_t least, size_t most,
                                    size_t batch);

/* ---- the search (size_search.c) ---- */

/* Runs `count` samples as a trial. REBATCH_OOM: it was taken back, and the trace is cut short.
 *  @param trace       empty before
 *  @param peak_bytes  most live in the pool meanwhile */
typedef rebatch_status rbi_trial(struct rbi_trace *trace, uint64_t *peak_bytes, void *user,
                                 size_t count, const struct rbi_trace *before);

struct rbi_search {
    /* set by the caller */
    rbi_trial *trial;
    void *user;
    struct rbi_setting setting;
    size_t least, most, batch; /* sizes; most <= batch; the limits allow least and most */
    /* A new size is no larger than it must be for the `left` samples to run in as few
     * micro-batches; 0: does not matter. */
    size_t left;
    /* The largest allowed size of at most `size`, and the smallest of at least that; 0: none. */
    size_t (*round)(void *limits, size_t size);
    size_t (*round_up)(void *limits, size_t size);
    void *limits;     /* of both */
    size_t hint;      /* found before, within [least, most]; 0: none */
    size_t too_large; /* known not to fit, above hint; 0: none is */
    uint32_t max_trials;
    uint64_t (*now)(void); /* nanoseconds */
    uint64_t max_ns;       /* no trial begins after so long; 0: no bound */
    bool is_fastest;       /* else the largest */

    /* found */
    rebatch_probe_report report;
    struct rbi_model model; /* may be empty */

    /* on the way */
    struct rbi_trace whole[RBI_TRACES_MOST]; /* by rising count */
    size_t whole_count;
    size_t latest;        /* the count of the last whole one */
    bool is_first_kept;   /* the first trial is still among them */
    struct rbi_trace cut; /* of the last that failed */
    bool is_model_made;   /* of all that is there */
    /* The largest that ran, the smallest that did not: fits < fails, unless it ran later on. */
    size_t fits, fails;
    uint32_t runs_of_fits;    /* on accumulated gradients */
    size_t failed;            /* a size that failed after it had run */
    uint64_t predicted_bytes; /* of the trial that runs; 0: nothing */
    size_t tried;             /* the last size */
    uint64_t began_ns;
};

/* The model that the last probe of a session has left there, or that it learns; NULL: none. */
const struct rbi_model *rbi_probe_model(const rebatch *rb);
/* The session takes a model over, which is about that lighten level and kind of size, and empty
 * then. */
rebatch_status rbi_probe_hand_over(rebatch *rb, struct rbi_model *model, unsigned lighten,
                                   bool by_cost);
/* The session asks a model that is kept elsewhere, until it has another one or none. */
void rbi_probe_lend(rebatch *rb, struct rbi_model *model);
/* A session's pool, and how its steps will use it. */
struct rbi_setting rbi_probe_setting(const rebatch *rb, size_t least);

/* What the session knows of the need of a micro-batch that has ended, with REBATCH_OK or
 * REBATCH_OOM; `trace` has ended too. */
void rbi_probe_note_need(struct rbi_trace *trace, const rebatch *rb, rebatch_status status);
/* Sizes that a session allows (struct rbi_search): of samples or, by cost, of the first samples of
 * the batch. */
size_t rbi_probe_round(void *limits, size_t size);
size_t rbi_probe_round_up(void *limits, size_t size);

/* Runs that are measured to find the fastest: RBI_TIMED_SIZES sizes, RBI_TIMED_TURNS times each. */
#define RBI_TIMED_SIZES 4
#define RBI_TIMED_TURNS 2
#define RBI_TIMED_RUNS (RBI_TIMED_SIZES * RBI_TIMED_TURNS)

/* ---- what is known of sizes, and which one is next (choose.c) ---- */

/* The trace of the last trial that ran; NULL: none. */
struct rbi_trace *rbi_search_latest(struct rbi_search *search);
/* Makes the search's model, of all that was seen up to now. */
rebatch_status rbi_search_model(struct rbi_search *search);
/* What a size does now, as far as that is known. */
rebatch_status rbi_search_forecast(struct rbi_forecast *out, struct rbi_search *search,
                                   const struct rbi_plan *plan);
bool rbi_search_may_go_on(const struct rbi_search *search);
/* The largest allowed size of at most `size` that is above what ran; 0: none. */
size_t rbi_search_allowed(const struct rbi_search *search, size_t size);
/* Or else the smallest above what ran, and below what failed. */
size_t rbi_search_allowed_near(const struct rbi_search *search, size_t size);
/* The largest size below `count` that ran; 0: none. */
size_t rbi_search_ran_below(const struct rbi_search *search, size_t count);
/* Readies the pool for a size, and says what it will need. */
rebatch_status rbi_search_prepare(struct rbi_search *search, size_t count);
/* The next size, the smallest to begin with; 0: `fits` is the answer, and leaves room for the
 * steps; it is 0 where nothing fits. */
rebatch_status rbi_search_next(size_t *out, struct rbi_search *search);

/* REBATCH_OK: report->size is set; REBATCH_E_EXHAUSTED: not even the smallest fits. */
rebatch_status rbi_search_run(struct rbi_search *search);

/* For one who runs the sizes himself, so that `trial` is NULL: begin; then what rbi_search_next()
 * says, each noted. `most` and `batch` may change on the way. */
void rbi_search_begin(struct rbi_search *search);
/* `count` samples ran or, with REBATCH_OOM, did not. Takes the trace over; of what did not run it
 * may be empty.
 *  @param peak_bytes  most live in the pool meanwhile */
void rbi_search_note(struct rbi_search *search, size_t count, rebatch_status status,
                     const struct rbi_trace *trace, uint64_t peak_bytes);
void rbi_search_release(struct rbi_search *search);

#endif
