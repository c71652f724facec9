/* What rebatch/nccl.h costs the GPUs of one machine (two, or as many as the argument says): a vote
 * beyond a bare all-reduce of the same words whose result is read back; and what a communicator
 * holds of a GPU, and gives back where NCCL has ncclCommSuspend() (2.29.7). */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "measure.h"
#include "rebatch/nccl.h"
#include "rebatch/rebatch.h"

enum { CALLS = 2000, RUNS = 11, WORDS = 10, WAIT_MS = 60000 };
enum { BYTES = 256 << 20, SUSPEND_MEMORY = 1 };

/* Of both processes. */
static struct {
    ncclUniqueId ids[2];
    volatile int has_ids;
} * shared;

static int rank, ranks = 2;
static ncclComm_t comm;  /* does not block: that of votes */
static ncclComm_t other; /* blocks */
static rebatch_group group;
static rebatch_nccl votes;
static cudaStream_t stream;
static uint64_t *words, *device_words;

static void check(rebatch_status status)
{
    if (!status)
        return;
    fprintf(stderr, "bench-nccl: rank %d: %s\n", rank, rebatch_last_error());
    _exit(1);
}

static void cuda(cudaError_t code)
{
    check(rebatch_from_cuda(NULL, (int)code));
}

static void nccl(ncclResult_t result)
{
    check(result == ncclInProgress ? REBATCH_OK : rebatch_from_nccl(NULL, (int)result));
}

/* ---- a vote ---- */

static void reduce_on(ncclComm_t its)
{
    cuda(cudaMemcpyAsync(device_words, words, WORDS * sizeof *words, cudaMemcpyHostToDevice,
                         stream));
    nccl(ncclAllReduce(device_words, device_words, WORDS, ncclUint64, ncclSum, its, stream));
    for (ncclResult_t state = ncclInProgress; state == ncclInProgress;)
        nccl(ncclCommGetAsyncError(its, &state));
    cuda(cudaMemcpyAsync(words, device_words, WORDS * sizeof *words, cudaMemcpyDeviceToHost,
                         stream));
    cuda(cudaStreamSynchronize(stream));
}

static void vote_barely(void)
{
    reduce_on(other);
}

/* NCCL launches what such a communicator does from a thread of its own. */
static void vote_barely_without_blocking(void)
{
    reduce_on(comm);
}

static void vote(void)
{
    uint64_t own[WORDS] = {1};
    check(group.all_reduce(own, WORDS, REBATCH_SUM, WAIT_MS, group.user));
}

/* Microseconds a call, the median of RUNS. */
static double measure(void (*run)(void))
{
    double us[RUNS];
    for (int i = -1; i < RUNS; i++) { /* the first one warms */
        const double began = rebatch_nccl_ms();
        for (int n = 0; n < CALLS; n++)
            run();
        if (i >= 0)
            us[i] = (rebatch_nccl_ms() - began) * 1e3 / CALLS;
    }
    return measure_median(us, RUNS);
}

/* ---- memory ---- */

static double free_mib(void)
{
    size_t bytes = 0, total = 0;
    cuda(cudaDeviceSynchronize());
    cuda(cudaMemGetInfo(&bytes, &total));
    return (double)bytes / 1048576.0;
}

static double ms_of(ncclResult_t (*call)(void))
{
    const double began = rebatch_nccl_ms();
    nccl(call());
    check(rebatch_nccl_wait(comm, stream, WAIT_MS));
    return rebatch_nccl_ms() - began;
}

/* As newer headers of NCCL declare them; this program may be built with older ones. */
static ncclResult_t (*comm_suspend)(ncclComm_t, int);
static ncclResult_t (*comm_resume)(ncclComm_t);

static ncclResult_t suspend(void)
{
    return comm_suspend(comm, SUSPEND_MEMORY);
}

static ncclResult_t resume(void)
{
    return comm_resume(comm);
}

static void find(void *out, const char *name)
{
    void *const address = dlsym(RTLD_DEFAULT, name);
    memcpy(out, &address, sizeof address);
}

static void measure_memory(double before_mib, double made_mib)
{
    void *gradients;
    cuda(cudaMalloc(&gradients, BYTES));
    const double allocated_mib = free_mib();
    nccl(ncclAllReduce(gradients, gradients, BYTES / sizeof(float), ncclFloat, ncclSum, comm,
                       stream));
    check(rebatch_nccl_wait(comm, stream, WAIT_MS));
    const double used_mib = free_mib();
    find(&comm_suspend, "ncclCommSuspend");
    find(&comm_resume, "ncclCommResume");
    int version = 0;
    nccl(ncclGetVersion(&version));
    if (rank == 0)
        printf("memory: nccl=%d communicator_mib=%.0f first_all_reduce_mib=%.0f\n", version,
               before_mib - made_mib, allocated_mib - used_mib);
    if (!comm_suspend || !comm_resume) {
        if (rank == 0)
            printf("memory: this NCCL has no ncclCommSuspend\n");
        return;
    }
    const double suspend_ms = ms_of(suspend), suspended_mib = free_mib();
    const double resume_ms = ms_of(resume);
    if (rank == 0)
        printf("memory: suspended gives back %.0f MiB, in %.1f ms; resumed in %.1f ms\n",
               suspended_mib - used_mib, suspend_ms, resume_ms);
}

/* ---- a rank ---- */

static double connect_ranks(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    void *block = NULL;
    cuda(cudaSetDevice(rank));
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda(cudaMallocHost(&block, WORDS * sizeof *words));
    words = block;
    cuda(cudaMalloc(&block, WORDS * sizeof *words));
    device_words = block;
    if (rank == 0) {
        nccl(ncclGetUniqueId(&shared->ids[0]));
        nccl(ncclGetUniqueId(&shared->ids[1]));
        __sync_synchronize();
        shared->has_ids = 1;
    }
    for (int ms = 0; !shared->has_ids && ms < WAIT_MS; ms++)
        (void)poll(NULL, 0, 1);
    const double before_mib = free_mib();
    nccl(ncclCommInitRankConfig(&comm, ranks, shared->ids[0], rank, &config));
    check(rebatch_nccl_wait(comm, stream, WAIT_MS));
    return before_mib;
}

static int run(void)
{
    const double before_mib = connect_ranks(), made_mib = free_mib();
    measure_memory(before_mib, made_mib);
    nccl(ncclCommInitRank(&other, ranks, shared->ids[1], rank));
    check(rebatch_group_nccl(&group, &votes, comm));
    const double blocking_us = measure(vote_barely);
    const double bare_us = measure(vote_barely_without_blocking), vote_us = measure(vote);
    if (rank == 0)
        printf("vote: ranks=%d bare_us=%.2f vote_us=%.2f bare_in_a_blocking_communicator_us=%.2f\n",
               ranks, bare_us, vote_us, blocking_us);
    (void)fflush(stdout);
    rebatch_nccl_close(&votes);
    return 0;
}

int main(int count, char **arguments)
{
    int failed = 0;
    if (count > 1)
        ranks = (int)strtol(arguments[1], NULL, 10);
    if (ranks < 1) {
        fprintf(stderr, "bench-nccl: %s ranks: expected a number of GPUs\n", arguments[1]);
        return 2;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    for (rank = 0; rank < ranks; rank++) {
        const pid_t child = fork(); /* before CUDA is used */
        if (child < 0)
            return 1;
        if (child == 0)
            _exit(run());
    }
    for (int i = 0; i < ranks; i++) {
        int status = 0;
        failed |= wait(&status) < 0 || status != 0;
    }
    return failed;
}
