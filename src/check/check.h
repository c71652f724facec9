/* The structs and functions that the files of this folder share: what is compared, how it differs,
 * which requests fail, and what is found. Must not know the session's struct. */
#ifndef RBI_CHECK_H
#define RBI_CHECK_H

#include <pthread.h>

#include "base/base.h"
#include "rebatch/check.h"
#include "recover/interface.h"

/* ---- requests that fail (injection.c) ---- */

/* A request of a callback. */
struct rbi_place {
    enum rbi_callback which;
    size_t first, count; /* of forward_backward */
    uint64_t serial;     /* of the callback's run */
    uint64_t number;     /* of the request in it, from 1 */
    bool is_helpers;     /* another thread than the callback's, which joined, made it */
};

/* Micro-batches in the order in which they ran. */
struct rbi_parts {
    struct rbi_part *list;
    size_t count, room;
};
/* False: there is no host memory for one more. */
bool rbi_parts_add(struct rbi_parts *parts, size_t first, size_t count);
bool rbi_parts_copy(struct rbi_parts *to, const struct rbi_parts *from);
bool rbi_parts_equal(const struct rbi_parts *a, const struct rbi_parts *b);
void rbi_parts_release(struct rbi_parts *parts);

/* The requests of a run, in order, and which of them fails. */
struct rbi_injection {
    rebatch *rb;
    struct rbi_place place; /* the last request; number 0: the callback has made none */
    pthread_t thread;       /* the callback's */
    bool is_running;        /* it */
    struct rbi_parts done;  /* what is in the accumulators */
    bool is_short;          /* of host memory for that */
    uint64_t requests;      /* of the run so far */
    uint64_t fails_at;      /* the number of the one that fails, from 1; 0: none */
    uint64_t ooms;          /* the pool's count when the callback began */
    uint64_t succeeded;     /* micro-batches, in all runs */
    bool has_failed;        /* the last callback */

    /* the request that failed on purpose */
    bool is_done;
    unsigned runs_since; /* it was done; 0: none was */
    struct rbi_place injected;
    uint64_t injected_bytes;
    uint64_t ooms_at_injection;

    /* the first OOM for which a callback returned REBATCH_OK */
    bool was_swallowed;
    struct rbi_place swallowed;
    uint64_t swallowed_bytes;

    /* Told before forward_backward runs, before any callback that follows one that failed, when
     * that was taken back (injection->place is that one's then), and after zero_grad. */
    void (*attempt_begins)(void *user);
    void (*was_taken_back)(void *user);
    void (*was_cleared)(void *user);
    void *user;
};

struct rbi_dry_step_watch rbi_injection_watch(struct rbi_injection *injection);
/* Counts from 0 from here on. */
void rbi_injection_begin(struct rbi_injection *injection, uint64_t fails_at);
/* For the pool: whether a request is to fail. */
bool rbi_injection_fails(void *user, size_t bytes);
/* "allocation 3 (1.50 MiB) of forward_backward of samples 0-15" */
void rbi_place_add(struct rbi_text *t, const struct rbi_place *place, uint64_t bytes);

/* " of samples 0-15"; of other callbacks nothing */
void rbi_samples_add(struct rbi_text *t, const struct rbi_place *place);

/* ---- what runs allocate (stale.c) ---- */

struct rbi_stale_block {
    const char *address;
    size_t bytes;
    struct rbi_place place; /* where it was allocated */
    bool is_padded;
    bool is_cached;  /* when it was taken back, the pool kept its memory */
    uint64_t digest; /* of its contents then */
};

struct rbi_stale_list {
    struct rbi_stale_block *blocks;
    size_t count, room;
};

struct rbi_stale {
    bool is_on;
    const struct rbi_injection *injection;
    struct rbi_stale_list live;   /* allocated, and neither freed nor taken back */
    struct rbi_stale_list gone;   /* taken back, and not allocated again */
    struct rbi_stale_list lost;   /* the same, also where the pool has kept no memory of it */
    struct rbi_stale_list beside; /* the same of threads that have not joined, in a callback */
    bool pads;                    /* the pool does (struct rbi_pool_fill) */
    uint64_t moves;               /* calls that have moved the pool's memory */
    /* Callbacks in which one of these was allocated and freed, and the last such block. */
    uint64_t helped;
    struct rbi_stale_block helpers;
};

