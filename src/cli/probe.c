/* Owns `rebatch probe`: its options, the probe of the reference model, and its progress.
 * Must not know the library's inside: public headers, and the model's. */
#include "cli/probe.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/command.h"
#include "gpt/error.h"
#include "gpt/probe.h"
#include "rebatch/rebatch.h"

#define PRESET_NAME(name, layers, channels, heads, length, vocabulary, dropout) " " name
#define DTYPE_NAME(name, text, bytes) " " text

/* X(name, argument, what it does) */
#define OPTIONS(X)                                                                                 \
    X(config, "FILE", "settings: device, limits, sizes, a file of results")                        \
    X(preset, "NAME", "sizes of the model (default demo):" GPT_PRESETS(PRESET_NAME))               \
    X(layers, "N", "other than the preset's; so are these:")                                       \
    X(channels, "N", "width of the residual stream, a multiple of 64")                             \
    X(heads, "N", "of attention")                                                                  \
    X(length, "N", "tokens of a sample")                                                           \
    X(vocabulary, "N", "a multiple of 64")                                                         \
    X(dtype, "TYPE", "of activations, on a GPU (default fp32):" GPT_DTYPES(DTYPE_NAME))            \
    X(batch, "N", "samples of the effective batch (default 64)")                                   \
    X(cap, "SIZE", "memory of the host device, 64MiB for example: REBATCH_DEVICE_CAPACITY")        \
    X(json, NULL, "one object instead of the table")                                               \
    X(help, NULL, "this text; so does -h")

enum probe_option {
#define OPTION(name, argument, text) OPTION_##name,
    OPTIONS(OPTION)
#undef OPTION
        OPTION_COUNT
};

static void print_help(void)
{
    printf(
        "usage: rebatch probe [OPTION]...\n"
        "\n"
        "Finds the largest micro-batch of the reference model that fits: two or three small ones "
        "run,\nthe memory of every size is predicted from them, and the largest that should fit "
        "runs once\nin full. Nothing is trained.\n\n");
#define OPTION(name, argument, text)                                                               \
    printf("  --%-10s %-5s %s\n", #name, argument ? argument : "", text);
    OPTIONS(OPTION)
#undef OPTION
    printf("\nexample: rebatch probe --preset demo --batch 64 --cap 64MiB\n"
           "exit status: 0 found, 1 it failed, 2 wrong usage, 3 nothing fits\n");
}

int rbi_probe_help(int count, char **arguments)
{
    if (count > 0 && !rbi_command_is_help(arguments[0]))
        return rbi_command_refuse("help probe");
    print_help();
    return RBI_EXIT_OK;
}

/* ---- options ---- */

struct request {
    struct gpt_train_options train;
    const char *config;
    bool json;
};

static bool set_count(size_t *out, const char *name, const char *text)
{
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && value >= 1 &&
        value <= UINT32_MAX) {
        *out = (size_t)value;
        return true;
    }
    fprintf(stderr, "rebatch: --%s is \"%.60s\": expected a number from 1 to %u\n", name, text,
            UINT32_MAX);
    return false;
}

static bool accept(rebatch_status status)
{
    if (status)
        fprintf(stderr, "rebatch: %s\n", gpt_last_error());
    return status == REBATCH_OK;
}

static bool apply(struct request *request, enum probe_option option, const char *argument)
{
    struct gpt_config *config = &request->train.config;
    switch (option) {
    case OPTION_config:
        request->config = argument;
        return true;
    case OPTION_preset:
        return accept(gpt_train_options_init(&request->train, argument));
    case OPTION_layers:
        return set_count(&config->layers, "layers", argument);
    case OPTION_channels:
        return set_count(&config->channels, "channels", argument);
    case OPTION_heads:
        return set_count(&config->heads, "heads", argument);
    case OPTION_length:
        return set_count(&config->length, "length", argument);
    case OPTION_vocabulary:
        return set_count(&config->vocabulary, "vocabulary", argument);
    case OPTION_dtype:
        return accept(gpt_dtype_parse(&config->dtype, argument));
    case OPTION_batch:
        return set_count(&request->train.batch, "batch", argument);
    case OPTION_cap:
        if (setenv("REBATCH_DEVICE_CAPACITY", argument, 1) == 0)
            return true;
        fprintf(stderr, "rebatch: --cap cannot be set: %s\n", strerror(errno));
        return false;
    case OPTION_json:
        request->json = true;
        return true;
    case OPTION_help:
    case OPTION_COUNT:
        break;
    }
    return false;
}

/* What getopt_long() did not take: ':' is an option without its value. */
static void refuse_option(int found, const char *given)
{
    const char letter[] = {'-', (char)optopt, '\0'};
    if (found == ':')
        fprintf(stderr, "rebatch: %.60s has no value; see 'rebatch help probe'\n", given);
    else
        fprintf(stderr, "rebatch: there is no option '%.60s'; see 'rebatch help probe'\n",
                optopt > OPTION_COUNT ? letter : given);
}

