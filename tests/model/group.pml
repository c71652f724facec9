/* What the models of several ranks share: their collectives, what must hold, and what breaks. A
 * model defines STATES, EVENTS and TRANSITIONS before it includes this file, and includes
 * trouble.pml after its proctype rank(me). */
#define REBATCH 0
#define FORGET 3 /* no rank hears of an update that failed after the vote */
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

/* The transitions that were taken in any run; they are no part of the state. */
c_decl {
    enum { STATES(NAME) STATE_COUNT };
    enum { EVENTS(NAME) EVENT_COUNT };
    static char taken[STATE_COUNT][EVENT_COUNT];
    static void say_taken(void) {
#define SAY(from, event, to) \
        printf(taken[from][event] ? "" : "never taken: %s, %s\n", #from, #event);
        TRANSITIONS(SAY)
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

/* The automaton in the header of a model has this transition. */
inline happens(what)
{
    d_step {
        if
#define TRANSITION(from, event, to) \
        :: at == from && what == event -> at = to; c_code { taken[from][event] = 1; }
        TRANSITIONS(TRANSITION)
        :: else -> assert(false)
        fi
    }
}

#define IN_REDUCE 8 /* more than a rank */
#define NOBODY 100
#define GARBAGE 50 /* what a rank that failed adds */

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
