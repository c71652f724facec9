/** @file exponential.cuh
 *  2^x in one instruction, and the factors between bases. Device side. */
#ifndef REBATCH_KERNELS_EXPONENTIAL_CUH
#define REBATCH_KERNELS_EXPONENTIAL_CUH

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

/** Off by 2 units in the last place at most; 2^-inf = 0; denormal results are 0; a NaN stays one
 *  (PTX ISA, ex2.approx.ftz). */
__device__ inline float power_of_2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

#endif
