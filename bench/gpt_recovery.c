/* What it costs to find the micro-batch, and to come back from running out of memory, at the size
 * of GPT-2 124M: bf16, 1,024 positions, 128 samples a step. Lines:
 *     caps rebatch CAP_GIB SIZE TRUE OOMS MICROBATCHES PROBE_MS MICROBATCH_MS PREDICTED_MIB
 *                  MEASURED_MIB COLD_MS STEP_MS
 *     learn rebatch CAP_GIB SIZE TRUE OOMS MICROBATCHES LATER_MICROBATCHES COLD_MS STEP_MS
 *     tenant rebatch SIZE_BEFORE SIZE_AFTER STRUCK_MS STEP_MS REDONE_SAMPLES
 * TRUE is yes when whole steps run at SIZE and not at SIZE + 1 (or SIZE is the batch). COLD_MS is
 * from the start of the probe to the end of the first effective step; STEP_MS an undisturbed one.
 * learn is a session without a probe, which learns from its first step's micro-batches.
 *     gpt_recovery TENANT_PROGRAM */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpt/error.h"
#include "gpt/train.h"
#include "measure.h"
#include "rebatch/rebatch.h"

enum { BATCH = 128, CLEAN_STEPS = 5, LEFT_MIB = 24 << 10, TAKEN_PERMILLE = 450 };

/* The driver does not give the last of what it says is free. */
#define SLACK_BYTES ((size_t)64 << 20)

static const size_t caps_gib[] = {8, 12, 24, 48, 96};

static double mib(uint64_t bytes)
{
    return (double)bytes / 1048576.0;
}

/* ---- a training ---- */

struct bench {
    rebatch_device *device;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
    /* the other user of the card strikes when this many micro-batches have run; 0: never */
    unsigned strikes_after, microbatches;
    FILE *tenant;
    double strike_ms; /* what it took that one: nobody computes, nor frees memory */
};

static rebatch_status open_bench(struct bench *bench, const rebatch_options *options)
{
    struct gpt_train_options train;
    rebatch_status status = gpt_train_options_init(&train, "gpt2-124m");
    train.batch = BATCH;
    train.total_steps = 1000;
    train.config.dtype = GPT_BF16;
    if (!status)
        status = rebatch_device_open_cuda(&bench->device, NULL);
    if (!status)
        status = rebatch_open(&bench->rb, bench->device, options);
    if (!status)
        status = gpt_data_open_default(&bench->data, ".", train.config.length);
    if (!status)
        status = gpt_trainer_create(&bench->trainer, bench->rb, gpt_cuda_ops_get(), NULL,
                                    bench->data, &train);
    return status;
}

static void close_bench(struct bench *bench)
{
    gpt_trainer_destroy(bench->trainer);
    gpt_data_close(bench->data);
    rebatch_close(bench->rb);
    rebatch_device_close(bench->device);
}

/* ---- the callbacks: the trainer's, and the other user in between ---- */

static rebatch_status tell_tenant(struct bench *bench, const char *what, size_t amount);

/* The other takes its share of what is free or only cached, and the pool gives back what that is
 * more than the device has. */
static rebatch_status make_way(struct bench *bench)
{
    rebatch_pool *pool = rebatch_get_pool(bench->rb);
    rebatch_memory_info memory;
    rebatch_pool_stats stats;
    rebatch_status status = rebatch_device_memory(bench->device, &memory);
    if (!status)
        status = rebatch_pool_get_stats(&stats, pool);
    if (status)
        return status;
    const size_t cached = (size_t)(stats.reserved_bytes - stats.live_bytes);
    const size_t taken = (memory.free_bytes + cached) / 1000 * TAKEN_PERMILLE;
    const size_t missing = taken > memory.free_bytes ? taken - memory.free_bytes : 0;
    status = rebatch_pool_trim(
        pool, cached - (missing + SLACK_BYTES < cached ? missing + SLACK_BYTES : cached), NULL);
    if (!status)
        status = rebatch_device_memory(bench->device, &memory);
    if (status)
        return status;
    const size_t left = memory.free_bytes > taken ? memory.free_bytes - taken : SLACK_BYTES;
    const double began = measure_seconds();
    status = tell_tenant(bench, "leave", left >> 20);
    bench->strike_ms = 1e3 * (measure_seconds() - began);
    return status;
}

static rebatch_status strike(struct bench *bench)
{
    const rebatch_status status = rebatch_stream_synchronize(bench->device, NULL);
    return status ? status : make_way(bench);
}

