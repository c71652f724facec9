/* Owns the tests of AdamW, the gradient's norm, the clip coefficient and the finite check. Must not
 * know: the kernels' insides. Run with -j1. */
#include <math.h>
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_optimizer, .fini = support_free_all);

#define COUNT 4099
#define UPDATES 5

static const rbk_adamw_settings settings_of_first = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1};

typedef struct weights {
    support_array master, m, v, working;
} weights;

static weights weights_create(rbk_dtype dtype, support_random *random)
{
    weights w;
    w.master = support_array_random(RBK_F32, COUNT, 1.0, random);
    w.m = support_array_random(RBK_F32, COUNT, 0.0, random);
    w.v = support_array_random(RBK_F32, COUNT, 0.0, random);
    w.working = support_array_poisoned(dtype, COUNT);
    return w;
}

static weights weights_copy(const weights *from)
{
    const weights w = {support_array_copy(&from->master), support_array_copy(&from->m),
                       support_array_copy(&from->v), support_array_copy(&from->working)};
    return w;
}

static void expect_same_weights(const weights *a, const weights *b, const char *what)
{
    support_expect_same(&a->master, 0, &b->master, 0, COUNT, what);
    support_expect_same(&a->m, 0, &b->m, 0, COUNT, what);
    support_expect_same(&a->v, 0, &b->v, 0, COUNT, what);
    support_expect_same(&a->working, 0, &b->working, 0, COUNT, what);
}

/* Elements [first, first + count). */
static void update(weights *w, const support_array *grad, const rbk_adamw_settings *settings,
                   const float *inverse_scale, const float *clip, const uint32_t *skip,
                   size_t first, size_t count)
{
    support_must(rbk_adamw(support_float_at(&w->master, first), support_float_at(&w->m, first),
                           support_float_at(&w->v, first), support_at(&w->working, first),
                           support_float_at(grad, first), settings, inverse_scale, clip, skip,
                           count, w->working.dtype, NULL),
                 "adamw");
}

static void reference_update(double *w, double *m, double *v, double g, const rbk_adamw_settings *s)
{
    const double update_number = (double)s->update;
    *w *= 1.0 - (double)s->learning_rate * s->weight_decay;
    *m = s->beta1 * *m + (1.0 - s->beta1) * g;
    *v = s->beta2 * *v + (1.0 - s->beta2) * g * g;
    const double m_hat = *m / (1.0 - pow(s->beta1, update_number));
    const double v_hat = *v / (1.0 - pow(s->beta2, update_number));
    *w -= s->learning_rate * m_hat / (sqrt(v_hat) + s->epsilon);
}

static void check_adamw(rbk_dtype dtype, support_random *random)
{
    weights w = weights_create(dtype, random);
    weights pieces = weights_copy(&w);
    weights want = weights_copy(&w);
    support_array factors = support_array_random(RBK_F32, 2, 1.0, random);
    const float *inverse_scale = support_float_at(&factors, 0);
    const float *clip = support_float_at(&factors, 1);
    rbk_adamw_settings settings = settings_of_first;
    for (settings.update = 1; settings.update <= UPDATES; settings.update++) {
        support_array grad = support_array_random(RBK_F32, COUNT, 1.0, random);
        update(&w, &grad, &settings, inverse_scale, clip, NULL, 0, COUNT);
        update(&pieces, &grad, &settings, inverse_scale, clip, NULL, 0, 1000);
        update(&pieces, &grad, &settings, inverse_scale, clip, NULL, 1000, 8);
        update(&pieces, &grad, &settings, inverse_scale, clip, NULL, 1008, COUNT - 1008);
        for (size_t i = 0; i < COUNT; i++)
            reference_update(&want.master.host[i], &want.m.host[i], &want.v.host[i],
                             grad.host[i] * factors.host[0] * factors.host[1], &settings);
    }
    support_expect_close(&w.master, want.master.host, 1e-5, "adamw: master");
    support_expect_close(&w.m, want.m.host, 1e-5, "adamw: m");
    support_expect_close(&w.v, want.v.host, 1e-5, "adamw: v");
    support_array_read(&w.working);
    for (size_t i = 0; i < COUNT; i++)
        cr_assert(w.working.host[i] == support_round(dtype, w.master.host[i]),
                  "working copy %zu is %.9g of %.9g", i, w.working.host[i], w.master.host[i]);
    expect_same_weights(&pieces, &w, "adamw in pieces");
}

Test(kernels_optimizer, adamw)
{
    support_each_dtype(check_adamw, 601);
}

Test(kernels_optimizer, adamw_skips)
{
    support_random random = {602};
    weights w = weights_create(RBK_BF16, &random);
    weights before = weights_copy(&w);
    support_array grad = support_array_random(RBK_F32, COUNT, 1.0, &random);
    const int32_t flags[2] = {0, 1};
    const uint32_t *skip = (const uint32_t *)support_upload_ints(flags, 2);
    update(&w, &grad, &settings_of_first, NULL, NULL, skip + 1, 0, COUNT);
    expect_same_weights(&w, &before, "skipped update");

    update(&w, &grad, &settings_of_first, NULL, NULL, skip, 0, COUNT);
    update(&before, &grad, &settings_of_first, NULL, NULL, NULL, 0, COUNT);
    expect_same_weights(&w, &before, "update that is not skipped");
}

