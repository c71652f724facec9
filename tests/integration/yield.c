/* Owns the tests of a training that is asked for memory over its socket: what it answers and gives.
 * Must not know the library's inside. */
#include "yield_common.h"

TestSuite(yield, .init = enter, .fini = leave);

/* ---- what it gives ---- */

Test(yield, a_training_gives_half_and_goes_on_smaller_and_grows_back)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    const uint64_t before = held_by(&rig);
    cr_assert_geq(before, WEIGHTS + BATCH * SAMPLE);
    ASK(text, "give 20MiB");
    cr_assert(strncmp(text, "ok: gave ", 9) == 0, "%s", text);
    cr_assert_leq(held_by(&rig), before - MIB(20));
    HAS(text, ", a step needs at least 10.0 MiB");
    wait_for_micro(&rig, 4);
    rig_hold(&rig);
    ASK(text, "status");
    cr_expect_eq(number_in(text, "held_bytes"), held_by(&rig));
    rig.holds = false;
    cr_expect_eq(number_in(text, "bound_bytes"), before - MIB(20));
    ASK(text, "give to 1GiB"); /* which takes back nothing that others were given */
    HAS(text, "ok: gave 0 B");
    ASK(text, "status");
    cr_expect_eq(number_in(text, "bound_bytes"), before - MIB(20));
    ASK(text, "wake");
    HAS(text, "ok: it may take memory again; holds ");
    wait_for_micro(&rig, BATCH);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_training_keeps_what_a_step_needs)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    ASK(text, "give to 1MiB");
    cr_assert(strncmp(text, "partly: gave ", 13) == 0, "%s", text);
    wait_for_micro(&rig, 1);
    wait_for_updates(&rig, 3);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
    cr_expect_leq(held_by(&rig), WEIGHTS + SAMPLE);
}

static atomic_uint attempts;

static rebatch_status forward_with_a_little_more(const rebatch_microbatch *mb, void *user)
{
    void *more;
    if (((struct rig *)user)->updates >= 3)
        attempts += mb->count == 1;
    if (rebatch_pool_alloc(&more, mb->pool, MIB(1), mb->stream, 0))
        return REBATCH_OOM;
    const rebatch_status status = forward_backward(mb, user);
    return status ? status : rebatch_pool_free(mb->pool, more);
}

Test(yield, what_a_step_needs_is_whole_pages)
{
    char text[512];
    rebatch_device *pages_as_on_cuda;
    OK(rebatch_device_open_dry(&pages_as_on_cuda, MIB(64), 0));
    OPEN_WITH(rig_open_on, rig, rig, pages_as_on_cuda, path);
    rig.ops.forward_backward = forward_with_a_little_more;
    rig_train(&rig);
    rig_hold(&rig);
    const int fd = send_raw("give to 1MiB\n");
    wait_for_turns();
    const unsigned updates = rig.updates;
    rig.holds = false;
    receive_raw(text, sizeof text, fd);
    while (rig.updates < updates + 4)
        usleep(1000);
    rig_stop(&rig);
    const unsigned since = rig.updates - updates;
    cr_expect_leq(attempts, since * BATCH, "%u attempts in %u updates", attempts, since);
    HAS(text, ", a step needs at least 12.0 MiB");
    cr_expect_eq(rig.lost, 0);
}

/* What its smallest micro-batch needs beside its samples, no size that ran has told. */
static rebatch_status forward_with_base(const rebatch_microbatch *mb, void *user)
{
    void *base;
    if (rebatch_pool_alloc(&base, mb->pool, MIB(8), mb->stream, 0))
        return REBATCH_OOM;
    rebatch_status status = forward_backward(mb, user);
    return status ? status : rebatch_pool_free(mb->pool, base);
}

Test(yield, what_was_given_comes_back_before_a_training_ends_for_want_of_it)
{
    char text[512];
    OPEN(rig, rig, path);
    rig.ops.forward_backward = forward_with_base;
    rig_train(&rig);
    ASK(text, "give to 1MiB");
    wait_for_micro(&rig, 1);
    ASK(text, "status");
    cr_expect_geq(number_in(text, "bound_bytes"), WEIGHTS + MIB(8) + SAMPLE);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_training_sleeps_with_its_contents_until_it_is_woken)
{
    char text[512];
    OPEN(rig, rig, path);
    memset(rig.weights, 7, WEIGHTS);
    rig_train(&rig);
    ASK(text, "sleep");
    HAS(text, "ok: asleep after ");
    HAS(text, "; holds 0 B, ");
    const unsigned updates = rig.updates;
    ASK(text, "status");
    HAS(text, "\"state\": \"asleep\"");
    ASK(text, "give 4MiB");
    cr_expect_str_eq(text, "no: it sleeps: expected wake");
    usleep(50000);
    cr_expect_eq(rig.updates, updates);
    ASK(text, "wake");
    HAS(text, "ok: it may take memory again");
    wait_for_updates(&rig, 3);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
    for (size_t i = 0; i < WEIGHTS; i++)
        cr_assert_eq(((unsigned char *)rig.weights)[i], 7);
}

