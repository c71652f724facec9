/* The parts of `rebatch replay`: reading a trace, running it against a pool on a dry device, and
 * printing what came of it. Must not know the library's inside: public headers only. */
#ifndef RBI_CLI_REPLAY_H
#define RBI_CLI_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#include "rebatch/pool.h"

/* ---- the command (replay_command.c) ---- */

/* Both take what follows the command's name and give the exit status. */
int rbi_replay_main(int count, char **arguments);
int rbi_replay_help(int count, char **arguments);

/* ---- settings (replay_settings.c) ---- */

struct rbi_replay_settings {
    size_t capacity_bytes; /* of the device; REBATCH_UNLIMITED: whatever the trace takes */
    size_t page_bytes;
    bool is_cuda; /* on a GPU's memory rather than a dry device */
    rebatch_pool_options pool;
    unsigned repeat;          /* timed samples a trace */
    bool smallest;            /* look for the smallest capacity too */
    const char *snapshot;     /* the file, which ends in .pickle or .csv; NULL: none */
    uint32_t snapshot_events; /* how many it has at most */
    bool json;
    bool help;
    size_t path_count; /* of `paths`, which are arguments */
    char **paths;
};
/* Reads the arguments; moves the paths to the front of them. False, with the mistake said on
 * stderr, when they are wrong. */
bool rbi_replay_settings_read(struct rbi_replay_settings *settings, int count, char **arguments);
/* The device to run on; owned by the caller. */
rebatch_status rbi_replay_open_device(rebatch_device **out,
                                      const struct rbi_replay_settings *settings);
/* Whether there is something before the ending too. */
bool rbi_replay_has_ending(const char *path, const char *ending);

/* ---- traces (replay_trace.c) ---- */

/* What a trace may have in use at once: 512 GiB in pages of 2 MiB, which is more than a device
 * has. A pool keeps a few bytes for each, so a line that asks for more costs a host its memory. */
#define RBI_REPLAY_PAGES_MOST 262144

enum rbi_replay_kind { RBI_REPLAY_ALLOC, RBI_REPLAY_FREE, RBI_REPLAY_USE };

/* One line of a trace. A block in use has a slot; a freed one's slot goes to the next. */
struct rbi_replay_op {
    uint64_t bytes; /* of an allocation */
    uint32_t slot;
    uint16_t stream; /* 0: the default stream */
    uint16_t kind;   /* enum rbi_replay_kind */
};

struct rbi_trace {
    const char *path;          /* borrowed */
    struct rbi_replay_op *ops; /* the file's, then a free for each block that it leaves in use */
    uint64_t *lines;           /* where the file's ops stand in it */
    size_t op_count;           /* in the file */
    size_t closed_count;       /* with the frees at the end: as many as there are allocations */
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
bool rbi_trace_read(struct rbi_trace *trace, const char *path, uint64_t page_bytes);
void rbi_trace_free(struct rbi_trace *trace);

/* ---- IDs of a trace (replay_ids.c) ---- */

struct rbi_replay_id {
    uint64_t id;
    uint64_t line; /* 0: an empty entry; else where it was allocated, or freed when not in use */
    uint64_t bytes;
    uint32_t slot;
    bool in_use;
};

/* Open addressing, linear probing, at most half full; an ID stays when it is freed, so that a
 * second free can be told from that of an unknown ID. */
struct rbi_replay_ids {
    struct rbi_replay_id *entries;
    size_t capacity; /* a power of two, or 0 */
    size_t used;
    uint64_t seed; /* another in every run: no file is written so that its IDs all collide */
};
/* The entry of an ID, an empty one when it is new; NULL when there is no memory for it. It is valid
 * until the next call. Whoever fills an empty one in adds 1 to `used`. */
struct rbi_replay_id *rbi_replay_ids_find(struct rbi_replay_ids *ids, uint64_t id);
void rbi_replay_ids_free(struct rbi_replay_ids *ids);

/* ---- running (replay_run.c) ---- */

struct rbi_replay_result {
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
bool rbi_replay_run(struct rbi_replay_result *result, const struct rbi_trace *trace,
                    const struct rbi_replay_settings *settings);

/* ---- printing (replay_print.c) ---- */

/* The head of the table; nothing with JSON. */
void rbi_replay_print_head(const struct rbi_replay_settings *settings);
/* A row of the table, or an object on a line of its own. */
void rbi_replay_print_result(const struct rbi_trace *trace, const struct rbi_replay_result *result,
                             const struct rbi_replay_settings *settings);

#endif
