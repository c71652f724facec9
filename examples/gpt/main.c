/* Owns the gpt program: its options, the training loop, and what it prints.
 * Must not know how a step recovers. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpt/error.h"
#include "gpt/parse.h"
#include "gpt/probe.h"
#include "gpt/save.h"
#include "gpt/train.h"
#include "output.h"
#include "rebatch/rebatch.h"

enum { EXIT_OK, EXIT_FAILED, EXIT_USAGE };

#define PRESET_NAME(name, layers, channels, heads, length, vocabulary, dropout) " " name
#define DTYPE_NAME(name, text, bytes) " " text

/* X(name, argument, what it does) */
#define OPTIONS(X)                                                                                 \
    X(preset, "NAME", "sizes of the model (default demo):" GPT_PRESETS(PRESET_NAME))               \
    X(data, "FILE", "train on this file; else on text that is on the machine anyway")              \
    X(steps, "N", "updates (default 40)")                                                          \
    X(batch, "N", "samples of an update (default 64)")                                             \
    X(seed, "N", "of weights, dropout and samples (default 1)")                                    \
    X(dtype, "TYPE", "of activations, on a GPU (default fp32):" GPT_DTYPES(DTYPE_NAME))            \
    X(exact, "on|off", "the same bits however the batch is cut, at some speed (default on)")       \
    X(dropout, "P", "0 to less than 1 (default: the preset's)")                                    \
    X(rate, "R", "highest learning rate (default 0.001)")                                          \
    X(shards, "K", "sum gradients in K shards: the same bits on 1 to K ranks (see below)")         \
    X(lighten, "N", "begin at this level: 1 and 2 compute again, 3 also puts moments on the host") \
    X(save, "FILE", "write the training's state there at the end")                                 \
    X(save_every, "N", "and after every N steps")                                                  \
    X(resume, "FILE", "go on where that training was: its settings, its text; --steps is in all")  \
    X(probe, NULL, "first find the largest micro-batch, by the settings of the group probe")       \
    X(eval, "N", "at the end, evaluate this many held-out samples")                                \
    X(config, "FILE", "settings of rebatch, as `rebatch config example` shows them")               \
    X(cap, "SIZE", "memory of the device, 64MiB for example: REBATCH_DEVICE_CAPACITY")             \
    X(micro, "N", "first micro-batch size: REBATCH_BATCH_START")                                   \
    X(root, "FOLDER", "where the text of the default is looked for first (default .)")             \
    X(help, NULL, "this text")

enum request_option {
#define OPTION(name, argument, text) OPTION_##name,
    OPTIONS(OPTION)
#undef OPTION
        OPTION_COUNT
};

/* "save-every": no identifier has a dash. */
struct spelling {
    char letters[16];
};
static struct spelling spell(const char *name)
{
    struct spelling spelling = {""};
    for (size_t i = 0; name[i] && i + 1 < sizeof spelling.letters; i++)
        spelling.letters[i] = name[i] == '_' ? '-' : name[i];
    return spelling;
}

