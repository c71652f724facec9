/* What a vote costs through rebatch/mpi.h beyond a bare MPI_Allreduce of the same words, or an
 * MPI_Iallreduce, which can be waited for with a timeout: the vote alone, and in a step whose
 * callbacks do nothing. */
#include <stdio.h>
#include <stdlib.h>

#include "rebatch/mpi.h"
#include "rebatch/rebatch.h"

enum { STEPS = 5000, RUNS = 21, BEGIN_WORDS = 10, END_WORDS = 1 };

static rebatch_group group;
static rebatch_mpi votes;
static rebatch *sessions[2]; /* without a group, with it */

static void vote_barely(void)
{
    uint64_t words[BEGIN_WORDS] = {1};
    MPI_Allreduce(MPI_IN_PLACE, words, BEGIN_WORDS, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, words, END_WORDS, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
}

static void vote_late(void)
{
    uint64_t words[BEGIN_WORDS] = {1};
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, words, BEGIN_WORDS, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD,
                   &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    MPI_Iallreduce(MPI_IN_PLACE, words, END_WORDS, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void vote(void)
{
    uint64_t words[BEGIN_WORDS] = {1};
    if (group.all_reduce(words, BEGIN_WORDS, REBATCH_SUM, 60000, group.user) ||
        group.all_reduce(words, END_WORDS, REBATCH_SUM, 60000, group.user))
        MPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- the step ---- */

static rebatch_status do_nothing(void *user)
{
    (void)user;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    rebatch_mutating(user);
    return REBATCH_OK;
}

static rebatch_status optimizer_step(void *user)
{
    rebatch_mutating(user);
    return REBATCH_OK;
}

static rebatch_status reduce(bool is_abandoned, void *user)
{
    (void)is_abandoned, (void)user;
    return REBATCH_OK;
}

static void step(rebatch *rb)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = do_nothing,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .reduce = reduce,
                                  .flags = REBATCH_DECLARES_MUTATION};
    if (rebatch_step(rb, &ops, 1, rb, NULL)) {
        fprintf(stderr, "bench-vote-mpi: %s\n", rebatch_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static void step_alone(void)
{
    step(sessions[0]);
}

static void step_together(void)
{
    step(sessions[1]);
}

/* ---- measuring ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Nanoseconds a call, the median of RUNS. */
static double measure(void (*run)(void))
{
    double ns[RUNS];
    for (int i = -1; i < RUNS; i++) { /* the first one warms */
        MPI_Barrier(MPI_COMM_WORLD);
        const double began = MPI_Wtime();
        for (int n = 0; n < STEPS; n++)
            run();
        if (i >= 0)
            ns[i] = (MPI_Wtime() - began) * 1e9 / STEPS;
    }
    qsort(ns, RUNS, sizeof *ns, by_value);
    return ns[RUNS / 2];
}

int main(int count, char **arguments)
{
    rebatch_device *device = NULL;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    MPI_Init(&count, &arguments);
    rebatch_status status = rebatch_group_mpi(&group, &votes, MPI_COMM_WORLD);
    if (!status)
        status = rebatch_device_open_host(&device, 64 << 20, NULL);
    if (!status)
        status = rebatch_open(&sessions[0], device, &options);
    options.group = &group;
    if (!status)
        status = rebatch_open(&sessions[1], device, &options);
    if (status) {
        fprintf(stderr, "bench-vote-mpi: %s\n", rebatch_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    const double bare = measure(vote_barely) / 2;
    const double late = measure(vote_late) / 2;
    const double alone = measure(vote) / 2;
    const double stepped = (measure(step_together) - measure(step_alone)) / 2;
    if (group.rank == 0)
        printf("vote: ranks=%u bare_ns=%.0f iallreduce_ns=%.0f vote_ns=%.0f in_step_ns=%.0f\n",
               group.size, bare, late, alone, stepped);
    rebatch_close(sessions[0]);
    rebatch_close(sessions[1]);
    rebatch_device_close(device);
    rebatch_mpi_close(&votes);
    MPI_Finalize();
    return 0;
}
