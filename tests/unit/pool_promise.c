/* Owns the tests of what is reserved in a phase that a plan serves: wherever the plan ends, what
 * was not used up yet is there. */
#include "unit/pool_help.h"

#define CALLS 90
#define BLOCKS CALLS
#define RESERVE_AT 25       /* the call that reserves */
#define RESERVE_AGAIN_AT 45 /* in a script of two */
#define SEEDS 300

enum what { ALLOCATES, FREES, RESERVES };

struct call {
    enum what what;
    size_t block, bytes;
};

struct script {
    struct call calls[CALLS];
};

struct run {
    struct rig rig;
    void *blocks[BLOCKS];
    size_t made; /* blocks */
    size_t left; /* of what was reserved */
};

static size_t some_bytes(uint64_t *random)
{
    return UNIT * (1 + draw(random) % (draw(random) % 4 ? 100 : 1000));
}

/* Blocks that come and go, of which some stay to the end; and one reserve, or two. */
static struct script write_script(uint64_t seed)
{
    struct script script;
    size_t open[BLOCKS], opened = 0;
    uint64_t random = seed;
    const bool reserves_twice = seed % 3 == 0;
    for (size_t i = 0; i < CALLS; i++) {
        struct call *call = &script.calls[i];
        if (i == RESERVE_AT || (i == RESERVE_AGAIN_AT && reserves_twice)) {
            *call = (struct call){RESERVES, 0, some_bytes(&random) * (1 + draw(&random) % 20)};
        } else if (opened == 0 || draw(&random) % 3) {
            open[opened++] = i;
            *call = (struct call){ALLOCATES, i, some_bytes(&random)};
        } else {
            const size_t at = draw(&random) % opened;
            *call = (struct call){FREES, open[at], 0};
            open[at] = open[--opened];
        }
    }
    return script;
}

/* What a call must not do is fail where it is within what was reserved. */
static void play(struct run *run, const struct script *script, size_t first, size_t last)
{
    for (size_t i = first; i < last; i++) {
        const struct call *call = &script->calls[i];
        if (call->what == RESERVES) {
            cr_assert_eq(rebatch_pool_reserve(run->rig.pool, call->bytes, NULL), REBATCH_OK);
            run->left = call->bytes > run->left ? call->bytes : run->left;
        } else if (call->what == FREES) {
            give(run->rig.pool, run->blocks[call->block]);
            run->blocks[call->block] = NULL;
        } else {
            run->blocks[call->block] = take(run->rig.pool, call->bytes);
            run->left -= call->bytes < run->left ? call->bytes : run->left;
        }
    }
}

static void end_phase(struct run *run)
{
    for (size_t k = 0; k < BLOCKS; k++) {
        give(run->rig.pool, run->blocks[k]);
        run->blocks[k] = NULL;
    }
    run->left = 0;
    cr_assert_eq(rebatch_pool_mark(run->rig.pool, 0), REBATCH_OK);
}

/* The device has no byte more. */
static void fill_device(const struct run *run)
{
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(run->rig.device, &info), REBATCH_OK);
    cr_assert_eq(rebatch_device_set_capacity(run->rig.device, info.used_bytes), REBATCH_OK);
}

/* Other calls than the plan has, until what was reserved is used up to the last unit. */
static void use_up(struct run *run, uint64_t seed)
{
    uint64_t random = seed + 1;
    void *blocks[BLOCKS] = {NULL};
    for (size_t k = 0; run->left >= UNIT; k++) {
        const size_t units = run->left / UNIT;
        const size_t bytes = k < BLOCKS / 2 ? UNIT * (1 + draw(&random) % units) : run->left;
        cr_assert_eq(rebatch_pool_alloc(&blocks[k], run->rig.pool, bytes, NULL, 0), REBATCH_OK,
                     "seed %ju: %zu of the %zu bytes left: %s", (uintmax_t)seed, bytes, run->left,
                     rebatch_last_error());
        run->left -= bytes;
        if (draw(&random) % 2) {
            give(run->rig.pool, blocks[k]);
            blocks[k] = NULL;
        }
    }
    for (size_t k = 0; k < BLOCKS; k++)
        give(run->rig.pool, blocks[k]);
}

static bool is_served_to(struct run *run, const struct script *script, size_t reserved, size_t at)
{
    cr_assert_eq(rebatch_pool_mark(run->rig.pool, 1), REBATCH_OK);
    play(run, script, 0, reserved);
    fill_device(run);
    const bool serves = run->rig.pool->plan.mode == RBI_PLAN_SERVES;
    for (size_t i = reserved; i < at; i++) {
        const struct call *call = &script->calls[i];
        if (call->what == RESERVES || (call->what == ALLOCATES && call->bytes > run->left))
            break; /* promised is no more than is left */
        play(run, script, i, i + 1);
    }
    return serves;
}

Test(pool_promise, what_a_planned_phase_reserves_is_there_wherever_the_plan_ends,
     .description = "seeds 1 to 300")
{
    size_t served = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        uint64_t random = seed;
        struct run run = {.rig = rig_open(2000, NULL)};
        cr_assert_eq(rebatch_pool_reserve(run.rig.pool, 1000 * PAGE, NULL), REBATCH_OK);
        for (int i = 0; i < 6; i++) { /* it holds more than is in use: phases are planned */
            cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
            play(&run, &script, 0, CALLS);
            end_phase(&run);
        }
        cr_assert_eq(rebatch_pool_trim(run.rig.pool, 0, NULL), REBATCH_OK);
        const size_t reserved =
            1 + (script.calls[RESERVE_AGAIN_AT].what == RESERVES && seed % 2 ? RESERVE_AGAIN_AT
                                                                             : RESERVE_AT);
        served += is_served_to(&run, &script, reserved, reserved + draw(&random) % 30);
        assert_valid(run.rig.pool);
        use_up(&run, seed);
        end_phase(&run);
        rig_close(&run.rig);
    }
    cr_assert_gt(served, SEEDS / 2, "%zu phases were served", served);
}
