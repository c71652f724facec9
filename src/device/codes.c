/* Owns what the codes of CUDA, cuBLAS, cuDNN and NCCL mean: out of memory, perhaps, lost, or the
 * caller's. Must not know who got the code, nor any of their headers. */
#include "device/device.h"
#include "rebatch/cuda.h"

enum meaning {
    MEANS_OK,
    MEANS_OOM,
    MEANS_OOM_IF_FULL, /* the code hides the cause, which may be an OOM */
    MEANS_INVALID,     /* the caller's mistake */
    MEANS_UNSUPPORTED,
    MEANS_NO_DEVICE,
    MEANS_DEVICE, /* an error of this call alone */
    MEANS_LOST    /* sticky: every later call fails as well */
};

struct code {
    int first, last; /* the codes from first to last */
    enum meaning meaning;
    const char *name;
};

/* Codes that stand in no table are MEANS_DEVICE. Sources: driver_types.h and cuda.h of CUDA 13.0
 * ("the process must be terminated and relaunched" is what MEANS_LOST stands for), cublas_api.h,
 * cudnn_graph.h 9, nccl.h; 303 and cuDNN's internal errors were seen to hide an OOM when a module
 * or a library is loaded late. */
static const struct code cuda_codes[] = {
    {0, 0, MEANS_OK, "success"},
    {1, 1, MEANS_INVALID, "invalid value"},
    {2, 2, MEANS_OOM, "out of memory"},
    {4, 4, MEANS_LOST, "the driver is shutting down"},
    {34, 34, MEANS_NO_DEVICE, "the driver loaded is a stub"},
    {35, 36, MEANS_NO_DEVICE, "the driver is too old"},
    {46, 46, MEANS_OOM_IF_FULL, "the device is unavailable"},
    {100, 102, MEANS_NO_DEVICE, "no such device"},
    {214, 214, MEANS_LOST, "uncorrectable memory error"},
    {220, 220, MEANS_LOST, "uncorrectable NVLink error"},
    {226, 226, MEANS_LOST, "contained memory error"},
    {303, 303, MEANS_OOM_IF_FULL, "a module could not be loaded"},
    {400, 401, MEANS_INVALID, "invalid handle or state"},
    {700, 700, MEANS_LOST, "illegal memory access"},
    {701, 701, MEANS_INVALID, "a launch asks for too many registers or threads"},
    {702, 702, MEANS_LOST, "a launch timed out"},
    {709, 710, MEANS_LOST, "context destroyed, or a device assertion"},
    {714, 719, MEANS_LOST, "a kernel failed"},
    {720, 720, MEANS_INVALID, "a cooperative launch is too large"},
    {721, 721, MEANS_LOST, "tensor memory leaked"},
    {800, 800, MEANS_UNSUPPORTED, "not permitted"},
    {801, 801, MEANS_UNSUPPORTED, "not supported"},
    {803, 804, MEANS_NO_DEVICE, "driver and runtime do not fit"},
    {808, 809, MEANS_OOM_IF_FULL, "too many clients or connections of MPS"},
    {810, 810, MEANS_LOST, "MPS ended this client"},
    {911, 911, MEANS_LOST, "an external device failed"},
};

static const struct code cublas_codes[] = {
    {0, 0, MEANS_OK, "success"},
    {1, 1, MEANS_OOM_IF_FULL, "not initialized"},
    {3, 3, MEANS_OOM, "allocation failed"},
    {7, 7, MEANS_INVALID, "invalid value"},
    {8, 8, MEANS_UNSUPPORTED, "architecture mismatch"},
    {11, 11, MEANS_OOM_IF_FULL, "mapping error"},
    {13, 13, MEANS_OOM_IF_FULL, "execution failed"},
    {14, 14, MEANS_OOM_IF_FULL, "internal error"},
    {15, 16, MEANS_UNSUPPORTED, "not supported"},
};

