/* Owns the tests of what a check says of rounding: a network whose sums depend on the cut, in
 * float, TF32 and bfloat16, right and with a mistake. Must not know more of the library than its
 * public headers say. */
#include <math.h>
#include <stdlib.h>

#include "check_common.h"
#include "rig.h"

#define BATCH 32
#define INPUTS 24
#define HIDDEN 32
#define OUTPUTS 8

/* With what operands of products are rounded; with bfloat16, gradients are too. */
enum precision { FLOAT, TF32, MIXED, BFLOAT16 };

enum mistake {
    NONE,
    WEIGHT_OF_THE_COUNT,
    LEAVES_OUT_A_SAMPLE,
    SAMPLES_OF_THE_BEGINNING,
    TARGETS_OF_THE_BEGINNING,
    MEAN_OF_THE_MICRO_BATCH,
    WEIGHT_A_LITTLE_SMALL,
    DECAYS_IN_EACH_MICRO_BATCH
};

/* What is added to the gradients and no sample has: a part of the weight, of its sign, the same for
 * all, or a part of the weight in the second layer alone. */
enum term { DECAY, SIGN, CONSTANT, DECAY_OF_ONE_LAYER };

struct net {
    struct check_run run;
    enum precision precision;
    enum mistake mistake;
    size_t batch;
    float too_small;      /* by so much is the weight in a part of the batch, by mistake */
    bool has_own_weights; /* samples are weighted by a constant */
    bool asks_session;    /* for the batch */
    rebatch_device *device;
    uint64_t rng;
    enum term term;
    float decay; /* how much of the term is added to the gradients */
    float w1[HIDDEN][INPUTS], w2[OUTPUTS][HIDDEN], shift;
    float x[BATCH][INPUTS], y[BATCH][OUTPUTS];
    /* results */
    float d1[HIDDEN][INPUTS], d2[OUTPUTS][HIDDEN], dshift;
    uint16_t b1[HIDDEN][INPUTS], b2[OUTPUTS][HIDDEN];
    float loss;
};

/* ---- numbers ---- */

static float uniform(struct net *n)
{
    n->rng = n->rng * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(n->rng >> 40) / (float)(1 << 23) - 1;
}

