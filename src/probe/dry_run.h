/* A copy of a pool over a dry device, and micro-batches run on it. */
#ifndef RBI_PROBE_DRY_H
#define RBI_PROBE_DRY_H

#include "probe/probe.h"

/* Node numbers count from 1; 0 is none. */
struct rbi_dry_list {
    uint32_t oldest, newest;
};

struct rbi_dry_node {
    void *address;
    uint32_t older, newer;
};

struct rbi_dry {
    rebatch_device *device;
    rebatch_pool *pool;
    const struct rbi_model *model;
    struct rbi_dry_node *nodes; /* the first stands for none */
    uint32_t node_count, node_room;
    uint32_t spare;             /* a list by `newer` */
    struct rbi_dry_list *made;  /* of each slot of the model, by the micro-batch that runs */
    struct rbi_dry_list *kept;  /* and by the one before */
    struct rbi_dry_list *freed; /* of those, by the one that runs */
    uint64_t failing_bytes;     /* the request that met an OOM */
};

/* What lives in `pool` lives in the copy, at the same addresses; nothing is known as kept.
 *  @return REBATCH_OK, REBATCH_E_HOST_OOM; close it in any case */
rebatch_status rbi_dry_open(struct rbi_dry *dry, const struct rbi_model *model, rebatch_pool *pool);
void rbi_dry_close(struct rbi_dry *dry);
/* The last micro-batch has kept this. */
rebatch_status rbi_dry_keep(struct rbi_dry *dry, uint32_t slot, void *address);
/* Takes of the device what others will hold of it for `count` samples. */
rebatch_status rbi_dry_hold_outside(const struct rbi_dry *dry, size_t count);
/* What they will hold more than they do now, beside `pool`. */
rebatch_status rbi_outside_growth(size_t *out, const struct rbi_model *model, rebatch_pool *pool,
                                  size_t count);
/* A micro-batch as the model has it. After REBATCH_OOM it is taken back, as a step does it. */
rebatch_status rbi_dry_run(struct rbi_dry *dry, size_t count);
/* The first trial as it was: what it has kept is kept. */
rebatch_status rbi_dry_run_first(struct rbi_dry *dry, const struct rbi_trace *first);

#endif
