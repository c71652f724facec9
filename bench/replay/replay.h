/* The parts of the replay of traces: reading a trace, running it against a pool on a dry device,
 * and printing what came of it. Must not know the library's inside: public headers only. */
#ifndef BENCH_REPLAY_H
#define BENCH_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#include "rebatch/pool.h"

/* ---- settings (settings.c) ---- */

struct replay_settings {
    size_t capacity_bytes; /* of the device; REBATCH_UNLIMITED: whatever the trace takes */
    size_t page_bytes;
    bool is_cuda; /* on a GPU's memory rather than a dry device */
    rebatch_pool_options pool;
    unsigned repeat;      /* timed samples a trace */
    bool smallest;        /* look for the smallest capacity too */
    const char *snapshot; /* how its files' names begin; NULL: none */
    bool json;
    bool help;
    size_t path_count; /* of `paths`, which are arguments */
    char **paths;
};
/* Reads the arguments of main(). False, with the mistake said on stderr, when they are wrong. */
bool replay_settings_read(struct replay_settings *settings, int count, char **arguments);

/* ---- traces (trace.c) ---- */

/* What a trace may have in use at once: 512 GiB in pages of 2 MiB, which is more than a device
 * has. A pool keeps a few bytes for each, so a line that asks for more costs a host its memory. */
#define REPLAY_PAGES_MOST 262144

enum replay_kind { REPLAY_ALLOC, REPLAY_FREE, REPLAY_USE };

/* One line of a trace. A block in use has a slot; a freed one's slot goes to the next. */
struct replay_op {
    uint64_t bytes; /* of an allocation */
    uint32_t slot;
    uint16_t stream; /* 0: the default stream */
    uint16_t kind;   /* enum replay_kind */
};

struct trace {
    const char *path;      /* borrowed */
    struct replay_op *ops; /* the file's, then a free for each block that it leaves in use */
    uint64_t *lines;       /* where the file's ops stand in it */
    size_t op_count;       /* in the file */
    size_t closed_count;   /* with the frees at the end: as many as there are allocations */
    size_t allocations;
    uint32_t slots;                /* most blocks in use at once */
    uint32_t streams;              /* different ones, the default stream always among them */
    uint64_t peak_requested_bytes; /* most asked for at once */
    uint64_t peak_live_bytes;      /* the same, each block rounded up to REBATCH_POOL_UNIT_BYTES */
    size_t peak_op;                /* the allocation that first reached peak_live_bytes */
    uint64_t torch_allocated_bytes, torch_reserved_bytes; /* PyTorch's peaks; 0: it does not say */
};
/* Reads gzip or plain text, for a device with pages of `page_bytes`. False, with file, line
 * and what was expected on stderr, when it cannot. */
bool trace_read(struct trace *trace, const char *path, uint64_t page_bytes);
void trace_free(struct trace *trace);

/* ---- IDs of a trace (ids.c) ---- */

struct replay_id {
    uint64_t id;
    uint64_t line; /* 0: an empty entry; else where it was allocated, or freed when not in use */
    uint64_t bytes;
    uint32_t slot;
    bool in_use;
};

/* Open addressing, linear probing, at most half full; an ID stays when it is freed, so that a
 * second free can be told from that of an unknown ID. */
struct replay_ids {
    struct replay_id *entries;
    size_t capacity; /* a power of two, or 0 */
    size_t used;
};
/* The entry of an ID, an empty one when it is new; NULL when there is no memory for it. It is valid
 * until the next call. Whoever fills an empty one in adds 1 to `used`. */
struct replay_id *replay_ids_find(struct replay_ids *ids, uint64_t id);
void replay_ids_free(struct replay_ids *ids);

/* ---- running (run.c) ---- */

struct replay_result {
    uint64_t pool_live_bytes; /* the pool's own peak of live bytes */
    uint64_t peak_reserved_bytes;
    uint64_t device_calls;    /* for memory, from the pool's creation to the end of the trace */
    rebatch_pool_stats first; /* of the pool when the trace ended for the first time */
    uint64_t third_driver_ns; /* in the driver's calls of the third pass on a pool */
    uint64_t warm_driver_ns;  /* in the driver's calls of a pass on a warm pool */
    uint64_t largest_hole_bytes;
    uint64_t smallest_capacity_bytes; /* 0: not looked for */
    double ns_per_pair;
};
/* False, with what went wrong on stderr, when the trace does not run. */
bool replay_run(struct replay_result *result, const struct trace *trace,
                const struct replay_settings *settings);

/* ---- printing (print.c) ---- */

/* The head of the table; nothing with JSON. */
void replay_print_head(const struct replay_settings *settings);
/* A row of the table, or an object on a line of its own. */
void replay_print_result(const struct trace *trace, const struct replay_result *result,
                         const struct replay_settings *settings);

#endif