static void print_help(void)
{
    printf("gpt: train a small transformer on bytes, through running out of memory\n\n"
           "usage: gpt [OPTION]...\n");
#define OPTION(name, argument, text)                                                               \
    printf("  --%-10s %-7s %s\n", spell(#name).letters, argument ? argument : "", text);
    OPTIONS(OPTION)
#undef OPTION
    printf("\nWith --shards, gpt-mpi (make gpt-mpi) trains on the processes that mpirun starts:\n"
           "    mpirun -n 2 gpt-mpi --shards 8\n"
           "and gpt-nccl (make gpt-nccl) on several GPUs, by the variables that torchrun sets:\n"
           "    GPT_RANKS_FILE=/tmp/gpt torchrun --no-python --nproc-per-node 2 gpt-nccl "
           "--shards 8\n");
    printf("\nWhere the settings have a probe.file, it probes as with --probe.\n"
           "GPT_THREADS in the environment is the number of threads that compute, and the\n"
           "variables of docs/config.md, such as REBATCH_BATCH_START, override the settings.\n"
           "exit status: 0 all is well, 1 it failed, 2 wrong usage\n");
}

/* ---- options ---- */

struct request {
    struct gpt_train_options train;
    size_t evaluation_samples;
    unsigned lighten;
    bool probe;
    size_t steps; /* of the whole training, those before a resume included */
    size_t save_every;
    const char *data, *config, *root, *save, *resume;
    struct gpt_source saved; /* of the text of the training that goes on */
};

static bool parse_level(unsigned *out, const char *text)
{
    size_t level;
    if (!gpt_parse_count(&level, "lighten", text, 0))
        return false;
    *out = (unsigned)level;
    if (level <= GPT_LIGHTEN_MOST)
        return true;
    fprintf(stderr, "gpt: --lighten is \"%s\": expected 0 to %d\n", text, GPT_LIGHTEN_MOST);
    return false;
}

static bool parse_exact(bool *inexact, const char *text)
{
    *inexact = strcmp(text, "off") == 0;
    if (*inexact || strcmp(text, "on") == 0)
        return true;
    fprintf(stderr, "gpt: --exact is \"%s\": expected on or off\n", text);
    return false;
}

/* Whether the model takes what an option says. */
static bool accept(rebatch_status status)
{
    if (status)
        fprintf(stderr, "gpt: %s\n", gpt_last_error());
    return status == REBATCH_OK;
}

static bool set_variable(const char *name, const char *value)
{
    if (setenv(name, value, 1) == 0)
        return true;
    fprintf(stderr, "gpt: %s cannot be set: %s\n", name, strerror(errno));
    return false;
}

/* Takes one option's argument in. The preset comes first: it sets what the others change. */
static bool apply(struct request *request, enum request_option option, const char *argument)
{
    struct gpt_train_options *train = &request->train;
    size_t seed;
    switch (option) {
    case OPTION_preset:
        return accept(gpt_train_options_init(train, argument));
    case OPTION_data:
        request->data = argument;
        return true;
    case OPTION_steps:
        return gpt_parse_count(&request->steps, "steps", argument, 1);
    case OPTION_batch:
        return gpt_parse_count(&train->batch, "batch", argument, 1);
    case OPTION_seed:
        if (!gpt_parse_count(&seed, "seed", argument, 0))
            return false;
        train->seed = seed;
        return true;
    case OPTION_dtype:
        return accept(gpt_dtype_parse(&train->config.dtype, argument));
    case OPTION_exact:
        return parse_exact(&train->config.inexact, argument);
    case OPTION_dropout:
        return gpt_parse_float(&train->config.dropout, "dropout", argument);
    case OPTION_rate:
        return gpt_parse_float(&train->learning_rate, "rate", argument);
    case OPTION_shards:
        return gpt_parse_count(&train->shards, "shards", argument, 1);
    case OPTION_lighten:
        return parse_level(&request->lighten, argument);
    case OPTION_save:
        request->save = argument;
        return true;
    case OPTION_save_every:
        return gpt_parse_count(&request->save_every, "save-every", argument, 1);
    case OPTION_resume:
        request->resume = argument;
        return true;
    case OPTION_probe:
        request->probe = true;
        return true;
    case OPTION_eval:
        return gpt_parse_count(&request->evaluation_samples, "eval", argument, 1);
    case OPTION_config:
        request->config = argument;
        return true;
    case OPTION_cap:
        return set_variable("REBATCH_DEVICE_CAPACITY", argument);
    case OPTION_micro:
        return set_variable("REBATCH_BATCH_START", argument);
    case OPTION_root:
        request->root = argument;
        return true;
    case OPTION_help:
    case OPTION_COUNT:
        break;
    }
    return false;
}

/* Finds the options' arguments. Whether to go on; else *code is what to exit with. */
static bool find_options(const char *given[OPTION_COUNT], int count, char **arguments, int *code)
{
    static const char *const names[] = {
#define OPTION(name, argument, text) #name,
        OPTIONS(OPTION)
#undef OPTION
    };
    static const bool takes_argument[] = {
#define OPTION(name, argument, text) argument != NULL,
        OPTIONS(OPTION)
#undef OPTION
    };
    struct spelling spellings[OPTION_COUNT];
    struct option known[OPTION_COUNT + 1] = {{NULL, 0, NULL, 0}};
    for (int i = 0; i < OPTION_COUNT; i++) {
        spellings[i] = spell(names[i]);
        known[i] = (struct option){spellings[i].letters,
                                   takes_argument[i] ? required_argument : no_argument, NULL, i};
    }
    *code = EXIT_USAGE;
    for (int found; (found = getopt_long(count, arguments, "", known, NULL)) != -1;) {
        if (found == '?')
            return false;
        if (found == OPTION_help) {
            print_help();
            *code = EXIT_OK;
            return false;
        }
        given[found] = optarg ? optarg : "";
    }
    if (optind < count) {
        fprintf(stderr, "gpt: \"%s\" is no option; see gpt --help\n", arguments[optind]);
        return false;
    }
    return true;
}

/* The settings begin as those of the preset, or of the training that goes on. */
static bool read_request(struct request *request, int count, char **arguments, int *code)
{
    const char *given[OPTION_COUNT] = {NULL};
    *request = (struct request){.steps = 0};
    struct gpt_train_options *train = &request->train;
    if (!find_options(given, count, arguments, code))
        return false;
    const char *resume = given[OPTION_resume];
    if (!accept(resume ? gpt_saved_options(train, &request->saved, resume)
                       : gpt_train_options_init(train, "demo"))) {
        *code = resume ? EXIT_FAILED : EXIT_USAGE;
        return false;
    }
    request->steps = train->total_steps;
    for (int i = 0; i < OPTION_COUNT; i++)
        if (given[i] && !apply(request, (enum request_option)i, given[i]))
            return false;
    if (request->save_every > 0 && !request->save) {
        fprintf(stderr, "gpt: --save-every is given without --save: expected a file\n");
        return false;
    }
    if (train->shards && (request->save || resume)) {
        fprintf(stderr, "gpt: --shards is given: expected no --save and no --resume\n");
        return false;
    }
    if (request->save && !accept(gpt_save_check_path(request->save))) {
        *code = EXIT_FAILED;
        return false;
    }
    if (resume)
        return true;
    train->total_steps = request->steps;
    train->warmup_steps = train->total_steps / 10;
    train->least_learning_rate = train->learning_rate / 10.0f;
    return true;
}

/* ---- the run ---- */

struct run {
    struct gpt_ranks ranks;
    rebatch_config *config;
    rebatch_device *device;
    rebatch *rb;
    struct gpt_data *data;
    struct gpt_trainer *trainer;
};

static void print_event(const rebatch_event *event, void *user)
{
    char line[512];
    (void)user;
    rebatch_event_format(line, sizeof line, event);
    printf("  ! %s\n", line);
}

/* A training that goes on has its own text, unless it is said where that is now: whether it is the
 * same is known when the state is loaded. */
static rebatch_status open_data(struct run *run, const struct request *request)
{
    const size_t length = request->train.config.length;
    const struct gpt_source *const saved = &request->saved;
    const bool is_saved = saved->path[0] && !request->data && !request->root;
    if (is_saved && !saved->is_default) {
        const rebatch_status status = gpt_data_open(&run->data, saved->path, length);
        char why[512];
        (void)snprintf(why, sizeof why, "%s", gpt_last_error());
        return status == REBATCH_E_IO
                   ? gpt_error(
                         status,
                         "%s: %s was saved in training on it, and --data says where it is now", why,
                         request->resume)
                   : status;
    }
    if (request->data)
        return gpt_data_open(&run->data, request->data, length);
    const char *const root = request->root ? request->root : is_saved ? saved->path : ".";
    return gpt_data_open_default(&run->data, root, length);
}

static rebatch_status open_run(struct run *run, struct request *request)
{
    const struct gpt_ops *ops = NULL;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.on_event = print_event;
    rebatch_status status = request->train.shards ? gpt_ranks_open(&run->ranks) : REBATCH_OK;
    if (!status)
        status = rebatch_config_load(&run->config, request->config);
    if (!status)
        status = rebatch_config_options(&options, run->config);
    if (request->train.shards) {
        options.group = &run->ranks.group;
        request->train.ranks = &run->ranks;
    }
    if (!status)
        status = open_data(run, request);
    if (!status)
        status = rebatch_config_open_device(&run->device, run->config);
    if (!status)
        status = gpt_ops_for_device(&ops, run->device);
    if (!status)
        status = rebatch_open(&run->rb, run->device, &options);
    if (!status)
        status = gpt_trainer_create(&run->trainer, run->rb, ops, NULL, run->data, &request->train);
    if (!status)
        status = gpt_trainer_ops()->lighten(request->lighten, run->trainer);
    return status;
}

static void close_run(struct run *run, rebatch_status status)
{
    gpt_trainer_destroy(run->trainer);
    rebatch_close(run->rb);
    rebatch_device_close(run->device);
    gpt_data_close(run->data);
    rebatch_config_free(run->config);
    gpt_ranks_close(&run->ranks, status);
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Beside what was measured, what the formula says; the first step has no moments yet. */
static void print_memory(const struct run *run, const rebatch_step_report *report, unsigned lighten)
{
    const struct gpt_train_options *train = &run->trainer->options;
    const struct gpt_memory memory = gpt_train_memory(train, lighten);
    const size_t micro = (train->batch + report->microbatches - 1) / report->microbatches;
    const double mib = 1048576.0, persistent = (double)memory.persistent_bytes / mib;
    const double sample = (double)memory.sample_bytes / mib;
    printf("memory: %.1f MiB + %zu x %.3f MiB = %.1f MiB by the formula, %.1f MiB measured\n",
           persistent, micro, sample, persistent + (double)micro * sample,
           (double)report->peak_bytes / mib);
    fflush(stdout);
}

static rebatch_status run_step(struct run *run, rebatch_step_report *out)
{
    const struct gpt_train_options *train = &run->trainer->options;
    rebatch_step_report report;
    struct gpt_step_result result;
    const double began = now_seconds();
    const rebatch_status status = gpt_trainer_step(run->trainer, &report, &result);
    if (status == REBATCH_E_EXHAUSTED) {
        char text[2048];
        rebatch_oom_format(text, sizeof text, &report.oom);
        fprintf(stderr, "%s\n", text);
    }
    if (status)
        return status;
    *out = report;
    if (run->ranks.group.rank > 0)
        return REBATCH_OK;
    const double tokens = (double)(train->batch * train->config.length);
    if (result.skipped)
        printf("step %4llu  gradients overflow with a loss scale of %g: no update\n",
               (unsigned long long)report.step, (double)result.loss_scale);
    printf("step %4llu  loss %.4f  norm %.3f  rate %.5f  micro %zu x %u  peak %.1f MiB  "
           "%.0f tokens/s\n",
           (unsigned long long)report.step, result.loss, (double)result.gradient_norm,
           (double)result.learning_rate, report.micro_after, report.microbatches,
           (double)report.peak_bytes / 1048576.0, tokens / (now_seconds() - began));
    fflush(stdout);
    return REBATCH_OK;
}

/* Asked for, or because the settings name a file that keeps what was found. */
static rebatch_status probe(struct run *run, bool is_asked)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_probe_report report;
    rebatch_status status = rebatch_config_probe_options(&options, run->config);
    if (!status && !is_asked && !options.file)
        return REBATCH_OK;
    if (!status)
        status = gpt_trainer_probe(run->trainer, &options, &report);
    if (!status)
        printf("probe: micro-batch %zu in %u trials; %s\n", report.size, report.trials,
               rebatch_saved_size_text(report.saved));
    return status;
}

/* At the end, and after every `save_every` steps before it. */
static rebatch_status save_if_due(struct run *run, const struct request *request)
{
    const size_t done = run->trainer->loss_count;
    const bool is_end = done >= request->steps;
    if (!request->save || (!is_end && (!request->save_every || done % request->save_every)))
        return REBATCH_OK;
    return gpt_trainer_save(run->trainer, request->save);
}

static rebatch_status evaluate(struct run *run, const struct request *request)
{
    double held_out;
    if (request->evaluation_samples == 0)
        return REBATCH_OK;
    const rebatch_status status =
        gpt_trainer_evaluate(run->trainer, request->evaluation_samples, &held_out);
    if (!status)
        printf("held-out loss %.4f over %zu samples\n", held_out, request->evaluation_samples);
    return status;
}

static rebatch_status train(struct run *run, const struct request *request)
{
    const struct gpt_trainer *trainer = run->trainer;
    char hash[GPT_HASH_TEXT_BYTES];
    rebatch_step_report report = {0};
    rebatch_status status = REBATCH_OK;
    if (request->resume) {
        status = gpt_trainer_load(run->trainer, request->resume);
        if (!status)
            printf("resumed after step %zu\n", trainer->loss_count);
    }
    if (!status)
        status = probe(run, request->probe);
    while (trainer->loss_count < request->steps && !status) {
        status = run_step(run, &report);
        if (!status)
            status = save_if_due(run, request);
    }
    if (!status && report.step > 0 && report.ooms == 0 && !request->train.shards)
        print_memory(run, &report, report.lighten_level ? report.lighten_level : request->lighten);
    if (!status)
        status = evaluate(run, request);
    if (!status)
        status = gpt_trainer_hash(run->trainer, hash);
    if (!status)
        printf("gpt: steps=%zu loss=%.4f->%.4f sha256=%s\n", trainer->loss_count,
               trainer->losses[0], trainer->losses[trainer->loss_count - 1], hash);
    return status;
}

static int run_gpt(int count, char **arguments)
{
    struct request request;
    struct run run = {0};
    int code;
    if (!read_request(&request, count, arguments, &code))
        return code;
    rebatch_status status = open_run(&run, &request);
    if (!status)
        status = train(&run, &request);
    if (status)
        fprintf(stderr, "gpt: %s: %s\n", rebatch_status_text(status), gpt_last_error());
    close_run(&run, status);
    return status ? EXIT_FAILED : EXIT_OK;
}

int main(int count, char **arguments)
{
    output_begin();
    return output_end("gpt", run_gpt(count, arguments));
}
