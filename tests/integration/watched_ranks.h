/* Ranks that are held to an automaton of tests/model in random trainings: what each calls is a word
 * of it, and each transition is taken. A test defines STATES, EVENTS and TRANSITIONS before it
 * includes this, and event_of_vote() and event_of_place() after it.
 * Must not know more of the library than its public headers say. */
#ifndef WATCHED_RANKS_H
#define WATCHED_RANKS_H

#include <stdio.h>
#include <string.h>

#include <criterion/criterion.h>

#include "rank_threads.h"

#define NAME(name) name,
enum state { STATES(NAME) };
enum event { EVENTS(NAME) };

#define TEXT(name) #name,
static const char *const state_names[] = {STATES(TEXT)};
static const char *const event_names[] = {EVENTS(TEXT)};

#define ROW(from, event, to) {from, event, to},
static const struct transition {
    enum state from;
    enum event event;
    enum state to;
} transitions[] = {TRANSITIONS(ROW)};
enum {
    TRANSITION_COUNT = sizeof transitions / sizeof *transitions,
    RANKS = 3,
    SENTENCE_WORDS = 25
};

/* Of the test: what a vote that came back is, and which event a callback is, if any. */
static enum event event_of_vote(size_t count, rebatch_reduction reduction);
static bool event_of_place(enum event *out, enum rank_place place);

/* What a rank does in one step. */
enum action {
    GO,
    REFUSE_ARGUMENTS,
    GIVE_BACK,
    NO_GUARD,
    FAIL_AT,
    NO_MEMORY,
    NEVER_MEMORY,
    NO_UPDATE, /* in lockstep the update's memory is gone when samples are accumulated */
    NO_LIGHTEN,
    ACTIONS
};

/* Of each rank, by its number: its thread alone writes there. */
static struct watched {
    enum state at;
    char fault[128]; /* the first event that the automaton does not have */
    bool taken[TRANSITION_COUNT];
    enum action action;
    enum rank_place place;
    unsigned votes, break_vote; /* of the step; the one that fails, from 1; 0: none */
} watched[RANKS];

static void happens(struct watched *w, enum event event)
{
    size_t i = 0;
    while (i < TRANSITION_COUNT && (transitions[i].from != w->at || transitions[i].event != event))
        i++;
    if (i < TRANSITION_COUNT) {
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
    happens(w, status ? BREAK : event_of_vote(count, reduction));
    return status;
}

static rebatch_status inside(struct rank *r, enum rank_place place)
{
    struct watched *const w = &watched[r->number];
    const bool may_fail = place != RANK_REDUCE && place != RANK_ABANDONED;
    enum event event;
    if (event_of_place(&event, place))
        happens(w, event);
    if (place == RANK_ACCUMULATED && w->action == NO_UPDATE)
        (void)rebatch_pool_set_limit(rebatch_get_pool(r->rb), 1);
    /* What may not, fails by its memory alone, before its collective. */
    return may_fail && w->action == FAIL_AT && w->place == place ? RANK_STATUS : REBATCH_OK;
}

static rebatch_status lighten(unsigned level, void *user)
{
    const struct rank *const r = user;
    if (watched[r->number].action == NO_LIGHTEN)
        return RANK_STATUS;
    return level > 1 ? REBATCH_E_UNSUPPORTED : REBATCH_OK;
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
    (void)rebatch_pool_set_limit(rebatch_get_pool(r->rb), 0);
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
    for (uint32_t i = 0; i < RANKS; i++) {
        struct rank *const r = &ranks->rank[i];
        struct watched *const w = &watched[i];
        w->votes = 0;
        w->action = draw(seed, 2) ? (enum action)draw(seed, ACTIONS) : GO;
        w->place = (enum rank_place)draw(seed, RANK_UPDATE + 1);
        w->break_vote = draw(seed, 12) ? 0 : draw(seed, 2) ? 1 : 1 + (unsigned)draw(seed, 9);
        if (w->action == NO_UPDATE && draw(seed, 3) == 0)
            w->break_vote = 6; /* the one after the end vote, where one micro-batch has run */
        r->fails_for_ever = w->action == NEVER_MEMORY;
        r->fail_request = w->action == NO_MEMORY || r->fails_for_ever ? 1 + draw(seed, 18) : 0;
    }
}

static void open_ranks(struct ranks *ranks, const rebatch_options *options)
{
    cr_assert(ranks_open(ranks, RANKS, options, 0), "%s", rebatch_last_error());
    for (uint32_t i = 0; i < RANKS; i++) {
        const rebatch_guard_ops ops = {sizeof ops, save, restore};
        watched[i].at = IDLE;
        ranks->rank[i].act = act;
        ranks->rank[i].vote = vote;
        ranks->rank[i].inside = inside;
        ranks->rank[i].ops.lighten = options->micro_smallest ? NULL : lighten;
        cr_assert_eq(rebatch_guard_with(ranks->rank[i].rb, &ops, &watched[i]), REBATCH_OK);
    }
}

/* Up to 12 steps: the group may end in one of them. */
static void train(uint64_t seed, const rebatch_options *options)
{
    struct ranks ranks;
    open_ranks(&ranks, options);
    for (unsigned step = 0; step < 12; step++) {
        draw_step(&ranks, &seed);
        ranks_step(&ranks);
        bool are_idle = true;
        for (uint32_t i = 0; i < RANKS; i++) {
            cr_assert(watched[i].fault[0] == '\0', "rank %u: %s", i, watched[i].fault);
            are_idle &= watched[i].at == IDLE;
        }
        if (are_idle && draw(&seed, 3) == 0) /* a checkpoint is restored */
            for (uint32_t i = 0; i < RANKS; i++)
                cr_assert_eq(rebatch_set_step(ranks.rank[i].rb, step), REBATCH_OK);
    }
    cr_assert(!ranks.meeting.was_mismatched);
    ranks_close(&ranks);
}

/* Trainings with these options in turn. */
static void take_all_transitions(const rebatch_options *options, size_t count)
{
    for (uint64_t seed = 1; seed <= 1000; seed++)
        train(seed * 1000, &options[seed % count]);
    for (size_t i = 0; i < TRANSITION_COUNT; i++) {
        bool is_taken = false;
        for (uint32_t rank = 0; rank < RANKS; rank++)
            is_taken |= watched[rank].taken[i];
        cr_expect(is_taken, "never taken: %s, %s", state_names[transitions[i].from],
                  event_names[transitions[i].event]);
    }
}

#endif
