/* Owns the answer of a build without CUDA: there are no such operations. Stands in for ops_cuda.c
 * and matmul_cuda.c. Must not know anything else. */
#include "gpt/ops.h"

const struct gpt_ops *gpt_cuda_ops_get(void)
{
    return NULL;
}
