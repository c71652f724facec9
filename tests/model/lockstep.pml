/* Several ranks in lockstep (docs/distributed.md), for Spin: their micro-batches have collectives,
 * so all run the same ones, and take back the same ones. Ranks run in any order, and an OOM, a
 * failure or a death comes at any point. scripts/test-model says what is checked.
 *
 * RANKS is 2 to 4. WAY is the protocol; ways that are not rebatch's must be found wrong. */
#include "lockstep.h"

/* Beside REBATCH, in which a rank that failed calls the collectives of its micro-batch that are
 * left, and then votes: */
#define OWN_SIZES 1 /* no vote before a micro-batch */
#define LEAVES 2    /* a rank that failed leaves the collectives, and goes to the vote */
#define ALONE 4     /* no vote after a micro-batch: a rank that failed runs it again alone */
#ifndef TROUBLES
#define TROUBLES 1 /* OOMs and failures of a rank in a step */
#endif

#define NAME(name) name,
mtype = { LOCKSTEP_STATES(NAME) LOCKSTEP_EVENTS(NAME) BEGIN_VOTE, SIZE_VOTE, SAMPLES_VOTE, END_VOTE,
          GATHER, SCATTER };

#define STATES LOCKSTEP_STATES
#define EVENTS LOCKSTEP_EVENTS
#define TRANSITIONS LOCKSTEP_TRANSITIONS
#define has_failed_in_reduce false /* no callback has all the reduction */
#include "group.pml"

/* ---- one rank ---- */

#define SAMPLES_OF_RANK 2
#define IS_DOOMED (owes_batch || owes_error)

/* Of an attempt, in this order: the least of all ranks holds. */
#define BATCH_AGAIN 0
#define SAMPLES_AGAIN 1
#define SUCCEEDED 2
#define IS_WELL (outcome == SUCCEEDED && !own)

/* A collective of the micro-batch. All ranks run the same samples. After one has failed there are
 * no more. */
inline program(which)
{
    given = (IS_WELL -> size : GARBAGE);
    place = done * 4 + size;
    if
    :: comm[GRADIENTS].absent & ME -> ok = false
    :: else -> all_reduce(GRADIENTS, which, given, 0, place)
    fi;
    given = 0;
    place = 0;
    if
    :: ok -> assert(low == high)
    :: else
    fi;
    called++
}

/* It has failed: it calls what it has not called yet. */
inline give_up()
{
    happens(GIVE_UP);
#if WAY != LEAVES
    if
    :: called == 0 -> program(GATHER)
    :: else
    fi;
    if
    :: called < 2 -> program(SCATTER)
    :: else
    fi
#endif
}

/* An OOM, or a failure (own) of this rank. */
inline may_fail()
{
    if
    :: true
    :: troubles < TROUBLES -> troubles++; outcome = SAMPLES_AGAIN
    :: troubles < TROUBLES -> troubles++; outcome = BATCH_AGAIN
    :: troubles < TROUBLES -> troubles++; own = true
    fi
}

inline may_fail_if_ok()
{
    if
    :: ok -> may_fail()
    :: else -> own = true
    fi
}

inline run_samples()
{
    outcome = SUCCEEDED;
    called = 0;
    if
    :: IS_DOOMED -> outcome = BATCH_AGAIN
    :: else ->
        if
        :: true -> happens(SAMPLES)
        :: troubles < TROUBLES -> troubles++; outcome = SAMPLES_AGAIN /* the memory was taken */
        fi
    fi;
    if
    :: IS_WELL -> may_fail()
    :: else
    fi;
    if
    :: IS_WELL -> program(GATHER); may_fail_if_ok()
    :: else
    fi;
    if
    :: IS_WELL -> program(SCATTER); added = sum; may_fail_if_ok()
    :: else
    fi;
    if
    :: !IS_WELL -> give_up()
    :: else
    fi
}

/* What it knew of before, and the others hear of only now. */
inline take_owed()
{
    if
    :: owes_error -> own = true; outcome = SUCCEEDED
    :: owes_batch -> outcome = BATCH_AGAIN
    :: else
    fi;
    owes_error = false;
    owes_batch = false
}

