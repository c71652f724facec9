/* A storm: short random trainings of a small model under every kind of trouble, each compared with
 * the same training in plain C. What the files of this folder give each other.
 * Must not know more of the library than its public headers say. */
#ifndef STORM_H
#define STORM_H

#include "rebatch/rebatch.h"

#define STORM_PARAMETERS 4
#define STORM_BATCH_MOST 40
#define STORM_MAP_MOST 100 /* more than twice the above */
#define STORM_LENGTH_MOST 32
#define STORM_CACHES 4
#define STORM_SPARES 3
#define STORM_TEMPS 64
#define STORM_FAULTS 4
#define STORM_BUFFERS 2
#define STORM_LEVELS 3
/* More than the device has ever: no stage of the pool's search can serve it. */
#define STORM_IMPOSSIBLE_BYTES ((size_t)1 << 30)
/* All that any training needs, several times over. */
#define STORM_PLENTY_BYTES ((size_t)64 << 20)
#define STORM_STATUS ((rebatch_status)(REBATCH_E_USER + 7))

/* ---- dice ---- */

uint64_t storm_hash(uint64_t a, uint64_t b);
/* The next number, and one below n, and true once in n times. */
uint64_t storm_next(uint64_t *dice);
size_t storm_below(uint64_t *dice, size_t n);
bool storm_one_in(uint64_t *dice, size_t n);
/* From low to high, both included. */
size_t storm_between(uint64_t *dice, size_t low, size_t high);

/* ---- the arithmetic, which model and reference share (reference.c) ---- */

/* What a training is: all that decides its result. */
struct storm_numbers {
    double parameters[STORM_PARAMETERS], moments[STORM_PARAMETERS], gradients[STORM_PARAMETERS];
    double running; /* a statistic over all samples in their order */
    uint64_t rng;
};

/* What one sample draws and looks up. */
struct storm_sample {
    double draw, entry;
    size_t length;
};

uint64_t storm_rng_next(uint64_t rng);
double storm_unit(uint64_t bits); /* in [0, 1) */
/* Entry `index` of the table that cache number `cache` holds. */
double storm_entry(size_t cache, size_t index);
size_t storm_length(uint64_t key, size_t sample);
double storm_running(double running, const struct storm_sample *sample);
void storm_accumulate(double *gradients, const double *parameters,
                      const struct storm_sample *sample, size_t batch);
void storm_update(double *parameter, double *moment, double gradient, double draw, double entry);
/* Which entry of cache 2 the update of a step looks up. */
size_t storm_update_index(uint64_t step);

/* One effective batch and its update, without the library. `lengths` is the key of the lengths. */
void storm_reference_step(struct storm_numbers *numbers, uint64_t step, size_t batch,
                          uint64_t lengths);

/* ---- what is drawn (plan.c) ---- */

enum storm_callback {
    STORM_ZERO,
    STORM_FORWARD,
    STORM_UPDATE,
    STORM_LIGHTEN,
    STORM_RESIZE,
    STORM_CALLBACKS
};

/* When a resize frees its old buffers: not at all, all of them first, each before or after the new
 * one is made. */
enum storm_frees {
    STORM_FREES_NOTHING,
    STORM_FREES_FIRST,
    STORM_FREES_BEFORE,
    STORM_FREES_AFTER,
    STORM_FREES
};

/* Where the limits on the size are. */
enum storm_source {
    STORM_FROM_OPTIONS,
    STORM_FROM_FILE,
    STORM_FROM_VARIABLES,
    STORM_FROM_BOTH, /* the variables hold */
    STORM_SOURCES
};

enum storm_manner {
    STORM_RETURN,  /* answers REBATCH_OOM */
    STORM_POOL,    /* passes up what the pool answers to a request that cannot fit */
    STORM_ESCAPE,  /* rebatch_escape(), from some depth */
    STORM_SWALLOW, /* answers REBATCH_OK and leaves an OOM in the device's last error */
    STORM_OWN,     /* answers STORM_STATUS */
    STORM_OWN_ESCAPE,
    STORM_MANNERS
};

