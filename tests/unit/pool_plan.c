/* Owns the tests of phases and their plans: that no page is moved any more, that a call which
 * differs ends it, and that blocks are where nobody else is all the while. */
#include "pool/plan/layout.h"
#include "unit/pool_help.h"

/* ---- layouts ---- */

#define LIFETIMES 200

/* Random lifetimes, which are harder than those of a program, share no place while they meet, and
 * lose no more than a quarter. */
Test(pool_plan, a_layout_has_no_two_blocks_at_one_place, .description = "seeds 1 to 100")
{
    for (uint64_t seed = 1; seed <= 100; seed++) {
        struct rbi_lifetime of[LIFETIMES];
        const struct rbi_lifetime *room[LIFETIMES];
        uint64_t random = seed, in_use = 0;
        for (size_t i = 0; i < LIFETIMES; i++) {
            const uint32_t from = (uint32_t)(2 * i);
            of[i] = (struct rbi_lifetime){.units = 1 + (uint32_t)(draw(&random) % 100),
                                          .from = from,
                                          .to = from + 1 + (uint32_t)(draw(&random) % 80)};
        }
        for (uint32_t at = 0; at < 2 * LIFETIMES; at++) {
            uint64_t units = 0;
            for (size_t i = 0; i < LIFETIMES; i++)
                units += of[i].from <= at && at < of[i].to ? of[i].units : 0;
            in_use = in_use < units ? units : in_use;
        }
        const uint64_t units = rbi_layout_pack(of, room, LIFETIMES, in_use);
        for (size_t i = 0; i < LIFETIMES; i++) {
            cr_assert_leq((uint64_t)of[i].offset + of[i].units, units);
            for (size_t k = 0; k < i; k++)
                cr_assert(of[i].from >= of[k].to || of[k].from >= of[i].to ||
                          of[i].offset >= of[k].offset + of[k].units ||
                          of[k].offset >= of[i].offset + of[i].units);
        }
        cr_assert_geq(units, in_use);
        cr_assert_leq(units, in_use + in_use / 4, "seed %ju: %ju units for %ju in use",
                      (uintmax_t)seed, (uintmax_t)units, (uintmax_t)in_use);
    }
}

/* ---- phases ---- */

#define BLOCKS 60
#define CALLS (2 * BLOCKS)

/* Calls of a phase: an allocation of so many bytes, or the free of that block (0). */
struct script {
    struct {
        size_t block, bytes;
    } calls[CALLS];
};

static struct script write_script(uint64_t seed)
{
    struct script script;
    size_t open[BLOCKS], opened = 0, made = 0;
    uint64_t random = seed;
    for (size_t i = 0; i < CALLS; i++) {
        if (made < BLOCKS && (opened == 0 || draw(&random) % 3)) {
            script.calls[i].block = open[opened++] = made++;
            const uint64_t size = draw(&random), kind = draw(&random);
            script.calls[i].bytes = 1 + size % (kind % 4 ? PAGE : 20 * PAGE);
        } else {
            const size_t at = draw(&random) % opened;
            script.calls[i].block = open[at];
            script.calls[i].bytes = 0;
            open[at] = open[--opened];
        }
    }
    return script;
}

struct run {
    struct rig rig;
    unsigned char *blocks[BLOCKS];
    size_t bytes[BLOCKS];
};

/* Runs calls [first, last) of a script; each block is marked at both ends while it is in use. */
static rebatch_status play(struct run *run, const struct script *script, size_t first, size_t last)
{
    for (size_t i = first; i < last; i++) {
        const size_t k = script->calls[i].block, bytes = script->calls[i].bytes;
        void *block = NULL;
        if (bytes) {
            if (rebatch_pool_alloc(&block, run->rig.pool, bytes, NULL, 0))
                return REBATCH_OOM;
            run->blocks[k] = block;
            run->bytes[k] = bytes;
            run->blocks[k][0] = run->blocks[k][bytes - 1] = (unsigned char)k;
        } else {
            cr_assert_eq(run->blocks[k][0], (unsigned char)k);
            cr_assert_eq(run->blocks[k][run->bytes[k] - 1], (unsigned char)k);
            give(run->rig.pool, run->blocks[k]);
            run->blocks[k] = NULL;
        }
    }
    return REBATCH_OK;
}