/* Records the pool's calls until rbi_stale_end(). */
void rbi_stale_begin(struct rbi_stale *stale, const struct rbi_injection *injection);
void rbi_stale_end(struct rbi_stale *stale);
/* What the callback that ran last has allocated was taken back, or what all have; not what resize
 * has. The device is idle. */
void rbi_stale_take_back(struct rbi_stale *stale, bool is_all);
/* A block that was taken back and written since. The device is idle. */
bool rbi_stale_find(struct rbi_stale_block *out, struct rbi_stale *stale);
/* The block of a list that is at that address; NULL: there is none. Safe in a handler of a
 * signal. */
const struct rbi_stale_block *rbi_stale_at(const struct rbi_stale_list *list, const void *address);
/* Of how many micro-batches of the run the same allocation is in use, and the last of these blocks:
 * what each one leaves. */
size_t rbi_stale_count_left(struct rbi_stale_block *out, const struct rbi_stale *stale);
/* A block in use that is written beyond its end, where its memory was filled with `fill` and padded
 * (struct rbi_pool_fill). The device is idle. */
bool rbi_stale_find_overrun(struct rbi_stale_block *out, const struct rbi_stale *stale,
                            uint8_t fill);

/* ---- what is compared (items.c) ---- */

/* What the program names, or a block without a name. */
struct rbi_item {
    char name[64];
    bool has_name;     /* by the program */
    bool is_old;       /* a block that is older than the step */
    void *pointer;     /* NULL: */
    const void *where; /* the variable that holds the pointer, else */
    uint64_t made_nth; /* the allocation of zero_grad that makes it, from 1 */
    size_t bytes;
    rebatch_guard_kind kind;
    rebatch_number number;
    bool is_compared;   /* else only what changes from run to run is said */
    bool is_settled;    /* there is a finding about it */
    double size;        /* the largest value after the first run */
    double noise;       /* its rounding as measured, as a part of the largest value */
    double noise_uncut; /* of the first run's micro-batches alone */
};

struct rbi_items {
    const rebatch *rb;
    const struct rbi_stale *stale;
    struct rbi_item *list;
    size_t count, room;
};

/* What the program names. Each of these: REBATCH_OK, REBATCH_E_HOST_OOM. */
rebatch_status rbi_items_add_names(struct rbi_items *items);
rebatch_status rbi_items_add(struct rbi_items *items, const struct rbi_item *item);
/* Adds the blocks that zero_grad has made in the run, and that are in use. */
rebatch_status rbi_items_add_made(struct rbi_items *items);
/* The run has ended: settles what zero_grad makes in some runs only. */
void rbi_items_drop_missing(struct rbi_items *items);
void rbi_items_release(struct rbi_items *items);
/* Whether one of them is in that memory. */
bool rbi_items_are_in(const struct rbi_items *items, const char *address, size_t bytes);
/* Where it is now; NULL: nowhere. */
void *rbi_item_place(const struct rbi_items *items, const struct rbi_item *item);
/* "\"gradient\"", "block 12 (1.50 MiB)" */
void rbi_item_add(struct rbi_text *t, const struct rbi_item *item);

/* Copies of all items, at one time. */
struct rbi_values {
    char **copies; /* one for each */
    size_t count;  /* of them */
};
/* Host memory for the items that it has none for. */
rebatch_status rbi_values_open(struct rbi_values *values, const struct rbi_items *items);
void rbi_values_close(struct rbi_values *values);
/* Copies, and waits for it: of a session's device, or in host memory. */
rebatch_status rbi_check_copy(const rebatch *rb, rebatch_guard_kind kind, void *to,
                              const void *from, size_t bytes);
/* What device memory holds, read through `chunk` of that room. */
rebatch_status rbi_check_digest(uint64_t *out, const rebatch *rb, const char *address, size_t bytes,
                                char *chunk, size_t room);
