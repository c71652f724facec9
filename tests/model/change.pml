/* The change of a Step with fully_shard() from whole parameters (the window) to lockstep and back
 * (docs/distributed.md), for Spin: ranks run in any order, and memory runs out, another failure or
 * a death comes at any point. What votes within a step, ranks.pml and lockstep.pml check; here a
 * step has the votes by which ranks change their way. scripts/test-model says what is checked.
 *
 * RANKS is 2 to 4. WAY is the protocol; ways that are not rebatch's must be found wrong. */

/* Beside REBATCH, in which all ranks decide by what the last vote says of each: */
#define ALONE 1      /* a rank decides by its own failure */
#define ANY 2        /* that one rank ran out is enough, though another one failed otherwise */
#define OWN_RETURN 4 /* a rank returns when it has memory itself */
#define OVERWRITE 5  /* a callback that a rank abandons overwrites how the one before it ended */
#ifndef TROUBLES
#define TROUBLES 1 /* failures of a rank in a step, all its tries together */
#endif

/* Where a rank is between two tries, and what it does there. */
#define CHANGE_STATES(X) X(WINDOW) X(LOCKSTEP) X(ON_HOST) X(LOST)
#define CHANGE_EVENTS(X) X(LEAVE) X(RETURN) X(STAY) X(BREAK)
#define CHANGE_TRANSITIONS(X)                                                                      \
    X(WINDOW, LEAVE, LOCKSTEP)                                                                     \
    X(LOCKSTEP, LEAVE, ON_HOST) /* the device's part of the sums */                                \
    X(LOCKSTEP, RETURN, WINDOW)                                                                    \
    X(LOCKSTEP, STAY, LOCKSTEP)                                                                    \
    X(ON_HOST, RETURN, WINDOW)                                                                     \
    X(ON_HOST, STAY, LOCKSTEP) /* sums are on the device again */                                  \
    X(WINDOW, BREAK, LOST)                                                                         \
    X(LOCKSTEP, BREAK, LOST)                                                                       \
    X(ON_HOST, BREAK, LOST)

#define NAME(name) name,
mtype = { CHANGE_STATES(NAME) CHANGE_EVENTS(NAME) RETURN_VOTE, GATHER_VOTE, BEGIN_VOTE,
          SAMPLES_VOTE, END_VOTE, LAST_ROUND, GATHER, REDUCE, PASS };

#define STATES CHANGE_STATES
#define EVENTS CHANGE_EVENTS
#define TRANSITIONS CHANGE_TRANSITIONS
#include "group.pml"

#define SAMPLES_OF_RANK 1
/* How a rank fares, and what its votes say of its last callback. */
#define WELL 0
#define RAN_OUT 1
#define FAILED 2

bool failed_otherwise[CALLS]; /* some rank has, in that call, or failed outside of callbacks */

/* ---- one rank ---- */

/* A callback ends. */
inline may_fail()
{
    if
    :: true
    :: troubles < TROUBLES -> troubles++; own = RAN_OUT; says = RAN_OUT
    :: troubles < TROUBLES -> troubles++; own = FAILED; says = FAILED; failed_otherwise[call] = true
    fi
}

/* Memory for the whole parameters may not be there. */
inline look_for_memory()
{
    lacks = false;
    if
    :: true
    :: troubles < TROUBLES -> troubles++; lacks = true
    fi
}

/* A collective of the model. One that fails is a rank that is missing. */
inline collective(which, amount)
{
    if
    :: comm[GRADIENTS].absent & ME -> ok = false
    :: else -> all_reduce(GRADIENTS, which, amount, 0, 0)
    fi;
    if
    :: ok
    :: else -> own = FAILED; says = FAILED; is_broken = true
    fi
}

inline vote(which)
{
    all_reduce(VOTES, which, (says == RAN_OUT -> 1 : 0), (own -> 1 : 0), says);
    if
    :: ok
    :: else -> is_broken = true
    fi
}

inline set_return()
{
    return_at = step + wait
}

