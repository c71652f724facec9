/* The demonstration: trains under a cap that does not hold the first micro-batch, shrinks in the
 * middle and later grows; trains again without a cap; and compares the two runs to the bit.
 * Must not know how recovery works: it only watches. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpt/error.h"
#include "gpt/ops.h"
#include "gpt/train.h"
#include "output.h"
#include "rebatch/rebatch.h"

#define MIB ((size_t)1 << 20)
#define STEPS 48
#define BAR_WIDTH 30

/* Memory of a GPU comes in pieces of this. */
#define GPU_PIECE (2 * MIB)

/* What the other users of the card do, and what they leave for us. */
static const struct phase {
    size_t step; /* from here on */
    size_t cap_bytes;
    const char *what;
} phases[] = {
    {0, 80 * MIB, "another program takes memory"},
    {16, 48 * MIB, "a second one takes memory too"},
    {30, 160 * MIB, "both programs end"},
};
#define PHASES (sizeof phases / sizeof *phases)

/* ---- looks ---- */

struct look {
    const char *strong, *alarm, *good, *plain;
};

static struct look look_for(FILE *file)
{
    const bool colours = isatty(fileno(file)) && !getenv("NO_COLOR");
    return colours ? (struct look){"\033[1m", "\033[33m", "\033[32m", "\033[0m"}
                   : (struct look){"", "", "", ""};
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (double)MIB;
}

/* '#' live, '=' reserved beyond it, '.' free, '|' the cap; the width is the largest cap there will
 * be. */
static void draw_bar(char bar[BAR_WIDTH + 2], uint64_t live, uint64_t reserved, uint64_t cap)
{
    const double unit = (double)phases[PHASES - 1].cap_bytes / BAR_WIDTH;
    const int live_end = (int)ceil((double)live / unit);
    const int reserved_end = (int)ceil((double)reserved / unit);
    const int cap_end = (int)lround((double)cap / unit);
    for (int i = 0; i <= BAR_WIDTH; i++)
        bar[i] = i == cap_end       ? '|'
                 : i > cap_end      ? ' '
                 : i < live_end     ? '#'
                 : i < reserved_end ? '='
                                    : '.';
    bar[BAR_WIDTH + 1] = '\0';
}

/* ---- one run ---- */

struct run {
    struct look look;
    FILE *csv; /* where each step is recorded, or NULL */
    bool is_capped;
    bool is_cuda, has_hog; /* on a GPU; there, real pressure stands for the cap */
    size_t cap_bytes;
    rebatch_device *device;
    rebatch_pool *hog; /* what another user of the GPU holds */
    rebatch *rb;
    struct gpt_trainer *trainer;
    size_t micro_first, micro_least, micro_last;
    uint64_t ooms, redone_samples, samples;
    char grown[256]; /* what is to be said of growth, after the line of its step; "": nothing */
    char hash[GPT_HASH_TEXT_BYTES];
};

static void on_event(const rebatch_event *event, void *user)
{
    struct run *run = user;
    char line[256];
    if (event->kind == REBATCH_EVENT_GROW) { /* the next step is the first that has the new size */
        (void)rebatch_event_format(run->grown, sizeof run->grown, event);
        return;
    }
    (void)rebatch_event_format(line, sizeof line, event);
    printf("  %s! %s%s\n", run->look.alarm, line, run->look.plain);
}

static rebatch_status open_run(struct run *run, const struct gpt_data *data,
                               const struct gpt_train_options *options)
{
    const size_t cap = run->is_capped ? phases[0].cap_bytes : REBATCH_UNLIMITED;
    const struct gpt_ops *ops = run->is_cuda ? gpt_cuda_ops_get() : &gpt_host_ops;
    if (!ops)
        return gpt_error(REBATCH_E_UNSUPPORTED, "this program was built without CUDA");
    rebatch_status status = run->is_cuda ? rebatch_device_open_cuda(&run->device, NULL)
                                         : rebatch_device_open_host(&run->device, cap, NULL);
    if (status)
        return status;
    rebatch_options session = REBATCH_OPTIONS_INIT;
    session.grow_after = 4;
    session.on_event = on_event;
    session.on_event_user = run;
    status = rebatch_open(&run->rb, run->device, &session);
    return status ? status : gpt_trainer_create(&run->trainer, run->rb, ops, NULL, data, options);
}