struct storm_fault {
    enum storm_callback callback;
    uint32_t nth, times; /* calls of that callback in this step, from 1 */
    size_t more_than;    /* only those with more samples */
    bool is_late;        /* half of the change was made */
    enum storm_manner manner;
    uint32_t seen;
};

/* What is the same during a training. */
struct storm_plan {
    rebatch_options options;
    size_t page_bytes;
    size_t batch_least, batch_most;
    uint32_t steps;
    unsigned levels;                        /* of lighten; 0: no callback */
    bool has_flag, declares, reserves;      /* of REBATCH_DECLARES_MUTATION; calls it */
    bool has_cost, is_one_guard, is_padded; /* one guard for all host state; memory is */
    unsigned cost_kind;
    bool makes_gradients;  /* in zero_grad, lazily */
    bool frees_first;      /* a cache that is replaced: before the larger one is there */
    bool unpins;           /* a cache may be given up once it was used in a callback */
    bool is_sloppy;        /* a lighten that fails has changed guarded state */
    bool reclaims;         /* off: the program frees what a failed callback has allocated */
    size_t pressures;      /* callbacks */
    size_t overflow_bytes; /* host memory for updates */
    size_t base_bytes, unit_bytes, late_bytes, zero_bytes, update_bytes, spare_bytes;
    unsigned trouble; /* 0: memory is short; 1: faults; 2: both */
    unsigned probes;  /* one step in so many has a probe before it; 0: none */
    unsigned checks;  /* the same of a check */
    unsigned maps;    /* the same of rebatch_map() */
    unsigned limits;  /* the same of another limit on the pool */
    bool has_resize, guards_buffers, has_neighbour;
    bool nests;        /* the neighbour steps within callbacks too */
    bool makes_before; /* buffers for one sample, which the first resize frees */
    bool lowers;       /* limits move within callbacks too */
    enum storm_source source;
};

struct storm;
void storm_plan_draw(struct storm_plan *plan, uint64_t *dice);
/* The faults of a step, and where else trouble comes from in it. */
void storm_plan_step(struct storm *s);
/* Whether a micro-batch that is not the last may have that size, and the largest for a batch. */
bool storm_is_allowed(const rebatch_options *o, size_t size);
size_t storm_upper(const rebatch_options *o, size_t batch);
/* Whether one size of at most `upper` cuts it so that the last one is allowed too, and the most
 * micro-batches of any cut. */
bool storm_can_cut(const rebatch_options *o, size_t batch, size_t upper);
size_t storm_most(const rebatch_options *o, size_t batch);

/* ---- the program under test (model.c) ---- */

struct storm_cache {
    double *table; /* NULL: there is none */
    uint64_t count;
};

struct storm_spare {
    void *block;
    uint64_t bytes;
};

/* All guarded host state. */
struct storm_keep {
    uint64_t rng;
    struct storm_cache caches[STORM_CACHES];
    double *moments;      /* on the device; NULL: none there */
    uint64_t moments_are; /* 0: not made yet; 1: on the device; 2: on the host */
    double *gradients;
    struct storm_spare spares[STORM_SPARES];
    uint64_t level;
};

/* What a resize has made. */
struct storm_buffers {
    void *blocks[STORM_BUFFERS]; /* may be guarded */
    size_t bytes[STORM_BUFFERS];
    size_t samples;
    void *older[STORM_BUFFERS]; /* of before the first step, until resize frees them */
    uint64_t salt, made;        /* of what is written into them; calls */
    enum storm_frees manner;
    bool is_backwards; /* the last one is made first */
    bool are_there;
};

/* Another session on the pool (neighbour.c). */
struct storm_neighbour {
    rebatch *rb; /* NULL: there is none */
    struct storm_buffers buffers;
    uint64_t dice;
    size_t batch, next;
};