/* To nearest, ties to even, with so many bits of the fraction left. */
static float round_bits(float value, unsigned left)
{
    uint32_t bits;
    const unsigned drop = 23 - left;
    memcpy(&bits, &value, sizeof bits);
    bits += ((uint32_t)1 << (drop - 1)) - 1 + (bits >> drop & 1);
    bits &= ~(((uint32_t)1 << drop) - 1);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* An operand. */
static float operand(const struct net *n, float value)
{
    return n->precision == FLOAT ? value : round_bits(value, n->precision == TF32 ? 10 : 7);
}

/* Libraries choose an algorithm by the shape: here, how many products are summed at a time. */
struct sum {
    float whole, part;
    size_t count, most;
};

static struct sum sum_for(size_t shape)
{
    return (struct sum){0, 0, 0, 1 + shape * 5 % 7};
}

static void sum_add(struct sum *sum, float value)
{
    sum->part += value;
    if (++sum->count == sum->most) {
        sum->whole += sum->part;
        sum->part = 0;
        sum->count = 0;
    }
}

static float sum_end(const struct sum *sum)
{
    return sum->whole + sum->part;
}

/* ---- the network ---- */

struct activations {
    float before[BATCH][HIDDEN], hidden[BATCH][HIDDEN], centered[BATCH][HIDDEN],
        dout[BATCH][OUTPUTS], dhidden[BATCH][HIDDEN];
};

/* By rounding, what is close to 0 has one slope or the other. */
static bool is_relu(size_t h)
{
    return h % 2;
}

static float weight_of(const struct net *n, const rebatch_microbatch *mb)
{
    const bool is_small = n->mistake == WEIGHT_A_LITTLE_SMALL && mb->count < n->batch;
    const float all = n->mistake == WEIGHT_OF_THE_COUNT ? (float)mb->count
                      : n->has_own_weights              ? (float)n->batch
                      : n->asks_session                 ? (float)rebatch_get_batch(n->run.rb, 1)
                                                        : (float)mb->batch;
    return (is_small ? 1 - n->too_small : 1) / all;
}

static const float *input_of(const struct net *n, const rebatch_microbatch *mb, size_t i)
{
    return n->x[n->mistake == SAMPLES_OF_THE_BEGINNING ? i : mb->first + i];
}

static const float *target_of(const struct net *n, const rebatch_microbatch *mb, size_t i)
{
    return n->y[n->mistake == SAMPLES_OF_THE_BEGINNING || n->mistake == TARGETS_OF_THE_BEGINNING
                    ? i
                    : mb->first + i];
}

/* The mean of a sample is taken away, or, by mistake, that of the micro-batch; so a shift of all
 * has no gradient but rounding. */
static void center(const struct net *n, const rebatch_microbatch *mb, struct activations *a)
{
    struct sum all = sum_for(mb->count);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t h = 0; h < HIDDEN; h++)
            sum_add(&all, a->hidden[i][h]);
    for (size_t i = 0; i < mb->count; i++) {
        struct sum own = sum_for(mb->count);
        for (size_t h = 0; h < HIDDEN; h++)
            sum_add(&own, a->hidden[i][h]);
        const float mean = n->mistake == MEAN_OF_THE_MICRO_BATCH
                               ? sum_end(&all) / (float)(mb->count * HIDDEN)
                               : sum_end(&own) / HIDDEN;
        for (size_t h = 0; h < HIDDEN; h++)
            a->centered[i][h] = operand(n, a->hidden[i][h] - mean);
    }
}

static void forward(struct net *n, const rebatch_microbatch *mb, struct activations *a)
{
    for (size_t i = 0; i < mb->count; i++)
        for (size_t h = 0; h < HIDDEN; h++) {
            struct sum sum = sum_for(mb->count);
            for (size_t k = 0; k < INPUTS; k++)
                sum_add(&sum, operand(n, n->w1[h][k]) * operand(n, input_of(n, mb, i)[k]));
            const float before = sum_end(&sum);
            a->before[i][h] = before;
            a->hidden[i][h] = n->shift + (is_relu(h) ? fmaxf(before, 0) : tanhf(before));
        }
    center(n, mb, a);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t o = 0; o < OUTPUTS; o++) {
            struct sum sum = sum_for(mb->count + 1);
            for (size_t h = 0; h < HIDDEN; h++)
                sum_add(&sum, operand(n, n->w2[o][h]) * a->centered[i][h]);
            a->dout[i][o] = sum_end(&sum) - target_of(n, mb, i)[o];
        }
}

static void backward(struct net *n, const rebatch_microbatch *mb, struct activations *a)
{
    const float weight = weight_of(n, mb);
    struct sum loss = sum_for(mb->count), shift = sum_for(mb->count);
    for (size_t i = 0; i < mb->count; i++) {
        const bool is_left_out = n->mistake == LEAVES_OUT_A_SAMPLE && mb->first > 0 && i == 0;
        for (size_t o = 0; o < OUTPUTS; o++) {
            sum_add(&loss, weight * a->dout[i][o] * a->dout[i][o]);
            a->dout[i][o] = is_left_out ? 0 : operand(n, 2 * weight * a->dout[i][o]);
        }
        float all = 0;
        for (size_t h = 0; h < HIDDEN; h++) {
            struct sum sum = sum_for(mb->count);
            for (size_t o = 0; o < OUTPUTS; o++)
                sum_add(&sum, a->dout[i][o] * operand(n, n->w2[o][h]));
            a->dhidden[i][h] = sum_end(&sum);
            all += a->dhidden[i][h];
        }
        for (size_t h = 0; h < HIDDEN; h++) {
            const float slope = tanhf(a->before[i][h]);
            const float centered = a->dhidden[i][h] - all / HIDDEN;
            sum_add(&shift, centered);
            a->dhidden[i][h] =
                operand(n, centered * (is_relu(h) ? a->before[i][h] > 0 : 1 - slope * slope));
        }
    }
    n->loss += sum_end(&loss);
    n->dshift += sum_end(&shift);
}