static void drop_hog(struct run *run)
{
    rebatch_pool_destroy(run->hog);
    run->hog = NULL;
}

static void close_run(struct run *run)
{
    gpt_trainer_destroy(run->trainer);
    rebatch_close(run->rb);
    drop_hog(run);
    rebatch_device_close(run->device);
}

/* Takes what is free but for `leave_bytes`, in as large pieces as the driver gives. */
static rebatch_status fill_hog(struct run *run, size_t leave_bytes)
{
    size_t piece = SIZE_MAX;
    for (;;) {
        rebatch_memory_info memory;
        void *unused;
        rebatch_status status = rebatch_device_memory(run->device, &memory);
        if (status)
            return status;
        const size_t over = memory.free_bytes > leave_bytes ? memory.free_bytes - leave_bytes : 0;
        piece = (piece < over ? piece : over) / GPU_PIECE * GPU_PIECE;
        if (piece == 0)
            return REBATCH_OK;
        status = rebatch_pool_alloc(&unused, run->hog, piece, NULL, 0);
        if (status == REBATCH_OOM)
            piece /= 2;
        else if (status)
            return status;
    }
}

/* Leaves the cap to the training's pool, what that holds already included. */
static rebatch_status take_hog(struct run *run)
{
    rebatch_pool *pool = rebatch_get_pool(run->rb);
    rebatch_pool_options uncached = REBATCH_POOL_OPTIONS_INIT;
    rebatch_pool_stats stats;
    uncached.caching = REBATCH_OFF;
    drop_hog(run);
    rebatch_status status = rebatch_pool_trim(pool, 0, NULL);
    if (!status)
        status = rebatch_pool_get_stats(&stats, pool);
    if (!status)
        status = rebatch_pool_create(&run->hog, run->device, &uncached);
    if (status)
        return status;
    const size_t held = (size_t)stats.reserved_bytes;
    return fill_hog(run, run->cap_bytes > held ? run->cap_bytes - held : 0);
}

static rebatch_status set_cap(struct run *run, size_t bytes)
{
    run->cap_bytes = bytes;
    if (run->has_hog)
        return take_hog(run);
    if (run->is_cuda)
        return rebatch_pool_set_limit(rebatch_get_pool(run->rb), bytes);
    return rebatch_device_set_capacity(run->device, bytes);
}

static rebatch_status change_cap(struct run *run, size_t step)
{
    for (size_t i = 0; i < PHASES && run->is_capped; i++) {
        if (phases[i].step != step)
            continue;
        printf("  %s~ %s: cap %.0f MiB%s\n", run->look.strong, phases[i].what,
               mib(phases[i].cap_bytes), run->look.plain);
        return set_cap(run, phases[i].cap_bytes);
    }
    return REBATCH_OK;
}

static void note(struct run *run, const rebatch_step_report *report)
{
    if (report->step == 0)
        run->micro_first = run->micro_least = report->micro_before;
    if (report->micro_after < run->micro_least)
        run->micro_least = report->micro_after;
    run->micro_last = report->micro_after;
    run->ooms += report->ooms;
    run->redone_samples += report->redone_samples;
    run->samples += run->trainer->options.batch;
}

/* Losses in all their digits; sizes in samples, `begun` that of the first attempt. */
static void record_step(const struct run *run, const rebatch_step_report *report, double loss)
{
    const size_t batch = run->trainer->options.batch;
    fprintf(run->csv, "%s,%llu,%zu,%llu,%zu,%zu,%zu,%u,%.17g\n", run->is_capped ? "capped" : "free",
            (unsigned long long)report->step, run->cap_bytes,
            (unsigned long long)report->peak_bytes, batch, report->micro_before,
            (batch + report->microbatches - 1) / report->microbatches, report->ooms, loss);
}

static void print_step(struct run *run, const rebatch_step_report *report, double loss, double took)
{
    const struct gpt_train_options *options = &run->trainer->options;
    const size_t batch = options->batch;
    char bar[BAR_WIDTH + 2];
    draw_bar(bar, report->peak_bytes, report->reserved_bytes, run->cap_bytes);
    printf("%3llu  loss %.4f  %2zu x %-2u [%s] %3.0f/%3.0f/%3.0f MiB %6.1fk tokens/s\n",
           (unsigned long long)report->step, loss,
           (batch + report->microbatches - 1) / report->microbatches, report->microbatches, bar,
           mib(report->peak_bytes), mib(report->reserved_bytes), mib(run->cap_bytes),
           (double)(batch * options->config.length) / took / 1e3);
    if (*run->grown)
        printf("  %s+ %s%s\n", run->look.good, run->grown, run->look.plain);
    *run->grown = '\0';
}

