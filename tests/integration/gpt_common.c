/* Owns what the gpt_* tests share.
 * Must not know private headers of the library. */
#include "gpt_common.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt/host.h"
#include "step_common.h"

/* ---- numbers ---- */

void fill_random(float *values, size_t count, float scale, uint64_t *state)
{
    for (size_t i = 0; i < count; i++)
        values[i] = scale * ((float)(script_random(state) >> 40) / 8388608.0f - 1.0f);
}

#define ARRAYS_MOST 4096
static void *arrays[ARRAYS_MOST];
static size_t array_count;

static void *array(size_t count, size_t size)
{
    void *values = calloc(count ? count : 1, size);
    cr_assert_not_null(values);
    cr_assert_lt(array_count, ARRAYS_MOST);
    arrays[array_count++] = values;
    return values;
}

void release_arrays(void)
{
    while (array_count > 0)
        free(arrays[--array_count]);
}

float *random_floats(size_t count, float scale, uint64_t *state)
{
    float *values = array(count, sizeof *values);
    fill_random(values, count, scale, state);
    return values;
}

float *poisoned_floats(size_t count)
{
    float *values = array(count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = NAN;
    return values;
}

double *to_doubles(const float *values, size_t count)
{
    double *doubles = array(count, sizeof *doubles);
    for (size_t i = 0; i < count; i++)
        doubles[i] = (double)values[i];
    return doubles;
}

float *zero_floats(size_t count)
{
    return array(count, sizeof(float));
}

double *zero_doubles(size_t count)
{
    return array(count, sizeof(double));
}

double relative_error(const float *got, const double *want, size_t count)
{
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(got[i]))
            return INFINITY;
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    return size > 0.0 ? sqrt(difference / size) : sqrt(difference);
}

size_t stride_of_cases(size_t most)
{
    const char *text = getenv("REBATCH_TEST_STRIDE");
    const unsigned long stride = text ? strtoul(text, NULL, 10) : 1;
    return stride < 1 ? 1 : stride < most ? stride : most;
}

void choose_quick_isa(void)
{
    const size_t valgrind_s = 40;
    if (stride_of_cases(valgrind_s) == valgrind_s)
        cr_assert(gpt_isa_force(GPT_ISA_PORTABLE));
}

/* ---- text ---- */

struct gpt_data *open_text(size_t length)
{
    struct gpt_data *data;
    ASSERT_OK(gpt_data_open_default(&data, ".", length));
    return data;
}

/* ---- a run ---- */

struct run_options tiny_run(void)
{
    struct run_options options = {0};
    ASSERT_OK(gpt_train_options_init(&options.train, "tiny"));
    options.train.batch = 16;
    options.train.clip = 0.5f;
    options.train.warmup_steps = 1;
    return options;
}

void run_open(struct run *run, const struct run_options *options)
{
    const size_t capacity = options->capacity_bytes ? options->capacity_bytes : REBATCH_UNLIMITED;
    *run = (struct run){0};
    choose_quick_isa();
    ASSERT_OK(rebatch_device_open_host(&run->host, capacity, NULL));
    ASSERT_OK(rebatch_device_open_fault(&run->device, run->host, NULL));
    if (options->own_stream)
        ASSERT_OK(rebatch_stream_create(&run->stream, run->device));
    rebatch_options session = REBATCH_OPTIONS_INIT;
    session.micro_start = options->micro;
    session.learn = options->learns ? REBATCH_ON : REBATCH_OFF;
    session.growth = REBATCH_OFF;
    session.stream = run->stream;
    session.pool.caching = options->uncached ? REBATCH_OFF : REBATCH_ON;
    ASSERT_OK(rebatch_open(&run->rb, run->device, &session));
    run->data = open_text(options->train.config.length);
    ASSERT_OK(gpt_trainer_create(&run->trainer, run->rb,
                                 options->ops ? options->ops : &gpt_host_ops, run->stream,
                                 run->data, &options->train));
}

void run_close(struct run *run)
{
    rebatch_pool_stats stats;
    gpt_trainer_destroy(run->trainer);
    gpt_data_close(run->data);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run->rb)));
    cr_assert_eq(stats.live_bytes, 0);
    rebatch_close(run->rb);
    if (run->stream)
        rebatch_stream_destroy(run->device, run->stream);
    rebatch_device_close(run->device);
    rebatch_device_close(run->host);
}

void run_steps(struct run *run, size_t steps)
{
    for (size_t i = 0; i < steps; i++)
        ASSERT_OK(gpt_trainer_step(run->trainer, NULL, NULL));
}

void run_hash(struct run *run, char text[GPT_HASH_TEXT_BYTES])
{
    ASSERT_OK(gpt_trainer_hash(run->trainer, text));
}

void run_whole(char text[GPT_HASH_TEXT_BYTES], const struct run_options *options, size_t steps)
{
    struct run run;
    run_open(&run, options);
    run_steps(&run, steps);
    run_hash(&run, text);
    run_close(&run);
}
