/* A co-tenant that comes and goes on a schedule: throughput in each phase beside the best fixed
 * size for it, and how many growths fail. Memory is a host device's; time is virtual: a micro-batch
 * takes a unit a sample and OVERHEAD more, one that runs out of memory a third of that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/rebatch.h"

enum {
    BATCH = 256,
    LAYERS = 12,
    OVERHEAD = 16,       /* samples whose time a micro-batch takes however small it is */
    UPDATE = 8,          /* time of an update */
    SAMPLE_KIB = 288,    /* a layer, until the backward pass */
    WORKSPACE_KIB = 512, /* a layer, for a moment */
    STATE_MIB = 24,      /* parameters; as much for gradients, twice for moments */
    UNITS_A_SECOND = 333,
    STEPS_MOST = 8192,
    FLICKER = 8 /* seconds */
};
#define MIB(n) ((size_t)(n) << 20)
#define CAPACITY MIB(512)
#define MINUTE (60.0 * UNITS_A_SECOND)

/* From a time on, the co-tenant has a share; `flickers`: comes and goes every few seconds. */
static const struct phase {
    double minutes; /* that it lasts */
    unsigned percent;
    bool flickers;
} phases[] = {
    {4, 0, false}, {4, 40, false}, {4, 65, false}, {4, 20, false},
    {3, 50, true}, {6, 0, false},  {4, 55, false}, {3, 30, false},
};
enum { PHASES = sizeof phases / sizeof *phases };

static double phase_start(size_t phase)
{
    double start = 0;
    for (size_t i = 0; i < phase; i++)
        start += phases[i].minutes * MINUTE;
    return start;
}

static size_t phase_at(double time)
{
    size_t phase = PHASES - 1;
    while (phase > 0 && time < phase_start(phase))
        phase--;
    return phase;
}

/* What the co-tenant leaves. */
static size_t capacity_at(double time)
{
    const size_t phase = phase_at(time);
    const double since = (time - phase_start(phase)) / UNITS_A_SECOND / FLICKER;
    if (phases[phase].flickers && (unsigned)since % 2)
        return CAPACITY;
    return CAPACITY / 100 * (100 - phases[phase].percent) & ~(MIB(1) - 1);
}

/* ---- the training ---- */

struct sample {
    double time; /* when the step began */
    double seconds;
};

struct training {
    rebatch *rb;
    rebatch_device *device;
    double time;
    bool is_alone; /* no co-tenant: the capacity stays what it is */
    size_t capacity;
    void *state, *moments;
    struct sample steps[STEPS_MOST];
    size_t step_count;
    unsigned failed_growths, ooms, refused;
};

static void look_at_the_clock(struct training *t)
{
    const size_t capacity = t->is_alone ? t->capacity : capacity_at(t->time);
    if (capacity != t->capacity)
        (void)rebatch_device_set_capacity(t->device, capacity);
    t->capacity = capacity;
}

static rebatch_status zero_grad(void *user)
{
    struct training *t = user;
    rebatch_status status = REBATCH_OK;
    look_at_the_clock(t);
    if (!t->state)
        status =
            rebatch_pool_alloc(&t->state, rebatch_get_pool(t->rb), MIB(2 * STATE_MIB), NULL, 0);
    rebatch_mutating(t->rb);
    return status;
}

static rebatch_status run_layers(const rebatch_microbatch *mb)
{
    void *kept[LAYERS] = {NULL};
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < LAYERS && !status; i++) {
        void *workspace = NULL;
        status = rebatch_pool_alloc(&kept[i], mb->pool, mb->count * SAMPLE_KIB << 10, NULL, 0);
        if (!status)
            status = rebatch_pool_alloc(&workspace, mb->pool, WORKSPACE_KIB << 10, NULL, 0);
        if (!status)
            status = rebatch_pool_free(mb->pool, workspace);
    }
    for (int i = LAYERS; i-- > 0 && !status;)
        status = rebatch_pool_free(mb->pool, kept[i]);
    return status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    const double full = OVERHEAD + (double)mb->count;
    look_at_the_clock(t);
    const rebatch_status status = run_layers(mb);
    t->time += status ? full / 3 : full;
    if (!status)
        rebatch_mutating(t->rb);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct training *t = user;
    if (!t->moments) {
        const rebatch_status status =
            rebatch_pool_alloc(&t->moments, rebatch_get_pool(t->rb), MIB(2 * STATE_MIB), NULL, 0);
        if (status)
            return status;
    }
    rebatch_mutating(t->rb);
    t->time += UPDATE;
    return REBATCH_OK;
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

static void note_event(const rebatch_event *event, void *user)
{
    struct training *t = user;
    t->failed_growths += event->kind == REBATCH_EVENT_GROWTH_FAILED;
}