static rebatch_status zero_grad(void *user)
{
    return gpt_trainer_ops()->zero_grad(((struct bench *)user)->trainer);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct bench *bench = user;
    rebatch_status status = gpt_trainer_ops()->forward_backward(mb, bench->trainer);
    if (!status && bench->strikes_after && ++bench->microbatches == bench->strikes_after)
        status = strike(bench);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    return gpt_trainer_ops()->optimizer_step(((struct bench *)user)->trainer);
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

/* One effective batch, to its end on the device. */
static rebatch_status run_step(struct bench *bench, rebatch_step_report *report, double *ms)
{
    const double began = measure_seconds();
    rebatch_status status = rebatch_step(bench->rb, &ops, BATCH, bench, report);
    if (!status)
        status = rebatch_stream_synchronize(bench->device, NULL);
    *ms = 1e3 * (measure_seconds() - began);
    return status;
}

/* The median of undisturbed steps. */
static rebatch_status run_clean(struct bench *bench, rebatch_step_report *report, double *ms)
{
    double each[CLEAN_STEPS];
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < CLEAN_STEPS && !status; i++)
        status = run_step(bench, report, &each[i]);
    if (!status)
        *ms = measure_median(each, CLEAN_STEPS);
    return status;
}

/* ---- the largest micro-batch under a cap ---- */

