/* Owns the tests of rebatch_guard(): state that is put back when work is thrown away.
 * Must not know more of the library than its public headers say. */
#include <stdlib.h>
#include <string.h>

#include "step_common.h"

/* State that every callback moves on first thing, as an RNG's is, and what each call found. */
struct state {
    uint64_t *value; /* host or device memory */
    uint64_t found[64];
    size_t calls;
};

INSIDE(move_on)
{
    struct state *state = s->inside_user;
    if (callback == SCRIPT_LIGHTEN)
        return REBATCH_OK;
    cr_assert_lt(state->calls, 64);
    state->found[state->calls++] = *state->value;
    *state->value = *state->value * 6364136223846793005u + 1442695040888963407u;
    return REBATCH_OK;
}

static uint64_t after(unsigned moves)
{
    uint64_t value = 42;
    while (moves--)
        value = value * 6364136223846793005u + 1442695040888963407u;
    return value;
}

static void open_guarded(struct rig *rig, struct state *state, rebatch_guard_kind kind)
{
    rig_open(rig, MIB(64), &OPTIONS(.micro_start = 8, .growth = REBATCH_OFF));
    rig->script.base_bytes = MIB(1);
    static uint64_t host;
    void *block = &host;
    if (kind == REBATCH_GUARD_DEVICE)
        OK(rebatch_pool_alloc(&block, rebatch_get_pool(rig->rb), sizeof host, rig->script.stream,
                              0));
    *state = (struct state){.value = block};
    *state->value = 42;
    OK(rebatch_guard(rig->rb, state->value, sizeof host, kind));
    script_inside(&rig->script, move_on, state);
}

/* Runs one step of 16 samples with one fault, and compares the moves that each call found done. */
static void run_guarded(rebatch_guard_kind kind, enum script_callback callback, uint32_t nth,
                        enum script_when when, enum script_manner manner, rebatch_status expected,
                        const unsigned *moves, size_t calls, unsigned moves_at_end)
{
    struct state state;
    OPEN_WITH(open_guarded, rig, rig, &state, kind);
    struct script_fault *fault = script_fail(&rig.script, callback, nth, when, manner);
    if (expected == REBATCH_E_EXHAUSTED)
        fault->times = SCRIPT_FOREVER;
    cr_assert_eq(rig_step(&rig, 16), expected);
    OK(rebatch_stream_synchronize(rig.device, rig.script.stream));
    cr_assert_eq(state.calls, calls, "calls were %s", script_trace(&rig.script));
    for (size_t i = 0; i < calls; i++)
        cr_assert_eq(state.found[i], after(moves[i]), "call %zu of %s", i,
                     script_trace(&rig.script));
    cr_assert_eq(*state.value, after(moves_at_end), "at the end of %s", script_trace(&rig.script));
}

/* For both kinds: the calls' moves as a list. */
#define EXPECT_MOVES(callback, nth, when, manner, expected, at_end, ...)                           \
    do {                                                                                           \
        static const unsigned moves[] = {__VA_ARGS__};                                             \
        const size_t calls = sizeof moves / sizeof moves[0];                                       \
        run_guarded(REBATCH_GUARD_HOST, callback, nth, when, manner, expected, moves, calls,       \
                    at_end);                                                                       \
        run_guarded(REBATCH_GUARD_DEVICE, callback, nth, when, manner, expected, moves, calls,     \
                    at_end);                                                                       \
    } while (0)

Test(step_guard, without_a_failure_nothing_is_put_back)
{
    struct state state;
    OPEN_WITH(open_guarded, rig, rig, &state, REBATCH_GUARD_HOST);
    OK(rig_step(&rig, 16));
    OK(rig_step(&rig, 16));
    cr_assert_eq(*state.value, after(8));
}

Test(step_guard, oom_before_mutating_puts_back_what_was_before_the_attempt)
{
    /* z f0+8 f8+8! f8+4 f12+4 u */
    EXPECT_MOVES(SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_OK, 5, 0, 1, 2, 2, 3, 4);
}

Test(step_guard, oom_after_mutating_puts_back_what_was_before_zero_grad)
{
    /* z f0+8 f8+8! z f0+4 f4+4 f8+4 f12+4 u */
    EXPECT_MOVES(SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_OK, 6, 0, 1, 2, 0, 1, 2, 3,
                 4, 5);
}

