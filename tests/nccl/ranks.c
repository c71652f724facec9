/* Owns two ranks, processes of its own, with a GPU each, and their votes through rebatch/nccl.h.
 * Must not know what they live through (drawn.h).
 *
 *     ranks WHAT     # as drawn_live() takes it; the exit status is that of the ranks */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "drawn/drawn.h"
#include "rebatch/nccl.h"

#define RANKS 2
#define SETUP_MS 60000

/* Of all processes. */
static struct {
    ncclUniqueId id;
    volatile int has_id;
} * shared;

static int gpu;
static ncclComm_t comm;
static rebatch_nccl votes;
static cudaStream_t stream; /* of sums */
static void *sums;          /* on the GPU */

static rebatch_status check(ncclResult_t result)
{
    return result == ncclSuccess || result == ncclInProgress ? REBATCH_OK
                                                             : rebatch_from_nccl(NULL, (int)result);
}

static rebatch_status open_group(rebatch_group *out)
{
    return rebatch_group_nccl(out, &votes, comm);
}

static void close_group(void)
{
    rebatch_nccl_close(&votes);
}

/* A host device where there is none of CUDA: with the stand-in for NCCL. */
static rebatch_status open_device(rebatch_device **out)
{
    rebatch_cuda_options options = REBATCH_CUDA_OPTIONS_INIT;
    options.ordinal = gpu;
    const rebatch_status status = rebatch_device_open_cuda(out, &options);
    return status == REBATCH_E_NO_DEVICE ? rebatch_device_open_host(out, (size_t)4 << 20, NULL)
                                         : status;
}

static rebatch_status sum(uint64_t *values, size_t count, uint64_t timeout_ms)
{
    const size_t bytes = count * sizeof *values;
    rebatch_status status = rebatch_from_cuda(
        NULL, (int)cudaMemcpyAsync(sums, values, bytes, cudaMemcpyHostToDevice, stream));
    if (!status)
        status = check(ncclAllReduce(sums, sums, count, ncclUint64, ncclSum, comm, stream));
    if (!status)
        status = rebatch_nccl_wait(comm, stream, timeout_ms);
    if (!status)
        status = rebatch_from_cuda(
            NULL, (int)cudaMemcpyAsync(values, sums, bytes, cudaMemcpyDeviceToHost, stream));
    return status ? status : rebatch_nccl_wait(comm, stream, timeout_ms);
}

static void end(int code)
{
    if (!votes.is_aborted)
        (void)ncclCommAbort(comm);
    _exit(code);
}

static rebatch_status connect_ranks(int rank)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    int gpus = 0;
    rebatch_status status = rebatch_from_cuda(NULL, (int)cudaGetDeviceCount(&gpus));
    gpu = gpus ? rank % gpus : 0;
    if (!status)
        status = rebatch_from_cuda(NULL, (int)cudaSetDevice(gpu));
    if (!status)
        status =
            rebatch_from_cuda(NULL, (int)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (!status)
        status = rebatch_from_cuda(NULL, (int)cudaMalloc(&sums, 4096));
    if (!status && rank == 0)
        status = check(ncclGetUniqueId(&shared->id));
    if (rank == 0)
        shared->has_id = 1;
    for (int ms = 0; !shared->has_id && ms < SETUP_MS; ms++)
        (void)poll(NULL, 0, 1);
    __sync_synchronize();
    if (!status)
        status = check(ncclCommInitRankConfig(&comm, RANKS, shared->id, rank, &config));
    return status ? status : rebatch_nccl_wait(comm, stream, SETUP_MS);
}

static int live(int rank, const char *what)
{
    static const struct drawn_connection connection = {open_group, close_group, open_device, sum,
                                                       end};
    if (connect_ranks(rank)) {
        fprintf(stderr, "rank %d is not connected: %s\n", rank, rebatch_last_error());
        return 1;
    }
    const int code = drawn_live(&connection, (uint32_t)rank, RANKS, what);
    if (!check(ncclCommFinalize(comm)) && !rebatch_nccl_wait(comm, stream, SETUP_MS))
        (void)ncclCommDestroy(comm);
    return code;
}

/* A rank that is killed was meant to be. */
static int wait_for(int count)
{
    int code = 0;
    for (int i = 0; i < count; i++) {
        int status = 0;
        if (wait(&status) < 0)
            return 1;
        if (WIFEXITED(status) ? WEXITSTATUS(status) != 0 : WTERMSIG(status) != SIGKILL)
            code = 1;
    }
    return code;
}

int main(int count, char **arguments)
{
    const char *const what = count > 1 ? arguments[1] : "1";
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    for (int rank = 0; rank < RANKS; rank++) {
        const pid_t child = fork(); /* before CUDA is used */
        if (child < 0)
            return 1;
        if (child == 0) {
            const int code = live(rank, what);
            (void)fflush(NULL);
            _exit(code);
        }
    }
    return wait_for(RANKS);
}