/* ---- a step that is interrupted while it sleeps ---- */

static struct {
    rebatch_pool *pool;
    size_t limit; /* from the sleep on; 0: none */
    int asker;    /* who waits for the sleep */
    atomic_bool comes;
} interrupt;

static bool has_come(void *user)
{
    (void)user;
    return interrupt.comes;
}

static void *interrupt_sleep(void *user)
{
    char text[512];
    (void)user;
    receive_raw(text, sizeof text, interrupt.asker);
    HAS(text, "ok: asleep after ");
    OK(rebatch_pool_set_limit(interrupt.pool, interrupt.limit));
    interrupt.comes = true;
    return NULL;
}

/* A step within which a socket's request puts the pool to sleep. */
static rebatch_status step_interrupted(struct rig *rig, size_t limit)
{
    pthread_t thread;
    interrupt.pool = rebatch_get_pool(rig->rb);
    interrupt.limit = limit;
    interrupt.asker = send_raw("sleep\n");
    wait_for_turns();
    OK(rebatch_pool_set_interrupt(interrupt.pool, has_come, NULL));
    cr_assert_eq(pthread_create(&thread, NULL, interrupt_sleep, NULL), 0);
    const rebatch_status status = rebatch_step(rig->rb, &rig->ops, BATCH, rig, NULL);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    interrupt.comes = false;
    return status;
}

Test(yield, a_step_that_is_interrupted_wakes_and_goes_on)
{
    OPEN(rig, rig, path);
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, NULL));
    OK(step_interrupted(&rig, 0));
    cr_expect_eq(rig.updates, 2);
    cr_expect_eq(rig.lost, 0);
}

Test(yield, a_step_that_is_interrupted_and_cannot_wake_ends_with_a_status)
{
    OPEN(rig, rig, path);
    memset(rig.weights, 7, WEIGHTS);
    OK(rebatch_guard(rig.rb, rig.weights, WEIGHTS, REBATCH_GUARD_DEVICE));
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, NULL));
    cr_assert_eq(step_interrupted(&rig, MIB(2)), REBATCH_E_STATE);
    HAS(rebatch_last_error(), "interrupted while the pool sleeps: ");
    cr_expect_eq(rig.updates, 1);
    OK(rebatch_pool_set_limit(interrupt.pool, 0));
    OK(rebatch_pool_wake(interrupt.pool));
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, NULL));
    cr_expect_eq(rig.updates, 2);
    cr_expect_eq(rig.lost, 0);
    cr_expect_eq(((unsigned char *)rig.weights)[WEIGHTS - 1], 7);
}

static void *wake_when_waited(void *user)
{
    while (!interrupt.comes)
        usleep(1000);
    OK(rebatch_pool_wake(user));
    return NULL;
}

static void note_wait(void *user)
{
    (void)user;
    interrupt.comes = true;
}

Test(yield, a_step_that_begins_asleep_waits_before_it_saves_what_is_guarded)
{
    pthread_t thread;
    OPEN(rig, rig, NULL);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    const rebatch_sleep_options options = {.struct_size = sizeof options, .on_wait = note_wait};
    OK(rebatch_guard(rig.rb, rig.weights, WEIGHTS, REBATCH_GUARD_DEVICE));
    OK(rebatch_pool_sleep(pool, &options, NULL));
    cr_assert_eq(pthread_create(&thread, NULL, wake_when_waited, pool), 0);
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, NULL));
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_eq(rig.updates, 1);
}

Test(yield, no_micro_batch_that_runs_is_struck)
{
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_hold(&rig);
    const uint64_t held = held_by(&rig);
    const int fd = send_raw("give 20MiB\n");
    wait_for_turns();
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    cr_expect_eq(held_by(&rig), held);
    rig.holds = false;
    receive_raw(text, sizeof text, fd);
    cr_expect(strncmp(text, "ok: gave ", 9) == 0, "%s", text);
}