static rebatch_status phase(struct run *run, const struct script *script, uint64_t key)
{
    cr_assert_eq(rebatch_pool_mark(run->rig.pool, key), REBATCH_OK);
    return play(run, script, 0, CALLS);
}

static bool serves(const struct run *run)
{
    return run->rig.pool->plan.mode == RBI_PLAN_SERVES;
}

static uint64_t moved(const struct run *run)
{
    const rebatch_pool_stats stats = stats_of(run->rig.pool);
    return stats.remaps + stats.device_frees;
}

static void give_all(struct run *run)
{
    for (size_t k = 0; k < BLOCKS; k++) {
        give(run->rig.pool, run->blocks[k]); /* NULL: nothing */
        run->blocks[k] = NULL;
    }
}

static void close_run(struct run *run)
{
    give_all(run);
    assert_valid(run->rig.pool);
    cr_assert_eq(stats_of(run->rig.pool).live_bytes, 0);
    rig_close(&run->rig);
}

#define WARM 12

/* A pool on the smallest device on which a script runs so many times. */
static struct run open_tight_for(const struct script *script, int times,
                                 const rebatch_pool_options *options)
{
    for (size_t pages = 20;; pages++) {
        struct run run = {.rig = rig_open(pages, options)};
        rebatch_status status = REBATCH_OK;
        for (int i = 0; i < times && !status; i++)
            status = phase(&run, script, 1);
        if (!status)
            return run;
        close_run(&run);
    }
}

static struct run open_tight(const struct script *script)
{
    return open_tight_for(script, WARM, NULL);
}

/* On so many pages more. */
static struct run open_less_tight(const struct script *script, size_t pages)
{
    struct run tight = open_tight(script);
    rebatch_memory_info info;
    cr_assert_eq(rebatch_device_memory(tight.rig.device, &info), REBATCH_OK);
    close_run(&tight);
    return (struct run){.rig = rig_open(info.total_bytes / PAGE + pages, NULL)};
}

#define SEEDS 40

/* On so small a device every step moves pages; once there is a plan none does. */
Test(pool_plan, no_page_is_moved_once_a_phase_repeats, .description = "seeds 1 to 40")
{
    unsigned served = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_tight(&script);
        for (int i = 0; i < 8; i++)
            cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        const uint64_t before = moved(&run);
        for (int i = 0; i < 8; i++)
            cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        served += serves(&run);
        if (serves(&run))
            cr_assert_eq(moved(&run), before, "seed %ju", (uintmax_t)seed);
        assert_valid(run.rig.pool);
        close_run(&run);
    }
    cr_assert_geq(served, SEEDS / 2, "%u of %d scripts were served", served, SEEDS);
}

/* Where there is room, fresh pages take the place of free memory in parts of pages, which cannot
 * move into an arena. */
Test(pool_plan, with_some_room_no_script_moves_pages_for_long, .description = "seeds 1 to 40")
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_less_tight(&script, 60);
        for (int i = 0; i < 12; i++)
            cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        const uint64_t before = moved(&run);
        for (int i = 0; i < 12; i++)
            cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        cr_assert_eq(moved(&run), before, "seed %ju", (uintmax_t)seed);
        close_run(&run);
    }
}

/* The first script from `seed` on that is served. */
static struct run open_served(struct script *script, uint64_t seed)
{
    for (;; seed++) {
        *script = write_script(seed);
        struct run run = open_tight(script);
        for (int i = 0; i < 8; i++)
            cr_assert_eq(phase(&run, script, 1), REBATCH_OK);
        if (serves(&run))
            return run;
        close_run(&run);
    }
}

/* As a plain training loop does: what a phase keeps is freed after the next one is marked, before
 * that allocates. So it does not outlive its phase, and the plan serves it too. */
