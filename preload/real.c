/* Owns where the C library's own dlsym() is found, and whether this library's CUDA device asked for
 * it. Must not know who else answers for it, nor the driver. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "preload/preload.h"

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#else /* aarch64 */
#define FIRST_VERSION "GLIBC_2.17"
#endif

static _Atomic(rbi_dlsym *) real;

static void *find_none(void *handle, const char *symbol)
{
    (void)handle;
    (void)symbol;
    return NULL;
}

/* By version: our own symbol has none, so it is never what is found. */
rbi_dlsym *rbi_dlsym_real(void)
{
    static const char *const versions[] = {FIRST_VERSION, "GLIBC_2.34"};
    rbi_dlsym *known = atomic_load_explicit(&real, memory_order_relaxed);
    for (size_t i = 0; i < sizeof versions / sizeof *versions && !known; i++) {
        void *const found = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        memcpy(&known, &found, sizeof known);
    }
    atomic_store_explicit(&real, known, memory_order_relaxed);
    return known ? known : find_none;
}

/* ---- a CUDA device of this library ---- */

static atomic_bool has_rebatch;

static void *find_for_rebatch(void *handle, const char *symbol)
{
    return rbi_dlsym_real()(handle, symbol);
}

void *rbi_dlsym_answer_rebatch(void *handle, const char *symbol)
{
    rbi_dlsym *const function = find_for_rebatch;
    void *found;
    (void)handle;
    (void)symbol;
    atomic_store(&has_rebatch, true);
    memcpy(&found, &function, sizeof found);
    return found;
}

bool rbi_dlsym_has_rebatch(void)
{
    return atomic_load_explicit(&has_rebatch, memory_order_relaxed);
}