/* Into float, or into bfloat16. */
static void add(const struct net *n, float *gradient, uint16_t *narrow, float value)
{
    uint32_t bits;
    if (n->precision != BFLOAT16) {
        *gradient += value;
        return;
    }
    bits = (uint32_t)*narrow << 16;
    memcpy(gradient, &bits, sizeof bits);
    *gradient = round_bits(*gradient + value, 7);
    memcpy(&bits, gradient, sizeof bits);
    *narrow = (uint16_t)(bits >> 16);
}

/* Once in each micro-batch by mistake, else as much of it as samples. */
static float term_of(const struct net *n, const rebatch_microbatch *mb, float weight, bool is_first)
{
    const float term = n->term == CONSTANT                         ? 1
                       : n->term == SIGN                           ? copysignf(1, weight)
                       : n->term == DECAY_OF_ONE_LAYER && is_first ? 0
                                                                   : weight;
    return n->decay * term *
           (n->mistake == DECAYS_IN_EACH_MICRO_BATCH ? 1 : (float)mb->count / (float)mb->batch);
}

static void accumulate(struct net *n, const rebatch_microbatch *mb, const struct activations *a)
{
    for (size_t h = 0; h < HIDDEN; h++)
        for (size_t k = 0; k < INPUTS; k++) {
            struct sum sum = sum_for(mb->count);
            for (size_t i = 0; i < mb->count; i++)
                sum_add(&sum, a->dhidden[i][h] * operand(n, input_of(n, mb, i)[k]));
            add(n, &n->d1[h][k], &n->b1[h][k], sum_end(&sum) + term_of(n, mb, n->w1[h][k], true));
        }
    for (size_t o = 0; o < OUTPUTS; o++)
        for (size_t h = 0; h < HIDDEN; h++) {
            struct sum sum = sum_for(mb->count);
            for (size_t i = 0; i < mb->count; i++)
                sum_add(&sum, a->dout[i][o] * a->centered[i][h]);
            add(n, &n->d2[o][h], &n->b2[o][h], sum_end(&sum) + term_of(n, mb, n->w2[o][h], false));
        }
}

/* ---- the step ---- */

static rebatch_status zero_grad(void *user)
{
    struct net *n = user;
    memset(n->d1, 0, sizeof n->d1);
    memset(n->d2, 0, sizeof n->d2);
    memset(n->b1, 0, sizeof n->b1);
    memset(n->b2, 0, sizeof n->b2);
    n->loss = n->dshift = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct net *n = user;
    static struct activations a;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count << 12, mb->stream, 0);
    if (status)
        return status;
    forward(n, mb, &a);
    rebatch_mutating(n->run.rb);
    backward(n, mb, &a);
    accumulate(n, mb, &a);
    return rebatch_pool_free(mb->pool, memory);
}

static void watch(struct net *n, const char *name, void *what, size_t bytes, rebatch_number number)
{
    OK(rebatch_watch(n->run.rb, name, what, bytes, REBATCH_GUARD_HOST, number));
}

static void fill(struct net *n, uint64_t seed)
{
    n->rng = seed * UINT64_C(0x9e3779b97f4a7c15);
    for (size_t i = 0; i < sizeof n->w1 / sizeof(float); i++)
        n->w1[i / INPUTS][i % INPUTS] = 0.3f * uniform(n);
    for (size_t i = 0; i < sizeof n->w2 / sizeof(float); i++)
        n->w2[i / HIDDEN][i % HIDDEN] = 0.3f * uniform(n);
    for (size_t i = 0; i < sizeof n->x / sizeof(float); i++)
        n->x[i / INPUTS][i % INPUTS] = uniform(n);
    for (size_t i = 0; i < sizeof n->y / sizeof(float); i++)
        n->y[i / OUTPUTS][i % OUTPUTS] = uniform(n);
    n->shift = 0.1f * uniform(n);
}

