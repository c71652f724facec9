/* Several ranks as threads, each with a session on a device of its own, and a step whose sums are
 * exact. Their all-reduce is a meeting of the threads.
 * Must not know more of the library than its public headers say. */
#ifndef RANK_THREADS_H
#define RANK_THREADS_H

#include <pthread.h>

#include "rebatch/rebatch.h"

#define RANK_SUMS 8
#define RANK_STATUS ((rebatch_status)(REBATCH_E_USER + 9))

/* Where the threads meet: an all-reduce is over when all have come. */
struct meeting {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t size, arrived;
    uint32_t absent; /* that will not come: for these alone time runs */
    uint64_t round;
    bool *has_come;           /* to this round */
    uint64_t words[64];       /* of this round so far */
    uint64_t result[64];      /* of the round before */
    size_t count;             /* the first one's arguments */
    int kind;                 /* a reduction, or MEETING_PROGRAM */
    bool is_over;             /* it has ended for all: somebody did not come */
    bool was_mismatched;      /* ranks were in different collectives */
    uint64_t votes, programs; /* rounds of both kinds */
    uint64_t vote_words;
    uint32_t aborts;
};
#define MEETING_PROGRAM 3 /* a sum of the program's own */

/* It ends for all, as when the connections of a rank are closed. */
void meeting_leave(struct meeting *m);
rebatch_status meeting_reduce(struct meeting *m, uint32_t rank, uint64_t *words, size_t count,
                              int kind, uint64_t timeout_ms);

enum rank_place {
    RANK_ZERO,
    RANK_FORWARD,
    RANK_ACCUMULATED, /* in lockstep */
    RANK_REDUCE,
    RANK_ABANDONED,
    RANK_UPDATE
};

struct ranks;

struct rank {
    struct ranks *ranks;
    uint32_t number;
    rebatch_device *device;
    rebatch *rb;
    rebatch_step_ops ops;
    size_t batch; /* of this rank */
    /* Instead of rebatch_step(); NULL: that. */
    rebatch_status (*act)(struct rank *r);
    /* Instead of the group's all-reduce, which is meeting_reduce(); NULL: that. */
    rebatch_status (*vote)(struct rank *r, uint64_t *words, size_t count,
                           rebatch_reduction reduction, uint64_t timeout_ms);
    /* Called in every callback, before it changes anything. */
    rebatch_status (*inside)(struct rank *r, enum rank_place place);
    void *inside_user;
    uint64_t fail_request; /* the request of the step that finds no memory, from 1; 0: none */
    bool fails_for_ever;   /* so do all after it */
    size_t unit_bytes;     /* that a sample needs */
    size_t limit_bytes;    /* of the pool, when no request fails; 0: none */

    uint64_t first;           /* of its samples in the whole batch */
    uint64_t sums[RANK_SUMS]; /* the accumulators */
    uint64_t parameters[RANK_SUMS];
    uint64_t others;  /* micro-batches in lockstep in which a rank ran other samples */
    uint32_t calls;   /* collectives of the micro-batch in lockstep, so far */
    uint64_t weights; /* samples by mb->batch != the whole batch, or rank_batch != the rank's */

    uint64_t ooms; /* of all steps */

    /* of the last step */
    uint64_t requests;
    uint32_t updates, reduces, abandons;
    rebatch_status status;
    char error[512];
    rebatch_step_report report;
};

struct ranks {
    struct meeting meeting;
    uint32_t size;
    struct rank *rank;
    rebatch_status status; /* of ranks_open() */
};

/* `size` sessions, with batches of 6, 9, 12, ... samples; in lockstep of 12, with two collectives
 * in each micro-batch and none after them; on dry devices where `capacity_bytes` is
 * given, else on host devices of 4 MiB. Options may be NULL. False: one did not open. */
bool ranks_open(struct ranks *ranks, uint32_t size, const rebatch_options *options,
                size_t capacity_bytes);
void ranks_close(struct ranks *ranks);
/* Each rank whose number is not `absent` runs one step, in a thread of its own. */
void ranks_step_without(struct ranks *ranks, uint32_t absent);
void ranks_step(struct ranks *ranks);
/* One rank's step, in the thread that calls. */
void rank_step(struct rank *r);
/* What the parameters are after `steps` steps of all samples as one batch. */
void ranks_expected(uint64_t out[RANK_SUMS], const struct ranks *ranks, uint64_t steps);
rebatch_group rank_group(struct rank *r);
/* Whether every rank has the expected parameters, and no collective was mismatched. */
bool ranks_have_stepped(const struct ranks *ranks, uint64_t steps);

#endif
