/* How well the probe finds the largest micro-batch: seeded models, caps and settings of the pool on
 * the host device, the truth by trying every size, and beside it what others do on the same truth.
 */
#include "probe/probe.h"

#include "probe_cases.h"

enum { CASES = 200 };

/* ---- a session for it ---- */

struct bed {
    rebatch_device *device;
    rebatch *rb;
    struct model model;
};

static void die(const char *what)
{
    fprintf(stderr, "bench-probe: %s: %s\n", what, rebatch_last_error());
    exit(1);
}

/* The same device without its calls for virtual memory. */
static void make_plain(rebatch_device *device)
{
    static struct rbi_device_ops plain;
    plain = *device->ops;
    plain.reserve = NULL;
    device->ops = &plain;
}

static bool is_told; /* each trial of a probe is */

static void tell(const rebatch_event *event, void *user)
{
    (void)user;
    if (event->kind != REBATCH_EVENT_TRIAL)
        return;
    if (event->peak_bytes)
        printf("  %zu samples: %" PRIu64 " bytes live at the most\n", event->count,
               event->peak_bytes);
    else
        printf("  %zu samples: OOM, needs %" PRIu64 " bytes of %" PRIu64 "\n", event->count,
               event->needed_bytes, event->available_bytes);
}

static bool is_dry; /* devices without memory behind them: the same answers, sooner */

static void open_device(struct bed *bed, const struct setup *setup)
{
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    host.page_bytes = setup->page_bytes;
    const rebatch_status status =
        is_dry ? rebatch_device_open_dry(&bed->device, setup->capacity_bytes, setup->page_bytes)
               : rebatch_device_open_host(&bed->device, setup->capacity_bytes, &host);
    if (status || rebatch_stream_create(&bed->model.aside, bed->device))
        die("cannot open a device");
    if (setup->is_plain)
        make_plain(bed->device);
}

static void close_bed(struct bed *bed)
{
    rebatch_stream aside = bed->model.aside;
    rebatch_close(bed->rb);
    if (bed->model.outside)
        (void)rbi_device_free(bed->device, bed->model.outside, bed->model.outside_bytes);
    rebatch_stream_destroy(bed->device, aside);
    rebatch_device_close(bed->device);
}

/* False when not even the parameters fit. `micro`: the size of every micro-batch; 0: not fixed. */
static bool open_bed(struct bed *bed, const struct setup *setup, size_t micro)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.pool = setup->pool;
    options.growth = REBATCH_OFF;
    options.on_oom = micro ? REBATCH_ON_OOM_STOP : REBATCH_ON_OOM_HALVE;
    options.micro_start = micro;
    options.micro_smallest = micro ? micro : setup->smallest;
    options.micro_largest = micro ? micro : setup->largest;
    options.on_event = is_told && !micro ? tell : NULL;
    bed->model = setup->model;
    open_device(bed, setup);
    if (rebatch_open(&bed->rb, bed->device, &options))
        die("cannot open a session");
    bed->model.rb = bed->rb;
    bed->model.device = bed->device;
    if (make_parameters(&bed->model) == REBATCH_OK)
        return true;
    close_bed(bed);
    return false;
}

/* Whether whole steps run with that size, the later one without an OOM. */
static bool runs_steps(struct bed *bed, size_t batch)
{
    rebatch_step_report report = {0};
    for (int i = 0; i < 2; i++)
        if (rebatch_step(bed->rb, &ops, batch, &bed->model, &report))
            return false;
    return report.ooms == 0;
}

/* After a step of one sample, which makes what is made once. */
static bool is_size_fit(const struct setup *setup, size_t micro)
{
    struct bed bed;
    if (!open_bed(&bed, setup, micro))
        return false;
    const bool fits = rebatch_step(bed.rb, &ops, 1, &bed.model, NULL) == REBATCH_OK &&
                      runs_steps(&bed, setup->batch);
    close_bed(&bed);
    return fits;
}

/* fits[m] for each size; gives the largest. */
static size_t find_truth(bool fits[BATCH_MOST + 1], const struct setup *setup)
{
    size_t largest = 0;
    const size_t most =
        setup->largest && setup->largest < setup->batch ? setup->largest : setup->batch;
    const size_t least = setup->smallest < most ? setup->smallest : most;
    for (size_t micro = least ? least : 1; micro <= most; micro++)
        if ((fits[micro] = is_size_fit(setup, micro)))
            largest = micro;
    return largest;
}

/* ---- searches ---- */

struct outcome {
    size_t size, trials, ooms;
};

static bool is_tried(struct outcome *outcome, const bool *fits, size_t size)
{
    outcome->trials++;
    outcome->ooms += !fits[size];
    return fits[size];
}

/* Composer: half of what failed. */
static struct outcome search_halving(const bool *fits, size_t batch)
{
    struct outcome outcome = {0};
    for (size_t size = batch; size > 0; size /= 2)
        if (is_tried(&outcome, fits, size)) {
            outcome.size = size;
            break;
        }
    return outcome;
}