static rebatch_status run_step(struct training *t)
{
    rebatch_step_report report;
    const double began = t->time;
    look_at_the_clock(t);
    const rebatch_status status = rebatch_step(t->rb, &ops, BATCH, t, &report);
    if (status || t->step_count == STEPS_MOST)
        return status;
    t->steps[t->step_count++] = (struct sample){began, t->time - began};
    t->refused += report.ooms_in[REBATCH_PHASE_ADMISSION];
    t->ooms += report.ooms - report.ooms_in[REBATCH_PHASE_ADMISSION];
    return REBATCH_OK;
}

static rebatch_status open_training(struct training *t, size_t capacity, rebatch_options *options)
{
    memset(t, 0, sizeof *t);
    t->capacity = capacity;
    options->on_event = note_event;
    options->on_event_user = t;
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.page_bytes = MIB(2); /* as on a GPU */
    rebatch_status status = rebatch_device_open_host(&t->device, capacity, &host);
    if (!status)
        status = rebatch_open(&t->rb, t->device, options);
    return status;
}

static void close_training(struct training *t)
{
    rebatch_close(t->rb);
    rebatch_device_close(t->device);
}

/* ---- the best fixed size of a phase ---- */

/* Samples a unit of time once the first step is over; 0: it does not fit. */
static double fixed_throughput(struct training *t, size_t capacity, size_t micro)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = options.micro_smallest = options.micro_largest = micro;
    options.on_oom = REBATCH_ON_OOM_STOP;
    rebatch_status status = open_training(t, capacity, &options);
    t->is_alone = true;
    for (int i = 0; i < 3 && !status; i++)
        status = run_step(t);
    const double seconds = status ? 0 : t->steps[2].seconds;
    close_training(t);
    return status || t->ooms ? 0 : BATCH / seconds;
}

/* The largest, where several do equally well. */
struct best {
    size_t micro;
    double throughput;
};

static struct best find_best(struct training *t, size_t phase)
{
    /* What flickers leaves a fixed size no more than its least. */
    const size_t capacity = capacity_at(phase_start(phase));
    struct best best = {0, 0};
    for (size_t micro = 1; micro <= BATCH; micro++) {
        const double throughput = fixed_throughput(t, capacity, micro);
        if (throughput >= best.throughput && throughput > 0)
            best = (struct best){micro, throughput};
        if (throughput == 0)
            break;
    }
    return best;
}

/* ---- the run ---- */

static rebatch_status train(struct training *t)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_probe_options probe = REBATCH_PROBE_OPTIONS_INIT;
    options.on_oom = REBATCH_ON_OOM_FIT;
    probe.reserve_bytes = MIB(2 * STATE_MIB); /* the moments */
    rebatch_status status = open_training(t, capacity_at(0), &options);
    if (!status)
        status = rebatch_probe(t->rb, &ops, BATCH, t, &probe, NULL);
    while (!status && t->time < phase_start(PHASES))
        status = run_step(t);
    close_training(t);
    return status;
}

/* Samples a unit of time over the steps that began in a phase. */
static double throughput_in(const struct training *t, size_t phase)
{
    double time = 0;
    double samples = 0;
    for (size_t i = 0; i < t->step_count; i++) {
        if (phase_at(t->steps[i].time) != phase)
            continue;
        time += t->steps[i].seconds;
        samples += BATCH;
    }
    return samples / time;
}

int main(void)
{
    static struct training fixed;
    static struct training t;
    struct best best[PHASES];
    double least = 1e9;
    for (size_t i = 0; i < PHASES; i++)
        best[i] = find_best(&fixed, i);
    if (train(&t)) {
        fprintf(stderr, "bench-cotenant: %s\n", rebatch_last_error());
        return 1;
    }
    printf("effective batch %d; the co-tenant's share of %zu MiB\n\n", BATCH, CAPACITY >> 20);
    printf(
        "| minutes  | co-tenant     | best fixed size | its samples a second | rebatch | of it   "
        "|\n| -------- | ------------- | --------------- | -------------------- | ------- | "
        "------- |\n");
    for (size_t i = 0; i < PHASES; i++) {
        const double ours = throughput_in(&t, i);
        const double share = ours / best[i].throughput;
        least = share < least ? share : least;
        printf("| %2.0f to %2.0f | %2u %%%-9s | %15zu | %20.1f | %7.1f | %5.1f %% |\n",
               phase_start(i) / MINUTE, phase_start(i + 1) / MINUTE, phases[i].percent,
               phases[i].flickers ? ", flickers" : "", best[i].micro,
               best[i].throughput * UNITS_A_SECOND, ours * UNITS_A_SECOND, 100 * share);
    }
    printf("\ncotenant: phases=%d least=%.1f%% failed_growths=%u ooms=%u refused=%u steps=%zu\n",
           PHASES, 100 * least, t.failed_growths, t.ooms, t.refused, t.step_count);
    return 0;
}
