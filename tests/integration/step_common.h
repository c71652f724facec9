/* A scripted training step: it logs what is asked of it, marks the samples that count, uses memory,
 * and fails on order. And the rig that it runs on: host device, fault device, session.
 * Must not know more of the library than its public headers say. */
#ifndef STEP_COMMON_H
#define STEP_COMMON_H

#include "fault/fault_device.h"
#include "rig.h"

#define SCRIPT_SAMPLES 512
#define SCRIPT_CALLS 4096
#define SCRIPT_FAULTS 8
#define SCRIPT_PARAMETERS 8
#define SCRIPT_TRACE_BYTES 8192
#define SCRIPT_FOREVER UINT32_MAX
/* More than any device of these tests has: no stage of the pool's search can serve it. */
#define SCRIPT_IMPOSSIBLE_BYTES ((size_t)1 << 40)
/* A status that is the script's own. */
#define SCRIPT_STATUS ((rebatch_status)(REBATCH_E_USER + 7))

enum script_callback {
    SCRIPT_ZERO,
    SCRIPT_FORWARD,
    SCRIPT_UPDATE,
    SCRIPT_LIGHTEN,
    SCRIPT_CALLBACKS
};

enum script_when {
    SCRIPT_BEFORE, /* nothing was changed yet */
    SCRIPT_WHILE   /* half of the change was made */
};

enum script_manner {
    SCRIPT_RETURN,     /* answers REBATCH_OOM, as code does that got it from CUDA */
    SCRIPT_POOL,       /* passes up what the pool answers to a request that cannot fit */
    SCRIPT_ESCAPE,     /* rebatch_escape() with REBATCH_OOM, from depth 3 */
    SCRIPT_SWALLOW,    /* answers REBATCH_OK and leaves an OOM in the device's last error */
    SCRIPT_OWN,        /* answers SCRIPT_STATUS */
    SCRIPT_OWN_ESCAPE, /* rebatch_escape() with SCRIPT_STATUS, from depth 3 */
    SCRIPT_LOST        /* answers REBATCH_OOM when in truth the device is lost */
};

/* An order to fail. Calls are counted from the beginning of the rig's step. */
struct script_fault {
    enum script_callback callback;
    uint32_t nth;     /* the call of that callback that fails, from 1 */
    uint32_t times;   /* so many in a row; SCRIPT_FOREVER */
    size_t more_than; /* only calls with more samples than this count */
    enum script_when when;
    enum script_manner manner;
    uint32_t seen;
};

struct script_call {
    enum script_callback callback;
    size_t first, count; /* of SCRIPT_FORWARD */
    uint32_t attempt;
    uint64_t step;
    unsigned level;        /* of SCRIPT_LIGHTEN */
    rebatch_status answer; /* REBATCH_OOM also for one that was swallowed */
    bool mutated;          /* rebatch_mutating() was called */
};

struct script {
    rebatch *rb;
    rebatch_device *device; /* the fault device */
    rebatch_stream stream;  /* the session's */
    size_t batch;           /* of the step that runs */
    bool is_probed;         /* a probe runs, no step */

    /* How it behaves. */
    bool declares; /* calls rebatch_mutating() */
    bool reserves; /* reserves late_bytes before that */
    size_t zero_bytes, update_bytes;
    size_t base_bytes, sample_bytes; /* of forward_backward: base + count * sample; the latter
                                        halves with each lighten level */
    size_t late_bytes;               /* of forward_backward, allocated while accumulating */
    unsigned lighten_levels;         /* how many there are; 0: no callback */
    const size_t *lengths;           /* of the samples; NULL: each is 1, and the step has no cost */
    struct script_fault faults[SCRIPT_FAULTS];
    size_t fault_count;
    /* Called first in every callback; what it answers other than REBATCH_OK is passed up. */
    rebatch_status (*inside)(struct script *s, enum script_callback callback,
                             const rebatch_microbatch *mb);
    void *inside_user;

    /* Accumulators and parameters. */
    uint32_t marks[SCRIPT_SAMPLES];         /* how often each sample is in the accumulators */
    double weight;                          /* sum of their weights */
    double loss;                            /* a sum that shows the order of the samples */
    uint32_t parameters[SCRIPT_PARAMETERS]; /* how often each was updated */
    unsigned level;

    /* What happened in the step. */
    bool whole_at_update; /* every sample was in the accumulators once when the update ran */
    uint32_t updates;     /* that were applied to their end */
    uint32_t tries[SCRIPT_SAMPLES]; /* attempts that had this sample */
    struct script_call calls[SCRIPT_CALLS];
    size_t call_count;
    char trace[SCRIPT_TRACE_BYTES];
};

#define RIG_EVENTS 256

struct rig {
    rebatch_device *host, *device; /* the latter is a fault device on the former */
    rebatch *rb;
    rebatch_options options;        /* with which it was opened */
    bool in_place;                  /* steps are loops here, and nothing is learned */
    bool learned[SCRIPT_CALLBACKS]; /* a callback succeeded that had called rebatch_mutating() */
    struct script script;
    rebatch_step_ops ops;
    rebatch_step_report report; /* of the last rig_step() */
    rebatch_event events[RIG_EVENTS];
    size_t event_count;
    uint64_t steps; /* that succeeded */
    /* Another cost than the script's; NULL: that. */
    uint64_t (*cost)(size_t first, size_t count, void *user);
    char text[SCRIPT_TRACE_BYTES];
};

