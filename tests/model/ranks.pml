/* The votes of several ranks (docs/design.md), for Spin: ranks run in any order, and an OOM, a
 * failure or a death comes at any point. scripts/test-model says what is checked.
 *
 * RANKS is 2 to 4. WAY is the protocol; ways that are not rebatch's must be found wrong. */
#include "rank.h"

#define REBATCH 0           /* a rank that failed takes part in the reduction; then the vote */
#define VOTE_AFTER 1        /* a rank that failed calls no reduction, and goes to the vote */
#define REDUCE_IN_ATTEMPT 2 /* the reduction is in the attempt, and is repeated with it */
#define FORGET 3            /* no rank hears of an update that failed after the vote */
#ifndef WAY
#define WAY REBATCH
#endif
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 3 /* of rebatch_step() or rebatch_abandon_step() on each rank */
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef LOSSES
#define LOSSES 1 /* collectives that fail on one rank although no rank died: a timeout too short */
#endif

#define NAME(name) name,
mtype = { RANK_STATES(NAME) RANK_EVENTS(NAME) BEGIN_VOTE, END_VOTE, GRADIENT_1, GRADIENT_2 };

/* The transitions that were taken in any run; they are no part of the state. */
c_decl {
    enum { RANK_STATES(NAME) RANK_STATE_COUNT };
    enum { RANK_EVENTS(NAME) RANK_EVENT_COUNT };
    static char taken[RANK_STATE_COUNT][RANK_EVENT_COUNT];
    static void say_taken(void) {
#define SAY(from, event, to) \
        printf(taken[from][event] ? "" : "never taken: %s, %s\n", #from, #event);
        RANK_TRANSITIONS(SAY)
    }
};

/* ---- collectives ---- */

#define VOTES 0     /* of the group, and of the program: two communicators, so neither can take */
#define GRADIENTS 1 /* the other's place */
#define ALL ((1 << RANKS) - 1)
#define ME (1 << me)

/* One collective at a time: the next one begins when all that can have left the one before. */
typedef Communicator {
    mtype kind;
    byte arrived, left; /* ranks, as bits */
    byte absent;        /* those for which it has failed once: they never come again */
    byte failed, sum, low, high
};
Communicator comm[2];
byte dead, lost; /* ranks, as bits: those whose collective is about to fail, for no reason */
byte deaths, losses;

#define IS_OVER(c) (comm[c].arrived == ALL && (comm[c].left | comm[c].absent | dead) == ALL)
#define WILL_NOT_COME(c) ((dead | comm[c].absent) & ~comm[c].arrived)
#define IS_DOUBTFUL(c) ((dead | comm[c].absent) & comm[c].arrived)

inline clear(c)
{
    comm[c].arrived = 0;
    comm[c].left = 0;
    comm[c].failed = 0;
    comm[c].sum = 0;
    comm[c].low = 255;
    comm[c].high = 0
}

inline arrive(c, what, amount, has_failed, number)
{
    d_step {
        if
        :: IS_OVER(c) -> clear(c)
        :: else
        fi;
        if
        :: comm[c].arrived == 0 -> comm[c].kind = what
        :: else -> assert(comm[c].kind == what) /* all ranks call the same collective */
        fi;
        comm[c].arrived = comm[c].arrived | ME;
        comm[c].sum = comm[c].sum + amount;
        comm[c].failed = comm[c].failed + has_failed;
        comm[c].low = (number < comm[c].low -> number : comm[c].low);
        comm[c].high = (number > comm[c].high -> number : comm[c].high)
    }
}

inline depart(c, is_ok)
{
    d_step {
        ok = is_ok;
        sum = comm[c].sum;
        failed = comm[c].failed;
        low = comm[c].low;
        high = comm[c].high;
        comm[c].left = comm[c].left | ME;
        if
        :: !ok -> comm[c].absent = comm[c].absent | ME; sum = 0; failed = 0; low = 0; high = 0
        :: else
        fi;
        if
        :: IS_OVER(c) -> clear(c)
        :: else
        fi
    }
}

/* Sets ok, sum, failed, low, high. It fails where a rank will not come, may fail where one has gone
 * since it came, and at most LOSSES times for no reason. */
inline all_reduce(c, what, amount, has_failed, number)
{
    if
    :: true
    :: deaths < DEATHS -> goto die
    fi;
    (comm[c].left & ME) == 0 || IS_OVER(c) || WILL_NOT_COME(c); /* waits */
    arrive(c, what, amount, has_failed, number);
    if /* waits */
    :: comm[c].arrived == ALL -> depart(c, true)
    :: WILL_NOT_COME(c) || (comm[c].arrived == ALL && IS_DOUBTFUL(c)) -> depart(c, false)
    :: comm[c].arrived == ALL && losses < LOSSES -> losses++; depart(c, false)
    :: lost & ME -> lost = lost & ~ME; depart(c, false)
    :: dead & ME -> goto finish
    fi
}

/* ---- what must hold ---- */

bool updates[CALLS]; /* a rank has decided to update */
bool stays[CALLS];   /* a rank has ended the step without, and knows so: its end vote did not fail */
byte torn = CALLS;   /* the first step whose update failed after its vote: parameters differ */

/* One decision: no rank updates in a step that another one has ended without. */
inline decide(is_update)
{
    if
    :: is_update ->
        updates[call] = true;
        assert(call <= torn || is_torn) /* no update of parameters that differ */
    :: else -> stays[call] = true
    fi;
    assert(!(updates[call] && stays[call]))
}

/* The update fails here, and the others have updated. */
inline tear()
{
    is_torn = true;
    torn = (call < torn -> call : torn);
#if WAY == FORGET
    at = IDLE;
    step++;
#else
    owes = true;
#endif
}

/* The automaton in rank.h has this transition. */
inline happens(what)
{
    d_step {
        if
#define TRANSITION(from, event, to) \
        :: at == from && what == event -> at = to; c_code { taken[from][event] = 1; }
        RANK_TRANSITIONS(TRANSITION)
        :: else -> assert(false)
        fi
    }
}

/* ---- one rank ---- */

#define SAMPLES_OF_RANK (1 + me % 2)
#define IN_REDUCE 8 /* more than a rank */
#define NOBODY 100
#define GARBAGE 50 /* what a rank that failed adds to the accumulators */

/* Its own samples: micro-batches of any size, an OOM before or after the accumulators changed. A
 * failure (own) is a size that does not fit, or an error of the program. */
inline work()
{
    done = 0;
    has_oom = false;
    if
    :: true -> happens(ZERO)
    :: true -> own = true /* before zero_grad */
    fi;
    do
    :: !own && done < SAMPLES_OF_RANK ->
        happens(SAMPLES);
        if
        :: done++
        :: done = SAMPLES_OF_RANK
        :: !has_oom -> has_oom = true
        :: !has_oom -> has_oom = true; done = 0; happens(ZERO)
        :: own = true
        fi
    :: else -> break
    od;
    has_oom = false
}

/* The reduction's collectives; own where one has failed. */
inline gradients()
{
    all_reduce(GRADIENTS, GRADIENT_1, (own -> GARBAGE : done), 0, 0);
#if WAY == REDUCE_IN_ATTEMPT
    if
    :: ok -> all_reduce(GRADIENTS, GRADIENT_1, done, 0, 0) /* an OOM after the first collective */
    :: true
    fi;
#endif
    is_right = ok && sum == total;
    if
    :: ok ->
        all_reduce(GRADIENTS, GRADIENT_2, (own -> GARBAGE : done), 0, 0);
        is_right = is_right && ok && sum == total
    :: else
    fi;
    if
    :: !ok -> own = true; has_failed_in_reduce = true
    :: else
    fi
}

/* A vote has failed. abort() ends the program's collectives too. */
inline break_group()
{
    happens(BREAK);
    is_broken = true;
    comm[VOTES].absent = comm[VOTES].absent | ME;
    comm[GRADIENTS].absent = comm[GRADIENTS].absent | ME
}

/* The rounds after a vote in which a rank has failed. One that failed in the reduction comes last:
 * often another rank is the reason. */
inline hear()
{
    if
    :: own -> mine = me + (has_failed_in_reduce -> IN_REDUCE : 0)
    :: else -> mine = NOBODY
    fi;
    all_reduce(VOTES, LOWEST, 0, 0, mine);
    if
    :: ok ->
        happens(LOWEST);
        first = low;
        all_reduce(VOTES, SENTENCE, (first == mine -> 1 + me : 0), 0, 0)
    :: else
    fi;
    if
    :: ok ->
        assert(sum == 1 + first % IN_REDUCE); /* the sentence of that rank alone */
        happens(SENTENCE)
    :: else -> break_group()
    fi
}

/* A rank is interrupted only where it waits: all else that it does is its own. */
proctype rank(byte me)
{
    mtype at = IDLE;
    byte call, step, done, total, mine, first; /* call: of the step function, from 0 */
    byte sum, failed, low, high;               /* of the last collective */
    bool ok, own, has_oom, has_failed_in_reduce, is_right, is_broken, owes, is_torn, is_abandon;

    atomic {
        call = 0;
again:
        own = owes;
        if
        :: true -> happens(STEP)
        :: true -> happens(STEP); own = true /* its arguments are refused */
        :: true -> happens(ABANDON); own = true; is_abandon = true
        fi;
        if
        :: is_broken -> goto stay
        :: else
        fi;

        all_reduce(VOTES, BEGIN_VOTE, (own -> 0 : SAMPLES_OF_RANK), own, step);
        if
        :: !ok -> break_group(); goto stay
        :: else -> happens(VOTE); owes = false; total = sum
        fi;
        if
        :: failed > 0 -> hear(); goto stay
        :: failed == 0 && low != high ->
            all_reduce(VOTES, COMPARE, 0, 0, 0);
            if
            :: ok -> happens(COMPARE)
            :: else -> break_group()
            fi;
            goto stay
        :: else
        fi;

        work();
        if
        :: !own -> happens(REDUCE)
        :: else -> goto give_up
        fi;
        if
        :: true
        :: true -> happens(REDUCE)  /* an OOM before the first collective */
        :: own = true; goto give_up /* for which nothing is left to try */
        fi;
        if
        :: comm[GRADIENTS].absent & ME -> own = true; has_failed_in_reduce = true
        :: else -> gradients()
        fi;
        if
        :: true
        :: own = true /* reduce fails after its collectives; the update's memory is not there */
        fi;
        goto vote;
give_up:
        happens(GIVE_UP);
        if
        :: WAY == VOTE_AFTER || (comm[GRADIENTS].absent & ME)
        :: else -> gradients(); has_failed_in_reduce = false
        fi;

vote:
        all_reduce(VOTES, END_VOTE, 0, own, 0);
        if
        :: !ok -> break_group(); goto end
        :: else -> happens(VOTE)
        fi;
        if
        :: failed > 0 -> hear(); goto stay
        :: else
        fi;
        assert(is_right); /* every sample of every rank once */
        decide(true);
        happens(UPDATE);
        if
        :: true
        :: true -> happens(UPDATE) /* an OOM before anything was changed */
        :: deaths < DEATHS -> goto die
        fi;
        if
        :: true -> happens(DONE); step++
        :: true -> happens(FAIL); tear()
        fi;
        goto next;

stay:
        decide(false);
end:
        if
        :: at == TOLD && is_abandon -> happens(DONE)
        :: at != TOLD && is_abandon -> happens(PEER)
        :: else ->
            if
            :: own -> happens(FAIL)
            :: else -> happens(PEER)
            fi
        fi;
next:
        call++;
        done = 0; total = 0; mine = 0; first = 0; sum = 0; failed = 0; low = 0; high = 0;
        ok = false; own = false; has_failed_in_reduce = false; is_right = false; is_abandon = false;
        if
        :: call < CALLS -> goto again
        :: else -> goto finish
        fi;
die:
        deaths++;
        dead = dead | ME;
finish:
        skip
    }
}

#define WAITS(c) (comm[c].arrived & ~comm[c].left & ~(dead | lost))
#define HIT(rank) \
    :: deaths < DEATHS && (WAITS(VOTES) | WAITS(GRADIENTS)) & (1 << rank) -> \
        deaths++; \
        dead = dead | (1 << rank) \
    :: losses < LOSSES && (WAITS(VOTES) | WAITS(GRADIENTS)) & (1 << rank) -> \
        losses++; \
        lost = lost | (1 << rank)

/* A death, or a loss, of a rank that waits in a collective. */
proctype trouble()
{
end:
    do
    :: atomic {
           if
           HIT(0)
           HIT(1)
           HIT(2)
           HIT(3)
           fi
       }
    od
}

init
{
    byte i;
    atomic {
        c_code { atexit(say_taken); };
        clear(VOTES);
        clear(GRADIENTS);
        for (i : 0 .. RANKS - 1) {
            run rank(i)
        }
        run trouble()
    }
}
