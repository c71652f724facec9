/* Owns the driver's own functions: those that are taken, and others by name.
 * Must not know what is put in their place. */
#include <dlfcn.h>
#include <string.h>

#include "preload/preload.h"

static const char *const symbols[RBI_HOOK_COUNT] = {
#define SYMBOL(symbol, name, version, per_thread, arguments) #symbol,
    RBI_HOOKS(SYMBOL)
#undef SYMBOL
};

static _Atomic(rbi_function) reals[RBI_HOOK_COUNT];

bool rbi_driver_has(const void *address)
{
    static const char prefix[] = "libcuda.so";
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname)
        return false;
    const char *const slash = strrchr(info.dli_fname, '/');
    const char *const file = slash ? slash + 1 : info.dli_fname;
    return strncmp(file, prefix, sizeof prefix - 1) == 0;
}

/* Whoever calls one of ours by its symbol has the driver loaded, or wants to. */
rbi_function rbi_driver_find_other(const char *symbol)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!driver)
        driver = dlopen("libcuda.so.1", RTLD_LAZY);
    void *const found = driver ? rbi_dlsym_real()(driver, symbol) : NULL;
    rbi_function function;
    memcpy(&function, &found, sizeof function);
    return function;
}

/* The first that was found stays: all of them do the same. */
void rbi_driver_keep(enum rbi_hook hook, rbi_function function)
{
    rbi_function none = NULL;
    (void)atomic_compare_exchange_strong(&reals[hook], &none, function);
}

rbi_function rbi_driver_real(enum rbi_hook hook)
{
    if (!atomic_load_explicit(&reals[hook], memory_order_acquire)) {
        const rbi_function found = rbi_driver_find_other(symbols[hook]);
        if (found)
            rbi_driver_keep(hook, found);
    }
    return atomic_load_explicit(&reals[hook], memory_order_acquire);
}

int rbi_driver_current_device(void)
{
    static _Atomic(rbi_function) known;
    rbi_function function = atomic_load(&known);
    int device = -1;
    if (!function) {
        function = rbi_driver_find_other("cuCtxGetDevice");
        atomic_store(&known, function);
    }
    return function && ((int (*)(int *))function)(&device) == RBI_CU_SUCCESS ? device : -1;
}
