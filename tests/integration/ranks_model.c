/* Owns the test that a rank does what the model of the votes says (tests/model): what it calls, in
 * random trainings, is a word of the model's automaton, and it takes each transition.
 * Must not know more of the library than its public headers say. */
#include "model/rank.h"

#define STATES RANK_STATES
#define EVENTS RANK_EVENTS
#define TRANSITIONS RANK_TRANSITIONS
#include "rig.h"
#include "watched_ranks.h"

static enum event event_of_vote(size_t count, rebatch_reduction reduction)
{
    if (reduction == REBATCH_MIN)
        return count == 1 ? LOWEST : COMPARE;
    return count == SENTENCE_WORDS ? SENTENCE : VOTE;
}

static bool event_of_place(enum event *out, enum rank_place place)
{
    static const enum event events[] = {[RANK_ZERO] = ZERO,
                                        [RANK_FORWARD] = SAMPLES,
                                        [RANK_REDUCE] = REDUCE,
                                        [RANK_ABANDONED] = GIVE_UP,
                                        [RANK_UPDATE] = UPDATE};
    *out = events[place];
    return true;
}

Test(ranks_model, a_rank_takes_each_transition_of_the_model_and_no_other)
{
    take_all_transitions(&OPTIONS(.micro_start = 4), 1);
}
