/* How well the probe finds the largest micro-batch: seeded models, caps and settings of the pool on
 * the host device, the truth by trying every size, and beside it what others do on the same truth.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rebatch/rebatch.h"

enum { CASES = 200, ITEMS_MOST = 64, BATCH_MOST = 192 };

static const uint64_t seed = 20261120;

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t between(size_t low, size_t high, uint64_t *state)
{
    return low + (size_t)(next(state) % (high - low + 1));
}

static bool one_in(size_t n, uint64_t *state)
{
    return next(state) % n == 0;
}

/* ---- a model ---- */

enum manner { HELD, SHORT, LAZY, LATE }; /* till backward; not even; for ever; made in backward */

struct item {
    size_t fixed, each, unit; /* fixed + each * count, rounded up to unit */
    enum manner manner;
};

struct model {
    struct item items[ITEMS_MOST];
    size_t item_count;
    size_t parameters_bytes, moments_bytes;
    size_t chunk; /* samples that one more allocation serves; 0: none */

    rebatch *rb;
    void *lazy[ITEMS_MOST];
    void *parameters, *moments;
};

static size_t bytes_of(const struct item *item, size_t count)
{
    const size_t bytes = item->fixed + item->each * count;
    return (bytes + item->unit - 1) / item->unit * item->unit;
}

static rebatch_status alloc(const struct model *model, void **out, size_t bytes)
{
    return rebatch_pool_alloc(out, rebatch_get_pool(model->rb), bytes, NULL, 0);
}

static rebatch_status release(const struct model *model, void *block)
{
    return rebatch_pool_free(rebatch_get_pool(model->rb), block);
}

static rebatch_status make_once(const struct model *model, void **kept, size_t bytes)
{
    void *made;
    if (*kept)
        return REBATCH_OK;
    const rebatch_status status = alloc(model, &made, bytes);
    if (status == REBATCH_OK)
        *kept = made;
    return status;
}

static rebatch_status zero_grad(void *user)
{
    struct model *model = user;
    rebatch_mutating(model->rb);
    return REBATCH_OK;
}

static rebatch_status run_chunks(const struct model *model, size_t count)
{
    void *chunks[BATCH_MOST];
    size_t made = 0;
    rebatch_status status = REBATCH_OK;
    while (model->chunk && made * model->chunk < count && !status)
        if (!(status = alloc(model, &chunks[made], (size_t)300 << 10)))
            made++;
    while (made > 0 && !status)
        status = release(model, chunks[--made]);
    return status;
}

static rebatch_status forward(struct model *model, void **blocks, size_t count, size_t *late_bytes)
{
    rebatch_status status = REBATCH_OK;
    *late_bytes = 0;
    for (size_t i = 0; i < model->item_count && !status; i++) {
        const struct item *item = &model->items[i];
        const size_t bytes = bytes_of(item, count);
        if (item->manner == LATE)
            *late_bytes += (bytes + REBATCH_POOL_UNIT_BYTES - 1) & ~(size_t)511;
        else if (item->manner == LAZY)
            status = make_once(model, &model->lazy[i], item->fixed);
        else
            status = alloc(model, &blocks[i], bytes);
        if (!status && item->manner == SHORT) {
            status = release(model, blocks[i]);
            blocks[i] = NULL;
        }
    }
    return status ? status : run_chunks(model, count);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct model *model = user;
    void *blocks[ITEMS_MOST] = {NULL};
    size_t late_bytes;
    rebatch_status status = forward(model, blocks, mb->count, &late_bytes);
    if (!status)
        status = rebatch_reserve(model->rb, late_bytes);
    if (status)
        return status;
    rebatch_mutating(model->rb);
    for (size_t i = model->item_count; i-- > 0 && !status;) {
        if (model->items[i].manner == LATE)
            status = alloc(model, &blocks[i], bytes_of(&model->items[i], mb->count));
        if (!status)
            status = release(model, blocks[i]);
    }
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct model *model = user;
    const rebatch_status status = make_once(model, &model->moments, model->moments_bytes);
    if (status == REBATCH_OK)
        rebatch_mutating(model->rb);
    return status;
}