static rebatch_status train(struct run *run)
{
    rebatch_status status = REBATCH_OK;
    for (size_t step = 0; step < STEPS && !status; step++) {
        status = change_cap(run, step);
        if (status)
            return status;
        rebatch_step_report report;
        struct gpt_step_result result;
        const double began = seconds();
        status = gpt_trainer_step(run->trainer, &report, &result);
        if (status)
            return status;
        note(run, &report);
        if (run->csv)
            record_step(run, &report, result.loss);
        if (run->is_capped)
            print_step(run, &report, result.loss, seconds() - began);
        else
            printf(".");
        fflush(stdout);
    }
    return gpt_trainer_hash(run->trainer, run->hash);
}

/* ---- both ---- */

struct request {
    bool is_cuda, has_hog, wants_help;
    enum gpt_dtype dtype;
    const char *csv_path; /* NULL: steps are not recorded */
    FILE *csv;
};

/* Takes one option in; false: it is none of ours, or its argument is wrong. */
static bool apply(struct request *out, int option, const char *argument)
{
    switch (option) {
    case 'h':
        out->wants_help = true;
        return true;
    case 'o':
        out->has_hog = true;
        return true;
    case 'c':
        out->csv_path = argument;
        return true;
    case 'd':
        out->is_cuda = strcmp(argument, "cuda") == 0;
        return out->is_cuda || strcmp(argument, "host") == 0;
    case 't':
        return gpt_dtype_parse(&out->dtype, argument) == REBATCH_OK;
    default:
        return false;
    }
}

static void print_usage(FILE *stream)
{
    fputs(
        "usage: demo [--device host] [--csv FILE]\n"
        "       demo --device cuda [--dtype fp32|bf16|fp16] [--hog] [--csv FILE]\n"
        "\n"
        "Trains a small GPT under a cap that shrinks, through running out of memory, then without\n"
        "a cap, and compares the two to the bit.\n"
        "  --csv  records the steps of both trainings in FILE, which docs/pictures.py draws\n"
        "  --hog  memory runs out because somebody else holds it, not by a limit\n"
        "exit status: 0 the same bits, 1 others or it failed, 2 wrong usage\n",
        stream);
}

static bool read_request(struct request *out, int count, char **arguments)
{
    static const struct option known[] = {
        {"csv", required_argument, NULL, 'c'},   {"device", required_argument, NULL, 'd'},
        {"dtype", required_argument, NULL, 't'}, {"hog", no_argument, NULL, 'o'},
        {"help", no_argument, NULL, 'h'},        {NULL, 0, NULL, 0}};
    bool ok = true;
    for (int found; ok && (found = getopt_long(count, arguments, "", known, NULL)) != -1;)
        ok = apply(out, found, optarg);
    if (ok && optind == count &&
        (out->wants_help || out->is_cuda || (!out->has_hog && out->dtype == GPT_FP32)))
        return true;
    print_usage(stderr);
    return false;
}

static void introduce(const struct gpt_train_options *options, const struct gpt_data *data,
                      const struct look *look)
{
    const struct gpt_config *c = &options->config;
    size_t parameters = 0;
    for (size_t i = 0; i < gpt_tensor_count(c); i++) {
        const struct gpt_tensor tensor = gpt_tensor_at(c, i);
        parameters += tensor.rows * tensor.columns;
    }
    printf(
        "%sA GPT of %.2f million parameters on %.0f KiB of text, %d updates of %zu samples of %zu "
        "bytes.%s\n",
        look->strong, (double)parameters / 1e6, (double)gpt_data_bytes(data) / 1024, STEPS,
        options->batch, c->length, look->plain);
    printf("Each line: step, loss, micro-batch x accumulation, memory in use/reserved/cap, speed.\n"
           "In the bar: # in use at the peak, = reserved beyond it, . free, | the cap.\n");
}

