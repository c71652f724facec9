/* The common form of traces: which call of one is which of another, and what is done in turns. */
#ifndef RBI_PROBE_TRACE_ALIGNMENT_H
#define RBI_PROBE_TRACE_ALIGNMENT_H

#include "probe/probe.h"

/* Calls that make one turn, at the most. */
#define RBI_PERIOD_MOST 12
#define RBI_LOOPS_MOST 64
#define RBI_NOT_MET SIZE_MAX

/* How the turns of a loop are alike. */
enum rbi_sort {
    RBI_EVEN,            /* all of one size */
    RBI_RAGGED,          /* the last may be smaller */
    RBI_RAGGED_BUT_BASE, /* but is not in the base */
    RBI_SORTS
};

/* What the base, the largest whole trace, does in turns. */
struct rbi_form_loop {
    enum rbi_sort sort;
    size_t first, period;          /* events of the base */
    size_t turns[RBI_POINTS_MOST]; /* of each trace; 0: as many as the base, one by one */
    size_t last[RBI_POINTS_MOST]
               [RBI_PERIOD_MOST]; /* bytes of the last turn, where turns is not 0 */
};

/* `bytes` has one entry for each event of the base and trace; RBI_NOT_MET: the trace has no such
 * event. */
struct rbi_form {
    const struct rbi_trace *base;
    const struct rbi_trace *traces[RBI_POINTS_MOST]; /* by rising count; the base is one of them */
    size_t trace_count, base_at, latest_at;
    bool is_odd[RBI_POINTS_MOST]; /* not of the base's form */
    struct rbi_form_loop *loops;
    size_t loop_count;
    size_t *bytes;
    uint32_t *slots[RBI_POINTS_MOST]; /* of each block of a trace; RBI_NO_BLOCK: none of the base */
};

/* Of an event of the base, in a trace. */
static inline size_t *rbi_form_bytes(const struct rbi_form *form, size_t event, size_t trace)
{
    return &form->bytes[event * RBI_POINTS_MOST + trace];
}

/* ---- trace_alignment.c ---- */

/* False when the host's memory does not suffice; close it in any case. */
bool rbi_form_open(struct rbi_form *form, const struct rbi_traces *traces);
void rbi_form_close(struct rbi_form *form);
/* Whether a whole trace beside the base has its form; those that have not are left out. */
bool rbi_form_align(struct rbi_form *form);
/* A block that the micro-batch has not freed. */
bool rbi_trace_keeps(const struct rbi_trace *trace, const struct rbi_trace_event *event);

/* ---- size_functions.c ---- */

/* The loop whose first turn begins there; NULL: none. */
struct rbi_form_loop *rbi_form_loop_at(const struct rbi_form *form, size_t first);
/* The loop that an event of a first turn is in; NULL: none. */
const struct rbi_form_loop *rbi_form_loop_around(const struct rbi_form *form, size_t event);
/* The sizes that are known of an event, in a loop those of the last turn, and which of them is the
 * base's. */
struct rbi_points rbi_form_points(const struct rbi_form *form, const struct rbi_form_loop *loop,
                                  size_t event);
/* The line of the last turn's bytes over the samples left for it; false when it is none. */
bool rbi_form_fits_last(struct rbi_line *out, const struct rbi_form *form,
                        const struct rbi_form_loop *loop, const struct rbi_turns *turns,
                        size_t event);
/* How many turns sizes make; false when no size function explains them. */
bool rbi_form_turns(struct rbi_turns *out, const struct rbi_form *form,
                    const struct rbi_form_loop *loop);

#endif
