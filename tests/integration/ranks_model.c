/* Owns the test that a rank does what the model of the votes says (tests/model): what it calls, in
 * random trainings, is a word of the model's automaton, and it takes each transition.
 * Must not know more of the library than its public headers say. */
#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

#include "model/rank.h"
#include "rank_threads.h"

#define NAME(name) name,
enum state { RANK_STATES(NAME) STATES };
enum event { RANK_EVENTS(NAME) EVENTS };

#define TEXT(name) #name,
static const char *const state_names[] = {RANK_STATES(TEXT)};
static const char *const event_names[] = {RANK_EVENTS(TEXT)};

#define ROW(from, event, to) {from, event, to},
static const struct transition {
    enum state from;
    enum event event;
    enum state to;
} transitions[] = {RANK_TRANSITIONS(ROW)};
enum { TRANSITIONS = sizeof transitions / sizeof *transitions, SIZE = 3, SENTENCE_WORDS = 25 };

/* What a rank does in one step. */
enum action {
    GO,
    REFUSE_ARGUMENTS,
    GIVE_BACK,
    NO_GUARD,
    FAIL_AT,
    NO_MEMORY,
    NEVER_MEMORY,
    ACTIONS
};

/* Of each rank, by its number: its thread alone writes there. */
static struct watched {
    enum state at;
    char fault[128]; /* the first event that the automaton does not have */
    bool taken[TRANSITIONS];
    enum action action;
    enum rank_place place;
    unsigned votes, break_vote; /* of the step; the one that fails, from 1; 0: none */
} watched[SIZE];

static void happens(struct watched *w, enum event event)
{
    size_t i = 0;
    while (i < TRANSITIONS && (transitions[i].from != w->at || transitions[i].event != event))
        i++;
    if (i < TRANSITIONS) {
        w->taken[i] = true;
        w->at = transitions[i].to;
    } else if (!w->fault[0])
        (void)snprintf(w->fault, sizeof w->fault, "%s in %s", event_names[event],
                       state_names[w->at]);
}

static rebatch_status vote(struct rank *r, uint64_t *words, size_t count,
                           rebatch_reduction reduction, uint64_t timeout_ms)
{
    struct watched *const w = &watched[r->number];
    if (++w->votes == w->break_vote)
        meeting_leave(&r->ranks->meeting);
    const rebatch_status status =
        meeting_reduce(&r->ranks->meeting, r->number, words, count, (int)reduction, timeout_ms);
    const enum event agreed = reduction == REBATCH_MIN  ? count == 1 ? LOWEST : COMPARE
                              : count == SENTENCE_WORDS ? SENTENCE
                                                        : VOTE;
    happens(w, status ? BREAK : agreed);
    return status;
}

static rebatch_status inside(struct rank *r, enum rank_place place)
{
    static const enum event events[] = {[RANK_ZERO] = ZERO,
                                        [RANK_FORWARD] = SAMPLES,
                                        [RANK_REDUCE] = REDUCE,
                                        [RANK_ABANDONED] = GIVE_UP,
                                        [RANK_UPDATE] = UPDATE};
    struct watched *const w = &watched[r->number];
    happens(w, events[place]);
    if (place == RANK_REDUCE || place == RANK_ABANDONED)
        return REBATCH_OK; /* it fails by its memory alone, before its collective */
    return w->action == FAIL_AT && w->place == place ? RANK_STATUS : REBATCH_OK;
}

/* The guard of a rank's session: a step whose state cannot be saved fails before zero_grad. */
static rebatch_status save(rebatch_guard_point point, void *user)
{
    const struct watched *const w = user;
    return w->action == NO_GUARD && point == REBATCH_GUARD_STEP ? RANK_STATUS : REBATCH_OK;
}

static rebatch_status restore(rebatch_guard_point point, void *user)
{
    (void)point;
    (void)user;
    return REBATCH_OK;
}

static rebatch_status act(struct rank *r)
{
    struct watched *const w = &watched[r->number];
    const bool is_abandon = w->action == GIVE_BACK;
    happens(w, is_abandon ? ABANDON : STEP);
    const rebatch_status status =
        is_abandon ? rebatch_abandon_step(r->rb, "there is no data")
                   : rebatch_step(r->rb, &r->ops, w->action == REFUSE_ARGUMENTS ? 0 : r->batch, r,
                                  &r->report);
    happens(w, status == REBATCH_OK ? DONE : status == REBATCH_E_PEER ? PEER : FAIL);
    return status;
}

static uint64_t draw(uint64_t *seed, uint64_t below)
{
    uint64_t z = *seed += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (z ^ z >> 31) % below;
}

static void draw_step(struct ranks *ranks, uint64_t *seed)
{
    for (uint32_t i = 0; i < SIZE; i++) {
        struct rank *const r = &ranks->rank[i];
        struct watched *const w = &watched[i];
        w->votes = 0;
        w->action = draw(seed, 2) ? (enum action)draw(seed, ACTIONS) : GO;
        w->place = (enum rank_place)draw(seed, RANK_UPDATE + 1);
        w->break_vote = draw(seed, 12) ? 0 : 1 + (unsigned)draw(seed, 4);
        r->fails_for_ever = w->action == NEVER_MEMORY;
        r->fail_request = w->action == NO_MEMORY || r->fails_for_ever ? 1 + draw(seed, 12) : 0;
    }
}

static void open_ranks(struct ranks *ranks)
{
    rebatch_options o = REBATCH_OPTIONS_INIT;
    o.micro_start = 4;
    cr_assert(ranks_open(ranks, SIZE, &o, 0), "%s", rebatch_last_error());
    for (uint32_t i = 0; i < SIZE; i++) {
        const rebatch_guard_ops ops = {sizeof ops, save, restore};
        watched[i].at = IDLE;
        ranks->rank[i].act = act;
        ranks->rank[i].vote = vote;
        ranks->rank[i].inside = inside;
        cr_assert_eq(rebatch_guard_with(ranks->rank[i].rb, &ops, &watched[i]), REBATCH_OK);
    }
}

/* Up to 12 steps: the group may end in one of them. */
static void train(uint64_t seed)
{
    struct ranks ranks;
    open_ranks(&ranks);
    for (unsigned step = 0; step < 12; step++) {
        draw_step(&ranks, &seed);
        ranks_step(&ranks);
        bool are_idle = true;
        for (uint32_t i = 0; i < SIZE; i++) {
            cr_assert(watched[i].fault[0] == '\0', "rank %u: %s", i, watched[i].fault);
            are_idle &= watched[i].at == IDLE;
        }
        if (are_idle && draw(&seed, 3) == 0) /* a checkpoint is restored */
            for (uint32_t i = 0; i < SIZE; i++)
                cr_assert_eq(rebatch_set_step(ranks.rank[i].rb, step), REBATCH_OK);
    }
    cr_assert(!ranks.meeting.was_mismatched);
    ranks_close(&ranks);
}

Test(ranks_model, a_rank_takes_each_transition_of_the_model_and_no_other)
{
    for (uint64_t seed = 1; seed <= 1000; seed++)
        train(seed * 1000);
    for (size_t i = 0; i < TRANSITIONS; i++) {
        bool is_taken = false;
        for (uint32_t rank = 0; rank < SIZE; rank++)
            is_taken |= watched[rank].taken[i];
        cr_expect(is_taken, "never taken: %s, %s", state_names[transitions[i].from],
                  event_names[transitions[i].event]);
    }
}