static const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                     .zero_grad = zero_grad,
                                     .forward_backward = forward_backward,
                                     .optimizer_step = optimizer_step,
                                     .flags = REBATCH_DECLARES_MUTATION};

/* ---- a case ---- */

struct setup {
    struct model model;
    size_t batch, capacity_bytes, granule_bytes;
    rebatch_pool_options pool;
};

static void draw_items(struct model *model, uint64_t *state)
{
    static const size_t units[] = {1, 1, 1, 1, 256, 512, 4096, 65536};
    const size_t unit = units[next(state) % 8];
    static const enum manner manners[] = {HELD, HELD, HELD, HELD, SHORT, SHORT, LATE, LATE};
    model->item_count = between(3, ITEMS_MOST, state);
    for (size_t i = 0; i < model->item_count; i++) {
        struct item *item = &model->items[i];
        *item = (struct item){.unit = unit, .manner = manners[next(state) % 8]};
        item->each = between(1, (size_t)1 << between(8, 18, state), state);
        if (one_in(4, state))
            item->fixed = between(1, (size_t)1 << between(8, 21, state), state);
        if (one_in(6, state))
            item->each = 0;
        if (one_in(12, state)) {
            item->manner = LAZY;
            item->fixed = between(1, (size_t)1 << 21, state);
        }
    }
    model->parameters_bytes = between(1, (size_t)32 << 20, state);
    model->moments_bytes = one_in(2, state) ? 2 * model->parameters_bytes : 0;
    model->chunk = one_in(20, state) ? between(1, 4, state) : 0;
}

/* As much larger as the granules are: those of a card are small beside what it has. */
static void scale(struct model *model, size_t factor)
{
    for (size_t i = 0; i < model->item_count; i++) {
        model->items[i].fixed *= factor;
        model->items[i].each *= factor;
        model->items[i].each += model->items[i].each ? model->items[i].each % 509 : 0;
    }
    model->parameters_bytes *= factor;
    model->moments_bytes *= factor;
}

/* What a size needs, roughly: caps are drawn around it. */
static size_t need_of(const struct model *model, size_t count)
{
    size_t sum = model->parameters_bytes + model->moments_bytes;
    for (size_t i = 0; i < model->item_count; i++)
        if (model->items[i].manner != SHORT)
            sum += bytes_of(&model->items[i], count);
    return sum;
}

static void draw(struct setup *setup, size_t number)
{
    uint64_t state = seed + number;
    *setup = (struct setup){.pool = REBATCH_POOL_OPTIONS_INIT};
    draw_items(&setup->model, &state);
    setup->batch = between(8, BATCH_MOST, &state);
    setup->granule_bytes = one_in(2, &state) ? (size_t)64 << 10 : (size_t)2 << 20;
    scale(&setup->model, setup->granule_bytes >> 16);
    const size_t aim = one_in(12, &state) ? setup->batch * 2 : between(1, setup->batch, &state);
    const size_t room = need_of(&setup->model, aim);
    size_t capacity = room + between(0, room / 8, &state);
    if (one_in(80, &state)) /* nothing fits */
        capacity = setup->model.parameters_bytes + setup->model.moments_bytes / 2;
    setup->capacity_bytes = capacity + 2 * setup->granule_bytes;
    switch (between(0, 5, &state)) {
    case 0:
        setup->pool.limit_bytes = setup->capacity_bytes;
        setup->capacity_bytes *= 2;
        break;
    case 1:
        setup->pool.limit_permille = 500;
        setup->capacity_bytes *= 2;
        break;
    case 2:
        setup->pool.headroom_bytes = between(1, (size_t)8 << 20, &state);
        setup->capacity_bytes += setup->pool.headroom_bytes;
        break;
    case 3:
        setup->pool.caching = one_in(3, &state) ? REBATCH_OFF : REBATCH_ON;
        break;
    default:
        break;
    }
}

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

