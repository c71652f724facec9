/* What comes from outside of the ranks, and the beginning: the end of each model. */
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
