/* What the probe_* tests share: a step whose memory is a list of functions of the micro-batch.
 * Must not know more of the library than its public headers say. */
#ifndef PROBE_COMMON_H
#define PROBE_COMMON_H

#include "rebatch/rebatch.h"
#include "rig.h"

#define LOAD_ITEMS 24

/* Options of a probe with some members set: &PROBE(.max_trials = 3). */
#define PROBE(...)                                                                                 \
    ((rebatch_probe_options){.struct_size = sizeof(rebatch_probe_options), __VA_ARGS__})

/* Bytes are fixed + each * count, rounded up to `unit` (0: not). */
struct load_item {
    size_t fixed, each, unit;
    bool is_short; /* freed at once, else in the backward pass */
    bool is_lazy;  /* made by the first micro-batch, fixed, and kept */
    bool is_late;  /* allocated in the backward pass, after a reserve */
};

/* A step, and what was asked of it. */
struct load {
    rebatch *rb;
    struct load_item items[LOAD_ITEMS];
    size_t item_count;
    size_t moments_bytes; /* made by the first update */
    size_t chunk;         /* samples an extra allocation serves; 0: none */
    size_t bit_bytes;     /* one for each bit that the size has, of so much a sample; 0: none */
    size_t wall;          /* micro-batches of more samples answer REBATCH_OOM; 0: none */

    void *lazy[LOAD_ITEMS];
    void *moments;
    double accumulated; /* zero after zero_grad */
    uint64_t random;    /* moves on with every micro-batch */
    uint32_t zeroed, ran, updated;
    uint32_t probing; /* of `ran`, with probing set */
    size_t sizes[64]; /* of the first micro-batches */
    rebatch_status answer;
    uint32_t answer_at; /* the run that answers it, from 1; 0: none */
};

rebatch_step_ops load_ops(void);

/* A session on a host device of its own. */
struct bed {
    rebatch_device *device;
    rebatch *rb;
    struct load load;
    rebatch_step_ops ops;
    rebatch_probe_report report;
};
void bed_open(struct bed *bed, size_t capacity_bytes, const rebatch_options *options);
/* Sees that the device got its memory back. */
void bed_close(struct bed *bed);
/* A bed with a transformer's look: fixed parts, activations, short workspaces. */
void bed_open_typical(struct bed *bed, size_t capacity_bytes, const rebatch_options *options);
rebatch_status bed_probe(struct bed *bed, size_t batch, const rebatch_probe_options *options);
/* The largest micro-batch with which whole steps run, the second without an OOM, by trying all,
 * each after a step of one sample that makes what is made once; 0 when none does. For a load as it
 * stands before the first step. */
size_t true_largest(const struct bed *bed, size_t capacity_bytes, const rebatch_options *options,
                    size_t batch);
uint64_t bed_live_bytes(const struct bed *bed);

#endif
