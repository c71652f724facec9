/* What NVML says of the machine's GPUs, which it sees without CUDA.
 * Must not know who asks. */
#ifndef RBI_NVML_H
#define RBI_NVML_H

#include "base/base.h"

/* Adds "580.159.04; GPU 0 NVIDIA A100-SXM4-40GB, MIG on", or why NVML says nothing.
 *  @param[out] has_mig  whether a GPU is cut into instances, which CUDA sees one by one */
void rbi_nvml_describe(struct rbi_text *t, bool *has_mig);

#endif
