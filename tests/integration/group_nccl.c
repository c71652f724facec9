/* Owns the tests of rebatch/nccl.h, over stand-ins for NCCL and CUDA's runtime: one rank of two,
 * the other being drawn. Must not know more of the library than its public headers say. */
#include "rebatch/nccl.h"

#include <stdlib.h>

#include "rig.h"

/* ---- the stand-ins ---- */

/* What a stream has been given runs when it is asked for the last time. */
struct work {
    void *to;
    const void *from;
    size_t bytes;
    ncclRedOp_t op;
    bool is_copy;
};

static struct {
    uint64_t other[REBATCH_GROUP_WORDS]; /* the other rank's words */
    unsigned slow, running;       /* polls until NCCL has taken a call in; until it is done */
    unsigned entering;            /* of slow, left */
    bool is_missing;              /* the other rank never comes */
    ncclResult_t refused, broken; /* what a call, and later the communicator, says */

    struct work work[8];
    unsigned count, polls, aborts, votes, blocks, streams;
} nccl;

static int object;
#define COMM ((ncclComm_t)(void *)&object)

ncclResult_t ncclCommCount(ncclComm_t comm, int *out)
{
    *out = 2;
    return comm == COMM ? ncclSuccess : ncclInvalidUsage;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *out)
{
    *out = 1;
    return comm == COMM ? ncclSuccess : ncclInvalidUsage;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    nccl.aborts += comm == COMM;
    nccl.count = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    (void)comm;
    *out = nccl.broken ? nccl.broken : ncclSuccess;
    if (!nccl.broken && nccl.entering > 0) {
        nccl.entering--;
        *out = ncclInProgress;
    }
    return ncclSuccess;
}

static void enqueue(struct work work)
{
    cr_assert_lt(nccl.count, sizeof nccl.work / sizeof *nccl.work);
    nccl.work[nccl.count++] = work;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    cr_assert(comm == COMM && stream && type == ncclUint64);
    if (nccl.refused)
        return nccl.refused;
    nccl.votes++;
    nccl.entering = nccl.slow;
    enqueue((struct work){to, from, count * sizeof(uint64_t), op, false});
    return nccl.entering ? ncclInProgress : ncclSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    (void)kind;
    cr_assert_not_null(stream);
    cr_assert_eq(nccl.entering, 0, "a copy overtakes a collective that NCCL has not taken in");
    enqueue((struct work){to, from, bytes, ncclSum, true});
    return cudaSuccess;
}

static uint64_t reduced(uint64_t a, uint64_t b, ncclRedOp_t op)
{
    return op == ncclSum ? a + b : (op == ncclMin) == (a < b) ? a : b;
}