/* The partial sums of an array, all of them. */
static double *sum_squares(const support_array *in, size_t *parts)
{
    *parts = (in->count + RBK_NORM_CHUNK - 1) / RBK_NORM_CHUNK;
    double *partial = support_scratch(*parts * sizeof *partial);
    support_must(rbk_sum_squares(partial, in->device, in->count, NULL), "sum of squares");
    return partial;
}

/* From one element to several chunks and a bit. */
Test(kernels_optimizer, sum_squares)
{
    const size_t counts[] = {1, RBK_NORM_CHUNK / 2 + 3, RBK_NORM_CHUNK, 5 * RBK_NORM_CHUNK + 13};
    support_random random = {603};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        support_array in = support_array_random(RBK_F32, counts[i], 1.0, &random);
        size_t parts;
        double *device = sum_squares(&in, &parts), got[8], want[8] = {0.0};
        cr_assert(parts <= 8);
        support_must(cudaMemcpy(got, device, parts * sizeof *got, cudaMemcpyDeviceToHost),
                     "cudaMemcpy");
        for (size_t n = 0; n < counts[i]; n++)
            want[n / RBK_NORM_CHUNK] += in.host[n] * in.host[n];
        for (size_t p = 0; p < parts; p++)
            cr_assert(fabs(got[p] - want[p]) <= 1e-6 * want[p], "part %zu of %zu: %.9g, not %.9g",
                      p, counts[i], got[p], want[p]);
    }
}

/* Ones: any element left out or taken twice shows, in the parts and in their sum. */
Test(kernels_optimizer, norm_takes_each_once)
{
    const size_t counts[] = {7, RBK_NORM_CHUNK + 1, 3000 * RBK_NORM_CHUNK + 5};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        support_array in = support_array_poisoned(RBK_F32, counts[i]);
        support_array results = support_array_poisoned(RBK_F32, 2);
        support_must(rbk_fill(in.device, -1.0f, counts[i], RBK_F32, NULL), "fill");
        size_t parts;
        double *partial = sum_squares(&in, &parts);
        support_must(rbk_clip_coefficient(support_float_at(&results, 0),
                                          support_float_at(&results, 1), partial, parts, NULL, 0.5f,
                                          NULL),
                     "clip coefficient");
        support_array_read(&results);
        const float norm = (float)sqrt((double)counts[i]);
        cr_assert(results.host[1] == norm, "norm %.9g of %zu ones", results.host[1], counts[i]);
        cr_assert(results.host[0] == 0.5f / norm, "clip %.9g", results.host[0]);
    }
}

static void check_clip(double squared, float inverse_scale, float limit, double want_clip,
                       double want_norm)
{
    double *partial = support_scratch(2 * sizeof *partial);
    const double parts[2] = {squared * 0.25, squared * 0.75};
    support_must(cudaMemcpy(partial, parts, sizeof parts, cudaMemcpyHostToDevice), "cudaMemcpy");
    support_array values = support_array_poisoned(RBK_F32, 3);
    values.host[2] = inverse_scale;
    support_array_write(&values);
    support_must(rbk_clip_coefficient(support_float_at(&values, 0), support_float_at(&values, 1),
                                      partial, 2, support_float_at(&values, 2), limit, NULL),
                 "clip coefficient");
    support_array_read(&values);
    cr_assert(values.host[0] == want_clip, "clip %g, not %g", values.host[0], want_clip);
    cr_assert(values.host[1] == want_norm, "norm %g, not %g", values.host[1], want_norm);
}

Test(kernels_optimizer, clip_coefficient)
{
    check_clip(16.0, 1.0f, 1.0f, 0.25, 4.0);
    check_clip(16.0, 0.125f, 1.0f, 1.0, 0.5);
    check_clip(16.0, 0.5f, 1.0f, 0.5, 2.0);
    check_clip(16.0, 1.0f, 0.0f, 1.0, 4.0);
    check_clip(16.0, 1.0f, 4.0f, 1.0, 4.0);
}

static uint32_t check_finite_of(const support_array *array, uint32_t before)
{
    const int32_t start = (int32_t)before;
    int32_t *flag = support_upload_ints(&start, 1);
    int32_t after;
    support_must(rbk_finite_check((uint32_t *)flag, array->device, array->count, NULL),
                 "finite check");
    support_must(cudaMemcpy(&after, flag, sizeof after, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return (uint32_t)after;
}

Test(kernels_optimizer, finite_check)
{
    const size_t places[] = {0, 7, 8, 2047, 2048, COUNT - 1};
    const double bad[] = {INFINITY, -INFINITY, NAN};
    support_random random = {604};
    support_array array = support_array_random(RBK_F32, COUNT, 1e30, &random);
    cr_assert(check_finite_of(&array, 0) == 0);
    cr_assert(check_finite_of(&array, 1) == 1, "a flag that is up must stay up");
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        const double kept = array.host[places[p]];
        for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
            array.host[places[p]] = bad[b];
            support_array_write(&array);
            cr_assert(check_finite_of(&array, 0) == 1, "%g at %zu was not found", bad[b],
                      places[p]);
        }
        array.host[places[p]] = kept;
    }
}