/* Accelerate: nine tenths of what failed. */
static struct outcome search_tenths(const bool *fits, size_t batch)
{
    struct outcome outcome = {0};
    for (size_t size = batch; size > 0; size = size * 9 / 10)
        if (is_tried(&outcome, fits, size)) {
            outcome.size = size;
            break;
        }
    return outcome;
}

/* Lightning, "power": from 2, twice what ran, till something fails; half when the first does. */
static struct outcome search_power(const bool *fits, size_t batch)
{
    struct outcome outcome = {0};
    size_t size = batch < 2 ? batch : 2;
    while (size > 0) {
        const bool ran = is_tried(&outcome, fits, size);
        if (ran)
            outcome.size = size;
        if (outcome.size == batch || (!ran && outcome.size))
            break;
        size = !ran ? size / 2 : size > batch / 2 ? batch : size * 2;
    }
    return outcome;
}

/* Lightning, "binsearch": the same, then the middle of what ran and what failed; 5 % less. */
static struct outcome search_bisect(const bool *fits, size_t batch)
{
    struct outcome outcome = search_power(fits, batch);
    size_t fails = outcome.size > batch / 2 ? batch : outcome.size * 2;
    while (outcome.size && outcome.size < batch && outcome.size + 1 < fails) {
        const size_t middle = (outcome.size + fails) / 2;
        if (is_tried(&outcome, fits, middle))
            outcome.size = middle;
        else
            fails = middle;
    }
    if (outcome.size > 1)
        outcome.size = outcome.size * 95 / 100 ? outcome.size * 95 / 100 : 1;
    return outcome;
}

/* ---- the table ---- */

struct row {
    const char *name;
    struct outcome (*search)(const bool *fits, size_t batch); /* NULL: the probe */
    size_t exact, above, oom_free, trials, ooms, trials_most, cases;
    double share;
};

static void count(struct row *row, struct outcome outcome, size_t truth)
{
    row->exact += outcome.size == truth;
    row->above += outcome.size > truth;
    row->oom_free += outcome.ooms == 0;
    row->trials += outcome.trials;
    row->ooms += outcome.ooms;
    if (row->trials_most < outcome.trials)
        row->trials_most = outcome.trials;
    if (truth) {
        row->share += (double)outcome.size / (double)truth;
        row->cases++;
    }
}

static void print_row(const struct row *row)
{
    printf("%-28s %7.1f %6zu %8.2f %9zu %7zu %7zu %10.1f\n", row->name, (double)row->trials / CASES,
           row->trials_most, (double)row->ooms / CASES, row->oom_free, row->exact, row->above,
           100.0 * row->share / (double)(row->cases ? row->cases : 1));
}

/* How many sizes, and bytes of them in all, the model has otherwise than the trace. */
static void tell_difference(const struct rbi_model *model, const struct rbi_trace *trace)
{
    struct rbi_cursor cursor = {.model = model, .count = trace->count};
    const struct rbi_model_event *event;
    size_t i = 0, wrong = 0, events = 0;
    int64_t more = 0;
    for (; (event = rbi_model_next(&cursor)); events++) {
        const struct rbi_trace_event *real = i < trace->event_count ? &trace->events[i++] : NULL;
        if (!real || (event->kind != RBI_TRACE_ALLOC && event->kind != RBI_TRACE_RESERVE) ||
            real->bytes == cursor.bytes)
            continue;
        wrong++;
        more += (int64_t)cursor.bytes - (int64_t)real->bytes;
    }
    printf("  the model at %zu samples: %zu calls of %zu, %zu sizes wrong, %+" PRId64
           " bytes in all\n",
           trace->count, events, trace->event_count, wrong, more);
}

/* What the probe's model says of a micro-batch of the true size, beside one that runs. */
static void tell_model(const struct rbi_model *model, const struct setup *setup, size_t truth)
{
    struct bed bed;
    struct rbi_trace trace;
    if (!model || !model->has_events || truth == 0 || !open_bed(&bed, setup, truth)) {
        printf("  no model of calls\n");
        return;
    }
    if (rebatch_step(bed.rb, &ops, 1, &bed.model, NULL) == REBATCH_OK) {
        rbi_trace_begin(&trace, rebatch_get_pool(bed.rb), truth);
        if (rebatch_step(bed.rb, &ops, truth, &bed.model, NULL))
            printf("  step: %s\n", rebatch_last_error());
        (void)rbi_trace_end(&trace, rebatch_get_pool(bed.rb), NULL);
        tell_difference(model, &trace);
        rbi_trace_release(&trace);
    }
    close_bed(&bed);
}

