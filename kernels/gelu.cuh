/** @file gelu.cuh
 *  The GELU's tanh form and its derivative, for one number. Device side.
 *
 *  __expf and __fdividef are off by a few units in the last place (CUDA C++ Programming Guide,
 *  intrinsic functions), which is far below what the types and tolerances here need, and they treat
 *  infinities as the formula wants: exp(+inf) gives a gate of 0, exp(-inf) one of 1. */
#ifndef REBATCH_KERNELS_GELU_CUH
#define REBATCH_KERNELS_GELU_CUH

constexpr float GELU_SLOPE = 1.5957691216057308f;  /* 2 sqrt(2 / pi) */
constexpr float GELU_CUBIC = 0.07135481627260025f; /* the same times 0.044715 */

__device__ inline float gelu_gate(float x)
{
    const float z = x * fmaf(GELU_CUBIC, x * x, GELU_SLOPE);
    return __fdividef(1.0f, 1.0f + __expf(-z));
}

__device__ inline float gelu(float x)
{
    return x * gelu_gate(x);
}

__device__ inline float gelu_derivative(float x)
{
    const float gate = gelu_gate(x);
    const float slope = fmaf(3.0f * GELU_CUBIC, x * x, GELU_SLOPE);
    return fmaf(x * slope, gate * (1.0f - gate), gate);
}

#endif