Test(pool_plan, what_is_freed_before_the_first_allocation_is_of_the_phase_before)
{
    enum { KEPT = 20 };
    struct rig rig = rig_open(3 * KEPT * 3, NULL);
    void *kept[KEPT] = {NULL};
    for (int i = 0; i < 12; i++) {
        cr_assert_eq(rebatch_pool_mark(rig.pool, 1), REBATCH_OK);
        for (int k = 0; k < KEPT; k++)
            give(rig.pool, kept[k]);
        for (int k = 0; k < KEPT; k++) {
            void *moment = take(rig.pool, (size_t)(KEPT - k) * PAGE + PAGE / 2);
            kept[k] = take(rig.pool, 2 * PAGE + PAGE / 4);
            give(rig.pool, moment);
        }
    }
    cr_assert_eq(rig.pool->plan.mode, RBI_PLAN_SERVES);
    const struct rbi_phase *const phase = rig.pool->plan.phase;
    for (size_t i = 0; i < phase->count; i++)
        cr_assert_neq(phase->calls[i].offset * (phase->calls[i].kind != RBI_CALL_FREE),
                      RBI_PLAN_ELSEWHERE, "call %zu is served elsewhere", i);
    for (int k = 0; k < KEPT; k++)
        give(rig.pool, kept[k]);
    assert_valid(rig.pool);
    rig_close(&rig);
}

/* Blocks of one size find the places of those before them. */
Test(pool_plan, where_no_page_is_moved_there_is_no_plan)
{
    struct script script = write_script(3);
    for (size_t i = 0; i < CALLS; i++)
        script.calls[i].bytes = script.calls[i].bytes ? 2 * PAGE : 0;
    struct run run = {.rig = rig_open(4096, NULL)};
    for (int i = 0; i < 100; i++) {
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        cr_assert_not(serves(&run));
    }
    cr_assert_eq(moved(&run), 0);
    close_run(&run);
}

Test(pool_plan, switched_off_there_is_none)
{
    struct script script;
    struct run served = open_served(&script, 1);
    close_run(&served);
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.replay = REBATCH_OFF;
    struct run run = open_tight_for(&script, 32, &options);
    for (int i = 0; i < 20; i++) {
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        cr_assert_not(serves(&run));
    }
    close_run(&run);
}

/* No block of a script has this size. */
#define STRANGE_BYTES (21 * PAGE)

/* At every call something else comes. What was given out stays as it is, and the phase is served
 * again later. */
Test(pool_plan, a_call_that_differs_ends_it_for_this_phase)
{
    struct script script;
    struct run run = open_served(&script, 1);
    for (size_t at = 0; at < CALLS; at++) {
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
        cr_assert_eq(play(&run, &script, 0, at), REBATCH_OK);
        void *strange = NULL;
        const rebatch_status status =
            rebatch_pool_alloc(&strange, run.rig.pool, STRANGE_BYTES, NULL, 0);
        cr_assert(status == REBATCH_OK || status == REBATCH_OOM);
        cr_assert_not(serves(&run));
        assert_valid(run.rig.pool);
        give(run.rig.pool, strange);
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, 0), REBATCH_OK);
        for (size_t k = 0; k < BLOCKS; k++) {
            if (!run.blocks[k])
                continue;
            cr_assert_eq(run.blocks[k][run.bytes[k] - 1], (unsigned char)k);
            give(run.rig.pool, run.blocks[k]);
            run.blocks[k] = NULL;
        }
        int again = 0;
        while (again++ < 20 && !serves(&run))
            if (phase(&run, &script, 1)) /* pieces are where they were not before */
                break;
        give_all(&run);
    }
    close_run(&run);
}

