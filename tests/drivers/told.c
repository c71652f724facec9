/* A stand-in for CUDA's driver, with calls.c: a GPU that writes down each call with its arguments
 * in driver_log, and answers what a test has written into its variables. Must not know the
 * tests. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "device/cuda_driver.h"

#define GPUS 40
#define ATTRIBUTES 200

/* The call of that name answers driver_code instead of 0. */
extern char driver_log[], driver_fails[];
extern int driver_code, driver_attributes[], driver_reaches;
extern unsigned long long driver_context, driver_page, driver_host_page;
char driver_log[8192], driver_fails[64];
int driver_code, driver_attributes[ATTRIBUTES], driver_reaches = 1;
unsigned long long driver_context, driver_page = 2 << 20, driver_host_page = 2 << 20;

__attribute__((format(printf, 2, 3))) static int tell(const char *symbol, const char *format, ...)
{
    char *const end = driver_log + strlen(driver_log);
    size_t room = sizeof driver_log - 1 - (size_t)(end - driver_log);
    if (room < 1024)
        return 999; /* nobody reads it */
    const int length = snprintf(end, room, "%s", symbol + 2);
    va_list list;
    va_start(list, format);
    room -= (size_t)length;
    (void)vsnprintf(end + length, room, format, list);
    va_end(list);
    (void)strcat(driver_log, "\n");
    return strcmp(symbol, driver_fails) == 0 ? driver_code : 0;
}

#define CALL(symbol, arguments, effect, ...)                                                       \
    int symbol arguments;                                                                          \
    int symbol arguments                                                                           \
    {                                                                                              \
        const int code = tell(#symbol, __VA_ARGS__);                                               \
        if (!code) {                                                                               \
            effect;                                                                                \
        }                                                                                          \
        return code;                                                                               \
    }
#define NUMBER(pointer) (unsigned long long)(uintptr_t)(pointer)

CALL(cuInit, (unsigned flags), (void)0, " %u", flags)
CALL(cuDriverGetVersion, (int *out), *out = 12080, " ")
CALL(cuDeviceGetCount, (int *out), *out = GPUS, " ")
CALL(cuDeviceGet, (int *out, int ordinal), *out = ordinal + 100, " %d", ordinal)
CALL(cuDeviceGetName, (char *out, int size, int gpu), (void)snprintf(out, (size_t)size, "Told"),
     " %d %d", size, gpu)
CALL(cuDeviceGetAttribute, (int *out, int attribute, int gpu), *out = driver_attributes[attribute],
     " %d %d", attribute, gpu)
CALL(cuDevicePrimaryCtxRetain, (cu_context * out, int gpu), *out = (cu_context)7, " %d", gpu)
CALL(cuDevicePrimaryCtxRelease_v2, (int gpu), (void)0, " %d", gpu)
CALL(cuCtxGetCurrent, (cu_context * out), *out = (cu_context)(uintptr_t)driver_context, " ")
CALL(cuCtxPushCurrent_v2, (cu_context context), driver_context = NUMBER(context), " %llu",
     NUMBER(context))
CALL(cuCtxPopCurrent_v2, (cu_context * out), *out = (cu_context)(uintptr_t)driver_context;
     driver_context = 0, " ")
CALL(cuCtxSynchronize, (void), (void)0, " ")
CALL(cuMemGetInfo_v2, (size_t * free_bytes, size_t *total), *free_bytes = 3000; *total = 4000, " ")
CALL(cuMemAlloc_v2, (cu_pointer * out, size_t bytes), *out = 0x5000, " %zu", bytes)
CALL(cuMemFree_v2, (cu_pointer memory), (void)0, " %#llx", memory)
CALL(cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags), (void)memory, " %zu %u",
     bytes, flags)
CALL(cuMemHostUnregister, (void *memory), (void)memory, " ")
CALL(cuMemHostAlloc, (void **out, size_t bytes, unsigned flags), *out = (void *)0x6000, " %zu %u",
     bytes, flags)
CALL(cuMemFreeHost, (void *memory), (void)0, " %#llx", NUMBER(memory))
CALL(cuMemcpyAsync, (cu_pointer to, cu_pointer from, size_t bytes, cu_stream stream), (void)0,
     " %#llx %#llx %zu %llu", to, from, bytes, NUMBER(stream))
CALL(cuMemsetD8Async, (cu_pointer to, unsigned char value, size_t bytes, cu_stream stream), (void)0,
     " %#llx %d %zu %llu", to, value, bytes, NUMBER(stream))
CALL(cuStreamCreate, (cu_stream * out, unsigned flags), *out = (cu_stream)8, " %u", flags)
CALL(cuStreamDestroy_v2, (cu_stream stream), (void)0, " %llu", NUMBER(stream))
CALL(cuStreamSynchronize, (cu_stream stream), (void)0, " %llu", NUMBER(stream))
CALL(cuLaunchHostFunc, (cu_stream stream, void (*function)(void *), void *user), function(user),
     " %llu", NUMBER(stream))
CALL(cuEventCreate, (cu_event * out, unsigned flags), *out = (cu_event)9, " %u", flags)
CALL(cuEventDestroy_v2, (cu_event event), (void)0, " %llu", NUMBER(event))
CALL(cuEventQuery, (cu_event event), (void)0, " %llu", NUMBER(event))
CALL(cuEventSynchronize, (cu_event event), (void)0, " %llu", NUMBER(event))
CALL(cuCtxRecordEvent, (cu_context context, cu_event event), (void)0, " %llu %llu", NUMBER(context),
     NUMBER(event))
CALL(cuMemGetAllocationGranularity, (size_t * out, const struct cu_memory_kind *kind, int option),
     *out = kind->location.type == 1 ? driver_page : driver_host_page, " type %d at %d:%d, %d",
     kind->type, kind->location.type, kind->location.id, option)
CALL(cuMemAddressReserve,
     (cu_pointer * out, size_t bytes, size_t alignment, cu_pointer wish, unsigned long long flags),
     *out = 0x10000, " %zu %zu %llu %llu", bytes, alignment, wish, flags)
CALL(cuMemAddressFree, (cu_pointer address, size_t bytes), (void)0, " %#llx %zu", address, bytes)
CALL(cuMemCreate,
     (unsigned long long *out, size_t bytes, const struct cu_memory_kind *kind,
      unsigned long long flags),
     *out = 11, " %zu type %d at %d:%d, %llu", bytes, kind->type, kind->location.type,
     kind->location.id, flags)
CALL(cuMemRelease, (unsigned long long physical), (void)0, " %llu", physical)
CALL(cuMemMap,
     (cu_pointer address, size_t bytes, size_t offset, unsigned long long physical,
      unsigned long long flags),
     (void)0, " %#llx %zu %zu %llu %llu", address, bytes, offset, physical, flags)
CALL(cuMemUnmap, (cu_pointer address, size_t bytes), (void)0, " %#llx %zu", address, bytes)
CALL(cuDeviceCanAccessPeer, (int *out, int gpu, int peer), *out = driver_reaches, " %d %d", gpu,
     peer)

int cuMemSetAccess(cu_pointer address, size_t bytes, const struct cu_access *access, size_t count);
int cuMemSetAccess(cu_pointer address, size_t bytes, const struct cu_access *access, size_t count)
{
    char who[512] = "";
    for (size_t i = 0; i < count; i++) {
        char *const end = who + strlen(who);
        (void)snprintf(end, sizeof who - (size_t)(end - who), " %d:%d=%d", access[i].location.type,
                       access[i].location.id, access[i].flags);
    }
    return tell("cuMemSetAccess", " %#llx %zu%s", address, bytes, who);
}