static void close_bed(struct bed *bed)
{
    rebatch_close(bed->rb);
    rebatch_device_close(bed->device);
}

/* False when not even the parameters fit. */
static bool open_bed(struct bed *bed, const struct setup *setup, size_t micro)
{
    rebatch_host_options host = REBATCH_HOST_OPTIONS_INIT;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    host.granule_bytes = setup->granule_bytes;
    options.pool = setup->pool;
    options.growth = REBATCH_OFF;
    options.on_oom = micro ? REBATCH_ON_OOM_STOP : REBATCH_ON_OOM_HALVE;
    options.micro_start = options.micro_smallest = options.micro_largest = micro;
    if (rebatch_device_open_host(&bed->device, setup->capacity_bytes, &host) ||
        rebatch_open(&bed->rb, bed->device, &options))
        die("cannot open a session");
    bed->model = setup->model;
    bed->model.rb = bed->rb;
    if (make_once(&bed->model, &bed->model.parameters, bed->model.parameters_bytes) == REBATCH_OK)
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
    for (size_t micro = 1; micro <= setup->batch; micro++)
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

/* Whether the steps after the probe ran at the size found. */
static struct outcome probe(const struct setup *setup, bool *holds)
{
    struct bed bed;
    rebatch_probe_report report = {0};
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    options.reserve_bytes = setup->model.moments_bytes;
    *holds = true;
    if (!open_bed(&bed, setup, 0))
        return (struct outcome){0};
    const rebatch_status status =
        rebatch_probe(bed.rb, &ops, setup->batch, &bed.model, &options, &report);
    if (status && status != REBATCH_E_EXHAUSTED)
        die("the probe failed");
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

int main(int argc, char **argv)
{
    struct row rows[] = {{.name = "rebatch_probe"},
                         {.name = "halving (Composer)", .search = search_halving},
                         {.name = "x 0.9 (Accelerate)", .search = search_tenths},
                         {.name = "power (Lightning)", .search = search_power},
                         {.name = "power, bisect (Lightning)", .search = search_bisect}};
    const bool is_verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    size_t microbatches[CASES], held = 0;
    for (size_t i = 0; i < CASES; i++) {
        struct setup setup;
        bool fits[BATCH_MOST + 1] = {false}, holds;
        draw(&setup, i);
        const size_t truth = find_truth(fits, &setup);
        const struct outcome found = probe(&setup, &holds);
        microbatches[i] = found.trials;
        held += holds;
        count(&rows[0], found, truth);
        for (size_t k = 1; k < sizeof rows / sizeof *rows; k++)
            count(&rows[k], rows[k].search(fits, setup.batch), truth);
        if (is_verbose && (found.size != truth || found.ooms || !holds))
            printf("case %zu: batch %zu, found %zu of %zu, %zu runs, %zu OOMs, %s; granule %zu, "
                   "caching %s, chunk %zu\n",
                   i, setup.batch, found.size, truth, found.trials, found.ooms,
                   holds ? "holds" : "does not hold", setup.granule_bytes,
                   setup.pool.caching == REBATCH_OFF ? "off" : "on", setup.model.chunk);
    }
    printf("%d cases, seed %" PRIu64 "; the largest size of each by trying all of them\n", CASES,
           seed);
    printf("%-28s %7s %6s %8s %9s %7s %7s %10s\n", "", "trials", "most", "OOMs", "OOM-free",
           "exact", "above", "% of most");
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        print_row(&rows[k]);
    printf("steps after the probe that ran at its size: %zu of %d\n", held, CASES);
    qsort(microbatches, CASES, sizeof *microbatches, by_value);
    printf("probe: cases=%d exact=%zu above=%zu oom_free=%zu microbatches=%zu max=%zu\n", CASES,
           rows[0].exact, rows[0].above, rows[0].oom_free, microbatches[CASES / 2],
           microbatches[CASES - 1]);
    return 0;
}
