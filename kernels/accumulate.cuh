/** @file accumulate.cuh
 *  rbk_accumulate_partials() for two arrays in one launch. Host side. */
#ifndef REBATCH_KERNELS_ACCUMULATE_CUH
#define REBATCH_KERNELS_ACCUMULATE_CUH

#include "common.cuh"

/** sum_a[m] += ... of partial_a, and sum_b[m] += ... of partial_b. */
cudaError_t accumulate_both(float *sum_a, float *sum_b, const float *partial_a,
                            const float *partial_b, size_t batch, size_t parts, size_t width,
                            cudaStream_t stream);

#endif