/* Every claim of the last line is tested here. */
static bool print_verdict(const struct run *capped, const struct run *free_run)
{
    const double first = capped->trainer->losses[0];
    const double last = capped->trainer->losses[STEPS - 1];
    const bool identical = strcmp(capped->hash, free_run->hash) == 0;
    const bool ok = identical && last < first && capped->ooms > 0 && free_run->ooms == 0 &&
                    capped->micro_least < capped->micro_first &&
                    capped->micro_last > capped->micro_least;
    printf("\nSHA-256 over weights, both moments of AdamW and every loss\n  with the cap  %s\n"
           "  without       %s\n",
           capped->hash, free_run->hash);
    printf("%sdemo: %s ooms=%llu micro=%zu->%zu->%zu loss=%.2f->%.2f redone=%.1f%% "
           "identical=%s%s\n",
           ok ? capped->look.good : capped->look.alarm, ok ? "ok" : "failed",
           (unsigned long long)capped->ooms, capped->micro_first, capped->micro_least,
           capped->micro_last, first, last,
           100.0 * (double)capped->redone_samples / (double)capped->samples,
           identical ? "yes" : "no", capped->look.plain);
    return ok;
}

/* A GPU's code takes memory when it is first used. That is not what the cap is about: so one step
 * comes first that does not count. */
static rebatch_status warm_up(const struct gpt_train_options *options, const struct gpt_data *data)
{
    struct run run = {.look = look_for(stdout), .is_cuda = true};
    rebatch_status status = open_run(&run, data, options);
    if (!status)
        status = gpt_trainer_step(run.trainer, NULL, NULL);
    close_run(&run);
    return status;
}

static rebatch_status run_both(const struct request *request,
                               const struct gpt_train_options *options, const struct gpt_data *data,
                               bool *ok)
{
    struct run capped = {.look = look_for(stdout),
                         .csv = request->csv,
                         .is_capped = true,
                         .is_cuda = request->is_cuda,
                         .has_hog = request->has_hog};
    struct run free_run = {.look = capped.look, .csv = request->csv, .is_cuda = request->is_cuda};
    introduce(options, data, &capped.look);
    rebatch_status status = request->is_cuda ? warm_up(options, data) : REBATCH_OK;
    if (!status)
        status = open_run(&capped, data, options);
    if (!status)
        status = train(&capped);
    drop_hog(&capped);
    if (!status) {
        printf("\nThe same training without a cap, all %zu samples at once ", options->batch);
        fflush(stdout);
        status = open_run(&free_run, data, options);
    }
    if (!status)
        status = train(&free_run);
    if (!status)
        *ok = print_verdict(&capped, &free_run);
    close_run(&free_run);
    close_run(&capped);
    return status;
}

static rebatch_status open_csv(struct request *request)
{
    if (!request->csv_path)
        return REBATCH_OK;
    request->csv = fopen(request->csv_path, "w");
    if (!request->csv)
        return gpt_error(REBATCH_E_IO, "cannot write %s: %s", request->csv_path, strerror(errno));
    fputs("run,step,cap_bytes,peak_bytes,batch,begun,micro,ooms,loss\n", request->csv);
    return REBATCH_OK;
}

static rebatch_status close_csv(struct request *request, rebatch_status status)
{
    if (!request->csv)
        return status;
    const bool is_lost = ferror(request->csv) != 0;
    if ((fclose(request->csv) || is_lost) && !status)
        return gpt_error(REBATCH_E_IO, "cannot write %s", request->csv_path);
    return status;
}

static int run_demo(int count, char **arguments)
{
    struct request request = {0};
    struct gpt_train_options options;
    struct gpt_data *data = NULL;
    bool ok = false;
    if (!read_request(&request, count, arguments))
        return 2;
    if (request.wants_help) {
        print_usage(stdout);
        return 0;
    }
    rebatch_status status = gpt_train_options_init(&options, "demo");
    options.total_steps = STEPS;
    options.config.dtype = request.dtype;
    if (!status)
        status = gpt_data_open_default(&data, ".", options.config.length);
    if (!status)
        status = open_csv(&request);
    if (!status)
        status = run_both(&request, &options, data, &ok);
    status = close_csv(&request, status);
    if (status)
        fprintf(stderr, "demo: failed: %s: %s\n", rebatch_status_name(status), gpt_last_error());
    gpt_data_close(data);
    return ok && !status ? 0 : 1;
}

int main(int count, char **arguments)
{
    output_begin();
    return output_end("demo", run_demo(count, arguments));
}