Test(step_guard, oom_in_zero_grad_puts_back_what_was_before_it)
{
    /* z by a CUDA code with nothing cached has nothing to retry; swallowed likewise: EXHAUSTED */
    EXPECT_MOVES(SCRIPT_ZERO, 1, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_E_EXHAUSTED, 0, 0);
}

Test(step_guard, oom_in_zero_grad_that_is_tried_again_finds_the_same_state)
{
    struct state state;
    OPEN_WITH(open_guarded, rig, rig, &state, REBATCH_GUARD_HOST);
    OK(rig_step(&rig, 16)); /* the cache holds something to release now */
    script_fail(&rig.script, SCRIPT_ZERO, 1, SCRIPT_WHILE, SCRIPT_RETURN);
    STEP(&rig, 16, REBATCH_OK, "z! z f0+8 f8+8 u");
    cr_assert_eq(state.found[4], after(4));
    cr_assert_eq(state.found[5], after(4));
    cr_assert_eq(*state.value, after(8));
}

Test(step_guard, oom_in_the_optimizer_before_mutating_puts_back_what_was_before_it)
{
    /* z f0+8 f8+8 u! u */
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_RETURN, REBATCH_OK, 4, 0, 1, 2, 3, 3);
}

Test(step_guard, a_torn_update_puts_nothing_back)
{
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_E_TORN, 4, 0, 1, 2, 3);
}

Test(step_guard, a_failed_update_that_had_begun_puts_nothing_back)
{
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_OWN, SCRIPT_STATUS, 4, 0, 1, 2, 3);
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_OWN_ESCAPE, SCRIPT_STATUS, 4, 0, 1, 2, 3);
}

Test(step_guard, exhausted_puts_back_what_was_before_the_step)
{
    /* z f0+8 f8+8! f8+4! f8+2! f8+1! */
    EXPECT_MOVES(SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_E_EXHAUSTED, 0, 0, 1, 2, 2,
                 2, 2);
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_E_EXHAUSTED, 0, 0, 1, 2, 3);
}

Test(step_guard, a_failure_that_is_no_oom_puts_back_what_was_before_the_step)
{
    EXPECT_MOVES(SCRIPT_ZERO, 1, SCRIPT_BEFORE, SCRIPT_OWN, SCRIPT_STATUS, 0, 0);
    EXPECT_MOVES(SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_OWN, SCRIPT_STATUS, 0, 0, 1, 2);
    EXPECT_MOVES(SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_OWN_ESCAPE, SCRIPT_STATUS, 0, 0, 1, 2, 3);
}

Test(step_guard, the_next_step_guards_anew)
{
    struct state state;
    OPEN_WITH(open_guarded, rig, rig, &state, REBATCH_GUARD_HOST);
    OK(rig_step(&rig, 16));
    *state.value = after(20); /* changed between the steps: that is the user's, and stays */
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_WHILE, SCRIPT_OWN);
    cr_assert_eq(rig_step(&rig, 16), SCRIPT_STATUS);
    cr_assert_eq(*state.value, after(20));
}

/* ---- a callback between attempts ---- */

/* Counts in guarded state, and runs out of memory on the way back to level 0. */
INSIDE(count_lightening)
{
    uint64_t *value = s->inside_user;
    if (callback != SCRIPT_LIGHTEN)
        return REBATCH_OK;
    ++*value;
    return s->level > 0 ? REBATCH_OOM : REBATCH_OK;
}

Test(step_guard, a_lighten_that_fails_puts_back_what_it_changed)
{
    uint64_t value = 0;
    OPEN(rig, rig, MIB(64), &OPTIONS(.micro_smallest = 8, .grow_after = 2, .grow_wait_max = 2));
    rig.script.lighten_levels = 1;
    rig.ops.lighten = script_ops().lighten;
    OK(rebatch_guard(rig.rb, &value, sizeof value, REBATCH_GUARD_HOST));
    script_inside(&rig.script, count_lightening, &value);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 8));
    cr_assert_eq(rig.report.lighten_level, 1);
    cr_assert_eq(value, 1);
    rig.script.fault_count = 0;
    bool is_tried = false;
    for (int i = 0; i < 16 && !is_tried; i++) {
        OK(rig_step(&rig, 8));
        is_tried = strstr(script_trace(&rig.script), "l0!") != NULL;
    }
    cr_assert(is_tried, "calls were %s", script_trace(&rig.script));
    cr_assert_eq(rig.report.lighten_level, 1);
    cr_assert_eq(value, 1, "it is %d", (int)value);
}