Test(pool_plan, statistics_count_the_phases_that_a_plan_served_to_their_end)
{
    struct script script;
    struct run run = open_served(&script, 1);
    cr_assert_eq(rebatch_pool_mark(run.rig.pool, 0), REBATCH_OK);
    const rebatch_pool_stats before = stats_of(run.rig.pool);
    cr_assert_eq(before.phases, WARM + 8);
    cr_assert_gt(before.planned_phases, 0);
    cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
    cr_assert_eq(stats_of(run.rig.pool).planned_phases, before.planned_phases, "it has not ended");
    cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
    give(run.rig.pool, take(run.rig.pool, STRANGE_BYTES)); /* begins the phase, and ends its plan */
    cr_assert_eq(rebatch_pool_mark(run.rig.pool, 0), REBATCH_OK);
    const rebatch_pool_stats after = stats_of(run.rig.pool);
    cr_assert_eq(after.phases, before.phases + 2);
    cr_assert_eq(after.planned_phases, before.planned_phases + 1);
    close_run(&run);
}

Test(pool_plan, one_that_is_dropped_reserves_nothing_until_its_calls_have_repeated)
{
    for (uint64_t other = 0; other < 2; other++) { /* the phase that runs, or every one */
        struct script script;
        struct run run = open_served(&script, 1);
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1 + other), REBATCH_OK);
        give(run.rig.pool, take(run.rig.pool, script.calls[0].bytes)); /* begins the phase */
        rbi_pool_drop_plan(run.rig.pool, other);
        const uint64_t planned = stats_of(run.rig.pool).planned_phases;
        size_t released;
        cr_assert_eq(rebatch_pool_trim(run.rig.pool, 0, &released), REBATCH_OK);
        const size_t reserved = stats_of(run.rig.pool).reserved_bytes;
        for (int i = 0; i < 3; i++) {
            cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
            give(run.rig.pool, take(run.rig.pool, 1));
            cr_assert_not(serves(&run));
        }
        cr_assert_leq(stats_of(run.rig.pool).reserved_bytes, reserved + PAGE);
        cr_assert_eq(stats_of(run.rig.pool).planned_phases, planned);
        rbi_pool_drop_plan(run.rig.pool, other); /* there is none */
        int again = 0;
        while (again++ < 20 && !serves(&run))
            cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        cr_assert(serves(&run));
        close_run(&run);
    }
}

Test(pool_plan, its_state_is_valid_after_every_call)
{
    struct script script;
    struct run run = open_served(&script, 1);
    cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
    for (size_t i = 0; i < CALLS; i++) {
        cr_assert_eq(play(&run, &script, i, i + 1), REBATCH_OK);
        assert_valid(run.rig.pool);
        cr_assert(serves(&run), "a look at what is counted does not end it");
    }
    close_run(&run);
}

Test(pool_plan, a_rollback_takes_back_what_it_gave)
{
    struct script script;
    struct run run = open_served(&script, 1);
    for (size_t at = 1; at < CALLS; at++) {
        const rebatch_scope scope = begin(run.rig.pool);
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
        cr_assert_eq(play(&run, &script, 0, at), REBATCH_OK);
        rollback(run.rig.pool, scope);
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, 0), REBATCH_OK);
        for (size_t k = 0; k < BLOCKS; k++) {
            if (run.blocks[k]) /* late: ignored */
                give(run.rig.pool, run.blocks[k]);
            run.blocks[k] = NULL;
        }
        cr_assert_eq(stats_of(run.rig.pool).live_bytes, 0);
        assert_valid(run.rig.pool);
    }
    close_run(&run);
}

/* A block that is kept from one phase into the next, as a loss may be. */
Test(pool_plan, what_outlives_its_phase_is_served_elsewhere)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_less_tight(&script, 2); /* two are kept at a time */
        unsigned char *kept = NULL;
        for (int i = 0; i < 20; i++) {
            cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
            cr_assert_eq(play(&run, &script, 0, CALLS / 2), REBATCH_OK);
            unsigned char *const next = take(run.rig.pool, UNIT);
            next[0] = (unsigned char)i;
            if (kept) {
                cr_assert_eq(kept[0], (unsigned char)(i - 1));
                give(run.rig.pool, kept);
            }
            kept = next;
            cr_assert_eq(play(&run, &script, CALLS / 2, CALLS), REBATCH_OK);
            assert_valid(run.rig.pool);
        }
        give(run.rig.pool, kept);
        close_run(&run);
    }
}

