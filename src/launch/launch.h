/* What the person who starts a program asks of it through the environment: the parts of this
 * folder. Must not know how a session recovers or a probe searches. */
#ifndef RBI_LAUNCH_H
#define RBI_LAUNCH_H

#include "config/settings.h"
#include "rebatch/probe.h"
#include "recover/interface.h"

struct rbi_run {
    struct rbi_run_settings settings;
    rebatch *rb;    /* borrowed; NULL: it is not open yet */
    bool has_begun; /* a step */

    /* Failures on purpose (inject.c).
     *   survived <= injected <= requests; what follows them is of all steps */
    bool in_step;
    uint64_t requests; /* of steps' callbacks, without those that a reserve has promised */
    uint64_t injected;
    uint64_t survived;                 /* in steps that succeeded all the same */
    uint64_t injected_before;          /* the step that runs */
    struct rbi_pool_fault outer_fault; /* what makes requests fail outside of its steps */
    uint64_t last_struck;              /* the pool's count of failures with the last of them */
    uint64_t steps;                    /* that succeeded */
    uint64_t samples;                  /* in them */
    uint64_t ooms;                     /* in steps and maps, injected or not */
    uint64_t redone_samples, lost_ns;
    uint64_t whole_limit_bytes; /* what a share of --shrink is one of; 0: not known yet */
    size_t next_shrink;
};

/* Reads what the environment asks for (launch.c), lowers the limit in `options`, and sets the level
 * of events there.
 *  @return REBATCH_OK; REBATCH_E_PARSE for a variable that cannot be read; REBATCH_E_HOST_OOM */
rebatch_status rbi_launch_open(struct rbi_launch *out, rebatch_options *options);

/* ---- which request fails (failing_request.c) ---- */

/* Whether the settings fail this request; the first is number 1. */
bool rbi_run_fails(const struct rbi_run_settings *settings, uint64_t request);

/* ---- the way to whoever started the program (report.c) ---- */

/* Says `text` of `length` bytes to the `rebatch` command, in one piece; false: there is none, or it
 * has gone. */
bool rbi_report_send(const struct rbi_run *run, const char *text, size_t length);
/* Says how the run that was asked for has ended, and ends the process: to the command, or else
 * `complaint` to standard error and `text` to standard output. Where that is not possible, the exit
 * status is 1. Nothing that the program registered to run at its end runs. */
_Noreturn void rbi_report_end(const struct rbi_run *run, int code, const char *complaint,
                              const char *text);

/* ---- a probe and nothing else (probe_only.c) ---- */

/* Probes, says what was found, and ends the process. `options` is NULL where the program makes no
 * probe itself: then an update runs before it, so that what an optimizer keeps is there. */
_Noreturn void rbi_only_probe(struct rbi_run *run, const rebatch_step_ops *ops, size_t batch,
                              void *user, const rebatch_probe_options *options);

/* ---- a check and nothing else (check_only.c) ---- */

/* Checks the step, says what was found, and ends the process. */
_Noreturn void rbi_only_check(struct rbi_run *run, const rebatch_step_ops *ops, size_t batch,
                              void *user);

/* ---- what was found (probe_table.c) ---- */

/* One size: a row of the table. */
struct rbi_probe_row {
    rebatch_prediction prediction; /* size alone is set when has_prediction is not */
    bool has_prediction;
    bool ran, failed;        /* in a trial; failed: out of memory */
    uint64_t measured_bytes; /* of one that ran: most live */
    const char *remark;      /* "largest" and the like; "" */
};

#define RBI_PROBE_ROWS 96

struct rbi_probe_result {
    size_t batch;
    uint64_t total; /* the batch, or its cost where the step has one */
    bool by_cost;
    const char *device;
    uint64_t device_bytes; /* UINT64_MAX: no cap */
    uint64_t limit_bytes;  /* what the pool can hold; UINT64_MAX: no limit */
    rebatch_status status;
    char error[512]; /* why, unless status is REBATCH_OK */
    double seconds;
    rebatch_probe_report report;
    struct rbi_probe_row rows[RBI_PROBE_ROWS]; /* by size */
    size_t row_count;
};

void rbi_probe_add_table(struct rbi_text *t, const struct rbi_probe_result *result);
/* The same as one object. */
void rbi_probe_add_json(struct rbi_text *t, const struct rbi_probe_result *result);

/* ---- failures on purpose (inject.c) ---- */

/* The session is open: has its pool fail requests, where that is asked for, and lowers its limit
 * from the first step on. REBATCH_E_INVALID when there is no memory to take a share of. */
rebatch_status rbi_inject_begin(struct rbi_run *run);
void rbi_inject_step_begins(struct rbi_run *run);
void rbi_inject_step_ended(struct rbi_run *run, const rebatch_step_report *report);
/* No request of a map is failed; its OOMs count. */
void rbi_inject_map_ended(struct rbi_run *run, const rebatch_step_report *report);
/* Says what came of it, once the session ends, where nobody else will. */
void rbi_inject_end(const struct rbi_run *run);

#endif
