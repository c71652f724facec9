/* Owns the table of the driver's functions that are taken, and what a program gets that asks for
 * one by name. Must not know what ours do. */
#include <string.h>

#include "preload/preload.h"

#define FLAG_PER_THREAD 2 /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */

static const struct {
    const char *symbol, *name;
    int version;
    bool per_thread;
    rbi_function ours;
} hooks[RBI_HOOK_COUNT] = {
#define HOOK(symbol, name, version, per_thread, arguments)                                         \
    {#symbol, name, version, per_thread, (rbi_function)symbol},
    RBI_HOOKS(HOOK)
#undef HOOK
};

/* ---- by symbol ---- */

/* A driver that finds its functions by their symbols, as other libraries do, has found ours. */
static void *replace(enum rbi_hook hook, void *found)
{
    rbi_function function;
    void *ours;
    memcpy(&function, &found, sizeof function);
    if (function != hooks[hook].ours)
        rbi_driver_keep(hook, function);
    memcpy(&ours, &hooks[hook].ours, sizeof ours);
    return ours;
}

static int find_symbol(const char *symbol)
{
    if (symbol[0] != 'c' || symbol[1] != 'u' || (symbol[2] != 'M' && symbol[2] != 'G'))
        return -1;
    for (int i = 0; i < RBI_HOOK_COUNT; i++)
        if (strcmp(hooks[i].symbol, symbol) == 0)
            return i;
    return -1;
}

bool rbi_hook_is_symbol(const char *symbol)
{
    return find_symbol(symbol) >= 0;
}

/* Another library may have functions of these names too: they stay as they are. */
void *rbi_hook_replace_symbol(const char *symbol, void *found)
{
    const int hook = find_symbol(symbol);
    return hook >= 0 && found && rbi_driver_has(found) ? replace((enum rbi_hook)hook, found)
                                                       : found;
}

/* ---- by cuGetProcAddress() ---- */

/* The form of `name` that a program of this version of CUDA gets, as far as the table knows. Where
 * there are two with the same version, that for per-thread streams is the second. */
static int find_asked(const char *name, int version, bool per_thread)
{
    int best = -1;
    for (int i = 0; i < RBI_HOOK_COUNT; i++)
        if (strcmp(hooks[i].name, name) == 0 && hooks[i].version <= version &&
            (per_thread || !hooks[i].per_thread) &&
            (best < 0 || hooks[i].version >= hooks[best].version))
            best = i;
    return best;
}

static void *ask_driver(const char *name, int version, unsigned long long flags)
{
    void *found = NULL;
    rbi_cuGetProcAddress_v2_type *const second = RBI_REAL(cuGetProcAddress_v2);
    rbi_cuGetProcAddress_type *const first = second ? NULL : RBI_REAL(cuGetProcAddress);
    const int code = second  ? second(name, &found, version, flags, NULL)
                     : first ? first(name, &found, version, flags)
                             : RBI_CU_NOT_FOUND;
    return code == RBI_CU_SUCCESS ? found : NULL;
}

/* A newer driver may have a newer form for this version of CUDA. Then it is not what the driver
 * gives for the version of ours, and nothing is replaced. */
static void replace_asked(void **out, const char *name, int version, unsigned long long flags)
{
    const int hook = find_asked(name, version, (flags & FLAG_PER_THREAD) != 0);
    if (hook >= 0 && ask_driver(name, hooks[hook].version, flags) == *out)
        *out = replace((enum rbi_hook)hook, *out);
}

int cuGetProcAddress(const char *name, void **out, int version, unsigned long long flags)
{
    rbi_cuGetProcAddress_type *const real = RBI_REAL(cuGetProcAddress);
    const int code = real ? real(name, out, version, flags) : RBI_CU_NOT_FOUND;
    if (code == RBI_CU_SUCCESS && name && out && *out)
        replace_asked(out, name, version, flags);
    return code;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, unsigned long long flags,
                        int *found)
{
    rbi_cuGetProcAddress_v2_type *const real = RBI_REAL(cuGetProcAddress_v2);
    const int code = real ? real(name, out, version, flags, found) : RBI_CU_NOT_FOUND;
    if (code == RBI_CU_SUCCESS && name && out && *out)
        replace_asked(out, name, version, flags);
    return code;
}