struct trial {
    enum precision precision;
    enum mistake mistake;
    uint64_t seed;
    float decay;
    enum term term;
    double tolerance;
    size_t batch; /* 0: BATCH */
    float too_small;
    bool has_own_weights, asks_session;
};

static rebatch_status check_trial(rebatch_check_report *report, const struct trial *trial)
{
    const enum precision precision = trial->precision;
    const enum mistake mistake = trial->mistake;
    rebatch_check_options of_check = REBATCH_CHECK_OPTIONS_INIT;
    of_check.tolerance = trial->tolerance;
    static struct net n;
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    if (trial->has_own_weights)
        ops.flags |= REBATCH_OWN_WEIGHTS;
    n = (struct net){.precision = precision,
                     .mistake = mistake,
                     .batch = trial->batch ? trial->batch : BATCH,
                     .has_own_weights = trial->has_own_weights,
                     .asks_session = trial->asks_session,
                     .too_small = trial->too_small,
                     .term = trial->term,
                     .decay = trial->decay};
    fill(&n, trial->seed);
    open_on_host(&n.device, &n.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    if (precision == BFLOAT16) {
        watch(&n, "w1", n.b1, sizeof n.b1, REBATCH_BF16);
        watch(&n, "w2", n.b2, sizeof n.b2, REBATCH_BF16);
    } else {
        watch(&n, "w1", n.d1, sizeof n.d1, REBATCH_F32);
        watch(&n, "w2", n.d2, sizeof n.d2, REBATCH_F32);
    }
    if (trial->tolerance <= 0) /* all of it is rounding, beyond any tolerance */
        watch(&n, "shift", &n.dshift, sizeof n.dshift, REBATCH_F32);
    watch(&n, "loss", &n.loss, sizeof n.loss, REBATCH_F32);
    const rebatch_status status = rebatch_check(n.run.rb, &ops, n.batch, &n, &of_check, report);
    rebatch_close(n.run.rb);
    rebatch_device_close(n.device);
    return status;
}

static const char *const precisions[] = {"float", "TF32", "bfloat16 with float gradients",
                                         "bfloat16"};

/* Seeds 1 to 15. */
Test(check_rounding, a_network_without_a_mistake_has_none_in_any_precision)
{
    static const size_t batches[] = {2, 8, BATCH};
    rebatch_check_report report;
    for (enum precision precision = FLOAT; precision <= BFLOAT16; precision++)
        for (size_t i = 0; i < 6; i++)
            for (uint64_t seed = 1; seed <= 15; seed++) {
                const struct trial trial = {precision,
                                            NONE,
                                            seed,
                                            .decay = 0.01f,
                                            .batch = batches[i % 3],
                                            .has_own_weights = i / 3};
                cr_expect_eq(check_trial(&report, &trial), REBATCH_OK, "%s, %d, seed %ju:\n%s",
                             precisions[precision], (int)i, (uintmax_t)seed, check_texts(&report));
            }
}

static void expect_cut(const struct trial *trial)
{
    rebatch_check_report report;
    cr_expect_eq(check_trial(&report, trial), REBATCH_E_STATE, "%s, %d, seed %ju:\n%s",
                 precisions[trial->precision], (int)trial->mistake, (uintmax_t)trial->seed,
                 check_texts(&report));
    cr_expect_eq(report.findings[0].kind, REBATCH_FINDING_CUT, "%s", check_texts(&report));
    cr_expect_eq(report.mistakes, 1, "%s", check_texts(&report));
}

/* Seeds 1 to 10. */
Test(check_rounding, a_mistake_is_told_from_rounding_in_any_precision)
{
    static const enum mistake mistakes[] = {WEIGHT_OF_THE_COUNT, LEAVES_OUT_A_SAMPLE,
                                            SAMPLES_OF_THE_BEGINNING, TARGETS_OF_THE_BEGINNING,
                                            MEAN_OF_THE_MICRO_BATCH};
    const size_t count = sizeof mistakes / sizeof *mistakes;
    for (enum precision precision = FLOAT; precision <= BFLOAT16; precision++)
        for (size_t i = 0; i < 2 * count; i++)
            for (uint64_t seed = 1; seed <= 10; seed++) {
                const struct trial trial = {precision, mistakes[i % count], seed, .decay = 0.01f,
                                            .has_own_weights = i >= count};
                expect_cut(&trial);
            }
}

/* In few samples too. Seeds 1 to 10. */
Test(check_rounding, so_it_is_in_a_small_batch)
{
    static const size_t batches[] = {2, 5, 12};
    for (enum precision precision = FLOAT; precision <= BFLOAT16; precision++)
        for (enum mistake mistake = WEIGHT_OF_THE_COUNT; mistake <= TARGETS_OF_THE_BEGINNING;
             mistake++)
            for (size_t i = 0; i < 6; i++)
                for (uint64_t seed = 1; seed <= 10; seed++) {
                    const struct trial trial = {precision,
                                                mistake,
                                                seed,
                                                .decay = 0.01f,
                                                .batch = batches[i % 3],
                                                .has_own_weights = i / 3};
                    expect_cut(&trial);
                }
}

/* The largest gradient of all samples in float. */
static float largest_of(const struct trial *trial)
{
    static struct net n;
    static struct activations a;
    const rebatch_microbatch mb = {.count = trial->batch, .batch = trial->batch};
    float largest = 0;
    n = (struct net){.batch = trial->batch};
    fill(&n, trial->seed);
    forward(&n, &mb, &a);
    backward(&n, &mb, &a);
    accumulate(&n, &mb, &a);
    for (size_t i = 0; i < sizeof n.d1 / sizeof(float); i++)
        largest = fmaxf(largest, fabsf(n.d1[i / INPUTS][i % INPUTS]));
    for (size_t i = 0; i < sizeof n.d2 / sizeof(float); i++)
        largest = fmaxf(largest, fabsf(n.d2[i / HIDDEN][i % HIDDEN]));
    return largest;
}

/* How many of these are called mistakes, of 32: each term in batches of 8 and 32. Seeds 1 to 4. */
static int count_terms(enum precision precision, enum mistake mistake, float part, bool has_own)
{
    int count = 0;
    for (enum term term = DECAY; term <= DECAY_OF_ONE_LAYER; term++)
        for (size_t batch = 8; batch <= BATCH; batch *= 4)
            for (uint64_t seed = 1; seed <= 4; seed++) {
                const float weight = term == SIGN || term == CONSTANT ? 1 : 0.3f;
                rebatch_check_report report;
                struct trial trial = {.precision = precision,
                                      .mistake = mistake,
                                      .seed = seed,
                                      .term = term,
                                      .batch = batch,
                                      .has_own_weights = has_own};
                trial.decay = part * largest_of(&trial) / weight;
                count += check_trial(&report, &trial) != REBATCH_OK;
                cr_expect(mistake == NONE || report.mistakes == 0 ||
                              report.findings[0].kind == REBATCH_FINDING_CUT,
                          "%s", check_texts(&report));
            }
    return count;
}

/* A term that is added once a micro-batch instead of once a batch, of that part of the largest
 * gradient: as small as what float, TF32 and bfloat16 round. What bfloat16 gradients lose of it is
 * not found. The same terms are right where each micro-batch adds its samples' share. */
Test(check_rounding, small_terms_that_each_micro_batch_adds_are_found)
{
    static const struct {
        enum precision precision;
        float part;
        int least; /* of 32 */
    } rows[] = {
        {FLOAT, 1e-3f, 32},   {FLOAT, 1e-4f, 32},    {FLOAT, 1e-6f, 32},    {TF32, 1e-3f, 32},
        {TF32, 1e-4f, 32},    {TF32, 1e-5f, 30},     {MIXED, 1e-3f, 32},    {MIXED, 1e-4f, 32},
        {MIXED, 1e-5f, 32},   {BFLOAT16, 1e-2f, 32}, {BFLOAT16, 3e-3f, 32}, {BFLOAT16, 1e-3f, 11},
        {BFLOAT16, 1e-4f, 0},
    };
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
        const enum precision precision = rows[i / 2].precision;
        const float part = rows[i / 2].part;
        const int found = count_terms(precision, DECAYS_IN_EACH_MICRO_BATCH, part, i % 2);
        cr_expect_geq(found, rows[i / 2].least, "%s, %g of the gradient: %d of 32",
                      precisions[precision], (double)part, found);
        cr_expect_eq(count_terms(precision, NONE, part, i % 2), 0, "%s, %g of the gradient",
                     precisions[precision], (double)part);
    }
}

