/** @file boxes.cuh
 *  Descriptions of arrays for copies of boxes (TMA), and whether there is such a thing. Host
 *  side. */
#ifndef REBATCH_KERNELS_BOXES_CUH
#define REBATCH_KERNELS_BOXES_CUH

#include <cuda.h>

#include "common.cuh"

/** Whether the current device and this build have code for sm_90a. */
cudaError_t has_sm90(bool *out);

/** Boxes of `box_rows` positions of one sample by `box_columns` (64 or 32) columns of
 *  [batch, length, width] bf16 or fp16, swizzled; outside there are zeros. */
cudaError_t describe_boxes(CUtensorMap *out, const void *array, size_t batch, size_t length,
                           size_t width, int box_rows, int box_columns, rbk_dtype dtype);

#endif
