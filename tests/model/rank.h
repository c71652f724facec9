/* One rank's calls of rebatch_step() and rebatch_abandon_step(), as the program sees them: an
 * automaton, written once. The model (ranks.pml) takes each transition and no other, and so does
 * the library (tests/integration/ranks_model.c). */
#ifndef TESTS_MODEL_RANK_H
#define TESTS_MODEL_RANK_H

/* What a rank is in the middle of. */
#define RANK_STATES(X)                                                                             \
    X(IDLE)      /* between two steps */                                                           \
    X(BEGINS)    /* in rebatch_step(), before the begin vote */                                    \
    X(ABANDONS)  /* in rebatch_abandon_step(), before the begin vote */                            \
    X(BEGUN)     /* the begin vote is over */                                                      \
    X(WORKS)     /* on its own samples: no collective */                                           \
    X(REDUCES)   /* sums the accumulators over all ranks */                                        \
    X(ABANDONED) /* failed, and took part in the others' reduction */                              \
    X(VOTED)     /* the end vote is over */                                                        \
    X(COMPARED)  /* the ranks disagree, and each knows on what */                                  \
    X(FAILING)   /* a vote is over to which this rank said that it failed */                       \
    X(NAMED)     /* the lowest rank that failed is known */                                        \
    X(TOLD)      /* and its sentence */                                                            \
    X(UPDATES)   /* in the update */                                                               \
    X(OWES)      /* its update failed after the vote: between two steps */                         \
    X(OWING)     /* the same, in the next step, before the begin vote */                           \
    X(BROKEN)    /* a vote failed */                                                               \
    X(LOST)      /* so no step votes again: between two steps */                                   \
    X(REFUSED)   /* the same, in a step */

/* What happens: calls of the library, of the program's callbacks, and votes that came back. */
#define RANK_EVENTS(X)                                                                             \
    X(STEP)     /* rebatch_step() */                                                               \
    X(ABANDON)  /* rebatch_abandon_step() */                                                       \
    X(VOTE)     /* all_reduce with how many failed */                                              \
    X(COMPARE)  /* all_reduce with what the ranks disagree on */                                   \
    X(LOWEST)   /* all_reduce with the lowest rank that did */                                     \
    X(SENTENCE) /* all_reduce with its sentence */                                                 \
    X(BREAK)    /* an all_reduce that failed */                                                    \
    X(ZERO)     /* zero_grad */                                                                    \
    X(SAMPLES)  /* forward_backward */                                                             \
    X(REDUCE)   /* reduce */                                                                       \
    X(GIVE_UP)  /* reduce, abandoned */                                                            \
    X(UPDATE)   /* optimizer_step */                                                               \
    X(DONE)     /* REBATCH_OK is returned */                                                       \
    X(PEER)     /* REBATCH_E_PEER is returned */                                                   \
    X(FAIL)     /* any other status is returned */

/* From a state, by an event, to a state. */
#define RANK_TRANSITIONS(X)                                                                        \
    X(IDLE, STEP, BEGINS)                                                                          \
    X(IDLE, ABANDON, ABANDONS)                                                                     \
    X(BEGINS, VOTE, BEGUN)                                                                         \
    X(BEGINS, BREAK, BROKEN)                                                                       \
    X(ABANDONS, VOTE, FAILING)                                                                     \
    X(ABANDONS, BREAK, BROKEN)                                                                     \
    X(BEGUN, ZERO, WORKS)                                                                          \
    X(BEGUN, GIVE_UP, ABANDONED)                                                                   \
    X(BEGUN, LOWEST, NAMED)                                                                        \
    X(BEGUN, COMPARE, COMPARED)                                                                    \
    X(BEGUN, BREAK, BROKEN)                                                                        \
    X(COMPARED, PEER, IDLE)                                                                        \
    X(WORKS, ZERO, WORKS)                                                                          \
    X(WORKS, SAMPLES, WORKS)                                                                       \
    X(WORKS, REDUCE, REDUCES)                                                                      \
    X(WORKS, GIVE_UP, ABANDONED)                                                                   \
    X(REDUCES, REDUCE, REDUCES)                                                                    \
    X(REDUCES, GIVE_UP, ABANDONED)                                                                 \
    X(REDUCES, VOTE, VOTED)                                                                        \
    X(REDUCES, BREAK, BROKEN)                                                                      \
    X(ABANDONED, VOTE, FAILING)                                                                    \
    X(ABANDONED, BREAK, BROKEN)                                                                    \
    X(VOTED, UPDATE, UPDATES)                                                                      \
    X(VOTED, LOWEST, NAMED)                                                                        \
    X(VOTED, BREAK, BROKEN)                                                                        \
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