/* Two blocks are used by another stream, and calls of that stream come between. */
Test(pool_plan, what_other_streams_use_is_served_elsewhere)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        struct run run = open_less_tight(&script, 24);
        rebatch_stream other;
        cr_assert_eq(rebatch_stream_create(&other, run.rig.device), REBATCH_OK);
        for (int i = 0; i < 20; i++) {
            cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
            unsigned char *const shared = take(run.rig.pool, 2 * PAGE);
            cr_assert_eq(rebatch_pool_use_on(run.rig.pool, shared, other), REBATCH_OK);
            cr_assert_not(serves(&run) && run.rig.pool->by_sequence.previous->planned);
            void *const theirs = take_on(run.rig.pool, PAGE, other);
            cr_assert_eq(play(&run, &script, 0, CALLS), REBATCH_OK);
            give(run.rig.pool, theirs);
            give(run.rig.pool, shared);
            assert_valid(run.rig.pool);
        }
        rebatch_stream_destroy(run.rig.device, other);
        close_run(&run);
    }
}

/* A phase that reserves memory in its middle, as a step does before it accumulates. */
static rebatch_status reserving_phase(struct run *run, const struct script *script, size_t bytes)
{
    cr_assert_eq(rebatch_pool_mark(run->rig.pool, 1), REBATCH_OK);
    rebatch_status status = play(run, script, 0, CALLS / 2);
    if (!status)
        status = rebatch_pool_reserve(run->rig.pool, bytes, NULL);
    return status ? status : play(run, script, CALLS / 2, CALLS);
}

/* Whether such phases run on a device of so many pages; *served: how many by a plan. */
static bool runs_reserving(const struct script *script, size_t pages, size_t bytes,
                           rebatch_toggle replay, unsigned *served)
{
    rebatch_pool_options options = REBATCH_POOL_OPTIONS_INIT;
    options.replay = replay;
    struct run run = {.rig = rig_open(pages, &options)};
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < 20 && !status; i++) {
        status = reserving_phase(&run, script, bytes);
        *served += serves(&run);
        assert_valid(run.rig.pool);
    }
    close_run(&run);
    return status == REBATCH_OK;
}

/* Far more than the blocks of the phase need: where it runs without a plan, it runs with one. */
Test(pool_plan, what_a_phase_reserves_has_a_place_in_its_plan)
{
    unsigned served = 0, unplanned = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        const struct script script = write_script(seed);
        const size_t bytes = 100 * PAGE;
        size_t pages = 100;
        while (!runs_reserving(&script, pages, bytes, REBATCH_OFF, &unplanned))
            pages++;
        cr_assert(runs_reserving(&script, pages, bytes, REBATCH_ON, &served), "seed %ju",
                  (uintmax_t)seed);
    }
    cr_assert_eq(unplanned, 0);
    cr_assert_geq(served, SEEDS, "%u phases were served", served);
}

/* The lifetimes of seed 4 pack into more pages than the device has: the search serves its phases,
 * and after five of them in a row, twice, it is not tried any more for a while. */
Test(pool_plan, an_arena_that_is_not_to_be_had_is_not_asked_for_in_every_phase)
{
    enum { PAGES = 111, RESERVED = 100 };
    const struct script script = write_script(4);
    struct run run = {.rig = rig_open(PAGES, NULL)};
    struct rbi_phase *known = NULL;
    for (int i = 0; i < 20; i++) {
        if (known && i < 3)
            known->served = 100; /* as before, when it had its arena */
        cr_assert_eq(reserving_phase(&run, &script, RESERVED * PAGE), REBATCH_OK);
        cr_assert_not(serves(&run));
        known = run.rig.pool->plan.phase;
        if (i < 10)
            cr_assert_eq(known->rest, 0, "phase %d", i);
    }
    cr_assert_gt(known->arena_bytes, PAGES * PAGE);
    cr_assert_gt(known->rest, 40);
    cr_assert_eq(known->served, 0, "it has to prove itself again");
    close_run(&run);
}

