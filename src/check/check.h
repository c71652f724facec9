/* What the files of this folder give each other: the values of what is watched, where the drill's
 * requests fail, and what is found.
 * Must not know the session's struct. */
#ifndef RBI_CHECK_H
#define RBI_CHECK_H

#include "base/base.h"
#include "rebatch/check.h"
#include "recover/session.h"

/* ---- values (values.c) ---- */

/* Copies of what is watched, at one time. */
struct rbi_values {
    char **copies; /* one for each name */
};

/* Host memory for the values of all names. */
rebatch_status rbi_values_open(struct rbi_values *values, const rebatch *rb);
void rbi_values_close(struct rbi_values *values, const rebatch *rb);
/* Reads them, and puts them back. The device is idle. */
rebatch_status rbi_values_read(struct rbi_values *values, const rebatch *rb);
rebatch_status rbi_values_write(const struct rbi_values *values, const rebatch *rb);

/* How two values of one name differ. */
struct rbi_difference {
    bool differs;
    size_t at;      /* the first number that does; for bytes, the first byte */
    double was, is; /* there */
    double largest; /* difference, as a part of the largest value; infinite for what is no number */
};
struct rbi_difference rbi_values_compare(const struct rbi_watched *watched, const char *was,
                                         const char *is);
/* Whether they are about twice what they were, by least squares, as dropout changes them too. */
bool rbi_values_doubled(const struct rbi_watched *watched, const char *was, const char *is);

/* ---- requests that fail (strike.c) ---- */

/* A request of a callback. */
struct rbi_place {
    enum rbi_callback which;
    size_t first, count; /* of forward_backward */
    uint64_t serial;     /* of the callback's run */
    uint64_t number;     /* of the request in it, from 1 */
};

/* The requests of a run, in order, and which of them fails. */
struct rbi_strike_plan {
    rebatch *rb;
    struct rbi_place place; /* the last request; number 0: the callback has made none */
    uint64_t requests;      /* of the run so far */
    uint64_t fails_at;      /* the number of the one that fails, from 1; 0: none */
    bool has_failed;        /* the last callback */

    /* the request that failed */
    bool has_struck;
    struct rbi_place struck;
    uint64_t struck_bytes;
    uint64_t ooms_at_strike;
    bool was_swallowed; /* the callback returned REBATCH_OK */

    /* Told before forward_backward runs, and before any callback that follows one that failed, when
     * that was taken back; plan->place is that one's then. */
    void (*attempt_begins)(void *user);
    void (*was_taken_back)(void *user);
    void *user;
};

struct rbi_drill_watch rbi_strike_watch(struct rbi_strike_plan *plan);
/* Counts from 0 from here on. */
void rbi_strike_begin(struct rbi_strike_plan *plan, uint64_t fails_at);
/* For the pool: whether a request is to fail. */
bool rbi_strike_asked(void *user);
/* "allocation 3 (1.50 MiB) of forward_backward of samples 0-15" */
void rbi_place_add(struct rbi_text *t, const struct rbi_place *place, uint64_t bytes);

/* ---- memory that was taken back (stale.c) ---- */

struct rbi_stale_block {
    const char *address;
    size_t bytes;
    struct rbi_place place; /* where it was allocated */
    bool is_cached;         /* when it was taken back, the pool kept its memory */
    uint64_t digest;        /* of its contents then */
};

struct rbi_stale_list {
    struct rbi_stale_block *blocks;
    size_t count, room;
};

struct rbi_stale {
    bool is_on;
    const struct rbi_strike_plan *plan;
    struct rbi_stale_list live; /* allocated, and neither freed nor taken back */
    struct rbi_stale_list gone; /* taken back, and not allocated again */
    uint64_t moves;             /* calls that have moved the pool's memory */
};

/* Records the pool's calls until rbi_stale_end(). */
void rbi_stale_begin(struct rbi_stale *stale, const struct rbi_strike_plan *plan);
void rbi_stale_end(struct rbi_stale *stale);
/* What the callback that ran last has allocated was taken back, or what all have; not what resize
 * has. The device is idle. */
void rbi_stale_take_back(struct rbi_stale *stale, bool is_all);
/* A block that was taken back and written since. The device is idle. */
bool rbi_stale_find(struct rbi_stale_block *out, struct rbi_stale *stale);

/* ---- what is found (findings.c) ---- */

struct rbi_findings {
    rebatch_check_report *report;
    const rebatch_check_options *options;
};

/* Adds one; the text as for printf. */
void rbi_finding_add(struct rbi_findings *f, rebatch_finding_kind kind, const char *name,
                     const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Whether there is one of the kind about that name; NULL: about any. */
bool rbi_finding_has(const struct rbi_findings *f, rebatch_finding_kind kind, const char *name);
/* Whether the difference is beyond rounding. */
bool rbi_finding_is_wrong(const struct rbi_findings *f, const struct rbi_watched *watched,
                          const struct rbi_difference *difference);
/* "element 3 is 0.5 and was 0.25" */
void rbi_finding_add_values(struct rbi_text *t, const struct rbi_watched *watched,
                            const struct rbi_difference *difference);

#endif
