/* What is known of the graphs of micro-batches (REBATCH_STEP_CAPTURED). */
#ifndef RBI_CAPTURED_H
#define RBI_CAPTURED_H

#include "device/device.h"
#include "rebatch/step.h"

enum rbi_graph_state {
    RBI_GRAPH_NONE,    /* micro-batches of the size run by themselves, and are counted */
    RBI_GRAPH_UNKNOWN, /* captured, and not compared yet */
    RBI_GRAPH_PROVED,
    RBI_GRAPH_REFUSED
};

/* Of micro-batches of one size. */
struct rbi_captured_size {
    size_t count; /* samples; 0: the entry is empty */
    enum rbi_graph_state state;
    rbi_graph graph;   /* NULL without one */
    uint64_t key;      /* of the batch, and of where what is watched lay, when it was captured */
    uint64_t step;     /* in which one ran without a graph for the last time */
    unsigned steps;    /* in which one did */
    size_t first;      /* sample with which it was captured */
    uint64_t last_use; /* by rbi_captured.uses */
};

#define RBI_CAPTURED_SIZES 2

struct rbi_captured {
    bool is_on; /* in the step that runs */
    rebatch_status (*forward_backward)(const rebatch_microbatch *mb, void *user);
    void *user;
    struct rbi_captured_size sizes[RBI_CAPTURED_SIZES];
    uint64_t uses;
    bool has_told; /* why there is no graph */
};

/* A step begins: what was captured of another function goes. */
void rbi_captured_begin_step(rebatch *rb);
/* forward_backward, or the replay of its graph. */
rebatch_status rbi_captured_run(rebatch *rb, const rebatch_microbatch *mb);
/* All graphs go: memory that they use may be taken back, or is. */
void rbi_captured_drop(rebatch *rb);

#endif
