/* A stand-in for NCCL between processes, and for CUDA's runtime: ranks have shared memory, and a
 * GPU's memory is the host's. As with NCCL, a call enqueues, and the collective ends when all ranks
 * have come, or never. Each rank calls the same collectives in the same order; a pair's ncclSend()
 * and ncclRecv() are one. Must not know the programs. */
#include <cuda_runtime.h>
#include <fcntl.h>
#include <nccl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANKS_MOST 8
#define WORK_MOST 64
#define SLOT_BYTES ((size_t)1 << 20)

/* Of all ranks, in shared memory: how many collectives each has written its values for, and how
 * many it has done. */
struct ncclComm {
    uint64_t written[RANKS_MOST], done[RANKS_MOST];
    char slots[RANKS_MOST][SLOT_BYTES];
};

struct work {
    enum { COPY, REDUCE, SWAP } kind;
    const void *from;
    void *to;
    size_t bytes;
    ncclRedOp_t op;
    int other;
};

/* Of this rank, which has one communicator. */
static struct {
    int rank, size;
    bool is_late; /* the next question finds NCCL still busy with the call */
    uint64_t begun, done;
    struct work queue[WORK_MOST], swap;
    size_t count;
} my;

static void refuse(const char *what)
{
    fprintf(stderr, "the stand-in for NCCL: %s\n", what);
    exit(3);
}

/* ---- the collectives ---- */

static uint64_t reduced(uint64_t a, uint64_t b, ncclRedOp_t op)
{
    return op == ncclSum ? a + b : (op == ncclMin) == (a < b) ? a : b;
}

static bool have_all(const uint64_t counts[], uint64_t most)
{
    for (int i = 0; i < my.size; i++)
        if (__atomic_load_n(&counts[i], __ATOMIC_ACQUIRE) < most)
            return false;
    return true;
}

static void take(struct ncclComm *comm, const struct work *work)
{
    if (work->kind == SWAP) {
        memcpy(work->to, comm->slots[work->other], work->bytes);
        return;
    }
    uint64_t *const to = work->to;
    for (size_t i = 0; i < work->bytes / sizeof *to; i++)
        for (int rank = 0; rank < my.size; rank++) {
            uint64_t value;
            memcpy(&value, comm->slots[rank] + i * sizeof value, sizeof value);
            to[i] = rank ? reduced(to[i], value, work->op) : value;
        }
}

/* Whether it is done. */
static bool advance(struct ncclComm *comm, const struct work *work)
{
    if (work->kind == COPY) {
        memcpy(work->to, work->from, work->bytes);
        return true;
    }
    if (my.begun == my.done) {
        if (!have_all(comm->done, my.done)) /* of the collective before */
            return false;
        memcpy(comm->slots[my.rank], work->from, work->bytes);
        __atomic_store_n(&comm->written[my.rank], ++my.begun, __ATOMIC_RELEASE);
    }
    if (!have_all(comm->written, my.begun))
        return false;
    take(comm, work);
    __atomic_store_n(&comm->done[my.rank], ++my.done, __ATOMIC_RELEASE);
    return true;
}

static struct ncclComm *the_comm;

static void enqueue(struct work work)
{
    if (my.count == WORK_MOST || (work.kind != COPY && work.bytes > SLOT_BYTES))
        refuse("too much work");
    my.queue[my.count++] = work;
    my.is_late = work.kind != COPY;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    while (my.count && advance(the_comm, &my.queue[0]))
        memmove(my.queue, my.queue + 1, --my.count * sizeof *my.queue);
    return my.count ? cudaErrorNotReady : cudaSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)stream;
    if (type != ncclUint64 || comm != the_comm)
        refuse("expected words");
    enqueue((struct work){REDUCE, from, to, count * sizeof(uint64_t), op, 0});
    return ncclInProgress;
}

ncclResult_t ncclGroupStart(void)
{
    my.swap = (struct work){.kind = SWAP};
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int other,
                      ncclComm_t comm, cudaStream_t stream)
{
    (void)type, (void)comm, (void)stream;
    my.swap.from = from;
    my.swap.bytes = count;
    my.swap.other = other;
    return ncclSuccess;
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int other, ncclComm_t comm,
                      cudaStream_t stream)
{
    (void)type, (void)comm, (void)stream;
    if (count != my.swap.bytes || other != my.swap.other)
        refuse("expected as many bytes from the same rank");
    my.swap.to = to;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    enqueue(my.swap);
    return ncclInProgress;
}

/* ---- communicators ---- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    (void)snprintf(out->internal, sizeof out->internal, "/rebatch-nccl-%d", (int)getpid());
    const int file = shm_open(out->internal, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)sizeof(struct ncclComm)))
        refuse("no shared memory");
    (void)close(file);
    return ncclSuccess;
}

/* The last one to come removes the name. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    const int file = shm_open(id.internal, O_RDWR, 0600);
    void *const memory =
        mmap(NULL, sizeof(struct ncclComm), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || memory == MAP_FAILED || size > RANKS_MOST || config->blocking)
        refuse("no shared memory, too many ranks, or a communicator that blocks");
    (void)close(file);
    my.rank = rank;
    my.size = size;
    *out = the_comm = memory;
    if (__atomic_add_fetch(&the_comm->written[RANKS_MOST - 1], 1, __ATOMIC_ACQ_REL) ==
        (uint64_t)size) {
        (void)shm_unlink(id.internal);
        __atomic_store_n(&the_comm->written[RANKS_MOST - 1], 0, __ATOMIC_RELEASE);
    }
    return ncclInProgress;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *out)
{
    (void)comm;
    *out = my.size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *out)
{
    (void)comm;
    *out = my.rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    (void)comm;
    *out = my.is_late ? ncclInProgress : ncclSuccess;
    my.is_late = false;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    (void)comm;
    my.count = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    (void)comm;
    return my.count ? ncclInvalidUsage : ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    (void)munmap(comm, sizeof *comm);
    return ncclSuccess;
}

/* ---- CUDA's runtime ---- */

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    (void)kind, (void)stream;
    enqueue((struct work){COPY, from, to, bytes, ncclSum, 0});
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    *out = malloc(bytes);
    return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *pointer)
{
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeHost(void *pointer)
{
    return cudaFree(pointer);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    (void)flags;
    *out = (cudaStream_t)(void *)&my;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out)
{
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    (void)device;
    return cudaSuccess;
}
