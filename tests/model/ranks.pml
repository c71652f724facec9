/* The votes of several ranks (docs/design.md), for Spin: ranks run in any order, and an OOM, a
 * failure or a death comes at any point. scripts/test-model says what is checked.
 *
 * RANKS is 2 to 4. WAY is the protocol; ways that are not rebatch's must be found wrong. */
#include "rank.h"

/* Beside REBATCH, in which a rank that failed takes part in the reduction, and then votes: */
#define VOTE_AFTER 1        /* a rank that failed calls no reduction, and goes to the vote */
#define REDUCE_IN_ATTEMPT 2 /* the reduction is in the attempt, and is repeated with it */

#define NAME(name) name,
mtype = { RANK_STATES(NAME) RANK_EVENTS(NAME) BEGIN_VOTE, END_VOTE, GRADIENT_1, GRADIENT_2 };

#define STATES RANK_STATES
#define EVENTS RANK_EVENTS
#define TRANSITIONS RANK_TRANSITIONS
#include "group.pml"

/* ---- one rank ---- */

#define SAMPLES_OF_RANK (1 + me % 2)

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

#include "trouble.pml"