/* cuDNN 8 counts from 1, cuDNN 9 from 1000. */
static const struct code cudnn_codes[] = {
    {0, 0, MEANS_OK, "success"},
    {1, 1, MEANS_OOM_IF_FULL, "not initialized"},
    {2, 2, MEANS_OOM, "allocation failed"},
    {3, 3, MEANS_INVALID, "bad parameter"},
    {4, 4, MEANS_OOM_IF_FULL, "internal error"},
    {5, 5, MEANS_INVALID, "invalid value"},
    {6, 6, MEANS_UNSUPPORTED, "architecture mismatch"},
    {7, 8, MEANS_OOM_IF_FULL, "mapping or execution failed"},
    {9, 9, MEANS_UNSUPPORTED, "not supported"},
    {1001, 1001, MEANS_OOM_IF_FULL, "not initialized"},
    {1008, 1008, MEANS_OOM_IF_FULL, "a library could not be loaded"},
    {2000, 2999, MEANS_INVALID, "bad parameter"},
    {3000, 3999, MEANS_UNSUPPORTED, "not supported"},
    {4000, 4002, MEANS_OOM_IF_FULL, "internal error"},
    {4003, 4003, MEANS_DEVICE, "host allocation failed"},
    {4004, 4004, MEANS_OOM, "device allocation failed"},
    {5000, 5999, MEANS_OOM_IF_FULL, "execution failed"},
};

static const struct code nccl_codes[] = {
    {0, 0, MEANS_OK, "success"},
    {1, 1, MEANS_OOM_IF_FULL, "unhandled CUDA error"},
    {4, 5, MEANS_INVALID, "invalid argument or usage"},
    {6, 6, MEANS_LOST, "a remote process failed: the communicator must be aborted"},
};

/* "Full": less is free than libraries and modules are known to ask for at once, 1 GiB, or on a
 * small device a sixteenth of it. */
#define FULL_BYTES ((size_t)1 << 30)
#define FULL_SHARE 16

static bool is_full(rebatch_device *device)
{
    rebatch_memory_info memory;
    if (!device || device->ops->memory(device->self, &memory) != REBATCH_OK)
        return false;
    return memory.free_bytes < rbi_min(FULL_BYTES, memory.total_bytes / FULL_SHARE);
}

static rebatch_status status_of(enum meaning meaning, rebatch_device *device)
{
    switch (meaning) {
    case MEANS_OK:
        return REBATCH_OK;
    case MEANS_OOM:
        return REBATCH_OOM;
    case MEANS_OOM_IF_FULL:
        return is_full(device) ? REBATCH_OOM : REBATCH_E_DEVICE;
    case MEANS_INVALID:
        return REBATCH_E_INVALID;
    case MEANS_UNSUPPORTED:
        return REBATCH_E_UNSUPPORTED;
    case MEANS_NO_DEVICE:
        return REBATCH_E_NO_DEVICE;
    case MEANS_LOST:
        return REBATCH_E_DEVICE_LOST;
    default:
        return REBATCH_E_DEVICE;
    }
}

static rebatch_status translate(const char *library, const struct code *codes, size_t count,
                                rebatch_device *device, int code)
{
    const struct code *found = NULL;
    for (size_t i = 0; i < count && !found; i++)
        if (codes[i].first <= code && code <= codes[i].last)
            found = &codes[i];
    const rebatch_status status = status_of(found ? found->meaning : MEANS_DEVICE, device);
    if (status)
        (void)rbi_error(status, "%s answered %d (%s)", library, code,
                        found ? found->name : "see its headers");
    return status;
}

#define TRANSLATE(library, codes)                                                                  \
    translate(library, codes, sizeof(codes) / sizeof *(codes), device, code)

rebatch_status rebatch_from_cuda(rebatch_device *device, int code)
{
    return code == 0 ? REBATCH_OK : TRANSLATE("CUDA", cuda_codes);
}

rebatch_status rebatch_from_cublas(rebatch_device *device, int code)
{
    return TRANSLATE("cuBLAS", cublas_codes);
}

rebatch_status rebatch_from_cudnn(rebatch_device *device, int code)
{
    return TRANSLATE("cuDNN", cudnn_codes);
}

rebatch_status rebatch_from_nccl(rebatch_device *device, int code)
{
    return TRANSLATE("NCCL", nccl_codes);
}
