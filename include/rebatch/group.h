/** @file group.h
 *  Several ranks that train one model together.
 *
 *  The program supplies the communication as a table of functions, so the library links none:
 *  rebatch/mpi.h and rebatch/nccl.h have ready ones. docs/distributed.md has the patterns.
 *
 *  Words: a rank is one process of the training, or one thread, with a device and a session of its
 *  own; a vote is a sum of a few words over all ranks. */
#ifndef REBATCH_GROUP_H
#define REBATCH_GROUP_H

#include "rebatch/status.h"

/** The most words of one call of rebatch_group.all_reduce. */
#define REBATCH_GROUP_WORDS 32

/** What rebatch_group.all_reduce computes of each word. */
typedef enum rebatch_reduction {
    REBATCH_SUM = 0, /**< the sum modulo 2^64 */
    REBATCH_MIN = 1, /**< the smallest, as unsigned numbers */
    REBATCH_MAX = 2  /**< the largest, as unsigned numbers */
} rebatch_reduction;

/** The ranks that train one model, and how they vote. All ranks call all_reduce in the same order,
 *  with the same arguments but for the words. rebatch calls it in the thread of the step, and only
 *  from rebatch_step(), rebatch_abandon_step() and rebatch_mutating_together(): two times in a step
 *  that succeeds; in lockstep four times, and once for each micro-batch. */
typedef struct rebatch_group {
    size_t struct_size; /**< sizeof(rebatch_group) */
    uint32_t rank;      /**< of this process, from 0 */
    uint32_t size;      /**< number of ranks, 1 to 131072 */
    /** Replace each of `count` words by its reduction over all ranks. `count` is from 1 to
     *  REBATCH_GROUP_WORDS. The call returns within `timeout_ms` milliseconds, also when another
     *  rank never calls. It needs no device memory, and must not call the session.
     *  @return REBATCH_OK; REBATCH_E_PEER when a rank did not come or the connection is lost. After
     *          any failure rebatch does not call it again. The message may name the rank
     *          (rebatch_group.missing does so too) */
    rebatch_status (*all_reduce)(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user);
    /** Optional. After all_reduce has failed: the rank that did not come; `size`: not known. */
    uint32_t (*missing)(void *user);
    /** Optional. After all_reduce has failed: end the collectives that other ranks or this one wait
     *  in, so that they fail there. Called once. */
    void (*abort)(void *user);
    void *user; /**< passed to the functions; borrowed until rebatch_close() */
} rebatch_group;
/** A group without functions: set rank, size and all_reduce. */
#define REBATCH_GROUP_INIT                                                                         \
    {                                                                                              \
        sizeof(rebatch_group), 0, 0, NULL, NULL, NULL, NULL                                        \
    }

#endif
