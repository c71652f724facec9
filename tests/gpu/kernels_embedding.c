/* Owns the tests of the embedding. Must not know: the kernels' insides. Run with -j1. */
#include <string.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_embedding, .fini = support_free_all);

/* More positions than one run of the sort holds, so that runs are merged, an odd number of them;
 * the vocabulary is small, so that tokens have many positions, and one token is much more common.
 * */
#define BATCH SUPPORT_CUT_BATCH
#define LENGTH 500
#define POSITIONS (BATCH * LENGTH)
#define VOCABULARY 61
#define COMMON 17

/* Samples' tokens are one further apart than they are long, as where targets follow the inputs. */
#define STRIDE (LENGTH + 1)

/* Some of a warp's lanes, two warps, and a warp and a bit. */
static const size_t widths[] = {8, 256, 136};

typedef struct problem {
    size_t width;
    rbk_dtype dtype;
    int32_t tokens[BATCH * STRIDE];
    int32_t *device_tokens;
    support_array token_weight, position_weight, dout, out;
    support_array token_start, position_start, token_grad, position_grad;
    void *scratch;
    size_t scratch_bytes;
} problem;

static problem *problem_create(size_t width, rbk_dtype dtype, support_random *random)
{
    problem *p = support_calloc(1, sizeof *p);
    p->width = width;
    p->dtype = dtype;
    for (size_t n = 0; n < BATCH * STRIDE; n++) {
        const uint64_t r = support_next(random);
        p->tokens[n] = r % 4 == 0 ? COMMON : (int32_t)(r / 4 % VOCABULARY);
    }
    p->tokens[3] = -1;
    p->tokens[STRIDE] = VOCABULARY;
    p->tokens[BATCH * STRIDE - 2] = INT32_MAX;
    p->device_tokens = support_upload_ints(p->tokens, BATCH * STRIDE);
    p->token_weight = support_array_random(dtype, VOCABULARY * width, 1.0, random);
    p->position_weight = support_array_random(dtype, LENGTH * width, 1.0, random);
    p->dout = support_array_random(dtype, POSITIONS * width, 1.0, random);
    p->out = support_array_poisoned(dtype, POSITIONS * width);
    p->token_start = support_array_random(RBK_F32, VOCABULARY * width, 1.0, random);
    p->position_start = support_array_random(RBK_F32, LENGTH * width, 1.0, random);
    p->token_grad = support_array_copy(&p->token_start);
    p->position_grad = support_array_copy(&p->position_start);
    p->scratch_bytes = rbk_embedding_backward_scratch_bytes(BATCH, LENGTH);
    p->scratch = support_scratch(p->scratch_bytes);
    return p;
}

/* Token n of the positions, which are dense; -1 when it is outside the vocabulary. */
static int32_t token_at(const problem *p, size_t n)
{
    const int32_t token = p->tokens[n / LENGTH * STRIDE + n % LENGTH];
    return token >= 0 && token < VOCABULARY ? token : -1;
}

static void check_forward(problem *p)
{
    const size_t width = p->width;
    double *want = support_calloc(POSITIONS * width, sizeof(double));
    support_must(rbk_embedding_forward(p->out.device, p->device_tokens, STRIDE,
                                       p->token_weight.device, p->position_weight.device, BATCH,
                                       LENGTH, width, VOCABULARY, p->dtype, NULL),
                 "embedding forward");
    for (size_t n = 0; n < POSITIONS; n++) {
        const int32_t token = token_at(p, n);
        for (size_t c = 0; c < width; c++)
            want[n * width + c] =
                (token >= 0 ? p->token_weight.host[(size_t)token * width + c] : 0.0) +
                p->position_weight.host[n % LENGTH * width + c];
    }
    support_expect_close(&p->out, want, support_tolerance(p->dtype), "embedding forward");
}

/* The header promises the order of every addition, so the reference in float gives the very bits.
 * */