/* Some steps after it has left the window. */
inline come_back()
{
    wait = 2 * wait;
    set_return();
    look_for_memory();
#if WAY == OWN_RETURN
    failed = (lacks -> 1 : 0);
    ok = true;
#else
    all_reduce(VOTES, RETURN_VOTE, 0, lacks, 0);
#endif
    if
    :: !ok -> is_broken = true
    :: ok && failed == 0 -> happens(RETURN)
    :: else -> happens(STAY)
    fi
}

/* Whether a step that failed runs again in another way: what the last vote said of each rank. */
#if WAY == ALONE
#define IS_SHORT (own == RAN_OUT)
#elif WAY == ANY
#define IS_SHORT (own != FAILED && sum > 0)
#else
#define IS_SHORT (own != FAILED && high == RAN_OUT)
#endif

/* A rank is interrupted only where it waits: all else that it does is its own. */
proctype rank(byte me)
{
    mtype at = WINDOW;
    byte call, step, return_at, troubles, own, says, reduced;
    byte wait = 1;
    byte sum, failed, low, high; /* of the last collective */
    bool ok, lacks, is_broken, is_torn;

    atomic {
        call = 0;
again:
        if
        :: at != WINDOW && step >= return_at -> come_back()
        :: else
        fi;
        if
        :: is_broken -> goto lost_rank
        :: else
        fi;
try:
        own = WELL;
        if
        :: at == WINDOW ->
            look_for_memory();
            all_reduce(VOTES, GATHER_VOTE, 0, lacks, 0);
            if
            :: !ok -> goto lost_rank
            :: ok && failed > 0 -> happens(LEAVE); set_return(); goto try
            :: else
            fi;
            collective(GATHER, 0);
            if
            :: is_broken -> goto lost_rank
            :: else
            fi
        :: else
        fi;

        says = WELL; /* a step begins */
        if
        :: true
        :: troubles < TROUBLES -> /* its batch is refused: no callback has run */
            troubles++;
            own = FAILED;
            failed_otherwise[call] = true
        fi;
        vote(BEGIN_VOTE);
        if
        :: is_broken -> goto lost_rank
        :: !is_broken && failed > 0 -> goto last_round
        :: else
        fi;

        may_fail(); /* its samples, or in lockstep its part of the micro-batch */
        if
        :: at == WINDOW ->
#if WAY == OVERWRITE
            says = WELL;
#endif
            collective(REDUCE, (own -> GARBAGE : SAMPLES_OF_RANK))
        :: else ->
            collective(PASS, (own -> GARBAGE : SAMPLES_OF_RANK));
        fi;
        reduced = sum;
        if
        :: at != WINDOW ->
            vote(SAMPLES_VOTE);
            if
            :: !ok -> goto lost_rank
            :: ok && failed > 0 -> goto last_round
            :: else
            fi
        :: else
        fi;
        if
        :: true
        :: own == WELL && troubles < TROUBLES -> /* the update's memory is not there, which no */
            troubles++;                          /* callback has said: the step ends on all */
            own = RAN_OUT;
            failed_otherwise[call] = true
        fi;
        vote(END_VOTE);
        if
        :: !ok -> goto lost_in_end_vote
        :: ok && failed > 0 -> goto last_round
        :: else
        fi;
        assert(reduced == RANKS * SAMPLES_OF_RANK); /* every sample of every rank once */
        decide(true);
        step++;
        goto next;

last_round: /* of those in which a rank says why */
        vote(LAST_ROUND);
        if
        :: is_broken -> goto lost_rank
        :: else
        fi;
        if
        :: IS_SHORT && at != ON_HOST -> happens(LEAVE); set_return(); goto try
        :: else
        fi;
        /* It ends, and the program goes on. Lack of memory alone ends no step in the window. */
        assert(at != WINDOW || failed_otherwise[call] || deaths + losses > 0);
        decide(false);
next:
        call++;
        troubles = 0; own = 0; says = 0; reduced = 0; sum = 0; failed = 0; low = 0; high = 0;
        ok = false; lacks = false;
        if
        :: call < CALLS -> goto again
        :: else -> goto finish
        fi;

lost_rank:
        decide(false);
lost_in_end_vote:
        break_group();
        goto finish;
die:
        deaths++;
        dead = dead | ME;
finish:
        skip
    }
}

#include "trouble.pml"