/* ---- pointers to what an attempt allocates ---- */

struct cached {
    void *workspace; /* guarded */
    size_t made;
};

INSIDE(make_once)
{
    struct cached *cached = s->inside_user;
    if (callback != SCRIPT_FORWARD || cached->workspace)
        return REBATCH_OK;
    cached->made++;
    return rebatch_pool_alloc(&cached->workspace, mb->pool, KIB(64), mb->stream, 0);
}

Test(step_guard, a_guarded_pointer_to_what_was_taken_back_is_null_again)
{
    OPEN(rig, rig, MIB(64), NULL);
    struct cached cached = {0};
    OK(rebatch_guard(rig.rb, &cached.workspace, sizeof cached.workspace, REBATCH_GUARD_HOST));
    script_inside(&rig.script, make_once, &cached);
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    OK(rig_step(&rig, 16));
    cr_assert_eq(cached.made, 2);
    size_t bytes;
    OK(rebatch_pool_block_bytes(&bytes, rebatch_get_pool(rig.rb), cached.workspace));
}

/* ---- a stream of its own ---- */

static void move_on_there(void *user)
{
    uint64_t *value = user;
    *value = *value * 6364136223846793005u + 1442695040888963407u;
}

/* Enqueues the change and does not wait: only the stream's order makes the copies right. */
INSIDE(enqueue_move)
{
    return rebatch_stream_call(s->device, s->stream, move_on_there, s->inside_user);
}

static void guard_on_stream(enum script_callback callback, uint32_t nth, enum script_when when,
                            enum script_manner manner, rebatch_status expected, unsigned moves)
{
    OPEN_WITH(rig_open_on_stream, rig, rig, MIB(64), &OPTIONS(.micro_start = 8));
    rebatch_stream stream = rig.script.stream;
    void *value;
    OK(rebatch_pool_alloc(&value, rebatch_get_pool(rig.rb), sizeof(uint64_t), stream, 0));
    *(uint64_t *)value = 42;
    OK(rebatch_guard(rig.rb, value, sizeof(uint64_t), REBATCH_GUARD_DEVICE));
    script_inside(&rig.script, enqueue_move, value);
    script_fail(&rig.script, callback, nth, when, manner);
    cr_assert_eq(rig_step(&rig, 16), expected);
    OK(rebatch_stream_synchronize(rig.device, stream));
    cr_assert_eq(*(uint64_t *)value, after(moves), "after %s", script_trace(&rig.script));
}

Test(step_guard, device_state_is_saved_and_put_back_in_the_streams_order)
{
    guard_on_stream(SCRIPT_FORWARD, 2, SCRIPT_BEFORE, SCRIPT_POOL, REBATCH_OK, 5);
    guard_on_stream(SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_OK, 6);
    guard_on_stream(SCRIPT_FORWARD, 2, SCRIPT_WHILE, SCRIPT_OWN, SCRIPT_STATUS, 0);
    guard_on_stream(SCRIPT_UPDATE, 1, SCRIPT_BEFORE, SCRIPT_OWN, SCRIPT_STATUS, 0);
    guard_on_stream(SCRIPT_UPDATE, 1, SCRIPT_WHILE, SCRIPT_POOL, REBATCH_E_TORN, 4);
}

/* ---- many, and bad ones ---- */

enum { MANY = 300 };

struct many {
    rebatch *rb;
    uint32_t states[MANY], by_functions[MANY], saved[MANY];
    size_t calls; /* of forward_backward */
};

static struct many *many;

static rebatch_status save_one(rebatch_guard_point point, void *user)
{
    const size_t i = (size_t)((uint32_t *)user - many->by_functions);
    if (point == REBATCH_GUARD_STEP)
        many->saved[i] = many->by_functions[i];
    return REBATCH_OK;
}

static rebatch_status restore_one(rebatch_guard_point point, void *user)
{
    const size_t i = (size_t)((uint32_t *)user - many->by_functions);
    if (point == REBATCH_GUARD_STEP)
        many->by_functions[i] = many->saved[i];
    return REBATCH_OK;
}

static rebatch_status change_all_and_fail(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    for (size_t i = 0; i < MANY; i++)
        many->states[i]++, many->by_functions[i]++;
    many->calls++;
    return REBATCH_E_USER;
}