/* The report says what grows, and nothing else. */
Test(check_rounding, what_grows_with_the_number_of_micro_batches_is_named)
{
    rebatch_check_report report;
    const struct trial trial = {MIXED, DECAYS_IN_EACH_MICRO_BATCH, 1, .decay = 1e-3f};
    cr_expect_eq(check_trial(&report, &trial), REBATCH_E_STATE, "%s", check_texts(&report));
    const rebatch_finding *const found = check_find(&report, REBATCH_FINDING_CUT, "w1");
    cr_expect(found && strstr(found->text, "with the number of micro-batches: with each one more"),
              "%s", check_texts(&report));
    cr_expect_eq(report.finding_count, 1, "%s", check_texts(&report));
}

/* As small as what is computed in rounds; where weights do not follow the batch, that is not
 * measured. Seeds 1 to 10. */
Test(check_rounding, a_weight_that_is_a_little_too_small_is_found)
{
    static const float parts[] = {
        [FLOAT] = 3e-4f, [TF32] = 3e-3f, [MIXED] = 0.02f, [BFLOAT16] = 0.03f};
    for (enum precision precision = FLOAT; precision <= BFLOAT16; precision++)
        for (int i = 0; i < 6; i++)
            for (uint64_t seed = 1; seed <= 10; seed++) {
                const struct trial trial = {precision,
                                            WEIGHT_A_LITTLE_SMALL,
                                            seed,
                                            .decay = 0.01f,
                                            .batch = (const size_t[]){3, 8, BATCH}[i % 3],
                                            .has_own_weights = i / 3,
                                            .too_small = i / 3 ? 0.03f : parts[precision]};
                expect_cut(&trial);
            }
}