/* Whether the steps after the probe ran at the size found. */
static struct outcome probe(const struct setup *setup, size_t truth, bool *holds)
{
    struct bed bed;
    rebatch_probe_report report = {0};
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    *holds = true;
    if (!open_bed(&bed, setup, 0))
        return (struct outcome){0};
    if (!setup->is_after_a_step)
        options.reserve_bytes = moments_bytes(&setup->model);
    else if (rebatch_step(bed.rb, &ops, 1, &bed.model, NULL)) {
        close_bed(&bed);
        return (struct outcome){0};
    }
    const rebatch_status status =
        rebatch_probe(bed.rb, &ops, setup->batch, &bed.model, &options, &report);
    if (status && status != REBATCH_E_EXHAUSTED)
        die("the probe failed");
    if (is_told)
        tell_model(rbi_probe_model(bed.rb), setup, truth);
    if (status == REBATCH_OK)
        *holds = runs_steps(&bed, setup->batch) &&
                 rebatch_get_micro(bed.rb, setup->batch) == report.size;
    close_bed(&bed);
    return (struct outcome){report.size, report.microbatches, report.ooms};
}

static int by_value(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a;
    const size_t y = *(const size_t *)b;
    return (x > y) - (x < y);
}

static size_t read_arguments(uint64_t *seed, bool *is_verbose, size_t *only, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-v") == 0)
            *is_verbose = true;
        else if (strcmp(argv[i], "--dry") == 0)
            is_dry = true;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            *seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--case") == 0 && i + 1 < argc)
            *only = strtoull(argv[++i], NULL, 10);
        else
            return 1;
    }
    return 0;
}

static void print_case(size_t i, const struct setup *setup, struct outcome found, size_t truth,
                       bool holds)
{
    const struct model *m = &setup->model;
    printf("case %zu: batch %zu, found %zu of %zu, %zu runs, %zu OOMs, %s; page %zu%s%s%s, loops "
           "%zu, outside %zu + %zu, unit %zu, limit %zu/%u, headroom %zu, div %u\n",
           i, setup->batch, found.size, truth, found.trials, found.ooms,
           holds ? "holds" : "does not hold", setup->page_bytes,
           setup->pool.caching == REBATCH_OFF ? ", not caching" : "",
           setup->is_plain ? ", plain" : "", setup->is_after_a_step ? ", after a step" : "",
           m->loop_count, m->outside_fixed, m->outside_each, m->items[0].unit,
           setup->pool.limit_bytes, setup->pool.limit_permille, setup->pool.headroom_bytes,
           setup->pool.rounding_divisions);
}

/* The case, and the probe once more with all that it does. */
static void tell_case(size_t i, const struct setup *setup, struct outcome found, size_t truth,
                      bool holds)
{
    print_case(i, setup, found, truth, holds);
    is_told = true;
    (void)probe(setup, truth, &holds);
    is_told = false;
}

int main(int argc, char **argv)
{
    struct row rows[] = {{.name = "rebatch_probe"},
                         {.name = "halving (Composer)", .search = search_halving},
                         {.name = "x 0.9 (Accelerate)", .search = search_tenths},
                         {.name = "power (Lightning)", .search = search_power},
                         {.name = "power, bisect (Lightning)", .search = search_bisect}};
    bool is_verbose = false;
    uint64_t seed = 0; /* the first cases */
    size_t microbatches[CASES] = {0}, held = 0, above_held = 0;
    size_t only = SIZE_MAX;
    if (read_arguments(&seed, &is_verbose, &only, argc, argv)) {
        fprintf(stderr, "usage: probe [-v] [--dry] [--seed N] [--case I]\n"
                        "  -v: the cases missed, or with an OOM: settings, trials, model\n");
        return 2;
    }
    for (size_t i = 0; i < CASES; i++) {
        struct setup setup;
        bool fits[BATCH_MOST + 1] = {false}, holds;
        if (only != SIZE_MAX && only != i)
            continue;
        if (seed)
            draw(&setup, seed, i);
        else
            draw_first(&setup, i);
        const size_t truth = find_truth(fits, &setup);
        const struct outcome found = probe(&setup, truth, &holds);
        microbatches[i] = found.trials;
        held += holds;
        above_held += holds && found.size > truth;
        count(&rows[0], found, truth);
        for (size_t k = 1; k < sizeof rows / sizeof *rows; k++)
            count(&rows[k], rows[k].search(fits, setup.batch), truth);
        if (is_verbose && (found.size != truth || found.ooms || !holds || only == i))
            tell_case(i, &setup, found, truth, holds);
    }
    printf("%d cases, seed %" PRIu64 "; the largest size of each by trying all of them\n", CASES,
           seed);
    printf("%-28s %7s %6s %8s %9s %7s %7s %10s\n", "", "trials", "most", "OOMs", "OOM-free",
           "exact", "above", "% of most");
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        print_row(&rows[k]);
    printf(
        "steps after the probe that ran at its size: %zu of %d; of the sizes above: %zu of %zu\n",
        held, CASES, above_held, rows[0].above);
    qsort(microbatches, CASES, sizeof *microbatches, by_value);
    printf("probe: cases=%d found_permille=%.0f ooms=%zu above=%zu held=%zu microbatches=%zu "
           "max=%zu\n",
           CASES, 1000 * rows[0].share / (double)rows[0].cases, rows[0].ooms, rows[0].above, held,
           microbatches[CASES / 2], microbatches[CASES - 1]);
    return 0;
}