/* A network guards several states of each layer. */
Test(step_guard, any_number_of_states_can_be_guarded)
{
    const rebatch_step_ops ops = OPS(nothing_to_do, change_all_and_fail, nothing_to_do, .flags = 0);
    rebatch_device *device;
    many = calloc(1, sizeof *many);
    open_on_host(&device, &many->rb, MIB(4), NULL);
    for (size_t i = 0; i < MANY; i++) {
        const rebatch_guard_ops functions = {sizeof functions, save_one, restore_one};
        many->states[i] = many->by_functions[i] = (uint32_t)i;
        cr_assert_eq(
            rebatch_guard(many->rb, &many->states[i], sizeof *many->states, REBATCH_GUARD_HOST),
            REBATCH_OK, "%zu: %s", i, rebatch_last_error());
        cr_assert_eq(rebatch_guard_with(many->rb, &functions, &many->by_functions[i]), REBATCH_OK,
                     "%zu: %s", i, rebatch_last_error());
    }
    cr_assert_eq(rebatch_step(many->rb, &ops, 4, NULL, NULL), REBATCH_E_USER);
    cr_expect_eq(many->calls, 1);
    for (size_t i = 0; i < MANY; i++) {
        cr_expect_eq(many->states[i], i);
        cr_expect_eq(many->by_functions[i], i);
    }
    rebatch_close(many->rb);
    rebatch_device_close(device);
    free(many);
}

static bool guard_fails_to_save, guard_has_said;

static rebatch_status save_or_fail(rebatch_guard_point point, void *user)
{
    (void)point;
    (void)user;
    if (guard_fails_to_save && guard_has_said) /* what a call of the library fails with */
        return rebatch_guard(NULL, &guard_has_said, 1, REBATCH_GUARD_HOST);
    return guard_fails_to_save ? REBATCH_E_USER + 77 : REBATCH_OK;
}

static rebatch_status fail_to_restore(rebatch_guard_point point, void *user)
{
    (void)point;
    (void)user;
    return REBATCH_E_USER + 78;
}

Test(step_guard, a_guard_function_that_fails_is_named)
{
    const rebatch_guard_ops functions = {sizeof functions, save_or_fail, fail_to_restore};
    OPEN(rig, rig, MIB(64), NULL);
    OK(rebatch_guard_with(rig.rb, &functions, NULL));
    OK(rig_step(&rig, 4));
    guard_fails_to_save = true;
    FAILS_WITH(rig_step(&rig, 4), REBATCH_E_USER + 77,
               "step 1: save of rebatch_guard_with() returned 1077");
    guard_has_said = true;
    cr_assert_eq(rig_step(&rig, 4), REBATCH_E_INVALID);
    cr_expect_str_eq(rebatch_last_error(), "rb is NULL", "its own sentence stays");
    guard_fails_to_save = false;
    script_fail(&rig.script, SCRIPT_FORWARD, 1, SCRIPT_BEFORE, SCRIPT_POOL);
    FAILS_WITH(rig_step(&rig, 4), REBATCH_E_USER + 78,
               "step 1: restore of rebatch_guard_with() returned 1078");
}

Test(step_guard, bad_arguments_are_refused_and_said)
{
    OPEN(rig, rig, MIB(64), NULL);
    int state = 0;
    rebatch_clear_error();
    FAILS_WITH(rebatch_guard(NULL, &state, sizeof state, REBATCH_GUARD_HOST), REBATCH_E_INVALID,
               "rb is NULL");
    FAILS_WITH(rebatch_guard(rig.rb, NULL, sizeof state, REBATCH_GUARD_HOST), REBATCH_E_INVALID,
               "state is NULL");
    FAILS_WITH(rebatch_guard(rig.rb, &state, 0, REBATCH_GUARD_HOST), REBATCH_E_INVALID,
               "bytes is 0: expected the size of state");
    rebatch_clear_error();
    cr_assert_eq(rebatch_guard(rig.rb, &state, sizeof state, (rebatch_guard_kind)0),
                 REBATCH_E_INVALID);
    cr_assert_eq(rebatch_guard(rig.rb, &state, sizeof state, (rebatch_guard_kind)3),
                 REBATCH_E_INVALID);
    cr_assert(strstr(rebatch_last_error(), "3"), "the text is: %s", rebatch_last_error());
}