Test(pool_plan, what_is_reserved_otherwise_ends_it_and_is_there)
{
    struct script script;
    struct run run = open_served(&script, 1);
    cr_assert_eq(rebatch_pool_mark(run.rig.pool, 1), REBATCH_OK);
    cr_assert_eq(rebatch_pool_reserve(run.rig.pool, PAGE, NULL), REBATCH_OK);
    cr_assert_not(serves(&run));
    void *const block = take(run.rig.pool, PAGE);
    give(run.rig.pool, block);
    close_run(&run);
}

Test(pool_plan, without_host_memory_there_is_none)
{
    const struct script script = write_script(1);
    struct run run = open_tight(&script);
    for (uint64_t nth = 1; nth < 40; nth++) {
        rbi_heap_fail(nth, 1);
        cr_assert_eq(rebatch_pool_mark(run.rig.pool, nth + 1), REBATCH_OK);
        rbi_heap_fail(nth, 1);
        for (int i = 0; i < 4; i++) {
            const rebatch_status status = phase(&run, &script, nth + 1);
            cr_assert(status == REBATCH_OK || status == REBATCH_OOM);
            give_all(&run);
        }
        rbi_heap_fail(0, 0);
        assert_valid(run.rig.pool);
    }
    close_run(&run);
}

/* Micro-batches of two sizes and an update, one after the other. */
Test(pool_plan, each_key_has_its_plan)
{
    struct script scripts[3];
    struct run run = open_served(&scripts[0], 1);
    scripts[1] = scripts[0];
    scripts[2] = scripts[0];
    for (size_t i = 0; i < CALLS; i++) {
        scripts[1].calls[i].bytes = (scripts[0].calls[i].bytes + 1) / 2;
        scripts[2].calls[i].bytes = (scripts[0].calls[i].bytes + 2) / 3;
    }
    uint64_t before = 0;
    for (int i = 0; i < 40; i++) {
        before = i == 30 ? moved(&run) : before;
        for (uint64_t key = 1; key <= 3; key++)
            cr_assert_eq(phase(&run, &scripts[key - 1], key), REBATCH_OK);
    }
    cr_assert_eq(moved(&run), before);
    close_run(&run);
}

/* The same key has other calls from some phase on. */
Test(pool_plan, other_calls_are_planned_in_their_turn)
{
    struct script script;
    struct run run = open_served(&script, 1);
    for (size_t i = 0; i < CALLS; i++)
        script.calls[i].bytes = script.calls[i].bytes * 9 / 10 + (script.calls[i].bytes != 0);
    uint64_t before = 0;
    for (int i = 0; i < 40; i++) {
        before = i == 30 ? moved(&run) : before;
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
    }
    cr_assert_eq(moved(&run), before);
    assert_valid(run.rig.pool);
    close_run(&run);
}

/* As where a program looks at its passes in its first steps: those that follow are planned for at
 * once. */
Test(pool_plan, other_calls_after_a_few_phases_are_planned_at_once)
{
    struct script script;
    struct run run = open_served(&script, 1);
    rbi_pool_drop_plan(run.rig.pool, true);
    int phases = 0;
    while (!serves(&run) && ++phases < 40)
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
    cr_assert_lt(phases, 8);
    for (size_t i = 0; i < CALLS; i++)
        script.calls[i].bytes = script.calls[i].bytes * 9 / 10 + (script.calls[i].bytes != 0);
    for (phases = 0; phases < 2 || (!serves(&run) && phases < 40); phases++)
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
    cr_assert_leq(phases, 8);
    close_run(&run);
}

