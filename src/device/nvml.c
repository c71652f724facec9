/* Owns what NVML says, a library of the driver, found by name at run time.
 * Must not know CUDA. */
#include "device/nvml.h"

#include <dlfcn.h>
#include <string.h>

/* Values of nvml.h. */
enum { MIG_ON = 1, VIRTUAL_GPU = 2 };

/* X(member, the symbol's name, arguments). All of them return an nvmlReturn_t. */
#define CALLS(X)                                                                                   \
    X(init, nvmlInit_v2, (void))                                                                   \
    X(shutdown, nvmlShutdown, (void))                                                              \
    X(driver_version, nvmlSystemGetDriverVersion, (char *text, unsigned size))                     \
    X(count, nvmlDeviceGetCount_v2, (unsigned *count))                                             \
    X(handle, nvmlDeviceGetHandleByIndex_v2, (unsigned index, void **out))                         \
    X(name, nvmlDeviceGetName, (void *gpu, char *text, unsigned size))                             \
    X(mig_mode, nvmlDeviceGetMigMode, (void *gpu, unsigned *now, unsigned *after_reset))           \
    X(virtualization, nvmlDeviceGetVirtualizationMode, (void *gpu, int *mode))

struct nvml {
#define MEMBER(member, symbol, arguments) int(*member) arguments;
    CALLS(MEMBER)
#undef MEMBER
};

/* Of a call that may not be there: true when it answered. */
#define ANSWERS(call, ...) (nvml->call && nvml->call(__VA_ARGS__) == 0)

static void describe_gpu(struct rbi_text *t, bool *has_mig, const struct nvml *nvml, unsigned index)
{
    char name[96] = "of unknown name";
    unsigned mig = 0, after_reset;
    int mode = 0;
    void *gpu;
    if (!ANSWERS(handle, index, &gpu))
        return;
    (void)ANSWERS(name, gpu, name, sizeof name);
    rbi_text_add(t, "; GPU %u %s", index, name);
    if (ANSWERS(mig_mode, gpu, &mig, &after_reset) && mig == MIG_ON) {
        rbi_text_add(t, ", MIG on");
        *has_mig = true;
    }
    if (ANSWERS(virtualization, gpu, &mode) && mode == VIRTUAL_GPU)
        rbi_text_add(t, ", a vGPU");
}

static void describe_all(struct rbi_text *t, bool *has_mig, const struct nvml *nvml)
{
    char version[96] = "no version";
    unsigned count = 0;
    const int code = nvml->init ? nvml->init() : -1;
    if (code) {
        rbi_text_add(t, "libnvidia-ml.so.1 answers %d to nvmlInit_v2", code);
        return;
    }
    (void)ANSWERS(driver_version, version, sizeof version);
    rbi_text_add(t, "%s", version);
    (void)ANSWERS(count, &count);
    for (unsigned i = 0; i < count; i++)
        describe_gpu(t, has_mig, nvml, i);
    if (nvml->shutdown)
        (void)nvml->shutdown();
}

void rbi_nvml_describe(struct rbi_text *t, bool *has_mig)
{
    struct nvml nvml;
    void *const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    *has_mig = false;
    if (!library) {
        rbi_text_add(t, "not found");
        return;
    }
#define FIND(member, symbol, arguments)                                                            \
    {                                                                                              \
        void *found = dlsym(library, #symbol);                                                     \
        memcpy(&nvml.member, &found, sizeof found);                                                \
    }
    CALLS(FIND)
#undef FIND
    describe_all(t, has_mig, &nvml);
    (void)dlclose(library);
}
