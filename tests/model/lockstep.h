/* One rank's calls of rebatch_step() and rebatch_abandon_step() in lockstep, as the program sees
 * them: an automaton, written once. The model (lockstep.pml) takes each transition and no other,
 * and so does the library (tests/integration/lockstep_model.c). */
#ifndef TESTS_MODEL_LOCKSTEP_H
#define TESTS_MODEL_LOCKSTEP_H

#include "group.h"

/* What a rank is in the middle of. */
#define LOCKSTEP_STATES(X)                                                                         \
    GROUP_STATES(X)                                                                                \
    X(ZEROED)   /* zero_grad has run */                                                            \
    X(AGREED)   /* a vote on what comes next is over: the size, or that no samples are left */     \
    X(RUNS)     /* in a micro-batch: its collectives */                                            \
    X(GIVEN_UP) /* failed, and called the collectives of the micro-batch that were left */         \
    X(DECIDED)  /* the vote on the micro-batch is over: all accumulate it, or none */              \
    X(ENDED)    /* the end vote is over */

/* What happens: calls of the library, of the program's callbacks, and votes that came back. */
#define LOCKSTEP_EVENTS(X)                                                                         \
    GROUP_EVENTS(X)                                                                                \
    X(TOGETHER) /* all_reduce on a size, on a micro-batch, or on all of them */                    \
    X(GIVE_UP)  /* forward_backward, abandoned */

/* From a state, by an event, to a state. */
#define LOCKSTEP_TRANSITIONS(X)                                                                    \
    GROUP_TRANSITIONS(X)                                                                           \
    X(BEGUN, ZERO, ZEROED)                                                                         \
    X(BEGUN, TOGETHER, AGREED) /* it failed before zero_grad */                                    \
    X(ZEROED, ZERO, ZEROED)                                                                        \
    X(ZEROED, TOGETHER, AGREED)                                                                    \
    X(ZEROED, BREAK, BROKEN)                                                                       \
    X(AGREED, SAMPLES, RUNS)                                                                       \
    X(AGREED, GIVE_UP, GIVEN_UP) /* what was agreed cannot be run here */                          \
    X(AGREED, ZERO, ZEROED)      /* no samples were left, and one rank has to run all again */     \
    X(AGREED, TOGETHER, AGREED)  /* the same, and a rank has no way left to */                     \
    X(AGREED, VOTE, ENDED)                                                                         \
    X(AGREED, LOWEST, NAMED)                                                                       \
    X(AGREED, BREAK, BROKEN)                                                                       \
    X(RUNS, TOGETHER, DECIDED)                                                                     \
    X(RUNS, GIVE_UP, GIVEN_UP)                                                                     \
    X(RUNS, BREAK, BROKEN)                                                                         \
    X(GIVEN_UP, TOGETHER, DECIDED)                                                                 \
    X(GIVEN_UP, BREAK, BROKEN)                                                                     \
    X(DECIDED, SAMPLES, RUNS)                                                                      \
    X(DECIDED, GIVE_UP, GIVEN_UP) /* it could not accumulate, which the others hear of only now */ \
    X(DECIDED, ZERO, ZEROED)                                                                       \
    X(DECIDED, TOGETHER, AGREED)                                                                   \
    X(DECIDED, LOWEST, NAMED)                                                                      \
    X(DECIDED, BREAK, BROKEN)                                                                      \
    X(ENDED, UPDATE, UPDATES)                                                                      \
    X(ENDED, LOWEST, NAMED)                                                                        \
    X(ENDED, BREAK, BROKEN)

#endif