/* Reads them, and puts them back. The device is idle. */
rebatch_status rbi_values_read(struct rbi_values *values, const struct rbi_items *items);
rebatch_status rbi_values_write(const struct rbi_values *values, const struct rbi_items *items);

/* ---- blocks that are older than the step (older_blocks.c) ---- */

struct rbi_old_block {
    const char *address;
    size_t bytes;
    uint64_t allocation; /* its number */
    uint64_t digest;
    bool is_gone; /* freed since */
    bool has_changed;
};

struct rbi_old_blocks {
    rebatch *rb;
    struct rbi_old_block *list;
    size_t count, room;
    char *chunk; /* through which contents are read */
};

/* Those in use, but for what is named, and the session's own. REBATCH_OK, REBATCH_E_HOST_OOM. */
rebatch_status rbi_older_open(struct rbi_old_blocks *blocks, const struct rbi_items *named);
void rbi_older_close(struct rbi_old_blocks *blocks);
/* A copy of the contents of each, whose owner frees them with rbi_heap_free(), also on failure. */
rebatch_status rbi_older_save(char ***out, const struct rbi_old_blocks *blocks);
/* Notes the contents, and which have changed since they were noted last. The device is idle. */
rebatch_status rbi_older_note(struct rbi_old_blocks *blocks);
/* Notes the contents again: the first that has changed since, and that no guard holds. */
bool rbi_older_find_changed(struct rbi_text *t, struct rbi_old_blocks *blocks);
/* Settles what was freed for good: what comes and goes is no result. */
void rbi_older_drop_gone(struct rbi_items *items, struct rbi_old_blocks *blocks);
/* Adds those that have changed to what is compared. *left_out is the size of those that are too
 * large for that. */
rebatch_status rbi_older_add_changed(struct rbi_items *items, const struct rbi_old_blocks *blocks,
                                     uint64_t *left_out);

/* ---- how two values differ (values.c) ---- */

struct rbi_difference {
    bool differs;
    size_t at;           /* the number that differs most; for bytes, the first byte */
    double was, is;      /* there */
    double largest, rms; /* as parts of the largest value; infinite for what is no number */
};
/* `factor` times what it was is expected. */
struct rbi_difference rbi_values_compare(const struct rbi_item *item, const char *was,
                                         const char *is, double factor);
/* The share of the numbers that differ by more than that part of the largest value, and than that
 * part of their own size, of those that are not 0. */
double rbi_values_share_beyond(const struct rbi_item *item, const char *was, const char *is,
                               double part, double of_own);
double rbi_values_largest(const struct rbi_item *item, const char *values);
/* How many numbers it has. */
size_t rbi_values_count(const struct rbi_item *item);
/* Adds the differences to `sums`; the sum of their squares. */
double rbi_values_add_difference(float *sums, const struct rbi_item *item, const char *was,
                                 const char *is);
/* The root of the mean square, as a part of the largest value. */
double rbi_values_rms(const struct rbi_item *item, const char *values);
/* By which factor they have grown, by least squares, as dropout changes them too; 0: not known. */
double rbi_values_growth(const struct rbi_item *item, const char *was, const char *is);
/* Whether one of them is no number. */
bool rbi_values_find_no_number(size_t *at, const struct rbi_item *item, const char *values);
/* What contents without a name look like. */
rebatch_number rbi_values_guess(const char *values, size_t bytes);

/* ---- what grows with the number of micro-batches (trend.c) ---- */

struct rbi_trend_item {
    float *sums;    /* of the differences of all cuts, for each number */
    double squares; /* of all of them, each by the micro-batches that it has more */
};
struct rbi_trend {
    struct rbi_trend_item *list; /* one for each item; NULL: no cut was added */
    size_t count, cuts;
    double more, inverse; /* micro-batches that they have more than the first run, and 1/those */
};

/* ---- what is found (findings.c) ---- */