/* The order to fail the n-th call of a callback once; the rest can be set through the result. */
struct script_fault *script_fail(struct script *s, enum script_callback callback, uint32_t nth,
                                 enum script_when when, enum script_manner manner);
/* Calls of one callback in this step. */
size_t script_calls(const struct script *s, enum script_callback callback);
/* Whether each of `batch` samples is in the accumulators once, with weight 1/batch, in order. */
bool script_is_whole(const struct script *s, size_t batch);
/* Whether the accumulators hold the samples [0, end) once and no others. */
bool script_holds(const struct script *s, size_t end);
/* The calls of this step as "z f0+16 f16+16! f16+8~1 l1 u": zero_grad, forward_backward of first +
 * count, lighten of a level, optimizer_step; ! for one that failed, ~n for samples that were tried
 * n times before. */
const char *script_trace(struct script *s);
/* Adds to a text of limited size. */
void script_append(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Lets the next `times` device calls of the kinds in `calls` fail with `status`. */
void script_arm(const struct script *s, uint32_t calls, uint64_t times, rebatch_status status);
/* After an update that was torn: the parameters as they were before. */
void script_restore(struct script *s);
/* The callbacks, for a user pointer to a script; they declare. Without a cost. */
rebatch_step_ops script_ops(void);
uint64_t script_cost(size_t first, size_t count, void *user);
/* Begins such a function. */
#define INSIDE(name)                                                                               \
    static rebatch_status name(__attribute__((unused)) struct script *s,                           \
                               __attribute__((unused)) enum script_callback callback,              \
                               __attribute__((unused)) const rebatch_microbatch *mb)
/* What is called first in every callback. */
void script_inside(struct script *s,
                   rebatch_status (*inside)(struct script *s, enum script_callback callback,
                                            const rebatch_microbatch *mb),
                   void *user);
/* splitmix64 (Steele, Lea, Flood 2014). */
uint64_t script_random(uint64_t *state);
size_t below(uint64_t *random, size_t n);

/* A rig with `capacity_bytes` of memory and a script that declares. Events of every level are
 * collected, unless the options set a log level. */
void rig_open(struct rig *rig, size_t capacity_bytes, const rebatch_options *options);
/* The same with a stream of its own, which rig_close() destroys. */
void rig_open_on_stream(struct rig *rig, size_t capacity_bytes, const rebatch_options *options);
/* Closes everything, and sees that the device got all of its memory back. */
void rig_close(struct rig *rig);
/* One rebatch_step(). What holds of every step whatever happens in it is checked here: the order of
 * the calls, by the contract's table; the report; that every sample counted once; that nothing
 * leaked. */
rebatch_status rig_step(struct rig *rig, size_t batch);
/* One that ends with `status`, and whose calls are those of the trace (script_trace()). */
#define STEP(rig, batch, status, trace)                                                            \
    do {                                                                                           \
        cr_assert_eq(rig_step(rig, batch), status, "%s", rebatch_last_error());                    \
        cr_assert_str_eq(script_trace(&(rig)->script), trace);                                     \
    } while (0)
/* A session's first step, and what comes of it: a row of a table. Zero is an option's default, and
 * NULL or zero of what is expected is not looked at. Growth is off. */
struct rig_case {
    const char *what;
    size_t micro_start, micro_smallest, micro_largest;
    rebatch_on_oom on_oom;
    bool is_uncached, never_lightens;
    size_t capacity_bytes; /* 0: 64 MiB */
    size_t base_bytes, sample_bytes;
    unsigned lighten_levels;
    uint64_t device_ooms; /* so many requests to the device fail first */
    struct script_fault faults[2];
    size_t batch;

    rebatch_status status;
    const char *trace, *events;       /* script_trace(), rig_events() */
    const char *error;                /* a part of its text */
    size_t micro_before, micro_after; /* the next step's, for the same batch */
    unsigned lighten_level;
    const char *next_trace; /* of a second step without faults */
};
void rig_run_cases(const struct rig_case *cases, size_t count);
#define RIG_RUN_CASES(cases) rig_run_cases((cases), sizeof(cases) / sizeof *(cases))

/* The events of the last step as "SHRINK(16->8) LIGHTEN(l0->l1) STEP": with the micro-batch or the
 * level where it changed. */
const char *rig_events(struct rig *rig);
/* The first event of a kind in the last step; NULL when there was none. */
const rebatch_event *rig_event(const struct rig *rig, rebatch_event_kind kind);
/* Bytes that live in the pool, and that were taken from the device. */
uint64_t rig_live_bytes(const struct rig *rig);
size_t rig_used_bytes(const struct rig *rig);
/* Gives cached memory back and sets the host device's cap: a co-tenant comes or goes. */
void rig_set_capacity(struct rig *rig, size_t capacity_bytes);
/* Lets the next `times` device calls of the kinds in `calls` fail with `status`; 0 times: none. */
void rig_fail_device(struct rig *rig, uint32_t calls, uint64_t times, rebatch_status status);

#endif