/* The program, and what is known of how it should be. */
struct storm {
    uint64_t seed, dice;
    bool is_verbose, has_failed;
    char failure[400];
    struct storm_plan plan;

    rebatch_device *host, *device; /* the latter is a fault device on the former */
    rebatch *rb;
    rebatch_pool *pool;
    rebatch_step_ops ops;
    struct storm_neighbour neighbour;
    char settings[32]; /* name of a file */

    /* the program's state */
    struct storm_keep keep;
    double *parameters, *running; /* on the device, all the time */
    uint64_t other_bytes;         /* live besides what `keep` knows, all the time */
    double moments_on_host[STORM_PARAMETERS];
    bool is_pinned[STORM_CACHES];
    void *temps[STORM_TEMPS]; /* of the callback that runs */
    size_t temp_bytes[STORM_TEMPS];
    size_t temp_count;
    struct storm_sample *samples; /* of the micro-batch that runs; NULL: none */
    struct storm_buffers buffers, map_buffers;
    struct storm_buffers *of_map; /* that the map which runs has; NULL: none */
    size_t map_next, map_largest; /* its next sample; the most in a call */
    size_t limit;                 /* of the pool; 0: none */

    /* the step */
    uint64_t step, lengths;
    size_t batch;
    struct storm_fault faults[STORM_FAULTS];
    size_t fault_count;
    size_t room_low, room_high; /* what a co-tenant leaves; high 0: it does not move */
    bool is_armed;              /* device calls may fail */
    bool has_moved_limit;       /* within a callback */
    uint64_t made_at_step;      /* buffers.made when it began */
    bool is_probing;            /* a probe runs, no step */
    bool is_checked;            /* a check runs: is_probing is set, too */
    bool is_calm;               /* no more trouble from the program */

    /* what should be */
    struct storm_numbers before, after; /* the step, by the reference */
    struct storm_keep at_step;          /* to which an undone step comes back */
    struct storm_keep at_callback;      /* to which an undone attempt comes back */
    double running_at_step, running_at_callback;
    bool learned[STORM_CALLBACKS];
    size_t next;           /* sample that comes next */
    bool may_zero;         /* zero_grad is next */
    bool may_be_torn;      /* an update has failed after it had begun, or may have */
    bool is_updated;       /* the update has succeeded */
    bool has_answered_own; /* STORM_STATUS, before that */
    uint32_t calls[STORM_CALLBACKS];

    struct storm_counts *counts;
};

rebatch_step_ops storm_model_ops(const struct storm_plan *plan);

/* ---- its memory (reserve.c) ---- */

/* NULL: there is no memory. */
void *storm_alloc(struct storm *s, size_t bytes);
void storm_free(struct storm *s, void *pointer);
void storm_fill(void *block, size_t bytes, uint64_t marker);
bool storm_is_filled(const void *block, size_t bytes, uint64_t marker);
/* What is written into a spare block. */
uint64_t storm_spare_marker(const struct storm *s, size_t i);
/* A block of the callback that runs; NULL: there is no memory. */
void *storm_temp(struct storm *s, size_t bytes);
void storm_temps_free(struct storm *s);
/* What a callback that fails frees itself where rebatch takes nothing back. */
void storm_memory_leave(struct storm *s);
/* Whether nobody has written into them. */
bool storm_temps_hold(const struct storm *s);
/* Sees to it that a cache has so many entries, and stays until the callback is done with it. */
rebatch_status storm_cache_ensure(struct storm *s, size_t cache, size_t count);
void storm_cache_done(struct storm *s, size_t cache);
void storm_cache_drop(struct storm *s, size_t cache);
double storm_cache_look_up(struct storm *s, size_t cache, size_t index);
/* The pressure callback. */
size_t storm_give_up(size_t wanted_bytes, void *user);

/* ---- buffers of a size (buffers.c) ---- */