/* "not_cleared". */
const char *rbi_finding_name(rebatch_finding_kind kind);
/* Adds one; the text as for printf. */
void rbi_finding_add(rebatch_check_report *report, rebatch_finding_kind kind, const char *name,
                     const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Adds one about an allocation, which is named between the two texts. */
void rbi_finding_add_block(rebatch_check_report *report, rebatch_finding_kind kind,
                           const char *before, const struct rbi_place *place, uint64_t bytes,
                           const char *after);
bool rbi_finding_has(const rebatch_check_report *report, rebatch_finding_kind kind);

/* ---- a check (check.c) ---- */

struct rbi_check {
    rebatch *rb;
    rebatch_pool *pool;
    rebatch_check_options options;
    rebatch_check_report *report;
    struct rbi_injection injection;
    struct rbi_stale stale;
    struct rbi_old_blocks blocks;
    struct rbi_items items;
    struct rbi_values before;    /* the check */
    struct rbi_values reference; /* after the first run */
    struct rbi_values now;       /* after the run that ended last */
    struct rbi_values other;     /* before the attempt that failed; after a run without an OOM */
    struct rbi_values replayed;
    struct rbi_trend trend;
    struct rbi_parts whole; /* the micro-batches of the first run */
    struct rbi_parts ran;   /* those of the last rbi_check_run() */
    struct rbi_parts replayed_parts;
    bool has_own_weights;   /* which may not go by the batch */
    bool has_resize;        /* there is such a callback */
    bool is_first;          /* run, which shows what zero_grad clears */
    bool is_measured;       /* rounding is, which needs results that follow the batch */
    bool is_uncut_measured; /* or that was tried, of the first run's micro-batches */
    double typical_size;    /* of half of the items at most */
    bool is_cut_wrong;      /* there is a finding about it */
    size_t base;            /* the largest size that fits */
    size_t most_ran;        /* micro-batches in a run */
    size_t swallowing;      /* a larger one, at which an OOM is swallowed; 0: none */
    double rounding;        /* the largest difference by rounding */
    char rounding_of[192];
    bool is_rounding_unsure;
    uint64_t began_ns, deadline_ns;
};

/* ---- a program that ends while it is checked (ending.c) ---- */

/* What it was doing is said on standard error if it ends by a signal or by a call of exit, until
 * rbi_ending_leave(). Of checks in several threads, for one. */
void rbi_ending_watch(const struct rbi_check *c);
void rbi_ending_leave(const struct rbi_check *c);

/* ---- runs (runs.c) ---- */

/* All samples in micro-batches of at most `size`; reads the items into c->now. */
rebatch_status rbi_check_run(struct rbi_check *c, size_t size, uint64_t fails_at, size_t *ran);
/* These micro-batches, as of a batch of that size. */
rebatch_status rbi_check_run_parts(struct rbi_check *c, const struct rbi_parts *parts, size_t batch,
                                   struct rbi_values *into);
/* The first run's micro-batches so many times over, in a batch that is as much larger. */
rebatch_status rbi_check_run_repeated(struct rbi_check *c, size_t times);
/* Takes back what the run did: with or without what is watched. */
rebatch_status rbi_check_take_back(struct rbi_check *c);
/* The micro-batches that a run needs to show a leak. */
#define RBI_CHECK_FOR_LEAKS 4
rebatch_status rbi_check_undo(struct rbi_check *c);
/* Says who has written to memory that was taken back. */
void rbi_check_find_stale(struct rbi_check *c);
bool rbi_check_has_time(struct rbi_check *c);
/* Whether the check itself cannot go on. */
bool rbi_check_is_fatal(rebatch_status status);
/* The step ends where it should not. */
rebatch_status rbi_check_fail(struct rbi_check *c, const char *when, rebatch_status status);
/* The same, of a run that is then undone; REBATCH_OK: it ended as it should. */
rebatch_status rbi_check_end(struct rbi_check *c, const char *when, rebatch_status status);
/* Host memory for all copies of what is compared, and the first of them. */
rebatch_status rbi_check_open_values(struct rbi_check *c);

/* ---- differences that are findings (compare.c) ---- */

/* What was to be the same. */
struct rbi_comparison {
    rebatch_finding_kind kind;
    const char *when, *advice;
    const struct rbi_values *was, *is;
    const struct rbi_parts *parts; /* of other micro-batches than the first run's; else NULL */
    const char *verb;              /* NULL: "differs" */
    bool is_exact;                 /* any bit that differs is a finding */
    bool is_few;                   /* of few samples, in other micro-batches */
};
/* Adds one finding about all that differs. Runs more where rounding is to be measured; no run is
 * there to be undone. */
rebatch_status rbi_compare(struct rbi_check *c, const struct rbi_comparison *what);
/* The notes about rounding. */
void rbi_compare_end(struct rbi_check *c);
/* The note that a result is right although an OOM was swallowed, once. */
void rbi_compare_say_coped(struct rbi_check *c, const char *when);

/* ---- rounding (rounding.c) ---- */

enum rbi_verdict { RBI_EQUAL, RBI_ROUNDING, RBI_UNSURE, RBI_WRONG };
/* Of what two results are: the same micro-batches, which round in the same way, others, or few
 * samples in others. */
enum rbi_order { RBI_SAME_ORDER, RBI_OTHER_ORDER, RBI_FEW_SAMPLES };
/* `was` and `is` are the values. */
enum rbi_verdict rbi_rounding_judge(const struct rbi_check *c, const struct rbi_item *item,
                                    const struct rbi_difference *difference, enum rbi_order order,
                                    const char *was, const char *is);
/* After the first run: how large values are. */
void rbi_rounding_note_sizes(struct rbi_check *c);
/* Whether it is so small that it is nothing but rounding. */
bool rbi_rounding_is_all(const struct rbi_check *c, const struct rbi_item *item,
                         const struct rbi_difference *difference);
/* Whether measuring could tell. */
bool rbi_rounding_is_worth_measuring(const struct rbi_check *c, const struct rbi_item *item,
                                     const struct rbi_difference *difference);
/* Runs these micro-batches as parts of larger batches, and compares with `was`. */
rebatch_status rbi_rounding_measure(struct rbi_check *c, const struct rbi_parts *parts,
                                    const struct rbi_values *was);

/* ---- what grows with the number of micro-batches (trend.c) ---- */

/* The run of these micro-batches, whose results are in c->now. REBATCH_OK, REBATCH_E_HOST_OOM. */
rebatch_status rbi_trend_add(struct rbi_check *c, const struct rbi_parts *parts);
/* Whether an item gains the same with each micro-batch: ->is is the most that a number of it does,
 * and ->largest that as a part of the largest value. */
bool rbi_trend_find(struct rbi_difference *out, const struct rbi_check *c, size_t at);
void rbi_trend_release(struct rbi_trend *trend);

/* ---- the parts of a check ---- */

/* The first runs (reference_runs.c): *is_there stays false where there is none to compare with. */
rebatch_status rbi_reference_run(struct rbi_check *c, size_t batch, bool *is_there);
rebatch_status rbi_reference_run_again(struct rbi_check *c);
/* Freed and new memory (fill.c). Fills with 0 from the beginning on. */
void rbi_fill_set(struct rbi_check *c, uint8_t freed, uint8_t allocated);
/* New blocks are padded: rbi_stale_find_overrun(). */
void rbi_fill_pad(struct rbi_check *c, uint8_t allocated);
rebatch_status rbi_fill_run(struct rbi_check *c);
/* NaN as float, double and bfloat16. */
#define RBI_NO_NUMBER 0xff
/* Other micro-batches (cuts.c). */
rebatch_status rbi_cuts_run(struct rbi_check *c);
rebatch_status rbi_cuts_run_twice(struct rbi_check *c);
/* An OOM at each allocation (ooms.c), and before any other run at those of the first resize. */
rebatch_status rbi_ooms_run(struct rbi_check *c);
rebatch_status rbi_ooms_run_resizes(struct rbi_check *c, size_t batch);
void rbi_ooms_save_attempt(void *user);
void rbi_ooms_was_taken_back(void *user);
/* optimizer_step, in copies of the process (update.c). */
rebatch_status rbi_update_check(struct rbi_check *c);

#endif