static void refuse_device_guard(rebatch_device *device)
{
    rebatch *rb;
    void *state;
    int host = 0;
    OK(rebatch_open(&rb, device, NULL));
    OK(rebatch_pool_alloc(&state, rebatch_get_pool(rb), 512, NULL, 0));
    FAILS(rebatch_guard(rb, state, 512, REBATCH_GUARD_DEVICE), REBATCH_E_UNSUPPORTED,
          "cannot be copied");
    OK(rebatch_guard(rb, &host, sizeof host, REBATCH_GUARD_HOST));
    rebatch_close(rb);
}

Test(step_guard, device_state_of_a_device_that_copies_nothing_is_refused)
{
    rebatch_device *dry;
    rebatch_device *fault;
    OK(rebatch_device_open_dry(&dry, MIB(64), 0));
    OK(rebatch_device_open_fault(&fault, dry, NULL));
    refuse_device_guard(dry);
    refuse_device_guard(fault);
    char a[8], b[8];
    cr_assert_eq(rebatch_copy(fault, a, b, sizeof a, NULL), REBATCH_E_UNSUPPORTED);
    FAILS(rebatch_fill(dry, a, 0, sizeof a, NULL), REBATCH_E_UNSUPPORTED,
          "device dry has no contents");
    rebatch_device_close(fault);
    rebatch_device_close(dry);
}

Test(step_guard, a_device_guard_without_room_is_an_oom_and_leaves_nothing)
{
    OPEN(rig, rig, MIB(4), NULL);
    void *state;
    OK(rebatch_pool_alloc(&state, rebatch_get_pool(rig.rb), MIB(1) + KIB(512), NULL, 0));
    const uint64_t live_bytes = rig_live_bytes(&rig);
    /* one copy would fit, two do not */
    cr_assert_eq(rebatch_guard(rig.rb, state, MIB(1) + KIB(512), REBATCH_GUARD_DEVICE),
                 REBATCH_OOM);
    cr_assert_eq(rig_live_bytes(&rig), live_bytes);
    OK(rig_step(&rig, 4));
}

/* ---- state in memory of the pool ---- */

static char *take_block(const struct rig *rig, size_t bytes)
{
    void *block;
    OK(rebatch_pool_alloc(&block, rebatch_get_pool(rig->rb), bytes, rig->script.stream, 0));
    memset(block, 7, bytes);
    return block;
}

Test(step_guard, a_range_that_is_no_part_of_a_block_in_use_is_refused)
{
    OPEN(rig, rig, MIB(64), NULL);
    static char other[4096];
    char *const block = take_block(&rig, 4096);
    for (int kind = REBATCH_GUARD_HOST; kind <= REBATCH_GUARD_DEVICE; kind++) {
        FAILS(rebatch_guard(rig.rb, block, 4097, kind), REBATCH_E_INVALID,
              "with 4097 bytes: expected at most 4096, to the end of its block");
        FAILS(rebatch_guard_sums(rig.rb, block + 4000, 97, kind), REBATCH_E_INVALID,
              "with 97 bytes: expected at most 96, to the end of its block");
        OK(rebatch_guard(rig.rb, block + 4000, 96, kind));
        OK(rebatch_guard(rig.rb, other, sizeof other, kind));
    }
    OK(rig_step(&rig, 4));
    char *const freed = take_block(&rig, 4096);
    OK(rebatch_pool_free(rebatch_get_pool(rig.rb), freed));
    FAILS(rebatch_guard(rig.rb, freed, 4096, REBATCH_GUARD_DEVICE), REBATCH_E_INVALID,
          "which has been freed already: expected memory in use");
}

/* Or the next OOM would put the state back into what is another's by then. */
Test(step_guard, state_that_the_program_has_freed_ends_the_step)
{
    OPEN(rig, rig, MIB(64), NULL);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    char *const block = take_block(&rig, MIB(4));
    size_t released;
    OK(rebatch_guard(rig.rb, block + 512, 100, REBATCH_GUARD_DEVICE));
    OK(rig_step(&rig, 4));
    OK(rebatch_pool_free(pool, block));
    OK(rebatch_pool_trim(pool, 0, &released));
    for (int i = 0; i < 2; i++)
        FAILS(rig_step(&rig, 4), REBATCH_E_STATE,
              "has been freed: expected it to stay until rebatch_close()");
}