/* When a resize frees old buffers: without caching not at all. */
enum storm_frees storm_frees_draw(const struct storm *s, uint64_t *dice);
/* What a resize does. False: there is no memory. */
bool storm_buffers_make(struct storm *s, struct storm_buffers *b, size_t samples);
/* What a program makes before its first step, for one sample. */
bool storm_buffers_make_before(struct storm *s, struct storm_buffers *b);
/* They are there, with their contents, for so many samples. */
void storm_buffers_check(struct storm *s, const struct storm_buffers *b, size_t samples,
                         const char *where);
/* Bytes of those that are there. */
uint64_t storm_buffers_held(struct storm *s, const struct storm_buffers *b);
/* After a call that may have taken them back. */
void storm_buffers_find(struct storm *s, struct storm_buffers *b);
/* The resize of a map that has buffers of its own. */
rebatch_status storm_map_resize(size_t samples, void *user);

/* ---- another session on the pool (neighbour.c) ---- */

void storm_neighbour_open(struct storm *s);
void storm_neighbour_step(struct storm *s);
void storm_neighbour_close(struct storm *s);

/* ---- the pool's limit (limit.c) ---- */

void storm_limit_set(struct storm *s, size_t bytes);
/* Somebody lowers it, below what is reserved too, or lifts it: between steps, or in a callback. */
void storm_limit_move(struct storm *s);
/* No more is cached than it allows. */
void storm_limit_check(struct storm *s, const char *where);
/* When a step begins: buffers of before it that could be smaller do not exceed it. */
void storm_limit_check_buffers(struct storm *s);

/* ---- where limits come from (settings.c) ---- */

/* Gives the options to open the session with, so that those of the plan hold. */
rebatch_options storm_settings_set(struct storm *s);
void storm_settings_clear(struct storm *s);

/* ---- what must hold (checks.c) ---- */

/* Notes the first thing that is wrong. */
void storm_fail(struct storm *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
void storm_say(const struct storm *s, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Bytes that a block of so many has. */
size_t storm_rounded(size_t bytes);
/* Guarded state is what it should be, every pointer is a live block of its size with its contents,
 * and nothing else lives. `where` names the place. */
void storm_check_keep(struct storm *s, const struct storm_keep *should, double running,
                      const char *where);
void storm_check_memory(struct storm *s, const char *where);
/* What `keep` knows of is so much. */
uint64_t storm_held(struct storm *s, const char *where);
/* Blocks of before the step that a callback has freed stay untouched until it ends. */
void storm_check_waiting(struct storm *s, const char *where);
void storm_check_cut(struct storm *s, const rebatch_microbatch *mb);
void storm_check_numbers(struct storm *s, const struct storm_numbers *should, const char *where);
bool storm_same_bits(const double *a, const double *b, size_t count);

/* ---- a training (training.c) ---- */

/* What happened, all in all. */
#define STORM_COUNTS(X)                                                                            \
    X(trainings)                                                                                   \
    X(steps)                                                                                       \
    X(ok)                                                                                          \
    X(exhausted)                                                                                   \
    X(torn)                                                                                        \
    X(own)                                                                                         \
    X(ooms)                                                                                        \
    X(dirty_ooms)                                                                                  \
    X(undone)                                                                                      \
    X(shrunk)                                                                                      \
    X(grown)                                                                                       \
    X(growths_failed)                                                                              \
    X(lightened)                                                                                   \
    X(pressed)                                                                                     \
    X(probes)                                                                                      \
    X(checks)                                                                                      \
    X(maps)                                                                                        \
    X(resized)                                                                                     \
    X(beside)                                                                                      \
    X(recovery_steps)

struct storm_counts {
#define STORM_COUNT_(name) uint64_t name;
    STORM_COUNTS(STORM_COUNT_)
#undef STORM_COUNT_
};

/* Runs the training of a seed. `failure` has room for 512 bytes.
 * @return true when all held. */
bool storm_run(uint64_t seed, bool is_verbose, struct storm_counts *counts, char *failure);

#endif
