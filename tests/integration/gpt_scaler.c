/* Owns the tests of dynamic loss scaling: its rules one by one, and in training, where gradients
 * are made infinite on purpose. Must not know private headers of the library. */
#include <float.h>
#include <math.h>

#include "fault/fault_device.h"
#include "gpt/error.h"
#include "gpt_common.h"
#include "rig.h"

TestSuite(gpt_scaler, .fini = release_arrays);

/* ---- the rules ---- */

static void assert_state(const struct gpt_scaler *scaler, float scale, uint32_t good)
{
    cr_assert_eq(scaler->scale, scale, "scale %g, expected %g", (double)scaler->scale,
                 (double)scale);
    cr_assert_eq(scaler->good, good, "%u good, expected %u", scaler->good, good);
}

Test(gpt_scaler, two_thousand_good_updates_double_it)
{
    struct gpt_scaler scaler = {.scale = GPT_SCALER_FIRST};
    cr_assert_eq(GPT_SCALER_FIRST, 65536.0f);
    for (uint32_t i = 1; i <= 1999; i++) {
        gpt_scaler_update(&scaler, true);
        assert_state(&scaler, 65536.0f, i);
    }
    gpt_scaler_update(&scaler, true);
    assert_state(&scaler, 131072.0f, 0);
    for (uint32_t i = 0; i < 2000; i++)
        gpt_scaler_update(&scaler, true);
    assert_state(&scaler, 262144.0f, 0);
}

Test(gpt_scaler, a_bad_one_halves_it_and_the_count_begins_again)
{
    struct gpt_scaler scaler = {.scale = 65536.0f};
    for (uint32_t i = 0; i < 1999; i++)
        gpt_scaler_update(&scaler, true);
    gpt_scaler_update(&scaler, false);
    assert_state(&scaler, 32768.0f, 0);
    gpt_scaler_update(&scaler, false);
    assert_state(&scaler, 16384.0f, 0);
    for (uint32_t i = 0; i < 1999; i++)
        gpt_scaler_update(&scaler, true);
    assert_state(&scaler, 16384.0f, 1999);
    gpt_scaler_update(&scaler, true);
    assert_state(&scaler, 32768.0f, 0);
}

Test(gpt_scaler, it_has_no_least_and_never_becomes_infinite)
{
    struct gpt_scaler scaler = {.scale = 1.0f};
    for (int i = 1; i <= 149; i++) {
        gpt_scaler_update(&scaler, false);
        cr_assert_eq(scaler.scale, ldexpf(1.0f, -i));
    }
    gpt_scaler_update(&scaler, false);
    assert_state(&scaler, 0.0f, 0);
    scaler = (struct gpt_scaler){.scale = 0x1p127f, .good = 1999};
    gpt_scaler_update(&scaler, true);
    assert_state(&scaler, 0x1p127f, 0);
}

Test(gpt_scaler, the_inverse_is_rounded_once)
{
    static const float scales[] = {65536.0f, 1.0f, 3.0f, 1e-30f};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const struct gpt_scaler scaler = {.scale = scales[i]};
        cr_assert_eq(gpt_scaler_inverse(&scaler), (float)(1.0 / (double)scales[i]));
    }
}

/* ---- in training ---- */

/* The host's operations, but that the embedding's gradient has an infinity in it while `is_struck`.
 * The last operation of a backward pass, so it strikes in each micro-batch. */
static struct gpt_ops striking;
static bool is_struck;
static float strike;

static rebatch_status struck_backward(const struct gpt_queue *queue, float *dtoken_table,
                                      float *dposition_table, const void *dx,
                                      const struct gpt_tokens *tokens, size_t channels)
{
    const rebatch_status status =
        gpt_host_ops.embedding_backward(queue, dtoken_table, dposition_table, dx, tokens, channels);
    if (!status && is_struck)
        dposition_table[channels + 3] = strike;
    return status;
}