/* Whether to go on; else *code is what to exit with. */
static bool read_request(struct request *request, int count, char **arguments, int *code)
{
    static const struct option known[] = {
#define OPTION(name, argument, text)                                                               \
    {#name, argument ? required_argument : no_argument, NULL, OPTION_##name},
        OPTIONS(OPTION)
#undef OPTION
            {NULL, 0, NULL, 0}};
    const char *given[OPTION_COUNT] = {[OPTION_preset] = "demo"};
    *request = (struct request){.json = false};
    *code = RBI_EXIT_USAGE;
    for (int found; (found = getopt_long(count + 1, arguments - 1, ":h", known, NULL)) != -1;) {
        if (found == '?' || found == ':') {
            refuse_option(found, arguments[optind - 2]);
            return false;
        }
        given[found == 'h' ? OPTION_help : found] = optarg ? optarg : "";
    }
    if (given[OPTION_help]) {
        print_help();
        *code = RBI_EXIT_OK;
        return false;
    }
    if (optind < count + 1) {
        fprintf(stderr, "rebatch: \"%.60s\" is no option; see 'rebatch help probe'\n",
                arguments[optind - 1]);
        return false;
    }
    for (int i = 0; i < OPTION_COUNT; i++)
        if (given[i] && !apply(request, (enum probe_option)i, given[i]))
            return false;
    return accept(gpt_config_check(&request->train.config));
}

/* ---- progress ---- */

#define PROGRESS_WIDTH 20
#define TRIALS_USUAL 3

/* Trials as they come, for the table and, on the way, for whoever waits. */
struct progress {
    bool is_tty, is_quiet;
    struct rbi_probe_result *result;
    unsigned trials;
};

static void draw_progress(const struct progress *progress, const char *text)
{
    const unsigned all = progress->trials < TRIALS_USUAL ? TRIALS_USUAL : progress->trials + 1;
    const unsigned filled = progress->trials * PROGRESS_WIDTH / all;
    char bar[PROGRESS_WIDTH + 1];
    if (!progress->is_tty)
        return;
    for (unsigned i = 0; i < PROGRESS_WIDTH; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[PROGRESS_WIDTH] = '\0';
    fprintf(stderr, "\r\x1b[K[%s] %s", bar, text);
    (void)fflush(stderr);
}

static void clear_progress(const struct progress *progress)
{
    if (progress->is_tty)
        fputs("\r\x1b[K", stderr);
}

static struct rbi_probe_row *row_of(struct rbi_probe_result *result, size_t size)
{
    size_t at = 0;
    while (at < result->row_count && result->rows[at].prediction.size < size)
        at++;
    if (at < result->row_count && result->rows[at].prediction.size == size)
        return &result->rows[at];
    if (result->row_count == RBI_PROBE_ROWS)
        return NULL;
    memmove(&result->rows[at + 1], &result->rows[at],
            (result->row_count - at) * sizeof *result->rows);
    result->row_count++;
    result->rows[at] = (struct rbi_probe_row){.prediction = {.size = size}, .remark = ""};
    return &result->rows[at];
}

static void on_event(const rebatch_event *event, void *user)
{
    struct progress *progress = user;
    char line[512];
    (void)rebatch_event_format(line, sizeof line, event);
    const char *text = strstr(line, ": ") ? strstr(line, ": ") + 2 : line; /* behind the step */
    if (event->kind == REBATCH_EVENT_TRIAL) {
        progress->trials++;
        struct rbi_probe_row *row = row_of(progress->result, event->count);
        if (row && event->peak_bytes) {
            row->ran = true;
            row->measured_bytes = event->peak_bytes;
        } else if (row) {
            row->failed = true;
        }
        draw_progress(progress, text);
        if (progress->is_tty || progress->is_quiet)
            return;
    }
    clear_progress(progress);
    fprintf(stderr, "rebatch: %s\n", text);
}

/* ---- the probe ---- */

struct run {
    rebatch_config *config;
    rebatch_device *device;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
};

static void close_run(struct run *run)
{
    gpt_trainer_destroy(run->trainer);
    rebatch_close(run->rb);
    rebatch_device_close(run->device);
    gpt_data_close(run->data);
    rebatch_config_free(run->config);
}

/* Weights that do not fit are REBATCH_OOM. */
static rebatch_status open_run(struct run *run, const struct request *request,
                               struct progress *progress)
{
    const struct gpt_ops *ops;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_status status = rebatch_config_load(&run->config, request->config);
    if (!status)
        status = rebatch_config_options(&options, run->config);
    if (!status)
        status = rebatch_config_open_device(&run->device, run->config);
    if (!status)
        status = gpt_ops_for_device(&ops, run->device);
    if (!status)
        status = gpt_data_open_made(&run->data, request->train.config.length);
    options.on_event = on_event;
    options.on_event_user = progress;
    if (options.log_level < REBATCH_LOG_INFO)
        options.log_level = REBATCH_LOG_INFO; /* trials are the table */
    if (!status)
        status = rebatch_open(&run->rb, run->device, &options);
    if (!status)
        status = gpt_trainer_create(&run->trainer, run->rb, ops, NULL, run->data, &request->train);
    return status;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* A limit that no machine reaches is none. */
static uint64_t as_limit(uint64_t bytes)
{
    return bytes >= (uint64_t)1 << 60 ? UINT64_MAX : bytes;
}

/* What the table has beside the trials: powers of two up to the size found, the next one, the
 * whole batch, and twice the size. */
static void choose_rows(struct rbi_probe_result *result)
{
    const size_t found = result->report.size, batch = result->train.batch;
    for (size_t size = 1; size < found; size *= 2)
        (void)row_of(result, size);
    if (found < batch) {
        (void)row_of(result, found + 1);
        (void)row_of(result, batch);
    }
    (void)row_of(result, 2 * found);
}

static rebatch_status predict_rows(struct rbi_probe_result *result, const struct run *run)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    options.reserve_bytes = gpt_trainer_reserve_bytes(run->trainer);
    for (size_t i = 0; i < result->row_count; i++) {
        struct rbi_probe_row *row = &result->rows[i];
        const size_t size = row->prediction.size;
        const rebatch_status status =
            rebatch_predict(&row->prediction, run->rb, size, result->train.batch, &options);
        row->has_prediction = !status;
        if (status == REBATCH_E_STATE) { /* a single size has run: there is no model */
            row->prediction.size = size;
            continue;
        }
        if (status)
            return status;
        result->limit_bytes = as_limit(row->prediction.limit_bytes);
        row->remark = size == result->report.size ? "largest"
                      : row->prediction.fits      ? ""
                                                  : "does not fit";
    }
    return REBATCH_OK;
}

static rebatch_status probe(struct rbi_probe_result *result, const struct run *run,
                            struct progress *progress)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_status status = rebatch_config_probe_options(&options, run->config);
    if (status)
        return status;
    draw_progress(progress, "one sample");
    const double began = now_seconds();
    status = gpt_trainer_probe(run->trainer, &options, &result->report);
    result->seconds = now_seconds() - began;
    clear_progress(progress);
    if (status)
        return status;
    choose_rows(result);
    return predict_rows(result, run);
}

static void describe(struct rbi_probe_result *result, const struct run *run,
                     const struct request *request)
{
    rebatch_memory_info memory;
    size_t available;
    rebatch_pool_stats stats;
    result->train = request->train;
    result->device = rebatch_device_name(run->device);
    result->device_bytes = result->limit_bytes = UINT64_MAX;
    if (run->device && rebatch_device_memory(run->device, &memory) == REBATCH_OK)
        result->device_bytes = as_limit(memory.total_bytes);
    if (run->rb && rebatch_pool_available(&available, rebatch_get_pool(run->rb)) == REBATCH_OK &&
        rebatch_pool_get_stats(&stats, rebatch_get_pool(run->rb)) == REBATCH_OK)
        result->limit_bytes = as_limit(available + stats.live_bytes);
}

/* Says why nothing was found, and who holds the memory. */
static int fail(struct rbi_probe_result *result, const struct run *run,
                const struct request *request)
{
    char text[2048] = "";
    const bool is_memory = result->status == REBATCH_E_EXHAUSTED || result->status == REBATCH_OOM;
    fprintf(stderr, "rebatch: %s%s\n",
            result->status == REBATCH_OOM ? "nothing fits, not even the weights: " : "",
            result->error);
    if (is_memory && result->report.oom.asked_bytes == 0 && run->rb)
        (void)rebatch_pool_last_oom(&result->report.oom, rebatch_get_pool(run->rb));
    if (is_memory && result->report.oom.asked_bytes) {
        (void)rebatch_oom_format(text, sizeof text, &result->report.oom);
        fputs(text, stderr); /* lines, the last one too */
    }
    if (request->json)
        rbi_probe_print_json(result);
    /* The model is of a dtype that the device has not, which is known only now. */
    if (result->status == REBATCH_E_UNSUPPORTED && run->rb && !run->trainer)
        return RBI_EXIT_USAGE;
    return is_memory ? RBI_EXIT_NOTHING_FITS : RBI_EXIT_FAILED;
}

int rbi_probe_main(int count, char **arguments)
{
    static struct rbi_probe_result result; /* some ten thousand bytes */
    struct request request;
    struct run run = {0};
    int code;
    if (!read_request(&request, count, arguments, &code))
        return code;
    const bool is_tty = isatty(STDERR_FILENO) == 1;
    struct progress progress = {.is_tty = is_tty, .is_quiet = request.json, .result = &result};
    result.status = open_run(&run, &request, &progress);
    describe(&result, &run, &request);
    if (!result.status)
        result.status = probe(&result, &run, &progress);
    if (result.status) {
        (void)snprintf(result.error, sizeof result.error, "%s", gpt_last_error());
        code = fail(&result, &run, &request);
    } else {
        code = RBI_EXIT_OK;
        (request.json ? rbi_probe_print_json : rbi_probe_print)(&result);
    }
    close_run(&run);
    return code;
}
