/* What the tests of repeated calls share: a training step that is drawn by a seed, and a pool that
 * it runs on, each block of it marked at both ends. */
#ifndef POOL_SCRIPT_H
#define POOL_SCRIPT_H

#include "unit/pool_help.h"

enum { STEP = 60 };

/* What a call of a script does: allocates block `of` with `bytes`, or frees it. */
struct call {
    size_t of, bytes; /* 0: frees */
};

/* A training step: blocks of its own, all freed before its end. */
struct script {
    struct call calls[2 * STEP];
    size_t count;
};

static inline size_t draw_bytes(uint64_t *random)
{
    const size_t most = draw(random) % 4 == 0 ? 40 * GRANULE : GRANULE;
    return 1 + draw(random) % most;
}

static inline struct script write_script(uint64_t seed)
{
    struct script script = {.count = 0};
    size_t open[STEP], opened = 0, made = 0;
    uint64_t random = seed;
    while (script.count < 2 * STEP) {
        if (made < STEP && (opened == 0 || draw(&random) % 3 != 0)) {
            script.calls[script.count++] = (struct call){made, draw_bytes(&random)};
            open[opened++] = made++;
        } else {
            const size_t at = draw(&random) % opened;
            script.calls[script.count++] = (struct call){open[at], 0};
            open[at] = open[--opened];
        }
    }
    return script;
}

/* A pool, and what of a script is in use; each block is marked at both ends. */
struct run {
    struct rig rig;
    unsigned char *blocks[STEP];
    size_t bytes[STEP];
};

static inline void check_marks(const struct run *run, size_t of)
{
    cr_assert_eq(run->blocks[of][0], (unsigned char)of, "block %zu", of);
    cr_assert_eq(run->blocks[of][run->bytes[of] - 1],
                 run->bytes[of] == 1 ? (unsigned char)of : (unsigned char)(of + 1));
}

static inline void play_call(struct run *run, const struct call *call)
{
    const size_t of = call->of;
    if (call->bytes == 0) {
        check_marks(run, of);
        give(run->rig.pool, run->blocks[of]);
        run->blocks[of] = NULL;
        return;
    }
    run->blocks[of] = take(run->rig.pool, call->bytes);
    run->bytes[of] = call->bytes;
    run->blocks[of][call->bytes - 1] = (unsigned char)(of + 1);
    run->blocks[of][0] = (unsigned char)of;
}

static inline void play(struct run *run, const struct script *script, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        play_call(run, &script->calls[i]);
}

static inline void play_times(struct run *run, const struct script *script, int times)
{
    for (int i = 0; i < times; i++)
        play(run, script, 0, script->count);
}

/* In each step a block is allocated that is kept until the next step has its own, as a loss is:
 * gives the last, in which is the number of its step. */
static inline unsigned char *play_with_loss(struct run *run, const struct script *script, int times)
{
    unsigned char *loss = NULL;
    for (int i = 0; i < times; i++) {
        play(run, script, 0, script->count / 2);
        unsigned char *next = take(run->rig.pool, 700);
        if (loss) {
            cr_assert_eq(*loss, (unsigned char)(i - 1));
            give(run->rig.pool, loss);
        }
        *(loss = next) = (unsigned char)i;
        play(run, script, script->count / 2, script->count);
    }
    return loss;
}

static inline bool runs(const struct run *run)
{
    return run->rig.pool->cycle.phase == RBI_CYCLE_RUNS;
}

/* Steps until the pool knows what it needs, and moves no granules any more; and until a cycle is
 * taken up again. */
enum { WARM = 400, AGAIN = 20 };

/* A size that no block of the script has. */
static inline size_t strange_bytes(const struct script *script)
{
    bool used[STEP + 1] = {false};
    size_t units = 1;
    for (size_t i = 0; i < script->count; i++) {
        const size_t of = (script->calls[i].bytes + UNIT - 1) / UNIT;
        if (of <= STEP)
            used[of] = true;
    }
    while (used[units])
        units++;
    return units * UNIT;
}

static inline void close_run(struct run *run)
{
    rig_close(&run->rig);
}

#endif
