/* Sequences of variable length with a heavy tail, cut by cost and by count: OOMs, and tokens a unit
 * of time. Memory is a host device's; time is virtual: a micro-batch takes as long as its padded
 * tokens and OVERHEAD more, one that runs out of memory its forward third. Seed 2024. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "rebatch/rebatch.h"

enum {
    STEPS = 1000,
    BATCH = 64,
    LAYERS = 12,
    SHORTEST = 8,
    LONGEST = 2048,
    MEDIAN = 120,
    TOKEN_BYTES = 1536, /* kept a layer until the backward pass */
    SAMPLE_BYTES = 1024,
    FIXED_BYTES = 65536,
    OVERHEAD = 4096 /* tokens whose time a micro-batch takes however small it is */
};
#define CAPACITY ((size_t)256 << 20)

struct training {
    rebatch *rb;
    uint64_t random;
    size_t lengths[BATCH];
    double time;
    uint64_t tokens; /* real ones, of updates that were applied */
};

/* splitmix64 (Steele, Lea, Flood 2014), in (0, 1]. */
static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53 + 0x1p-53;
}

/* Log-normal with sigma 1 (Box, Muller 1958), cut off at both ends. */
static size_t draw_length(uint64_t *random)
{
    const double radius = sqrt(-2 * log(uniform(random)));
    const double normal = radius * cos(2 * acos(-1) * uniform(random));
    const double length = MEDIAN * exp(normal);
    return length < SHORTEST ? SHORTEST : length > LONGEST ? LONGEST : (size_t)length;
}

static uint64_t padded_tokens(size_t first, size_t count, void *user)
{
    const struct training *t = user;
    size_t longest = 0;
    for (size_t i = first; i < first + count; i++)
        longest = t->lengths[i] > longest ? t->lengths[i] : longest;
    return count * longest;
}

static rebatch_status zero_grad(void *user)
{
    struct training *t = user;
    rebatch_mutating(t->rb);
    return REBATCH_OK;
}

static rebatch_status run_layers(const rebatch_microbatch *mb, size_t tokens)
{
    void *kept[LAYERS] = {NULL};
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < LAYERS && !status; i++) {
        void *workspace = NULL;
        status = rebatch_pool_alloc(&kept[i], mb->pool,
                                    tokens * TOKEN_BYTES + mb->count * SAMPLE_BYTES, mb->stream, 0);
        if (!status)
            status =
                rebatch_pool_alloc(&workspace, mb->pool, tokens * 256 + FIXED_BYTES, mb->stream, 0);
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
    const size_t tokens = padded_tokens(mb->first, mb->count, t);
    const rebatch_status status = run_layers(mb, tokens);
    if (!mb->probing)
        t->time += status ? (OVERHEAD + (double)tokens) / 3 : OVERHEAD + (double)tokens;
    if (!status)
        rebatch_mutating(t->rb);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct training *t = user;
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < BATCH; i++)
        t->tokens += t->lengths[i];
    return REBATCH_OK;
}

struct way {
    const char *name;
    bool by_cost, probes, fixed;
    size_t start;
};

struct outcome {
    unsigned ooms;    /* micro-batches that ran out of memory */
    unsigned refused; /* that were not started, since it was known */
    uint64_t microbatches;
    double tokens; /* a unit of time */
};

static rebatch_status train(struct outcome *outcome, struct training *t, const struct way *way)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION,
                                  .cost = way->by_cost ? padded_tokens : NULL};
    rebatch_status status = REBATCH_OK;
    for (int step = 0; step < STEPS && !status; step++) {
        rebatch_step_report report;
        for (size_t i = 0; i < BATCH; i++)
            t->lengths[i] = draw_length(&t->random);
        if (step == 0 && way->probes)
            status = rebatch_probe(t->rb, &ops, BATCH, t, NULL, NULL);
        if (!status)
            status = rebatch_step(t->rb, &ops, BATCH, t, &report);
        if (status)
            break;
        outcome->ooms += report.ooms - report.ooms_in[REBATCH_PHASE_ADMISSION];
        outcome->refused += report.ooms_in[REBATCH_PHASE_ADMISSION];
        outcome->microbatches += report.microbatches;
    }
    outcome->tokens = (double)t->tokens / t->time;
    return status;
}

static rebatch_status run(struct outcome *outcome, const struct way *way)
{
    rebatch_device *device = NULL;
    struct training t = {.random = 2024};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_start = way->start;
    options.micro_largest = way->fixed ? way->start : 0;
    options.on_oom = REBATCH_ON_OOM_FIT;
    rebatch_status status = rebatch_device_open_host(&device, CAPACITY, NULL);
    if (!status)
        status = rebatch_open(&t.rb, device, &options);
    if (!status)
        status = train(outcome, &t, way);
    rebatch_close(t.rb);
    rebatch_device_close(device);
    return status;
}

int main(void)
{
    /* As many of the longest as fit: what one sets by hand to be safe. */
    const size_t safe = CAPACITY / ((size_t)LAYERS * LONGEST * TOKEN_BYTES + LONGEST * 256);
    const struct way ways[] = {
        {"by cost, probed", true, true, false, 0},
        {"by cost, from 4 samples on", true, false, false, 4},
        {"by count, probed", false, true, false, 0},
        {"by count, from 4 samples on", false, false, false, 4},
        {"by count, fixed for the longest", false, false, true, safe},
    };
    enum { WAYS = sizeof ways / sizeof *ways };
    struct outcome outcomes[WAYS];
    memset(outcomes, 0, sizeof outcomes);
    printf("%d steps of %d sequences, log-normal lengths %d to %d, median %d; %zu MiB\n\n", STEPS,
           BATCH, SHORTEST, LONGEST, MEDIAN, CAPACITY >> 20);
    printf("| %-31s | OOMs | refused | micro-batches a step | tokens a unit of time |\n", "");
    printf("| ------------------------------- | ---- | ------- | -------------------- | "
           "--------------------- |\n");
    for (size_t i = 0; i < WAYS; i++) {
        if (run(&outcomes[i], &ways[i])) {
            fprintf(stderr, "bench-cost: %s: %s\n", ways[i].name, rebatch_last_error());
            return 1;
        }
        printf("| %-31s | %4u | %7u | %20.1f | %21.3f |\n", ways[i].name, outcomes[i].ooms,
               outcomes[i].refused, (double)outcomes[i].microbatches / STEPS, outcomes[i].tokens);
    }
    printf("\ncost: steps=%d ooms_with=%u ooms_without=%u tokens_with=%.3f tokens_without=%.3f\n",
           STEPS, outcomes[0].ooms, outcomes[2].ooms, outcomes[0].tokens, outcomes[2].tokens);
    return 0;
}