static const struct gpt_ops *striking_ops(void)
{
    striking = gpt_host_ops;
    striking.embedding_backward = struck_backward;
    strike = INFINITY;
    return &striking;
}

static struct run_options scaled_run(void)
{
    struct run_options options = tiny_run();
    options.train.loss_scale = 65536.0f;
    options.ops = striking_ops();
    return options;
}

/* The parameters, for a test to compare. */
static float *parameters_of(const struct run *run, size_t *count)
{
    const struct gpt_config *config = &run->trainer->model->config;
    *count = 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        *count += gpt_block_elements(config, i);
    float *all = zero_floats(*count), *at = all;
    for (size_t i = 0; i < gpt_block_count(config); i++) {
        memcpy(at, run->trainer->model->parameters.blocks[i],
               gpt_block_elements(config, i) * sizeof *at);
        at += gpt_block_elements(config, i);
    }
    return all;
}

/* A power of two takes part in no rounding, as long as nothing is too large or too small. */
Test(gpt_scaler, a_scale_changes_no_weight, .description = "seed 1, 4 steps of 16")
{
    struct run_options options = scaled_run();
    struct run scaled, plain;
    struct gpt_step_result a, b;
    size_t count;
    run_open(&scaled, &options);
    options.train.loss_scale = 0.0f;
    run_open(&plain, &options);
    cr_assert(scaled.trainer->has_scaler && !plain.trainer->has_scaler);
    for (int i = 0; i < 4; i++) {
        ASSERT_OK(gpt_trainer_step(scaled.trainer, NULL, &a));
        ASSERT_OK(gpt_trainer_step(plain.trainer, NULL, &b));
        cr_assert_eq(a.loss, b.loss);
        cr_assert_eq(a.gradient_norm, b.gradient_norm);
        cr_assert_eq(a.loss_scale, 65536.0f);
        cr_assert_eq(b.loss_scale, 0.0f);
    }
    assert_state(&scaled.trainer->scaler, 65536.0f, 4);
    const float *got = parameters_of(&scaled, &count), *want = parameters_of(&plain, &count);
    cr_assert_arr_eq(got, want, count * sizeof *got);
    run_close(&scaled);
    run_close(&plain);
}

Test(gpt_scaler, an_infinity_skips_the_update_and_halves_the_scale, .description = "seed 1")
{
    static const float strikes[] = {INFINITY, -INFINITY, NAN};
    struct run_options options = scaled_run();
    char hash[GPT_HASH_TEXT_BYTES], other[GPT_HASH_TEXT_BYTES];
    struct gpt_step_result result = {0};
    size_t count;
    OPEN(run, run, &options);
    run_steps(&run, 2);
    for (size_t i = 0; i < 3; i++) {
        const float *before = parameters_of(&run, &count);
        const float rate = result.learning_rate;
        run_hash(&run, hash);
        is_struck = true;
        strike = strikes[i];
        ASSERT_OK(gpt_trainer_step(run.trainer, NULL, &result));
        cr_assert(result.skipped);
        cr_assert(i == 0 || result.learning_rate == rate, "the rate waits for the update");
        cr_assert_eq(run.trainer->updates, 2);
        cr_assert_eq(run.trainer->skipped, i + 1);
        cr_assert_eq(run.trainer->samples_seen, 16 * (3 + i));
        assert_state(&run.trainer->scaler, 65536.0f / (float)(2 << i), 0);
        cr_assert_arr_eq(parameters_of(&run, &count), before, count * sizeof *before);
        run_hash(&run, other);
        cr_assert_str_neq(hash, other, "the hash covers the scaler and the loss");
    }
    is_struck = false;
    ASSERT_OK(gpt_trainer_step(run.trainer, NULL, &result));
    cr_assert_not(result.skipped);
    cr_assert_eq(run.trainer->updates, 3);
    assert_state(&run.trainer->scaler, 8192.0f, 1);
}

