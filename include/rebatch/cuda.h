/** @file cuda.h
 *  NVIDIA GPUs: the CUDA device, and error codes of CUDA libraries.
 *
 *  This header needs no CUDA header, and the library is built without CUDA: it loads the driver at
 *  run time. */
#ifndef REBATCH_CUDA_H
#define REBATCH_CUDA_H

#include "rebatch/device.h"
#include "rebatch/status.h"

/** Options of a CUDA device. */
typedef struct rebatch_cuda_options {
    size_t struct_size; /**< sizeof(rebatch_cuda_options) */
    int ordinal;        /**< number of the GPU as CUDA counts, with CUDA_VISIBLE_DEVICES applied */
    /** The CUDA runtime's cudaGetLastError, cast to this type. Set it when the program links the
     *  runtime statically: otherwise rebatch cannot find and clear an error that the program did
     *  not check. NULL: the shared runtime of the process, if it has one. */
    int (*take_last_error)(void);
} rebatch_cuda_options;
/** Default options of a CUDA device: the first GPU. */
#define REBATCH_CUDA_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(rebatch_cuda_options), 0, NULL                                                      \
    }

#ifdef __cplusplus
extern "C" {
#endif

/** Open an NVIDIA GPU. The device uses the GPU's primary context, as the CUDA runtime does.
 *  Thread-safe.
 *
 *  A GPU whose driver refuses the calls of virtual memory has none. On a GPU that uses the memory
 *  of the machine (CU_DEVICE_ATTRIBUTE_INTEGRATED), free_bytes is MemAvailable less a 16th of all
 *  memory, and an allocation of more is REBATCH_OOM.
 *  @param[out] out  owned by the caller, close with rebatch_device_close(); NULL on failure
 *  @param options   copied; NULL: defaults
 *  @return REBATCH_OK; REBATCH_E_NO_DEVICE when there is no driver, the driver is too old, or there
 *          is no GPU of that ordinal; REBATCH_E_INVALID, REBATCH_E_HOST_OOM, REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_device_open_cuda(rebatch_device **out,
                                                    const rebatch_cuda_options *options);

/** The limit that other programs set for a GPU in the environment. Every pool on the GPU keeps to
 *  it, as to REBATCH_MEMORY_LIMIT: the smallest limit holds. It is CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
 *  of MPS, such as "0=2G,1=512M", or CUDA_DEVICE_MEMORY_LIMIT_<ordinal> of HAMi, such as "3000m",
 *  or else CUDA_DEVICE_MEMORY_LIMIT. Thread-safe, while the environment does not change.
 *  @param[out] bytes     0: none
 *  @param[out] variable  the one that sets it, terminated if size is at least 1; NULL is allowed if
 *                        size is 0
 *  @param size           room in bytes, the zero byte included; 40 hold every name
 *  @param ordinal        the GPU as CUDA counts, with CUDA_VISIBLE_DEVICES applied
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_PARSE: a value is no size, which
 *          rebatch_last_error() names; it sets no limit, and the others do */
REBATCH_API rebatch_status rebatch_cuda_limit(size_t *bytes, char *variable, size_t size,
                                              int ordinal);

/** Describe what a training on this machine would have: versions, GPUs, settings of the
 *  environment, and what would not work here and why. It opens each GPU, as a training does.
 *  `rebatch doctor` prints it. Thread-safe.
 *  @param[out] text     lines, terminated if size is at least 1; NULL is allowed if size is 0
 *  @param size          room in bytes, the zero byte included
 *  @param[out] has_gpu  whether a training could use a GPU; NULL is allowed
 *  @return the length of the whole text, without the zero byte */
REBATCH_API size_t rebatch_doctor_format(char *text, size_t size, bool *has_gpu);

/** The number of a device's GPU, for cudaSetDevice(). Thread-safe.
 *  @param[out] out  as CUDA counts; -1 on failure
 *  @param device    a CUDA device
 *  @return REBATCH_OK, REBATCH_E_INVALID; REBATCH_E_UNSUPPORTED when the device is not a GPU */
REBATCH_API rebatch_status rebatch_device_ordinal(int *out, const rebatch_device *device);

/** Translate an error code of the CUDA driver or runtime into a status. Sets the error message,
 *  unless the code is success. Thread-safe.
 *
 *  Some codes are ambiguous: CUDA also returns 303, for example, when it loads a kernel late and
 *  memory is short. An ambiguous code is an OOM only when `device` has almost no memory left.
 *  @param device  where the call failed; NULL: an ambiguous code is not an OOM
 *  @param code    a CUresult or cudaError_t, whose numbers agree
 *  @return REBATCH_OK; REBATCH_OOM; REBATCH_E_DEVICE_LOST for an error after which the process must
 *          end; REBATCH_E_INVALID, REBATCH_E_UNSUPPORTED, REBATCH_E_NO_DEVICE, REBATCH_E_DEVICE */
REBATCH_API rebatch_status rebatch_from_cuda(rebatch_device *device, int code);

/** Translate an error code of cuBLAS or cuBLASLt, as rebatch_from_cuda() does. Thread-safe.
 *  @param device  where the call failed; NULL: an ambiguous code is not an OOM
 *  @param code    a cublasStatus_t
 *  @return as rebatch_from_cuda() */
REBATCH_API rebatch_status rebatch_from_cublas(rebatch_device *device, int code);

/** Translate an error code of cuDNN 8 or 9, as rebatch_from_cuda() does. Thread-safe.
 *  @param device  where the call failed; NULL: an ambiguous code is not an OOM
 *  @param code    a cudnnStatus_t
 *  @return as rebatch_from_cuda() */
REBATCH_API rebatch_status rebatch_from_cudnn(rebatch_device *device, int code);

/** Translate an error code of NCCL, as rebatch_from_cuda() does. Thread-safe.
 *  @param device  where the call failed; NULL: an ambiguous code is not an OOM
 *  @param code    an ncclResult_t
 *  @return as rebatch_from_cuda() */
REBATCH_API rebatch_status rebatch_from_nccl(rebatch_device *device, int code);

#ifdef __cplusplus
}
#endif
#endif
