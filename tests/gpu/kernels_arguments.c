/* Owns the tests of what the launchers refuse. Must not know: the kernels' insides. Run with -j1.
 *
 * Every refused call gets one buffer that is large enough for any of them, poisoned, and it must be
 * untouched afterwards: nothing was launched. */
#include <math.h>
#include <stdlib.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

#define BYTES ((size_t)1 << 20)

static unsigned char *buffer;

/* The n-th of some places in the buffer, 16-byte aligned; they do not overlap for small shapes. */
static void *place(size_t n)
{
    return buffer + n * 16384;
}

static float *floats(size_t n)
{
    return place(n);
}

static int32_t *ints(size_t n)
{
    return place(n);
}

/* Not a multiple of 16, nor of 4. */
static void *odd(size_t n)
{
    return buffer + n * 16384 + 2;
}

static void expect_untouched(void)
{
    unsigned char *copy = malloc(BYTES);
    cr_assert(copy != NULL);
    support_must(cudaMemcpy(copy, buffer, BYTES, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t i = 0; i < BYTES; i++)
        cr_assert(copy[i] == 0xFF, "byte %zu was written", i);
    free(copy);
}

#define REFUSED(call)                                                                              \
    do {                                                                                           \
        cr_assert((call) == cudaErrorInvalidValue, "accepted: %s", #call);                         \
        cr_assert(cudaPeekAtLastError() == cudaSuccess, "left an error behind: %s", #call);        \
    } while (0)

static void begin(void)
{
    buffer = support_scratch(BYTES);
}

static void end(void)
{
    support_must(cudaSuccess, "refused calls");
    expect_untouched();
    support_free_all();
}

#define NO_DTYPE ((rbk_dtype)7)

Test(kernels_arguments, elementwise)
{
    begin();
    REFUSED(rbk_gelu_forward(NULL, place(1), 8, RBK_F32, NULL));
    REFUSED(rbk_gelu_forward(odd(0), place(1), 8, RBK_F32, NULL));
    REFUSED(rbk_gelu_forward(place(0), place(1), 0, RBK_F32, NULL));
    REFUSED(rbk_gelu_forward(place(0), place(1), SIZE_MAX, RBK_F32, NULL));
    REFUSED(rbk_gelu_forward(place(0), place(1), 8, NO_DTYPE, NULL));
    REFUSED(rbk_gelu_backward(place(0), NULL, place(2), 8, RBK_F32, NULL));
    REFUSED(rbk_gelu_backward(place(0), place(1), odd(2), 8, RBK_F32, NULL));
    REFUSED(rbk_bias_gelu_forward(place(0), odd(1), place(2), place(3), 1, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_gelu_forward(place(0), NULL, place(2), place(3), 1, 12, RBK_F32, NULL));
    REFUSED(rbk_bias_gelu_forward(place(0), NULL, place(2), place(3), 0, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_add(place(0), place(1), NULL, 1, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_add(place(0), place(1), place(2), 1, 0, RBK_F32, NULL));
    REFUSED(rbk_bias_add(place(0), place(1), place(2), 1, RBK_WIDTH_LIMIT + 8, RBK_F32, NULL));
    REFUSED(rbk_bias_add(place(0), place(1), place(2), SIZE_MAX / 8, 8, RBK_F32, NULL));
    REFUSED(rbk_residual_add(place(0), place(1), odd(2), 8, RBK_F32, NULL));
    REFUSED(rbk_cast(place(0), NO_DTYPE, place(1), RBK_F32, 8, NULL));
    REFUSED(rbk_cast(place(0), RBK_F32, place(1), NO_DTYPE, 8, NULL));
    REFUSED(rbk_scale(place(0), 1.0f, odd(1), 8, RBK_F32, NULL));
    REFUSED(rbk_fill(NULL, 1.0f, 8, RBK_F32, NULL));
    cr_assert(rbk_dtype_bytes(NO_DTYPE) == 0);
    end();
}

Test(kernels_arguments, dropout)
{
    const float bad[] = {-0.1f, 1.0f, 2.0f, NAN};
    rbk_dropout_key key = {1, 2, 3, 4, 0.1f};
    begin();
    REFUSED(rbk_dropout(place(0), place(1), NULL, 1, 8, RBK_F32, NULL));
    REFUSED(rbk_dropout(place(0), place(1), &key, 0, 8, RBK_F32, NULL));
    REFUSED(rbk_dropout(place(0), place(1), &key, 1, 12, RBK_F32, NULL));
    REFUSED(rbk_dropout(place(0), place(1), &key, 1, (size_t)1 << 34, RBK_F32, NULL));
    REFUSED(rbk_dropout(place(0), place(1), &key, (size_t)1 << 30, (size_t)1 << 33, RBK_F32, NULL));
    REFUSED(rbk_bias_dropout_residual(place(0), place(1), place(2), place(3), NULL, 1, 1, 8,
                                      RBK_F32, NULL));
    REFUSED(rbk_bias_dropout_residual(place(0), place(1), place(2), place(3), &key, 1, 1, 9,
                                      RBK_F32, NULL));
    REFUSED(rbk_bias_dropout_residual(place(0), place(1), place(2), place(3), &key, (size_t)1 << 30,
                                      (size_t)1 << 30, 8, RBK_F32, NULL));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        key.probability = bad[i];
        REFUSED(rbk_dropout(place(0), place(1), &key, 1, 8, RBK_F32, NULL));
    }
    end();
}

Test(kernels_arguments, weight_gradient)
{
    begin();
    REFUSED(rbk_weight_gradient(NULL, place(1), place(2), 1, 1, 8, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), odd(1), place(2), 1, 1, 8, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), odd(2), 1, 1, 8, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 0, 1, 8, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 1, 0, 8, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 1, 1, 12, 8, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 1, 1, 8, 12, RBK_BF16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 1, 1, 8, 8, NO_DTYPE, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), SIZE_MAX, 1, 8, 8, RBK_F32, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), (size_t)1 << 30, (size_t)1 << 20, 8,
                                8, RBK_F16, NULL));
    REFUSED(rbk_weight_gradient(floats(0), place(1), place(2), 1, 1, (size_t)1 << 23, 8, RBK_F32,
                                NULL));
    REFUSED(rbk_weight_gradient_portable(floats(0), place(1), NULL, 1, 1, 8, 8, RBK_F32, NULL));
    REFUSED(
        rbk_weight_gradient_portable(floats(0), place(1), place(2), 1, 1, 8, 8, NO_DTYPE, NULL));
    end();
}

Test(kernels_arguments, sums_over_samples)
{
    const size_t bytes = rbk_bias_backward_scratch_bytes(2, 3, 8);
    const size_t norm_bytes = rbk_layer_norm_backward_scratch_bytes(2, 3, 8);
    begin();
    REFUSED(rbk_bias_backward(floats(0), place(1), place(2), bytes - 1, 2, 3, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_backward(floats(0), place(1), NULL, bytes, 2, 3, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_backward(floats(0), place(1), place(2), BYTES, 2, 0, 8, RBK_F32, NULL));
    REFUSED(rbk_bias_backward(floats(0), place(1), place(2), BYTES, 70000, 3, 8, RBK_F32, NULL));
    REFUSED(rbk_accumulate_partials(floats(0), NULL, 1, 1, 8, NULL));
    REFUSED(rbk_accumulate_partials(floats(0), floats(1), 1, 0, 8, NULL));
    REFUSED(rbk_layer_norm_forward(place(0), NULL, floats(2), place(3), place(4), place(5), 1, 8,
                                   1e-5f, RBK_F32, NULL));
    REFUSED(rbk_layer_norm_forward(place(0), NULL, NULL, place(3), place(4), place(5), 1, 20, 1e-5f,
                                   RBK_F32, NULL));
    REFUSED(rbk_layer_norm_forward(place(0), NULL, NULL, place(3), place(4), place(5), 1,
                                   RBK_LAYER_NORM_WIDTH_LIMIT + 8, 1e-5f, RBK_F32, NULL));
    REFUSED(rbk_layer_norm_forward(place(0), NULL, NULL, place(3), place(4), place(5), 1, 8, -1.0f,
                                   RBK_F32, NULL));
    REFUSED(rbk_layer_norm_forward(place(0), NULL, NULL, place(3), place(4), place(5), 1, 8, NAN,
                                   RBK_F32, NULL));
    REFUSED(rbk_layer_norm_backward(place(0), floats(1), floats(2), place(3), NULL, place(4),
                                    floats(5), floats(6), place(7), place(8), norm_bytes - 1, 2, 3,
                                    8, RBK_F32, NULL));
    REFUSED(rbk_layer_norm_backward(place(0), floats(1), floats(2), place(3), odd(9), place(4),
                                    floats(5), floats(6), place(7), place(8), norm_bytes, 2, 3, 8,
                                    RBK_F32, NULL));
    REFUSED(rbk_layer_norm_backward(place(0), floats(1), NULL, place(3), NULL, place(4), floats(5),
                                    floats(6), place(7), place(8), norm_bytes, 2, 3, 8, RBK_F32,
                                    NULL));
    end();
}

Test(kernels_arguments, embedding)
{
    const size_t bytes = rbk_embedding_backward_scratch_bytes(2, 3);
    begin();
    REFUSED(
        rbk_embedding_forward(place(0), ints(1), 2, place(2), place(3), 1, 3, 8, 5, RBK_F32, NULL));
    REFUSED(
        rbk_embedding_forward(place(0), odd(1), 1, place(2), place(3), 1, 1, 8, 5, RBK_F32, NULL));
    REFUSED(
        rbk_embedding_forward(place(0), ints(1), 1, place(2), place(3), 1, 1, 4, 5, RBK_F32, NULL));
    REFUSED(
        rbk_embedding_forward(place(0), ints(1), 1, place(2), place(3), 1, 1, 8, 0, RBK_F32, NULL));
    REFUSED(rbk_embedding_backward(floats(0), floats(1), place(2), ints(3), 1 << 16, place(4),
                                   bytes - 1, 2, 3, 8, 5, RBK_F32, NULL));
    REFUSED(rbk_embedding_backward(NULL, floats(1), place(2), ints(3), 1 << 16, place(4), bytes, 2,
                                   3, 8, 5, RBK_F32, NULL));
    REFUSED(rbk_embedding_backward(floats(0), floats(1), place(2), ints(3), 1 << 16, place(4),
                                   SIZE_MAX, (size_t)1 << 16, (size_t)1 << 15, 8, 5, RBK_F32,
                                   NULL));
    end();
}

Test(kernels_arguments, attention)
{
    const size_t bytes = rbk_attention_backward_scratch_bytes(1, 2, 1);
    const size_t bad_widths[] = {0, 16, 48, 96, 256};
    const float bad_scales[] = {0.0f, -1.0f, INFINITY, NAN};
    begin();
    for (int d = 0; d < DTYPE_COUNT; d++) {
        const rbk_dtype dtype = support_dtypes[d];
        for (size_t i = 0; i < sizeof bad_widths / sizeof *bad_widths; i++)
            REFUSED(rbk_attention_forward(place(0), floats(1), place(2), 1, 2, 1, bad_widths[i],
                                          0.1f, dtype, NULL));
        for (size_t i = 0; i < sizeof bad_scales / sizeof *bad_scales; i++)
            REFUSED(rbk_attention_forward(place(0), floats(1), place(2), 1, 2, 1, 32, bad_scales[i],
                                          dtype, NULL));
        REFUSED(
            rbk_attention_forward(place(0), floats(1), place(2), 0, 2, 1, 32, 0.1f, dtype, NULL));
        REFUSED(rbk_attention_forward(place(0), floats(1), place(2), 1, (size_t)1 << 24, 1, 32,
                                      0.1f, dtype, NULL));
        REFUSED(rbk_attention_forward(place(0), floats(1), place(2), 1, 2, 65536, 32, 0.1f, dtype,
                                      NULL));
        REFUSED(rbk_attention_forward(odd(0), floats(1), place(2), 1, 2, 1, 32, 0.1f, dtype, NULL));
        REFUSED(rbk_attention_backward(place(0), place(1), place(2), place(3), floats(4), place(5),
                                       bytes - 1, 1, 2, 1, 32, 0.1f, dtype, NULL));
        REFUSED(rbk_attention_backward(place(0), place(1), place(2), place(3), NULL, place(5),
                                       bytes, 1, 2, 1, 32, 0.1f, dtype, NULL));
        REFUSED(rbk_attention_backward(place(0), place(1), place(2), place(3), floats(4), place(5),
                                       bytes, 1, 2, 1, 40, 0.1f, dtype, NULL));
    }
    REFUSED(
        rbk_attention_forward(place(0), floats(1), place(2), 1, 2, 1, 32, 0.1f, NO_DTYPE, NULL));
    end();
}

Test(kernels_arguments, loss)
{
    begin();
    REFUSED(rbk_cross_entropy(floats(0), place(1), ints(2), 1, 1, 1, 9, 8, 1.0f, NULL, 1, RBK_F32,
                              NULL));
    REFUSED(rbk_cross_entropy(floats(0), place(1), ints(2), 1, 1, 1, 9, 12, 1.0f, NULL, 1, RBK_F32,
                              NULL));
    REFUSED(
        rbk_cross_entropy(floats(0), place(1), NULL, 1, 1, 1, 8, 8, 1.0f, NULL, 1, RBK_F32, NULL));
    REFUSED(rbk_cross_entropy(floats(0), place(1), ints(2), 1, 1, 1, 8, 8, 1.0f, odd(3), 1, RBK_F32,
                              NULL));
    REFUSED(rbk_cross_entropy(floats(0), place(1), ints(2), 1, 0, 1, 8, 8, 1.0f, NULL, 1, RBK_F32,
                              NULL));
    REFUSED(rbk_cross_entropy(floats(0), place(1), ints(2), 1, 1, 2, 8, 8, 1.0f, NULL, 1, RBK_F32,
                              NULL));
    REFUSED(rbk_loss_sum(NULL, floats(1), 1, 1, NULL));
    REFUSED(rbk_loss_sum(place(0), floats(1), 1, 0, NULL));
    end();
}

Test(kernels_arguments, optimizer)
{
    const rbk_adamw_settings good = {1e-3f, 0.9f, 0.999f, 1e-8f, 0.0f, 1};
    const rbk_adamw_settings bad[] = {
        {1e-3f, 0.9f, 0.999f, 1e-8f, 0.0f, 0}, {NAN, 0.9f, 0.999f, 1e-8f, 0.0f, 1},
        {1e-3f, 1.0f, 0.999f, 1e-8f, 0.0f, 1}, {1e-3f, 0.9f, -0.1f, 1e-8f, 0.0f, 1},
        {1e-3f, 0.9f, 0.999f, NAN, 0.0f, 1},   {1e-3f, 0.9f, 0.999f, 1e-8f, -1.0f, 1},
        {-1.0f, 0.9f, 0.999f, 1e-8f, 0.0f, 1}, {INFINITY, 0.9f, 0.999f, 1e-8f, 0.0f, 1},
    };
    begin();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED(rbk_adamw(floats(0), floats(1), floats(2), place(3), floats(4), &bad[i], NULL, NULL,
                          NULL, 8, RBK_BF16, NULL));
    REFUSED(rbk_adamw(floats(0), floats(1), floats(2), place(3), floats(4), NULL, NULL, NULL, NULL,
                      8, RBK_BF16, NULL));
    REFUSED(rbk_adamw(floats(0), floats(1), floats(2), odd(3), floats(4), &good, NULL, NULL, NULL,
                      8, RBK_BF16, NULL));
    REFUSED(rbk_adamw(floats(0), floats(1), floats(2), place(3), floats(4), &good, odd(5), NULL,
                      NULL, 8, RBK_BF16, NULL));
    REFUSED(rbk_sum_squares(NULL, floats(1), 8, NULL));
    REFUSED(rbk_sum_squares(place(0), odd(1), 8, NULL));
    REFUSED(rbk_sum_squares(place(0), floats(1), 0, NULL));
    REFUSED(rbk_clip_coefficient(floats(0), NULL, place(1), 1, NULL, -1.0f, NULL));
    REFUSED(rbk_clip_coefficient(floats(0), NULL, place(1), 0, NULL, 1.0f, NULL));
    REFUSED(rbk_clip_coefficient(floats(0), NULL, NULL, 1, NULL, 1.0f, NULL));
    REFUSED(rbk_finite_check(NULL, floats(1), 8, NULL));
    REFUSED(rbk_finite_check(place(0), floats(1), 0, NULL));
    end();
}