Test(yield, an_idle_process_gives_what_is_cached_at_once)
{
    char text[512];
    void *block;
    OPEN(rig, rig, NULL);
    rebatch_pool *pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_alloc(&block, pool, MIB(32), NULL, 0));
    OK(rebatch_pool_free(pool, block));
    OK(rebatch_yield_to(pool, path));
    ASK(text, "give to 8MiB");
    cr_assert(strncmp(text, "ok: gave 32.0 MiB after ", 24) == 0, "%s", text);
    HAS(text, "what a step needs is not known");
    cr_expect_eq(held_by(&rig), WEIGHTS);
    ASK(text, "give 4MiB");
    HAS(text, "partly: gave 0 B after 0 ms, not in a step;");
    ASK(text, "sleep");
    cr_assert_str_eq(text, "no: not in a step, and it sleeps between two micro-batches");
}

Test(yield, a_training_that_pauses_is_bounded_when_its_next_step_begins)
{
    char text[512];
    rebatch_step_report report;
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_stop(&rig);
    ask_who_pauses(text, sizeof text, "give 20MiB\n");
    HAS(text, "ok: gave "); /* all that its last step has left in the cache */
    HAS(text, ", not in a step: the next one is bounded");
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, &report));
    cr_expect_eq(report.micro, 4);
    cr_expect_gt(rebatch_short_of_memory(rig.rb), 0);
    cr_expect_lt(rebatch_short_of_memory(rig.rb), 1);
}

Test(yield, the_least_bound_that_waits_for_a_step_stays)
{
    char text[512];
    rebatch_step_report report;
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_stop(&rig);
    ask_who_pauses(text, sizeof text, "give 20MiB\n");
    HAS(text, "the next one is bounded");
    ask_who_pauses(text, sizeof text, "give to 60MiB\n");
    HAS(text, "the next one is bounded");
    ask_who_pauses(text, sizeof text, "sleep\n");
    HAS(text, "no: not in a step");
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, &report));
    cr_expect_eq(report.micro, 4);
}

static void *ask_for_four(void *text)
{
    OK(rebatch_ask(text, 512, path, "give 4MiB"));
    return NULL;
}

Test(yield, two_clients_at_once_are_both_answered)
{
    char texts[2][512];
    pthread_t threads[2];
    OPEN(rig, rig, path);
    rig_train(&rig);
    const uint64_t before = held_by(&rig);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, ask_for_four, texts[i]), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
        cr_expect(strncmp(texts[i], "ok: gave ", 9) == 0, "%s", texts[i]);
    }
    cr_expect_leq(held_by(&rig), before - MIB(8));
}

Test(yield, the_program_may_put_its_pool_to_sleep_itself)
{
    char text[512];
    OPEN(rig, rig, path);
    OK(rebatch_pool_sleep(rebatch_get_pool(rig.rb), NULL, NULL));
    ASK(text, "status");
    HAS(text, "\"state\": \"asleep\"");
    ASK(text, "give 4MiB");
    HAS(text, "no: it sleeps");
    ASK(text, "wake");
    HAS(text, "holds 8.00 MiB");
}

Test(yield, a_wake_by_the_program_ends_what_was_asked)
{
    char text[512];
    OPEN(rig, rig, path);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    rig_train(&rig);
    ASK(text, "give 20MiB");
    OK(rebatch_pool_wake(pool));
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
    wait_for_micro(&rig, BATCH);
    ASK(text, "sleep");
    OK(rebatch_pool_wake(pool));
    ASK(text, "status");
    HAS(text, "\"state\": \"training\"");
    while (held_by(&rig) < WEIGHTS + BATCH * SAMPLE) /* of which it can give */
        usleep(1000);
    ASK(text, "give 4MiB");
    HAS(text, "ok: ");
}

Test(yield, what_was_given_comes_back_for_an_allocation_outside_of_steps)
{
    char text[512];
    void *evaluated;
    OPEN(rig, rig, path);
    rig_train(&rig);
    ASK(text, "give to 20MiB");
    HAS(text, "ok: ");
    rig_stop(&rig);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    OK(rebatch_pool_alloc(&evaluated, pool, MIB(30) + 1, NULL, 0));
    OK(rebatch_pool_free(pool, evaluated));
    ASK(text, "status");
    cr_expect_lt(number_in(text, "bound_bytes"), WEIGHTS + MIB(48));
    OK(rebatch_pool_give(pool, MIB(20), NULL)); /* the program's own */
    cr_expect_eq(rebatch_pool_alloc(&evaluated, pool, MIB(30), NULL, 0), REBATCH_OOM);
}

