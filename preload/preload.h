/* The parts of librebatch_wrap.so, which stands between a program and CUDA's driver.
 * Must not know how a session or its pool works. */
#ifndef RBI_PRELOAD_H
#define RBI_PRELOAD_H

#include "config/settings.h"
#include "device/cuda_driver.h"

/* Codes of cuda.h. */
enum {
    RBI_CU_SUCCESS = 0,
    RBI_CU_INVALID_VALUE = 1,
    RBI_CU_OUT_OF_MEMORY = 2,
    RBI_CU_NO_DEVICE = 100,
    RBI_CU_NOT_FOUND = 500,
    RBI_CU_LAUNCH_FAILED = 719,
    RBI_CU_NOT_SUPPORTED = 801,
    RBI_CU_UNKNOWN = 999
};

/* ---- the entry points that are taken (entry.c, hooks.c) ---- */

typedef struct rbi_cu_pool_object *cu_pool;

/* X(symbol, the name that cuGetProcAddress() is asked for, the first version of CUDA that has this
 * form, whether a stream of 0 is the thread's, arguments). All of them return a CUresult.
 *
 * The forms without a version have 32-bit pointers and sizes. They are declared with 64 bits, so
 * that a call is handed on with every bit that the caller has put there. */
#define RBI_HOOKS(X)                                                                               \
    X(cuMemAlloc, "cuMemAlloc", 2000, false, (cu_pointer * out, size_t bytes))                     \
    X(cuMemAlloc_v2, "cuMemAlloc", 3020, false, (cu_pointer * out, size_t bytes))                  \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, false,                                          \
      (cu_pointer * out, size_t * pitch, size_t width, size_t height, unsigned element))           \
    X(cuMemAllocAsync, "cuMemAllocAsync", 11020, false,                                            \
      (cu_pointer * out, size_t bytes, cu_stream stream))                                          \
    X(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, true,                                        \
      (cu_pointer * out, size_t bytes, cu_stream stream))                                          \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, false,                            \
      (cu_pointer * out, size_t bytes, cu_pool pool, cu_stream stream))                            \
    X(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 11020, true,                        \
      (cu_pointer * out, size_t bytes, cu_pool pool, cu_stream stream))                            \
    X(cuMemCreate, "cuMemCreate", 10020, false,                                                    \
      (unsigned long long *out, size_t bytes, const struct cu_memory_kind *kind,                   \
       unsigned long long flags))                                                                  \
    X(cuMemFree, "cuMemFree", 2000, false, (cu_pointer memory))                                    \
    X(cuMemFree_v2, "cuMemFree", 3020, false, (cu_pointer memory))                                 \
    X(cuMemFreeAsync, "cuMemFreeAsync", 11020, false, (cu_pointer memory, cu_stream stream))       \
    X(cuMemFreeAsync_ptsz, "cuMemFreeAsync", 11020, true, (cu_pointer memory, cu_stream stream))   \
    X(cuMemRelease, "cuMemRelease", 10020, false, (unsigned long long physical))                   \
    X(cuMemGetInfo, "cuMemGetInfo", 2000, false, (size_t * free_bytes, size_t * total_bytes))      \
    X(cuMemGetInfo_v2, "cuMemGetInfo", 3020, false, (size_t * free_bytes, size_t * total_bytes))   \
    X(cuGetProcAddress, "cuGetProcAddress", 11030, false,                                          \
      (const char *name, void **out, int version, unsigned long long flags))                       \
    X(cuGetProcAddress_v2, "cuGetProcAddress", 12000, false,                                       \
      (const char *name, void **out, int version, unsigned long long flags, int *found))

enum rbi_hook {
#define RBI_HOOK_ID_(symbol, name, version, per_thread, arguments) RBI_HOOK_##symbol,
    RBI_HOOKS(RBI_HOOK_ID_)
#undef RBI_HOOK_ID_
        RBI_HOOK_COUNT
};

#define RBI_HOOK_DECLARE_(symbol, name, version, per_thread, arguments)                            \
    __attribute__((visibility("default"))) int symbol arguments;                                   \
    typedef int rbi_##symbol##_type arguments;
RBI_HOOKS(RBI_HOOK_DECLARE_)
#undef RBI_HOOK_DECLARE_

typedef void (*rbi_function)(void);

/* Whether dlsym() may have to answer with a function of ours. */
bool rbi_hook_is_symbol(const char *symbol);
/* Ours, and `found` is kept as the driver's, when `found` is what the driver has for `symbol`; else
 * `found`. */
void *rbi_hook_replace_symbol(const char *symbol, void *found);

/* ---- the driver's own functions (driver.c) ---- */

/* NULL: the driver has none. */
rbi_function rbi_driver_real(enum rbi_hook hook);
#define RBI_REAL(symbol) ((rbi_##symbol##_type *)rbi_driver_real(RBI_HOOK_##symbol))
/* Keeps a function as the driver's own, unless there is one already. */
void rbi_driver_keep(enum rbi_hook hook, rbi_function function);

/* Another function of the driver, by its symbol; NULL: the driver has none. */
rbi_function rbi_driver_find_other(const char *symbol);
/* The device of the context that is current in this thread; -1: there is none. */
int rbi_driver_current_device(void);
/* Whether the code or data at `address` is the driver's. */
bool rbi_driver_has(const void *address);

/* ---- the C library's own dlsym (real.c) ---- */