static void run(const struct work *work)
{
    uint64_t words[REBATCH_GROUP_WORDS];
    memcpy(words, work->from, work->bytes);
    for (size_t i = 0; !work->is_copy && i < work->bytes / sizeof *words; i++)
        words[i] = reduced(words[i], nccl.other[i], work->op);
    memcpy(work->to, words, work->bytes);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    (void)stream;
    if (nccl.is_missing || nccl.polls++ < nccl.running)
        return cudaErrorNotReady;
    for (unsigned i = 0; i < nccl.count; i++)
        run(&nccl.work[i]);
    nccl.count = nccl.polls = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    cr_assert_eq(flags, cudaStreamNonBlocking);
    *out = (cudaStream_t)(void *)&object;
    nccl.streams++;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    (void)stream;
    cr_assert_eq(nccl.count, 0, "a stream is destroyed that has work");
    nccl.streams--;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    nccl.blocks++;
    *out = malloc(bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer)
{
    nccl.blocks--;
    free(pointer);
    return cudaSuccess;
}

/* ---- the tests ---- */

static rebatch_nccl votes;

static rebatch_group open_group(void)
{
    rebatch_group group;
    OK(rebatch_group_nccl(&group, &votes, COMM));
    cr_assert(group.rank == 1 && group.size == 2 && group.all_reduce && group.abort);
    cr_assert_eq(nccl.votes, 1, "the ranks are not connected");
    return group;
}

static void expect_released(void)
{
    cr_assert(nccl.streams == 0 && nccl.blocks == 0, "%u streams and %u blocks are left",
              nccl.streams, nccl.blocks);
}

Test(group_nccl, votes_sum_and_find_the_least_and_the_most)
{
    static const uint64_t own[3] = {1, UINT64_MAX, 7}, other[3] = {5, 3, 7};
    static const uint64_t expected[][3] = {
        [REBATCH_SUM] = {6, 2, 14}, [REBATCH_MIN] = {1, 3, 7}, [REBATCH_MAX] = {5, UINT64_MAX, 7}};
    rebatch_group group = open_group();
    memcpy(nccl.other, other, sizeof other);
    for (int kind = REBATCH_SUM; kind <= REBATCH_MAX; kind++) {
        uint64_t words[3];
        memcpy(words, own, sizeof words);
        nccl.running = 5;
        nccl.slow = kind == REBATCH_MIN ? 3 : 0;
        OK(group.all_reduce(words, 3, (rebatch_reduction)kind, 10000, group.user));
        cr_assert_arr_eq(words, expected[kind], sizeof words);
    }
    rebatch_nccl_close(&votes);
    rebatch_nccl_close(&votes);
    rebatch_nccl_close(NULL);
    cr_assert(nccl.aborts == 0 && !votes.is_aborted);
    expect_released();
}

Test(group_nccl, a_rank_that_does_not_come_ends_the_vote_and_the_communicator)
{
    rebatch_group group = open_group();
    uint64_t words[1] = {4};
    nccl.is_missing = true;
    cr_assert_eq(group.all_reduce(words, 1, REBATCH_SUM, 3, group.user), REBATCH_E_PEER);
    cr_assert_eq(words[0], 4);
    group.abort(group.user);
    cr_assert_eq(nccl.aborts, 1);
    rebatch_nccl_close(&votes);
    cr_assert(votes.is_aborted, "the program is not told that its communicator has ended");
    expect_released();
}

Test(group_nccl, what_nccl_reports_is_in_the_message)
{
    rebatch_group group = open_group();
    uint64_t words[1] = {4};
    nccl.running = UINT32_MAX;
    nccl.broken = ncclRemoteError;
    cr_assert_neq(group.all_reduce(words, 1, REBATCH_SUM, 60000, group.user), REBATCH_OK);
    SAYS("NCCL");
    nccl.broken = ncclSuccess;
    nccl.refused = ncclInvalidUsage;
    cr_assert_neq(group.all_reduce(words, 1, REBATCH_SUM, 60000, group.user), REBATCH_OK);
    group.abort(group.user);
    rebatch_nccl_close(&votes);
    expect_released();
}

Test(group_nccl, a_group_that_cannot_connect_leaves_nothing)
{
    rebatch_group group;
    nccl.broken = ncclRemoteError;
    cr_assert_neq(rebatch_group_nccl(&group, &votes, COMM), REBATCH_OK);
    cr_assert(!group.all_reduce && !group.user);
    cr_assert(nccl.aborts == 1 && votes.is_aborted);
    expect_released();
}

Test(group_nccl, what_is_null_is_refused)
{
    rebatch_group group;
    cr_assert_eq(rebatch_group_nccl(NULL, &votes, COMM), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_group_nccl(&group, NULL, COMM), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_group_nccl(&group, &votes, NULL), REBATCH_E_INVALID);
    cr_assert(!group.all_reduce && !group.user);
    expect_released();
}

Test(group_nccl, the_wait_of_a_reduce_ends)
{
    nccl.is_missing = true;
    cr_assert_eq(rebatch_nccl_wait(COMM, NULL, 2), REBATCH_E_PEER);
    nccl.is_missing = false;
    nccl.running = 40;
    nccl.entering = 4;
    OK(rebatch_nccl_wait(COMM, NULL, 10000));
}