static void check_backward(problem *p)
{
    const size_t width = p->width;
    support_array token_want = support_array_copy(&p->token_start);
    support_array position_want = support_array_copy(&p->position_start);
    for (size_t n = 0; n < POSITIONS; n++) {
        for (size_t c = 0; c < width; c++) {
            const float d = (float)p->dout.host[n * width + c];
            double *position = &position_want.host[n % LENGTH * width + c];
            *position = (float)*position + d;
            if (token_at(p, n) < 0)
                continue;
            double *token = &token_want.host[(size_t)token_at(p, n) * width + c];
            *token = (float)*token + d;
        }
    }
    support_array_write(&token_want);
    support_array_write(&position_want);
    support_must(rbk_embedding_backward(p->token_grad.device, p->position_grad.device,
                                        p->dout.device, p->device_tokens, STRIDE, p->scratch,
                                        p->scratch_bytes, BATCH, LENGTH, width, VOCABULARY,
                                        p->dtype, NULL),
                 "embedding backward");
    support_expect_same(&p->token_grad, 0, &token_want, 0, token_want.count, "token gradient");
    support_expect_same(&p->position_grad, 0, &position_want, 0, position_want.count,
                        "position gradient");
}

static void check_cuts(problem *p)
{
    for (size_t c = 0; c < SUPPORT_CUT_COUNT; c += support_stride()) {
        support_array token_grad = support_array_copy(&p->token_start);
        support_array position_grad = support_array_copy(&p->position_start);
        size_t first = 0;
        for (const size_t *count = support_cuts[c]; *count > 0; first += *count++)
            support_must(rbk_embedding_backward(token_grad.device, position_grad.device,
                                                support_at(&p->dout, first * LENGTH * p->width),
                                                p->device_tokens + first * STRIDE, STRIDE,
                                                p->scratch, p->scratch_bytes, *count, LENGTH,
                                                p->width, VOCABULARY, p->dtype, NULL),
                         "embedding backward, cut");
        cr_assert(first == BATCH);
        support_expect_same(&token_grad, 0, &p->token_grad, 0, token_grad.count,
                            "token gradient, cut");
        support_expect_same(&position_grad, 0, &p->position_grad, 0, position_grad.count,
                            "position gradient, cut");
    }
}

Test(kernels_embedding, against_reference_and_cuts)
{
    support_random random = {301};
    for (int d = 0; d < DTYPE_COUNT; d++) {
        problem *p = problem_create(widths[d], support_dtypes[d], &random);
        check_forward(p);
        check_backward(p);
        check_cuts(p);
        support_free_all();
    }
}

/* Few positions, all of one token: a single short run. */
Test(kernels_embedding, one_token)
{
    enum { FEW = 3, WIDTH = 16 };
    support_random random = {302};
    const int32_t tokens[FEW] = {1, 1, 1};
    int32_t *device_tokens = support_upload_ints(tokens, FEW);
    support_array dout = support_array_random(RBK_F32, FEW * WIDTH, 1.0, &random);
    support_array token_grad = support_array_random(RBK_F32, 2 * WIDTH, 1.0, &random);
    support_array position_grad = support_array_random(RBK_F32, FEW * WIDTH, 1.0, &random);
    double want[2 * WIDTH];
    const size_t bytes = rbk_embedding_backward_scratch_bytes(1, FEW);
    void *scratch = support_scratch(bytes);

    memcpy(want, token_grad.host, sizeof want);
    for (size_t i = 0; i < FEW * WIDTH; i++)
        want[WIDTH + i % WIDTH] += dout.host[i];
    support_must(rbk_embedding_backward(token_grad.device, position_grad.device, dout.device,
                                        device_tokens, FEW, scratch, bytes, 1, FEW, WIDTH, 2,
                                        RBK_F32, NULL),
                 "embedding backward");
    support_expect_close(&token_grad, want, 1e-5, "one token's gradient");
}
