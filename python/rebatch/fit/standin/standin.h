/* The parts of the stand-in, as they see each other; README.md says what it stands in for.
 *
 * A function that can fail answers a `code`: the numbers that cudaError_t and CUresult share. */
#ifndef STANDIN_H
#define STANDIN_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin
{

enum code {
    OK = 0,
    INVALID = 1,
    OUT_OF_MEMORY = 2,
    NO_CONTEXT = 201,
    BAD_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};
static_assert(OUT_OF_MEMORY == (int)cudaErrorMemoryAllocation, "both count alike");
static_assert(OUT_OF_MEMORY == (int)CUDA_ERROR_OUT_OF_MEMORY, "both count alike");
static_assert(BAD_HANDLE == (int)cudaErrorInvalidResourceHandle, "both count alike");
static_assert(BAD_HANDLE == (int)CUDA_ERROR_INVALID_HANDLE, "both count alike");
static_assert(NOT_READY == (int)cudaErrorNotReady, "both count alike");
static_assert(NOT_READY == (int)CUDA_ERROR_NOT_READY, "both count alike");
static_assert(NOT_SUPPORTED == (int)cudaErrorNotSupported, "both count alike");
static_assert(NOT_SUPPORTED == (int)CUDA_ERROR_NOT_SUPPORTED, "both count alike");

/* The name of a code and what it means, in CUDA's words. */
const char *name_of(int error);
const char *text_of(int error);

/* ---- GPUs (device.cc) ---- */

/* STANDIN_GPUS, from 1 to GPUS_MOST. */
constexpr int GPUS_MOST = 16;
int gpu_count(void);
bool is_gpu(int gpu);
/* The calling thread's GPU, as the runtime has it: the first where none was chosen. */
int current_gpu(void);
/* The same as the driver has it: a context must be current. */
code context_gpu(int *gpu);
/* Makes it the calling thread's; from now on the GPU is in use. */
code use_gpu(int gpu);
bool is_gpu_used(int gpu);
code attribute(int *value, int attribute, int gpu);

/* ---- memory (memory.cc) ---- */

/* Memory is counted, mapped and moved in pages of this size, as on a GPU. */
constexpr size_t PAGE_BYTES = 2u << 20;

code alloc(void **out, size_t bytes, int gpu);
code release(void *memory);
code alloc_pinned(void **out, size_t bytes);
code release_pinned(void *memory);
code pin(void *memory, size_t bytes);
code unpin(void *memory);
/* Free and total memory of a GPU. */
void memory_info(size_t *free_bytes, size_t *total_bytes, int gpu);

/* The most bytes that a copy within a GPU, or a memset, changes: STANDIN_FILL_MOST. */
size_t fill_most(void);

struct owner {
    enum { NOBODY, GPU, PINNED } kind;
    int gpu;
    void *begin;
    size_t bytes;
};
/* Whose memory that address is. */
owner owner_of(const void *address);

/* Physical memory and the addresses at which it can be seen. */
/* gpu -1: memory of the host, as much as STANDIN_HOST says. */
code create(unsigned long long *out, size_t bytes, int gpu, bool is_shareable);
bool has_host_memory(void);
code drop(unsigned long long physical);
code export_physical(int *fd, unsigned long long physical);
code import_physical(unsigned long long *out, int fd);
code reserve(uintptr_t *out, size_t bytes, size_t alignment, uintptr_t wish);
code unreserve(uintptr_t address, size_t bytes);
code map(uintptr_t address, size_t bytes, size_t offset, unsigned long long physical);
code unmap(uintptr_t address, size_t bytes);
/* `gpus`: bit g is whether GPU g may use the memory. */
code set_access(uintptr_t address, size_t bytes, uint32_t gpus, bool may_write);

/* ---- streams, events and graph capture (streams.cc) ---- */

code create_stream(void **out, int priority);
code destroy_stream(void *stream);
/* Whether there is such a stream; NULL and the two other default streams are always there. */
code check_stream(void *stream);
int priority_of(void *stream);
/* Whose stream it is; of a default stream, the calling thread's GPU. */
int gpu_of_stream(void *stream);

code create_event(void **out);
code destroy_event(void *event);
code record_event(void *event, void *stream);
code record_all(void *event); /* of all streams; ends captures, as CUDA does */
code check_event(void *event);
/* Whether all work before is done; NOT_READY: it is not. */
code query_event(void *event);
code query_stream(void *stream);
/* The host has waited: all work so far is done. */
void wait_for_gpus(void);
code wait_for_all(int gpu); /* streams of all GPUs */
code wait_stream(void *stream);
void note_unmap(void);
code wait_event(void *stream, void *event);
code elapsed(float *milliseconds, void *start, void *end);

/* Number of the capture that the stream takes part in; 0: none. */
unsigned long long capture_of(void *stream);
code begin_capture(void *stream, int mode);
code end_capture(void *stream);
/* Whether a call may be made that CUDA refuses in some captures. As in CUDA, what is refused, and a
 * wait for a captured stream or its GPU, ends the captures. */
code check_unsafe(void);
/* The calling thread's cudaStreamCaptureMode; returns the one before. */
int exchange_mode(int mode);

/* ---- CUDA's libraries (libraries.cc) ---- */

enum library { CUBLAS = 1, CUBLAS_EX = 2, CUDNN = 4, UNMEASURED = 8 };
void note_library(library l);
/* One that no other is like: PyTorch has a workspace for each handle of cuBLAS. */
void *new_handle(void);

/* ---- finding functions (lookup.cc) ---- */

/* The driver's function of that name, without its version; NULL: the stand-in has none. */
void *find_function(const char *name);
/* Takes its place: answers "not supported". */
void *unsupported_function(void);

/* ---- functions that are not there (lacking.cc) ---- */

/* `caller` has asked the driver for a function that it has not. */
void note_missing(const void *caller);

} // namespace standin

#endif