/* A bound that the caller sets is the only one. */
Test(check_rounding, a_tolerance_is_the_bound_of_what_is_rounding)
{
    rebatch_check_report report;
    struct trial trial = {FLOAT, DECAYS_IN_EACH_MICRO_BATCH, 1, 0.01f, .tolerance = 0.5};
    cr_expect_eq(check_trial(&report, &trial), REBATCH_OK, "%s", check_texts(&report));
    cr_expect_not_null(check_find(&report, REBATCH_FINDING_ROUNDING, ""), "%s",
                       check_texts(&report));
    trial.tolerance = 1e-3;
    cr_expect_eq(check_trial(&report, &trial), REBATCH_E_STATE, "%s", check_texts(&report));
    trial = (struct trial){FLOAT, NONE, 1, 0, .tolerance = 1e-9};
    cr_expect_eq(check_trial(&report, &trial), REBATCH_E_STATE, "%s", check_texts(&report));
    cr_expect_not_null(check_find(&report, REBATCH_FINDING_CUT, "w1"), "%s", check_texts(&report));
    trial.tolerance = 1e-5;
    cr_expect_eq(check_trial(&report, &trial), REBATCH_OK, "%s", check_texts(&report));
}

/* It says the batch of each run, so rounding is measured, and weights are known. Seeds 1 to 5. */
Test(check_rounding, weights_by_the_batch_that_the_session_says_are_by_the_batch)
{
    rebatch_check_report report;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        const struct trial trial = {MIXED,         NONE, seed, .decay = 0.01f, .asks_session = true,
                                    .tolerance = 0};
        cr_expect_eq(check_trial(&report, &trial), REBATCH_OK, "%s", check_texts(&report));
        for (size_t i = 0; i < report.finding_count; i++)
            cr_expect(report.findings[i].kind == REBATCH_FINDING_ROUNDING &&
                          !strstr(report.findings[i].text, "do not follow mb->batch"),
                      "%s", check_texts(&report));
    }
}