/* The accumulators are about to change. */
inline accumulate()
{
    done = done + size;
    acc = acc + added;
    if
    :: true
    :: troubles < TROUBLES -> troubles++; owes_batch = true
    :: troubles < TROUBLES -> troubles++; owes_error = true
    fi
}

/* All run their samples again from the first, or this rank has no way left to. */
inline run_batch_again()
{
    if
    :: true -> done = 0; acc = 0; happens(ZERO)
    :: troubles < TROUBLES -> troubles++; own = true
    fi
}

/* A rank is interrupted only where it waits: all else that it does is its own. */
proctype rank(byte me)
{
    mtype at = IDLE;
    byte call, step, done, size, acc, added, called, outcome, troubles, total, mine, first;
    byte given, place; /* to a collective */
    byte sum, failed, low, high; /* of the last collective */
    bool ok, own, owes_batch, owes_error, is_broken, owes, is_torn, is_abandon;

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

        if
        :: true -> happens(ZERO)
        :: troubles < TROUBLES -> troubles++; happens(ZERO); happens(ZERO) /* an OOM in it */
        :: troubles < TROUBLES -> troubles++; happens(ZERO); own = true
        :: troubles < TROUBLES -> troubles++; own = true /* before it */
        fi;

choose:
        if
        :: size = 1
        :: size = SAMPLES_OF_RANK
        fi;
#if WAY != OWN_SIZES
        place = (own -> NOBODY : size);
        all_reduce(VOTES, SIZE_VOTE, 0, own, place);
        place = 0;
        if
        :: !ok -> break_group(); goto stay
        :: else -> happens(TOGETHER)
        fi;
        if
        :: failed > 0 -> hear(); goto stay
        :: else -> size = low
        fi;
#else
        happens(TOGETHER);
#endif
        if
        :: true
        :: troubles < TROUBLES -> troubles++; owes_error = true /* it cannot lighten as others do */
        fi;

next_samples:
        outcome = SUCCEEDED;
        if
        :: done == SAMPLES_OF_RANK -> take_owed()
        :: else ->
            size = (size < SAMPLES_OF_RANK - done -> size : SAMPLES_OF_RANK - done);
            run_samples();
            take_owed()
        fi;
#if WAY == ALONE
        if
        :: done < SAMPLES_OF_RANK && outcome == SAMPLES_AGAIN && !own ->
            happens(TOGETHER);
            goto next_samples
        :: else
        fi;
#endif
        place = (own -> SUCCEEDED : outcome);
        all_reduce(VOTES, SAMPLES_VOTE, 0, own, place);
        place = 0;
        if
        :: !ok -> break_group(); goto stay
        :: else -> happens(TOGETHER)
        fi;
        if
        :: failed > 0 -> hear(); goto stay
        :: else
        fi;
        if
        :: low == SUCCEEDED && done == SAMPLES_OF_RANK -> goto vote
        :: low == SUCCEEDED && done < SAMPLES_OF_RANK -> accumulate(); goto next_samples
        :: low == SAMPLES_AGAIN ->
            if
            :: true
            :: troubles < TROUBLES -> troubles++; own = true /* no way is left */
            fi
        :: low == BATCH_AGAIN -> run_batch_again()
        fi;
        goto choose;

vote:
        if
        :: true
        :: troubles < TROUBLES -> troubles++; own = true /* the update's memory is not there */
        fi;
        all_reduce(VOTES, END_VOTE, 0, own, 0);
        if
        :: !ok -> break_group(); goto end
        :: else -> happens(VOTE)
        fi;
        if
        :: failed > 0 -> hear(); goto stay
        :: else
        fi;
        assert(acc == total); /* every sample of every rank once */
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
        done = 0; size = 0; acc = 0; added = 0; called = 0; outcome = 0; troubles = 0; total = 0;
        mine = 0; first = 0; sum = 0; failed = 0; low = 0; high = 0;
        ok = false; own = false; owes_batch = false; owes_error = false; is_abandon = false;
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
