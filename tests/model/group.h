/* What a rank goes through in each step, whichever way its micro-batches run: it begins, hears in
 * votes who failed and of what, updates, and owes what failed after the last vote. The automata of
 * rank.h and lockstep.h are these states, events and transitions and their own. */
#ifndef TESTS_MODEL_GROUP_H
#define TESTS_MODEL_GROUP_H

/* What a rank is in the middle of. */
#define GROUP_STATES(X)                                                                            \
    X(IDLE)     /* between two steps */                                                            \
    X(BEGINS)   /* in rebatch_step(), before the begin vote */                                     \
    X(ABANDONS) /* in rebatch_abandon_step(), before the begin vote */                             \
    X(BEGUN)    /* the begin vote is over */                                                       \
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
#define GROUP_EVENTS(X)                                                                            \
    X(STEP)     /* rebatch_step() */                                                               \
    X(ABANDON)  /* rebatch_abandon_step() */                                                       \
    X(VOTE)     /* all_reduce with how many failed */                                              \
    X(COMPARE)  /* all_reduce with what the ranks disagree on */                                   \
    X(LOWEST)   /* all_reduce with the lowest rank that did */                                     \
    X(SENTENCE) /* all_reduce with its sentence */                                                 \
    X(BREAK)    /* an all_reduce that failed */                                                    \
    X(ZERO)     /* zero_grad */                                                                    \
    X(SAMPLES)  /* forward_backward */                                                             \
    X(UPDATE)   /* optimizer_step */                                                               \
    X(DONE)     /* REBATCH_OK is returned */                                                       \
    X(PEER)     /* REBATCH_E_PEER is returned */                                                   \
    X(FAIL)     /* any other status is returned */

/* From a state, by an event, to a state. */
#define GROUP_TRANSITIONS(X)                                                                       \
    X(IDLE, STEP, BEGINS)                                                                          \
    X(IDLE, ABANDON, ABANDONS)                                                                     \
    X(BEGINS, VOTE, BEGUN)                                                                         \
    X(BEGINS, BREAK, BROKEN)                                                                       \
    X(ABANDONS, VOTE, FAILING)                                                                     \
    X(ABANDONS, BREAK, BROKEN)                                                                     \
    X(BEGUN, LOWEST, NAMED)                                                                        \
    X(BEGUN, COMPARE, COMPARED)                                                                    \
    X(BEGUN, BREAK, BROKEN)                                                                        \
    X(COMPARED, PEER, IDLE)                                                                        \
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
