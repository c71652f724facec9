/* What a vote of a group costs beyond the all-reduces of the program, in a step whose callbacks do
 * nothing: of one rank, whose all-reduce returns at once. With VOTE_MPI of processes through
 * rebatch/mpi.h, also the vote alone, beside a bare MPI_Allreduce of the same words, and an
 * MPI_Iallreduce, which can be waited for with a timeout. */
#include <stdio.h>

#include "base/base.h"
#include "measure.h"
#ifdef VOTE_MPI
#include "rebatch/mpi.h"
#endif
#include "rebatch/rebatch.h"

enum { STEPS = 5000, RUNS = 21, BEGIN_WORDS = 10, END_WORDS = 1 };

static rebatch_group group;
static rebatch *sessions[2]; /* without a group, with it */

static void check(rebatch_status status)
{
    if (!status)
        return;
    fprintf(stderr, "bench-vote: %s\n", rebatch_last_error());
    exit(1); /* by which mpirun ends the others */
}

/* ---- votes ---- */

#ifdef VOTE_MPI
static rebatch_mpi votes;

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
    check(group.all_reduce(words, BEGIN_WORDS, REBATCH_SUM, 60000, group.user));
    check(group.all_reduce(words, END_WORDS, REBATCH_SUM, 60000, group.user));
}
#else
static rebatch_status meet_nobody(uint64_t *words, size_t count, rebatch_reduction reduction,
                                  uint64_t timeout_ms, void *user)
{
    (void)words, (void)count, (void)reduction, (void)timeout_ms, (void)user;
    return REBATCH_OK;
}
#endif

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
    check(rebatch_step(rb, &ops, 1, rb, NULL));
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

/* Nanoseconds a vote, of which a call makes two, the median of RUNS. */
static double measure(void (*run)(void))
{
    double ns[RUNS];
    for (int i = -1; i < RUNS; i++) { /* the first one warms */
#ifdef VOTE_MPI
        MPI_Barrier(MPI_COMM_WORLD);
#endif
        const uint64_t began = rbi_now_ns();
        for (int n = 0; n < STEPS; n++)
            run();
        if (i >= 0)
            ns[i] = (double)(rbi_now_ns() - began) / (2 * STEPS);
    }
    return measure_median(ns, RUNS);
}

int main(int count, char **arguments)
{
    rebatch_device *device = NULL;
    rebatch_options options = REBATCH_OPTIONS_INIT;
#ifdef VOTE_MPI
    MPI_Init(&count, &arguments);
    check(rebatch_group_mpi(&group, &votes, MPI_COMM_WORLD));
#else
    (void)count, (void)arguments;
    group = (rebatch_group){.struct_size = sizeof group, .size = 1, .all_reduce = meet_nobody};
#endif
    check(rebatch_device_open_host(&device, 64 << 20, NULL));
    check(rebatch_open(&sessions[0], device, &options));
    options.group = &group;
    check(rebatch_open(&sessions[1], device, &options));
    const double stepped = measure(step_together) - measure(step_alone);
#ifdef VOTE_MPI
    const double bare = measure(vote_barely), late = measure(vote_late), alone = measure(vote);
    if (group.rank == 0)
        printf("vote: ranks=%u bare_ns=%.0f iallreduce_ns=%.0f vote_ns=%.0f in_step_ns=%.0f\n",
               group.size, bare, late, alone, stepped);
#else
    printf("vote: ranks=1 in_step_ns=%.0f\n", stepped);
#endif
    rebatch_close(sessions[0]);
    rebatch_close(sessions[1]);
    rebatch_device_close(device);
#ifdef VOTE_MPI
    rebatch_mpi_close(&votes);
    MPI_Finalize();
#endif
    return 0;
}