/* Whether whole steps run at a size, without rebatch's help. */
static rebatch_status try_size(bool *fits, size_t cap_bytes, size_t size)
{
    struct bench bench = {0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool.limit_bytes = cap_bytes;
    options.micro_start = options.micro_smallest = options.micro_largest = size;
    options.on_oom = REBATCH_ON_OOM_STOP;
    options.admission = REBATCH_OFF;
    options.lighten = REBATCH_OFF;
    rebatch_step_report report;
    double ms;
    rebatch_status status = open_bench(&bench, &options);
    for (int i = 0; i < 2 && !status; i++)
        status = run_step(&bench, &report, &ms);
    *fits = !status;
    close_bench(&bench);
    return status == REBATCH_E_EXHAUSTED || status == REBATCH_OOM ? REBATCH_OK : status;
}

static rebatch_status check_truth(bool *is_true, size_t cap_bytes, size_t size)
{
    bool fits = false, more = false;
    rebatch_status status = try_size(&fits, cap_bytes, size);
    if (!status && size < BATCH)
        status = try_size(&more, cap_bytes, size + 1);
    *is_true = fits && !more;
    return status;
}

/* Bytes of AdamW's two moments, which the first update makes. */
static size_t moments_bytes(const struct bench *bench)
{
    const struct gpt_config *config = &bench->trainer->model->config;
    size_t elements = 0;
    for (size_t i = 0; i < gpt_block_count(config); i++)
        elements += gpt_block_elements(config, i);
    return 2 * sizeof(float) * elements;
}

/* The first step of a session that knows nothing, with no probe before it. */
static rebatch_status bench_learn(size_t gib)
{
    struct bench bench = {0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_step_report first = {0}, second = {0}, later = {0};
    double cold_ms = 0, second_ms = 0, clean_ms = 0;
    bool is_true = false;
    options.pool.limit_bytes = gib << 30;
    options.learn = REBATCH_ON;
    rebatch_status status = open_bench(&bench, &options);
    if (!status)
        status = run_step(&bench, &first, &cold_ms);
    if (!status) /* in which the size after the first update is run */
        status = run_step(&bench, &second, &second_ms);
    if (!status)
        status = run_clean(&bench, &later, &clean_ms);
    close_bench(&bench);
    if (!status)
        status = check_truth(&is_true, gib << 30, later.micro_after);
    if (!status)
        printf("learn rebatch %zu %zu %s %u %u %u %.1f %.1f\n", gib, later.micro_after,
               is_true ? "yes" : "no", first.ooms + second.ooms + later.ooms, first.microbatches,
               later.microbatches, cold_ms, clean_ms);
    fflush(stdout);
    return status;
}

static rebatch_status bench_cap(size_t gib, bool shows)
{
    struct bench bench = {0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_probe_options probing = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_probe_report probe;
    rebatch_step_report report;
    double probe_ms = 0, first_ms = 0, clean_ms = 0;
    bool is_true = false;
    options.pool.limit_bytes = gib << 30;
    rebatch_status status = open_bench(&bench, &options);
    if (!status) {
        const double began = measure_seconds();
        probing.reserve_bytes = moments_bytes(&bench);
        status = rebatch_probe(bench.rb, &ops, BATCH, &bench, &probing, &probe);
        probe_ms = 1e3 * (measure_seconds() - began);
    }
    if (!status)
        status = run_step(&bench, &report, &first_ms);
    const uint32_t ooms = probe.ooms + report.ooms;
    if (!status)
        status = run_clean(&bench, &report, &clean_ms);
    close_bench(&bench);
    if (!status && shows)
        status = check_truth(&is_true, gib << 30, probe.size);
    if (!status && shows)
        printf("caps rebatch %zu %zu %s %u %u %.1f %.1f %.1f %.1f %.1f %.1f\n", gib, probe.size,
               is_true ? "yes" : "no", ooms, probe.microbatches, probe_ms,
               clean_ms * (double)probe.size / BATCH, mib(probe.predicted_peak_bytes),
               mib(probe.measured_peak_bytes), probe_ms + first_ms, clean_ms);
    fflush(stdout);
    return status;
}

/* ---- another user of the card, in mid-training ---- */

static FILE *answers;

static rebatch_status tell_tenant(struct bench *bench, const char *what, size_t amount)
{
    char line[64];
    fprintf(bench->tenant, "%s %zu\n", what, amount);
    fflush(bench->tenant);
    return fgets(line, sizeof line, answers)
               ? REBATCH_OK
               : gpt_error(REBATCH_E_DEVICE, "the other user of the card did not answer");
}

/* Its input is a pipe, its output a file that this side opens: a named pipe. */
static FILE *open_tenant(const char *program)
{
    char folder[] = "/tmp/gpt_recovery.XXXXXX", path[64], command[512];
    if (!mkdtemp(folder))
        return NULL;
    snprintf(path, sizeof path, "%s/answers", folder);
    snprintf(command, sizeof command, "mkfifo '%s' && exec '%s' >'%s'", path, program, path);
    FILE *tenant = popen(command, "w");
    for (int i = 0; i < 1000 && tenant && !(answers = fopen(path, "r")); i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    (void)remove(path);
    (void)remove(folder);
    return answers ? tenant : NULL;
}

static rebatch_status bench_tenant(FILE *tenant)
{
    struct bench bench = {.tenant = tenant};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_probe_options probing = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_step_report before, struck, after;
    double ms, struck_ms = 0, clean_ms = 0;
    options.growth = REBATCH_OFF;
    options.on_oom = REBATCH_ON_OOM_FIT;
    rebatch_status status = tell_tenant(&bench, "leave", LEFT_MIB);
    if (!status)
        status = open_bench(&bench, &options);
    if (!status) {
        probing.reserve_bytes = moments_bytes(&bench);
        status = rebatch_probe(bench.rb, &ops, BATCH, &bench, &probing, NULL);
    }
    if (!status)
        status = run_clean(&bench, &before, &ms);
    bench.strikes_after = 1;
    if (!status)
        status = run_step(&bench, &struck, &struck_ms);
    bench.strikes_after = 0;
    if (!status)
        status = run_clean(&bench, &after, &clean_ms);
    if (!status)
        printf("tenant rebatch %zu %zu %.1f %.1f %zu\n", before.micro_after, after.micro_after,
               struck_ms - bench.strike_ms, clean_ms, struck.redone_samples);
    close_bench(&bench);
    return status;
}

/* How many of the caps are caps on this device; the first always counts. */
static rebatch_status count_caps(size_t *caps)
{
    rebatch_device *device;
    rebatch_memory_info info;
    rebatch_status status = rebatch_device_open_cuda(&device, NULL);
    if (status)
        return status;
    status = rebatch_device_memory(device, &info);
    rebatch_device_close(device);
    for (*caps = 1; !status && *caps < sizeof caps_gib / sizeof *caps_gib; (*caps)++)
        if (caps_gib[*caps] << 30 > info.free_bytes)
            break;
    if (*caps < sizeof caps_gib / sizeof *caps_gib)
        fprintf(stderr,
                "bench-recovery: %.0f GiB are free here: caps of %zu GiB and more are left out\n",
                (double)info.free_bytes / (double)((size_t)1 << 30), caps_gib[*caps]);
    return status;
}

int main(int count, char **arguments)
{
    if (count != 2) {
        fprintf(stderr, "usage: gpt_recovery TENANT_PROGRAM\n");
        return 2;
    }
    FILE *tenant = open_tenant(arguments[1]);
    if (!tenant) {
        fprintf(stderr, "bench-recovery: %s cannot be run\n", arguments[1]);
        return 1;
    }
    size_t caps = 0;
    rebatch_status status = count_caps(&caps);
    if (!status)
        status = bench_cap(caps_gib[caps - 1], false); /* loads kernels and libraries */
    for (size_t i = 0; i < caps && !status; i++)
        status = bench_cap(caps_gib[i], true);
    for (size_t i = 0; i < caps && !status; i++)
        status = bench_learn(caps_gib[i]);
    if (!status)
        status = bench_tenant(tenant);
    if (status)
        fprintf(stderr, "bench-recovery: %s: %s\n", rebatch_status_name(status), gpt_last_error());
    (void)pclose(tenant);
    return status ? 1 : 0;
}
