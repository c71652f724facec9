/* Owns the run of the reference model that all its tests share.
 * Must not know private headers of the library. */
#include "gpt_run.h"

#include <stdlib.h>

#include "fault/fault_device.h"
#include "gpt/host.h"

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
    ASSERT_OK(gpt_data_open(&data, TEST_TEXT, length));
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

struct run_options short_run(void)
{
    struct run_options options = tiny_run();
    options.train.batch = 4;
    options.train.config.length = 8;
    options.uncached = true;
    return options;
}

void run_open(struct run *run, const struct run_options *options)
{
    const size_t capacity = options->capacity_bytes ? options->capacity_bytes : REBATCH_UNLIMITED;
    const struct gpt_ops *ops = options->on_gpu ? gpt_cuda_ops_get() : &gpt_host_ops;
    *run = (struct run){.last_error = options->last_error};
    choose_quick_isa();
    if (options->on_gpu)
        ASSERT_OK(rebatch_device_open_cuda(&run->inner, NULL));
    else
        ASSERT_OK(rebatch_device_open_host(&run->inner, capacity, NULL));
    ASSERT_OK(rebatch_device_open_fault(&run->device, run->inner, NULL));
    if (options->own_stream)
        ASSERT_OK(rebatch_stream_create(&run->stream, run->device));
    rebatch_options session = REBATCH_OPTIONS_INIT;
    if (options->train.ranks)
        session.group = &options->train.ranks->group;
    session.micro_start = options->micro;
    session.learn = options->learns ? REBATCH_ON : REBATCH_OFF;
    session.growth = REBATCH_OFF;
    session.stream = run->stream;
    session.pool.caching = options->uncached ? REBATCH_OFF : REBATCH_ON;
    session.pool.limit_bytes = options->limit_bytes;
    ASSERT_OK(rebatch_open(&run->rb, run->device, &session));
    run->data = open_text(options->train.config.length);
    ASSERT_OK(gpt_trainer_create(&run->trainer, run->rb, options->ops ? options->ops : ops,
                                 run->stream, run->data, &options->train));
}

void run_close(struct run *run)
{
    rebatch_pool_stats stats;
    rebatch_memory_info memory;
    gpt_trainer_destroy(run->trainer);
    gpt_data_close(run->data);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run->rb)));
    cr_assert_eq(stats.live_bytes, 0);
    rebatch_close(run->rb);
    if (run->stream)
        rebatch_stream_destroy(run->device, run->stream);
    ASSERT_OK(rebatch_device_memory(run->inner, &memory));
    cr_assert_eq(memory.used_bytes, 0);
    rebatch_device_close(run->device);
    rebatch_device_close(run->inner);
    cr_assert(!run->last_error || run->last_error() == 0);
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
    OPEN(run, run, options);
    run_steps(&run, steps);
    run_hash(&run, text);
}