Test(yield, a_bound_of_the_program_is_not_raised)
{
    char text[512];
    OPEN(rig, rig, path);
    rebatch_pool *const pool = rebatch_get_pool(rig.rb);
    rig_train(&rig);
    OK(rebatch_pool_give(pool, WEIGHTS + 8 * SAMPLE, NULL));
    wait_for_micro(&rig, 8);
    ASK(text, "give to 60MiB");
    wait_for_updates(&rig, 3);
    cr_expect_leq(rig.micro, 8);
    cr_expect_leq(held_by(&rig), WEIGHTS + 8 * SAMPLE);
}

Test(yield, a_wake_ends_what_the_next_step_would_have_given)
{
    char text[512];
    rebatch_step_report report;
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_stop(&rig);
    ask_who_pauses(text, sizeof text, "give 20MiB\n");
    HAS(text, "the next one is bounded");
    ASK(text, "wake");
    OK(rebatch_step(rig.rb, &rig.ops, BATCH, &rig, &report));
    cr_expect_eq(report.micro, BATCH);
    ASK(text, "status");
    HAS(text, "\"bound_bytes\": null");
}

Test(yield, who_waits_for_memory_hears_of_a_wake)
{
    static const char *const requests[] = {"give 20MiB\n", "sleep\n"};
    char text[512];
    OPEN(rig, rig, path);
    rig_train(&rig);
    rig_hold(&rig);
    for (size_t i = 0; i < 2; i++) {
        const int fd = send_raw(requests[i]);
        wait_for_turns();
        ASK(text, "wake");
        HAS(text, "ok: ");
        receive_raw(text, sizeof text, fd);
        cr_expect_str_eq(text, "no: a wake has come before it");
    }
    rig.holds = false;
    wait_for_updates(&rig, 3);
    cr_expect_eq(rig.micro, BATCH);
}

/* ---- short of memory ---- */

Test(yield, a_step_is_short_of_memory_when_that_has_made_it_smaller_and_no_option_has)
{
    rebatch_step_report report;
    OPEN(rig, rig, NULL);
    rebatch *chosen;
    OK(rebatch_open(&chosen, rig.device, &OPTIONS(.micro_start = 4, .growth = REBATCH_OFF)));
    rebatch *const whole = rig.rb;
    rig.rb = chosen;
    OK(rebatch_step(chosen, &rig.ops, BATCH, &rig, &report));
    cr_expect(report.micro == 4 && rebatch_short_of_memory(chosen) <= 0);
    rebatch_close(chosen);
    rig.rb = whole;
    OK(rebatch_pool_set_limit(rebatch_get_pool(whole), WEIGHTS + 8 * SAMPLE));
    OK(rebatch_step(whole, &rig.ops, BATCH, &rig, &report));
    cr_expect(report.micro == 8 && rebatch_short_of_memory(whole) > 0);
}

/* ---- the reference model ---- */

struct asker {
    atomic_bool has_asked;
    char answer[512];
};

static void *ask_for_half(void *user)
{
    struct asker *const asker = user;
    char status[1024];
    char request[64];
    ASK(status, "status");
    (void)snprintf(request, sizeof request, "give %llu\n",
                   (unsigned long long)number_in(status, "held_bytes") / 2);
    const int fd = send_raw(request);
    wait_for_turns();
    asker->has_asked = true;
    receive_raw(asker->answer, sizeof asker->answer, fd);
    return NULL;
}

Test(yield, the_reference_model_has_the_same_bits, .description = "seed 1, 12 steps of 16")
{
    struct run_options options = tiny_run();
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    struct asker asker = {.has_asked = false};
    pthread_t thread;
    rebatch_step_report report;
    size_t least = BATCH;
    run_whole(want, &options, 12);
    OPEN(run, run, &options);
    OK(rebatch_yield_to(rebatch_get_pool(run.rb), path));
    run_steps(&run, 3);
    cr_assert_eq(pthread_create(&thread, NULL, ask_for_half, &asker), 0);
    for (int i = 3; i < 12; i++) {
        while (i == 8 && !asker.has_asked) /* by now while a step runs, or between two */
            usleep(1000);
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        least = report.micro < least ? report.micro : least;
    }
    cr_assert_eq(pthread_join(thread, NULL), 0);
    HAS(asker.answer, "gave ");
    cr_expect_lt(least, options.train.batch);
    run_hash(&run, got);
    cr_assert_str_eq(got, want);
}
