/* Owns NVML's functions, a library of their own: PyTorch asks it how many GPUs there are, and
 * whether they share memory between machines; `rebatch doctor` what they are. A program that asks
 * for more gets "not supported". */
#include <stdio.h>
#include <string.h>

#define NVML_API extern "C" __attribute__((visibility("default")))

extern "C" int cuDeviceGetCount(int *count);
extern "C" const char *standin_card(void);

namespace
{
constexpr int SUCCESS = 0, INVALID = 2; /* NVML_SUCCESS, NVML_ERROR_INVALID_ARGUMENT */
char handle;

/* A card that is cut into instances is called as one of them is, with " MIG " and its profile
 * behind the card's own name; a virtual GPU's begins with "GRID ". */
bool is_cut(void)
{
    return strstr(standin_card(), " MIG ");
}
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
    *count = gpus == 0 && is_cut() ? 1 : (unsigned)gpus; /* a card without instances */
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

NVML_API int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    snprintf(text, size, "stand-in");
    return SUCCESS;
}

NVML_API int nvmlDeviceGetName(void *, char *text, unsigned size)
{
    snprintf(text, size, "%s", standin_card());
    if (char *const instance = strstr(text, " MIG "))
        *instance = '\0';
    return SUCCESS;
}

NVML_API int nvmlDeviceGetMigMode(void *, unsigned *now, unsigned *after_reset)
{
    *now = *after_reset = is_cut();
    return SUCCESS;
}

NVML_API int nvmlDeviceGetVirtualizationMode(void *, int *mode)
{
    constexpr int NONE = 0, VGPU = 2; /* NVML_GPU_VIRTUALIZATION_MODE_… */
    *mode = strncmp(standin_card(), "GRID ", strlen("GRID ")) == 0 ? VGPU : NONE;
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
