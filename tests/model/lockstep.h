/* One rank's calls of rebatch_step() and rebatch_abandon_step() in lockstep, as the program sees
 * them: an automaton, written once. The model (lockstep.pml) takes each transition and no other,
 * and so does the library (tests/integration/lockstep_model.c). */
#ifndef TESTS_MODEL_LOCKSTEP_H
#define TESTS_MODEL_LOCKSTEP_H

/* What a rank is in the middle of. */
#define LOCKSTEP_STATES(X)                                                                         \
    X(IDLE)     /* between two steps */                                                            \
    X(BEGINS)   /* in rebatch_step(), before the begin vote */                                     \
    X(ABANDONS) /* in rebatch_abandon_step(), before the begin vote */                             \
    X(BEGUN)    /* the begin vote is over */                                                       \
    X(ZEROED)   /* zero_grad has run */                                                            \
    X(AGREED)   /* a vote on what comes next is over: the size, or that no samples are left */     \
    X(RUNS)     /* in a micro-batch: its collectives */                                            \
    X(GIVEN_UP) /* failed, and called the collectives of the micro-batch that were left */         \
    X(SETTLED)  /* the vote on the micro-batch is over: all accumulate it, or none */              \
    X(ENDED)    /* the end vote is over */                                                         \
    X(COMPARED) /* the ranks disagree, and each knows on what */                                   \
    X(FAILING)  /* a vote is over to which this rank said that it failed */                        \
    X(NAMED)    /* the lowest rank that failed is known */                                         \
    X(TOLD)     /* and its sentence */                                                             \
    X(UPDATES)  /* in the update */                                                                \
    X(OWES)     /* its update failed after the vote: between two steps */                          \
    X(OWING)    /* the same, in the next step, before the begin vote */                            \
    X(BROKEN)   /* a vote failed */                                                                \
    X(LOST)     /* so no step votes again: between two steps */                                    \
    X(REFUSED)  /* the same, in a step */

/* What happens: calls of the library, of the program's callbacks, and votes that came back. */
#define LOCKSTEP_EVENTS(X)                                                                         \
    X(STEP)     /* rebatch_step() */                                                               \
    X(ABANDON)  /* rebatch_abandon_step() */                                                       \
    X(VOTE)     /* all_reduce with how many failed */                                              \
    X(TOGETHER) /* all_reduce on a size, on a micro-batch, or on all of them */                    \
    X(COMPARE)  /* all_reduce with what the ranks disagree on */                                   \
    X(LOWEST)   /* all_reduce with the lowest rank that did */                                     \
    X(SENTENCE) /* all_reduce with its sentence */                                                 \
    X(BREAK)    /* an all_reduce that failed */                                                    \
    X(ZERO)     /* zero_grad */                                                                    \
    X(SAMPLES)  /* forward_backward */                                                             \
    X(GIVE_UP)  /* forward_backward, abandoned */                                                  \
    X(UPDATE)   /* optimizer_step */                                                               \
    X(DONE)     /* REBATCH_OK is returned */                                                       \
    X(PEER)     /* REBATCH_E_PEER is returned */                                                   \
    X(FAIL)     /* any other status is returned */

/* From a state, by an event, to a state. */
#define LOCKSTEP_TRANSITIONS(X)                                                                    \
    X(IDLE, STEP, BEGINS)                                                                          \
    X(IDLE, ABANDON, ABANDONS)                                                                     \
    X(BEGINS, VOTE, BEGUN)                                                                         \
    X(BEGINS, BREAK, BROKEN)                                                                       \
    X(ABANDONS, VOTE, FAILING)                                                                     \
    X(ABANDONS, BREAK, BROKEN)                                                                     \
    X(BEGUN, ZERO, ZEROED)                                                                         \
    X(BEGUN, TOGETHER, AGREED) /* it failed before zero_grad */                                    \
    X(BEGUN, LOWEST, NAMED)                                                                        \
    X(BEGUN, COMPARE, COMPARED)                                                                    \
    X(BEGUN, BREAK, BROKEN)                                                                        \
    X(COMPARED, PEER, IDLE)                                                                        \
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
    X(RUNS, TOGETHER, SETTLED)                                                                     \
    X(RUNS, GIVE_UP, GIVEN_UP)                                                                     \
    X(RUNS, BREAK, BROKEN)                                                                         \
    X(GIVEN_UP, TOGETHER, SETTLED)                                                                 \
    X(GIVEN_UP, BREAK, BROKEN)                                                                     \
    X(SETTLED, SAMPLES, RUNS)                                                                      \
    X(SETTLED, GIVE_UP, GIVEN_UP) /* it could not accumulate, which the others hear of only now */ \
    X(SETTLED, ZERO, ZEROED)                                                                       \
    X(SETTLED, TOGETHER, AGREED)                                                                   \
    X(SETTLED, LOWEST, NAMED)                                                                      \
    X(SETTLED, BREAK, BROKEN)                                                                      \
    X(ENDED, UPDATE, UPDATES)                                                                      \
    X(ENDED, LOWEST, NAMED)                                                                        \
    X(ENDED, BREAK, BROKEN)                                                                        \
    X(UPDATES, UPDATE, UPDATES)                                                                    \
    X(UPDATES, DONE, IDLE)                                                                         \
    X(UPDATES, FAIL, OWES)                                                                         \
    X(FAILING, LOWEST, NAMED)                                                                      \
    X(FAILING, BREAK, BROKEN)                                                                      \
    X(NAMED, SENTENCE, TOLD)                                                                       \
    X(NAMED, BREAK, BROKEN)                                                                        \
    X(TOLD, DONE, IDLE)                                                                            \
    X(TOLD, PEER, IDLE)                                                                            \
    X(TOLD, FAIL, IDLE)                                                                            \
    X(OWES, STEP, OWING)                                                                           \
    X(OWES, ABANDON, OWING)                                                                        \
    X(OWING, VOTE, FAILING)                                                                        \
    X(OWING, BREAK, BROKEN)                                                                        \
    X(BROKEN, PEER, LOST)                                                                          \
    X(BROKEN, FAIL, LOST)                                                                          \
    X(LOST, STEP, REFUSED)                                                                         \
    X(LOST, ABANDON, REFUSED)                                                                      \
    X(REFUSED, PEER, LOST)                                                                         \
    X(REFUSED, FAIL, LOST)

#endif