/* Without a scaler nobody looks, as in fp32 and bf16: the loss tells. */
Test(gpt_scaler, without_a_scale_nothing_is_skipped, .description = "seed 1")
{
    struct run_options options = scaled_run();
    struct gpt_step_result result;
    options.train.loss_scale = 0.0f;
    OPEN(run, run, &options);
    is_struck = true;
    ASSERT_OK(gpt_trainer_step(run.trainer, NULL, &result));
    cr_assert_not(result.skipped);
    cr_assert_eq(run.trainer->updates, 1);
}

Test(gpt_scaler, it_grows_in_training_after_two_thousand, .description = "seed 1")
{
    const struct run_options options = scaled_run();
    OPEN(run, run, &options);
    run_steps(&run, 1);
    run.trainer->scaler.good = 1998;
    run_steps(&run, 1);
    assert_state(&run.trainer->scaler, 65536.0f, 1999);
    run_steps(&run, 1);
    assert_state(&run.trainer->scaler, 131072.0f, 0);
    run_steps(&run, 1);
    assert_state(&run.trainer->scaler, 131072.0f, 1);
}

/* As if gradients overflowed with any scale above 1024: the first updates are skipped, and then it
 * learns. */
Test(gpt_scaler, a_scale_that_is_too_large_comes_down_by_itself, .description = "seed 1")
{
    struct run_options options = scaled_run();
    options.train.learning_rate = 1e-2f;
    OPEN(run, run, &options);
    for (int i = 0; i < 20; i++) {
        is_struck = run.trainer->scaler.scale > 1024.0f;
        run_steps(&run, 1);
        cr_assert_eq(run.trainer->skipped, i < 6 ? (uint64_t)i + 1 : 6);
    }
    assert_state(&run.trainer->scaler, 1024.0f, 14);
    cr_assert_eq(run.trainer->updates, 14);
    cr_assert_lt(run.trainer->losses[19], run.trainer->losses[0]);
}

/* ---- under OOMs ---- */

/* Step 1 of three is struck. An OOM anywhere, in any callback, is no bad update and no good one. */
static void run_struck(char hash[GPT_HASH_TEXT_BYTES], uint64_t *allocations, uint64_t nth)
{
    struct run_options options = scaled_run();
    options.train.batch = 4;
    options.train.config.length = 8;
    options.uncached = true;
    OPEN(run, run, &options);
    ASSERT_OK(rebatch_fault_arm(run.device, &FAULTS(.nth = nth)));
    for (int i = 0; i < 3; i++) {
        is_struck = i == 1;
        run_steps(&run, 1);
    }
    is_struck = false;
    ASSERT_OK(rebatch_fault_counts(run.device, allocations, NULL));
    assert_state(&run.trainer->scaler, 32768.0f, 1);
    cr_assert_eq(run.trainer->updates, 2);
    run_hash(&run, hash);
}

Test(gpt_scaler, an_oom_touches_neither_scale_nor_count, .description = "seed 1, 3 steps of 4")
{
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    uint64_t count, unused;
    run_struck(want, &count, 0);
    cr_assert_gt(count, 75);
    for (uint64_t nth = 1; nth <= count; nth += stride_of_cases(17)) {
        run_struck(got, &unused, nth);
        cr_assert_str_eq(got, want, "OOM at allocation %llu", (unsigned long long)nth);
    }
}

Test(gpt_scaler, a_scale_that_is_none_is_refused)
{
    static const float scales[] = {-1.0f, INFINITY, NAN};
    const struct run_options options = tiny_run();
    OPEN(run, run, &options);
    for (size_t i = 0; i < 3; i++) {
        struct gpt_train_options bad = options.train;
        struct gpt_trainer *trainer;
        bad.loss_scale = scales[i];
        ASSERT_ERROR(gpt_trainer_create(&trainer, run.rb, &gpt_host_ops, NULL, run.data, &bad),
                     REBATCH_E_INVALID, "loss_scale is");
    }
}
