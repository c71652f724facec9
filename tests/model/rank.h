/* One rank's calls of rebatch_step() and rebatch_abandon_step(), as the program sees them: an
 * automaton, written once. The model (ranks.pml) takes each transition and no other, and so does
 * the library (tests/integration/ranks_model.c). */
#ifndef TESTS_MODEL_RANK_H
#define TESTS_MODEL_RANK_H

#include "group.h"

/* What a rank is in the middle of. */
#define RANK_STATES(X)                                                                             \
    GROUP_STATES(X)                                                                                \
    X(WORKS)     /* on its own samples: no collective */                                           \
    X(REDUCES)   /* sums the accumulators over all ranks */                                        \
    X(ABANDONED) /* failed, and took part in the others' reduction */                              \
    X(VOTED)     /* the end vote is over */

/* What happens: calls of the library, of the program's callbacks, and votes that came back. */
#define RANK_EVENTS(X)                                                                             \
    GROUP_EVENTS(X)                                                                                \
    X(REDUCE)  /* reduce */                                                                        \
    X(GIVE_UP) /* reduce, abandoned */

/* From a state, by an event, to a state. */
#define RANK_TRANSITIONS(X)                                                                        \
    GROUP_TRANSITIONS(X)                                                                           \
    X(BEGUN, ZERO, WORKS)                                                                          \
    X(BEGUN, GIVE_UP, ABANDONED)                                                                   \
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
    X(VOTED, BREAK, BROKEN)

#endif
