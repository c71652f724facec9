/* Owns NVML's functions, a library of their own: PyTorch asks it how many GPUs there are, and
 * whether they share memory between machines. A program that asks for more gets "not supported". */
#include <string.h>

#define NVML_API extern "C" __attribute__((visibility("default")))

extern "C" int cuDeviceGetCount(int *count);

namespace
{
constexpr int SUCCESS = 0, INVALID = 2; /* NVML_SUCCESS, NVML_ERROR_INVALID_ARGUMENT */
char handle;
} // namespace

NVML_API int nvmlInit(void)
{
    return SUCCESS;
}

NVML_API int nvmlInit_v2(void)
{
    return SUCCESS;
}

NVML_API int nvmlShutdown(void)
{
    return SUCCESS;
}

NVML_API int nvmlDeviceGetCount_v2(unsigned *count)
{
    int gpus = 0;
    const int error = cuDeviceGetCount(&gpus);
    *count = (unsigned)gpus;
    return error ? INVALID : SUCCESS;
}

NVML_API int nvmlDeviceGetHandleByIndex_v2(unsigned, void **out)
{
    *out = &handle;
    return SUCCESS;
}

NVML_API int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **out)
{
    *out = &handle;
    return SUCCESS;
}

/* What an OOM's text lists: no processes. */
NVML_API int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *)
{
    *count = 0;
    return SUCCESS;
}

/* nvmlGpuFabricInfoV_t: after the version come an identifier of 16 bytes, two numbers and the
 * state, of which 0 is NVML_GPU_FABRIC_STATE_NOT_SUPPORTED. */
NVML_API int nvmlDeviceGetGpuFabricInfoV(void *, void *info)
{
    constexpr size_t VERSION_BYTES = 4, STATE_END = VERSION_BYTES + 16 + 4 + 4 + 1;
    memset((char *)info + VERSION_BYTES, 0, STATE_END - VERSION_BYTES);
    return SUCCESS;
}
