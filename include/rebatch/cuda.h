/** @file cuda.h
 *  NVIDIA GPUs: the device, and what the codes of CUDA's libraries mean.
 *
 *  Nothing here needs CUDA's headers, and the library needs no CUDA to be built. */
#ifndef REBATCH_CUDA_H
#define REBATCH_CUDA_H

#include "rebatch/device.h"
#include "rebatch/status.h"

/** Options of a CUDA device. */
typedef struct rebatch_cuda_options {
    size_t struct_size; /**< sizeof(rebatch_cuda_options) */
    int ordinal;        /**< which GPU, counted as CUDA does, CUDA_VISIBLE_DEVICES respected */
    /** The runtime's cudaGetLastError, cast. Give it when the runtime is linked statically: only
     *  then can an error that nobody looked at be found and cleared. NULL: the process's shared
     *  runtime is asked, if there is one. */
    int (*take_last_error)(void);
} rebatch_cuda_options;
#define REBATCH_CUDA_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_cuda_options), 0, NULL                                                      \
    }

#ifdef __cplusplus
extern "C" {
#endif

/** Open an NVIDIA GPU through its driver, which is loaded at run time: the library needs no CUDA to
 *  be built or to start. It shares the GPU's primary context with the CUDA runtime.
 *  @param[out] out  owned by the caller; NULL on failure
 *  @param options   copied; NULL means defaults: the first GPU
 *  @return REBATCH_OK; REBATCH_E_NO_DEVICE when there is no driver, it is too old, or there is no
 *          GPU of that ordinal; REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE. Any
 *          thread. */
REBATCH_API rebatch_status rebatch_device_open_cuda(rebatch_device **out,
                                                    const rebatch_cuda_options *options);

/** Which GPU a device is, for the runtime's cudaSetDevice().
 *  @param[out] out  counted as CUDA does; -1 on failure
 *  @param device    a CUDA device, or a fault device around one
 *  @return REBATCH_OK, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED when the device is no GPU. Any
 *          thread. */
REBATCH_API rebatch_status rebatch_device_ordinal(int *out, const rebatch_device *device);

/** What a code of CUDA's driver or runtime means here: REBATCH_OOM for an out of memory; for a code
 *  that can hide one (303, when a kernel is loaded late, for example), only when `device` has
 *  hardly any memory left; REBATCH_E_DEVICE_LOST for one after which the process must end. Sets the
 *  error text, unless the code is success.
 *  @param device  where it happened; NULL: an ambiguous code is then no OOM
 *  @param code    a CUresult or cudaError_t; their numbers agree
 *  @return REBATCH_OK, REBATCH_OOM, REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED, REBATCH_E_NO_DEVICE,
 *          REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST. Any thread. */
REBATCH_API rebatch_status rebatch_from_cuda(rebatch_device *device, int code);
/** The same for a cublasStatus_t, of cuBLAS and cuBLASLt. */
REBATCH_API rebatch_status rebatch_from_cublas(rebatch_device *device, int code);
/** The same for a cudnnStatus_t, of cuDNN 8 and 9. */
REBATCH_API rebatch_status rebatch_from_cudnn(rebatch_device *device, int code);
/** The same for an ncclResult_t. */
REBATCH_API rebatch_status rebatch_from_nccl(rebatch_device *device, int code);

#ifdef __cplusplus
}
#endif
#endif