/* ---- gradients of which a few numbers are large, as trainers have them ---- */

#define NUMBERS 1024

/* Which samples a micro-batch reads. */
enum reads { ITS_OWN, THE_FIRST, EVERY_SECOND, ONE_LESS_AT_A_LATER_PLACE, READS };

struct tailed {
    struct check_run run;
    rebatch_device *device;
    enum reads reads;
    float weight; /* 0: 1/batch */
    float gradient[NUMBERS];
};

/* One of 64 is large, and samples resemble each other there. */
static float part_of(size_t sample, size_t number)
{
    uint64_t state = sample * NUMBERS + number;
    (void)check_random(&state);
    const float random = 2 * check_random(&state) - 1;
    return number % 64 ? 0.01f * random : 1 + 0.2f * random;
}

static rebatch_status clear_tailed(void *user)
{
    struct tailed *t = user;
    memset(t->gradient, 0, sizeof t->gradient);
    return REBATCH_OK;
}

static rebatch_status add_tailed(const rebatch_microbatch *mb, void *user)
{
    struct tailed *t = user;
    const float weight = t->weight > 0 ? t->weight : 1 / (float)mb->batch;
    const bool is_less = t->reads == ONE_LESS_AT_A_LATER_PLACE && mb->first > 0;
    rebatch_mutating(t->run.rb);
    for (size_t i = is_less; i < mb->count; i++) {
        const size_t sample = t->reads == THE_FIRST      ? i
                              : t->reads == EVERY_SECOND ? mb->first + i / 2 * 2
                                                         : mb->first + i;
        for (size_t k = 0; k < NUMBERS; k++)
            t->gradient[k] += weight * part_of(sample, k);
    }
    return REBATCH_OK;
}

Test(check_rounding, wrong_samples_are_found_where_a_few_numbers_are_large)
{
    static const size_t batches[] = {2, 4, 7, 16, 40, 200};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
        for (int way = 0; way < 3 * READS; way++) {
            static struct tailed t;
            rebatch_check_report report;
            rebatch_step_ops ops = check_step_ops(clear_tailed, add_tailed);
            ops.flags |= way % 3 ? REBATCH_OWN_WEIGHTS : 0;
            t = (struct tailed){.reads = (enum reads)(way / 3),
                                .weight = way % 3 == 2 ? 1 / (float)batches[i] : 0};
            open_on_host(&t.device, &t.run.rb, MIB(1), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
            OK(rebatch_watch(t.run.rb, "gradient", t.gradient, sizeof t.gradient,
                             REBATCH_GUARD_HOST, REBATCH_F32));
            const bool is_right = t.reads == ITS_OWN;
            cr_expect_eq(rebatch_check(t.run.rb, &ops, batches[i], &t, NULL, &report),
                         is_right ? REBATCH_OK : REBATCH_E_STATE, "batch %zu, way %d: %s",
                         batches[i], way, check_texts(&report));
            cr_expect_eq(check_find(&report, REBATCH_FINDING_CUT, "gradient") != NULL, !is_right,
                         "%s", check_texts(&report));
            rebatch_close(t.run.rb);
            rebatch_device_close(t.device);
        }
}
