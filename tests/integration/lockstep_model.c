/* Owns the test that a rank in lockstep does what the model of lockstep says (tests/model).
 * Must not know more of the library than its public headers say. */
#include "model/lockstep.h"

#define STATES LOCKSTEP_STATES
#define EVENTS LOCKSTEP_EVENTS
#define TRANSITIONS LOCKSTEP_TRANSITIONS
#include "watched_ranks.h"

enum { TOGETHER_WORDS = 4 };

static enum event event_of_vote(size_t count, rebatch_reduction reduction)
{
    if (reduction == REBATCH_MIN)
        return count == 1 ? LOWEST : count == TOGETHER_WORDS ? TOGETHER : COMPARE;
    return count == SENTENCE_WORDS ? SENTENCE : VOTE;
}

static bool event_of_place(enum event *out, enum rank_place place)
{
    static const enum event events[] = {[RANK_ZERO] = ZERO,
                                        [RANK_FORWARD] = SAMPLES,
                                        [RANK_ABANDONED] = GIVE_UP,
                                        [RANK_UPDATE] = UPDATE};
    if (place == RANK_ACCUMULATED)
        return false; /* a part of forward_backward */
    *out = events[place];
    return true;
}

Test(lockstep_model, a_rank_takes_each_transition_of_the_model_and_no_other)
{
    rebatch_options options[] = {REBATCH_OPTIONS_INIT, REBATCH_OPTIONS_INIT, REBATCH_OPTIONS_INIT};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        options[i].lockstep = REBATCH_ON;
        options[i].micro_start = i ? 12 : 4;
    }
    options[2].micro_smallest = 12; /* no way is left after an OOM */
    options[2].max_attempts = 1;
    take_all_transitions(options, sizeof options / sizeof *options);
}
