/* Owns the loading of CUDA's driver.
 * Must not know what its calls are used for. */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "rebatch/cuda.h"

static struct rbi_cuda_driver driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *no_library, *no_symbol; /* why it could not be loaded; NULL: it was */
static int init_code;

typedef void *find_symbol(void *library, const char *symbol);

static find_symbol *find_finder(void *library)
{
    void *const found = dlsym(library, RBI_CUDA_REAL_DLSYM);
    find_symbol *finder;
    memcpy(&finder, &found, sizeof finder);
    return finder ? finder : dlsym;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        no_library = "libcuda.so.1 is not on this machine";
        return;
    }
    find_symbol *const find = find_finder(library);
#define FIND(member, symbol, arguments)                                                            \
    {                                                                                              \
        void *found = find(library, #symbol);                                                      \
        memcpy(&driver.member, &found, sizeof found);                                              \
    }
#define REQUIRE(member, symbol, arguments)                                                         \
    if (!driver.member)                                                                            \
        no_symbol = #symbol;
    RBI_CUDA_CALLS(FIND)
    RBI_CUDA_CALLS(REQUIRE)
    RBI_CUDA_OPTIONAL_CALLS(FIND)
#undef FIND
#undef REQUIRE
    if (!no_symbol)
        init_code = driver.init(0);
}

rebatch_status rbi_cuda_driver_load(const struct rbi_cuda_driver **out)
{
    *out = NULL;
    pthread_once(&once, load);
    if (no_library)
        return rbi_error(REBATCH_E_NO_DEVICE, "no CUDA device: %s", no_library);
    if (no_symbol)
        return rbi_error(REBATCH_E_NO_DEVICE, "no CUDA device: the driver is too old, it has no %s",
                         no_symbol);
    if (init_code)
        return rbi_error(REBATCH_E_NO_DEVICE, "no CUDA device: the driver answered %d to cuInit",
                         init_code);
    *out = &driver;
    return REBATCH_OK;
}