typedef void *rbi_dlsym(void *handle, const char *symbol);
/* Where there is none, one that finds nothing. */
rbi_dlsym *rbi_dlsym_real(void);
/* Answers a CUDA device of this library, whatever it asks for, with the address of one that finds
 * the driver's own functions. */
void *rbi_dlsym_answer_rebatch(void *handle, const char *symbol);
/* Whether a CUDA device of this library was opened in the process: whoever opened it takes memory
 * for a pool by the driver's own functions, and applies limits and failures itself. */
bool rbi_dlsym_has_rebatch(void);

/* ---- the process's session (session_pool.c) ---- */

/* Streams that are no handles: those of every process, and of every thread. */
#define RBI_CU_STREAM_LEGACY ((cu_stream)(uintptr_t)1)
#define RBI_CU_STREAM_PER_THREAD ((cu_stream)(uintptr_t)2)

/* Whether the call is for the session's pool. *code is then its answer; *out is set on success
 * only. */
bool rbi_pool_serves_alloc(int *code, cu_pointer *out, size_t bytes);
bool rbi_pool_serves_alloc_on(int *code, cu_pointer *out, size_t bytes, cu_stream stream);
bool rbi_pool_serves_free(int *code, cu_pointer memory);
bool rbi_pool_serves_free_on(int *code, cu_pointer memory, cu_stream stream);

/* ---- the allocations in use (holdings.c) ---- */

enum rbi_holding_kind { RBI_HOLDING_POINTER, RBI_HOLDING_PHYSICAL };

struct rbi_holding {
    uint64_t key; /* an address, or a handle of cuMemCreate() */
    uint64_t bytes;
    uint64_t charged_bytes; /* to the device's cap; 0: the memory is a pool's */
    uint64_t id;            /* in the trace; 0: it is not there */
    cu_stream stream;
    int device; /* -1: there is no such allocation */
    enum rbi_holding_kind kind;
};

/* Open addressing with linear probing, at most half full. */
struct rbi_holdings {
    struct rbi_holding *entries; /* bytes of 0: an empty one */
    size_t capacity;             /* a power of two, or 0 */
    size_t used;
};
/* Adds an allocation of at least 1 byte whose key is not there. False when there is no host
 * memory. */
bool rbi_holdings_add(struct rbi_holdings *holdings, const struct rbi_holding *holding);
/* Takes an allocation out. */
struct rbi_holding rbi_holdings_take(struct rbi_holdings *holdings, uint64_t key,
                                     enum rbi_holding_kind kind);
void rbi_holdings_free(struct rbi_holdings *holdings);

/* ---- the trace (record.c) ---- */

#define RBI_RECORD_STREAMS 1000

struct rbi_record {
    const char *path; /* what was asked for; NULL: no trace */
    char name[4200];  /* of the file that is written */
    int fd;
    bool is_open, has_failed;
    int device;       /* whose allocations are written: the first one's that has any */
    bool has_another; /* which is said once */
    uint64_t last_id;
    cu_stream streams[RBI_RECORD_STREAMS]; /* that were seen: number 1 and on */
    size_t stream_count;
};
/* Writes an allocation that was made, and gives its number there; 0: it is not there. */
uint64_t rbi_record_alloc(struct rbi_record *record, const struct rbi_holding *holding);
/* Writes a free. `stream` is where the work ends that must be waited for; NULL: it was waited for,
 * or it is the default stream. */
void rbi_record_free(struct rbi_record *record, const struct rbi_holding *holding,
                     const cu_stream *stream);
/* Writes a failure as a comment: a replay has failures of its own. */
void rbi_record_oom(struct rbi_record *record, int device, uint64_t bytes);

/* ---- what was asked for, and what came of it (ledger.c) ---- */

/* An allocation while it is made. */
struct rbi_request {
    uint64_t bytes;
    cu_stream stream;
    int device; /* -1: it is not counted */
};

/* False: the allocation is to fail for want of memory. `device` is -1 for the one that is current
 * in this thread. */
bool rbi_ledger_begin(struct rbi_request *request, uint64_t bytes, cu_stream stream, int device);
/* The driver has answered with `code`, and with `key` if that is RBI_CU_SUCCESS. */
void rbi_ledger_end(const struct rbi_request *request, int code, uint64_t key,
                    enum rbi_holding_kind kind);
/* The session's pool has answered with `code`, and with `address` if that is RBI_CU_SUCCESS. */
void rbi_ledger_note_pool(int code, uint64_t address, uint64_t bytes, cu_stream stream);

/* An allocation is about to be freed: from then on its key may be another's. `stream` as for
 * rbi_record_free(). */
struct rbi_holding rbi_ledger_take(uint64_t key, enum rbi_holding_kind kind,
                                   const cu_stream *stream);
/* It was not freed after all. */
void rbi_ledger_put_back(const struct rbi_holding *holding);

/* Lowers what the driver says of the current device to what the cap leaves. */
void rbi_ledger_lower(uint64_t *free_bytes, uint64_t *total_bytes);

/* ---- what is said of it (summary.c) ---- */

struct rbi_ledger_figures {
    uint64_t requests; /* allocations that were tried */
    uint64_t injected, beyond_cap, device_ooms;
    uint64_t peak_bytes, cap_bytes; /* of the device with the highest peak; cap 0: none */
    bool is_final;
    const char *trace; /* the file; NULL: none was written */
};
void rbi_summary_add(struct rbi_text *t, const struct rbi_run_settings *settings,
                     const struct rbi_ledger_figures *figures);

#endif