/* As a micro-batch that is a replay of a graph. */
Test(pool_plan, a_phase_without_an_allocation_takes_no_memory)
{
    struct script script;
    struct run run = open_served(&script, 1);
    rebatch_pool *const pool = run.rig.pool;
    size_t released;
    rebatch_scope scope;
    struct rbi_scope_use used;
    cr_assert_eq(rebatch_pool_mark(pool, 0), REBATCH_OK);
    cr_assert_eq(rebatch_pool_trim(pool, 0, &released), REBATCH_OK);
    const size_t reserved = stats_of(pool).reserved_bytes;
    cr_assert_eq(rbi_scope_begin_phase(&scope, pool, false, 1), REBATCH_OK);
    cr_assert_eq(rbi_scope_commit_phase(&used, pool, scope), REBATCH_OK);
    cr_assert_eq(stats_of(pool).reserved_bytes, reserved);
    cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
    cr_assert(serves(&run), "the plan is still there");
    close_run(&run);
}

/* As an evaluation between two steps may be: the plan is there when they come again. */
Test(pool_plan, one_phase_that_differs_costs_no_plan)
{
    struct script script, other;
    struct run run = open_served(&script, 1);
    other = script;
    other.calls[0].bytes = STRANGE_BYTES;
    for (int i = 0; i < 10; i++) {
        cr_assert_eq(phase(&run, &other, 1), REBATCH_OK);
        cr_assert_not(serves(&run));
        cr_assert_eq(phase(&run, &script, 1), REBATCH_OK);
        cr_assert(serves(&run));
    }
    close_run(&run);
}

Test(pool_plan, a_mark_of_no_pool_is_refused)
{
    cr_assert_eq(rebatch_pool_mark(NULL, 1), REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "pool is NULL"));
}

/* ---- free pages in a row ---- */

static struct rbi_block *line_up(rebatch_pool *pool, size_t pages)
{
    rbi_lock_take(&pool->lock);
    rbi_pool_flush_lists(pool);
    struct rbi_block *block =
        rbi_pool_line_up(pool, pages * PAGE, rbi_pool_find_stream(pool, NULL));
    rbi_lock_give(&pool->lock);
    assert_valid(pool);
    return block;
}

/* What is free already in one place stays; the rest is moved to it. */
Test(pool_plan, only_the_pages_that_lie_elsewhere_are_moved_into_a_row)
{
    struct rig rig = rig_open(56, NULL);
    unsigned char *const apart = take(rig.pool, 8 * PAGE), *const used = take(rig.pool, 8 * PAGE),
                         *const most = take(rig.pool, 40 * PAGE);
    memset(used, 7, 8 * PAGE);
    give(rig.pool, apart);
    give(rig.pool, most);
    const struct rbi_block *const row = line_up(rig.pool, 46);
    cr_assert_not_null(row);
    cr_assert_geq(row->bytes, 46 * PAGE);
    cr_assert_eq(stats_of(rig.pool).remaps, 6);
    for (size_t i = 0; i < 8 * PAGE; i++)
        cr_assert_eq(used[i], 7);
    give(rig.pool, used);
    rig_close(&rig);
}

/* Free: 8.5 pages, 8 that begin in the middle of one, and 40; of them 55 are whole pages. */
Test(pool_plan, where_too_few_are_free_no_page_is_moved_for_a_row)
{
    struct rig rig = rig_open(73, NULL);
    static const size_t half_pages[] = {17, 16, 16, 17, 80};
    void *blocks[5];
    for (size_t i = 0; i < 5; i++)
        blocks[i] = take(rig.pool, half_pages[i] * PAGE / 2);
    for (size_t i = 0; i < 5; i += 2)
        give(rig.pool, blocks[i]);
    const rebatch_pool_stats before = stats_of(rig.pool);
    cr_assert_eq(before.reserved_bytes - before.live_bytes, 113 * PAGE / 2);
    cr_assert_null(line_up(rig.pool, 56));
    cr_assert_eq(stats_of(rig.pool).remaps, 0);
    cr_assert_eq(stats_of(rig.pool).driver_unmaps, before.driver_unmaps);
    cr_assert_not_null(line_up(rig.pool, 55));
    give(rig.pool, blocks[1]);
    give(rig.pool, blocks[3]);
    rig_close(&rig);
}
