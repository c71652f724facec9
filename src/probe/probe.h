/* What a micro-batch allocated, what another size would, and whether that fits: the structs and the
 * seams between the files of this folder. Must not know models of machine learning. */
#ifndef RBI_PROBE_H
#define RBI_PROBE_H

#include "base/base.h"
#include "pool/pool.h"
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
 *   blocks == number of ALLOC events; is_freed has one entry a block */
struct rbi_trace {
    size_t count; /* samples */
    struct rbi_trace_event *events;
    size_t event_count, event_room;
    uint32_t blocks;
    bool *is_freed;
    uint64_t peak_bytes; /* on top of what lived before it */
    bool is_whole;       /* the micro-batch ran to its end */
    bool is_cut;         /* the host's memory did not suffice to record it */
};

/* Records the pool's calls until end; the trace is empty before. */
void rbi_trace_begin(struct rbi_trace *trace, rebatch_pool *pool, size_t count);
/* Stops, and pairs the frees with what they free. `before` may be NULL.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_trace_end(struct rbi_trace *trace, rebatch_pool *pool,
                             const struct rbi_trace *before);
/* Adds the request that failed to a trace that has ended. */
void rbi_trace_add_failure(struct rbi_trace *trace, size_t asked_bytes);
void rbi_trace_release(struct rbi_trace *trace);

/* ---- what another size would do (model.c) ---- */

/* Bytes as a function of the samples: through (count, bytes), rising by `rise` every `run`; the
 * quotient is rounded up, then down to a multiple of `unit`, a power of two. */
struct rbi_line {
    size_t count, run;
    int64_t bytes, rise;
    size_t unit;
};
size_t rbi_line_at(const struct rbi_line *line, size_t count);

struct rbi_model_event {
    enum rbi_trace_kind kind; /* ALLOC, FREE, FREE_PREVIOUS, RESERVE */
    uint32_t block;           /* number of the allocation in the model */
    struct rbi_line line;
    rebatch_stream stream;
    void *kept_at; /* where the last micro-batch has what this allocation keeps; NULL: it keeps
                      nothing */
};

/* Either events, or, when two traces have no common form, a line for the peak as a whole. */
struct rbi_model {
    struct rbi_model_event *events;
    size_t event_count;
    uint32_t blocks;
    struct rbi_line peak;
    rebatch_pool *pool; /* whose rounding it is; may be NULL */
    bool has_events;
    size_t most_known; /* the largest size that it was made from */
};

/* Puts a model together.
 *  @param low, high  whole traces, low->count < high->count
 *  @param cut        of a larger size that ran into an OOM; may be NULL
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM */
rebatch_status rbi_model_make(struct rbi_model *out, const struct rbi_trace *low,
                              const struct rbi_trace *high, const struct rbi_trace *cut);
/* From one trace alone: everything in proportion, which no size that also has a fixed part exceeds.
 * What the micro-batch kept is taken to have been made once. */
rebatch_status rbi_model_scale(struct rbi_model *out, const struct rbi_trace *trace);
void rbi_model_release(struct rbi_model *model);
/* The most bytes live at once on top of what lives already, rounded as the pool does, pieces not
 * considered. Uses no heap: `sizes` has room for model->blocks. */
uint64_t rbi_model_need(const struct rbi_model *model, size_t count, size_t *sizes);
/* The most bytes live at once, with what lives already, and without what is only reserved. */
rebatch_status rbi_model_peak(uint64_t *out, const struct rbi_model *model, size_t count);

/* ---- whether it fits (replay.c) ---- */

/* What is copied for a dry run, and what is done with it. */
struct rbi_setting {
    rebatch_pool *pool;
    rebatch_stream stream; /* the session's */
    /* Held during the probe for what the first update will take; NULL, 0: nothing. */
    void *reserve;
    size_t reserve_bytes;
    size_t admits_above; /* larger attempts start only when their memory is there */
};

struct rbi_forecast {
    bool fits;
    uint64_t peak_bytes;     /* live, all in all */
    uint64_t reserved_bytes; /* at the most */
    size_t failing_event;    /* of the model, when it does not fit */
    uint64_t failing_bytes;
};

/* Runs a micro-batch of a size on a copy of the pool, as it is now, and with a batch also what
 * comes after the probe: two steps of so many samples, and an update between them. The peaks are
 * those of the first micro-batch.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM, or what the dry pool says that is no OOM */
rebatch_status rbi_replay(struct rbi_forecast *out, const struct rbi_model *model,
                          const struct rbi_setting *setting, size_t count, size_t batch);
/* The largest size in [least, most] that fits; 0 when none does. */
rebatch_status rbi_replay_largest(size_t *out, const struct rbi_model *model,
                                  const struct rbi_setting *setting, size_t least, size_t most,
                                  size_t batch);

/* ---- the search (search.c) ---- */

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
    /* The largest allowed size of at most `size`, and the smallest of at least that; 0: none. */
    size_t (*round)(void *user, size_t size);
    size_t (*round_up)(void *user, size_t size);
    size_t hint; /* found before, within [least, most]; 0: none */
    uint32_t max_trials;

    /* found */
    rebatch_probe_report report;
    struct rbi_model model; /* may be empty */

    /* on the way */
    struct rbi_trace low, high, cut; /* the two largest whole ones, and the last that failed */
    size_t fits, fails;      /* the largest that ran, the smallest that did not: fits < fails */
    uint32_t runs_of_fits;   /* on accumulated gradients */
    uint64_t foretold_bytes; /* of the trial that runs; 0: nothing */
    size_t tried;            /* the last size */
};

/* The model that the last probe of a session has left there; NULL: none. */
const struct rbi_model *rbi_probe_model(const rebatch *rb);
/* A session's pool, and how its steps will use it. */
struct rbi_setting rbi_probe_setting(const rebatch *rb, size_t least);

/* REBATCH_OK: report->size is set; REBATCH_E_EXHAUSTED: not even the smallest fits. */
rebatch_status rbi_search_run(struct rbi_search *search);
void rbi_search_release(struct rbi_search *search);

#endif
