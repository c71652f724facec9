/* Owns a training of several processes that vote by rebatch/mpi.h: OOMs and failures are drawn from
 * one seed, so each rank knows how a step must end. A rank can sleep for ever, or be killed.
 * Must not know more of the library than its public headers say. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rebatch/mpi.h"
#include "rebatch/rebatch.h"

#define STEPS 200
#define TROUBLED_STEP 5
#define OWN_STATUS ((rebatch_status)(REBATCH_E_USER + 3))

struct training {
    rebatch *rb;
    MPI_Comm comm; /* of the accumulators */
    int rank, size;
    uint64_t seed, calls;  /* of rebatch_step() */
    uint64_t sum, updated; /* the accumulator, the parameter */
    bool has_failed;       /* the request that this step draws */
    const char *trouble;   /* of rank 1: "sleeps", "dies" or "" */
};

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t draw(const struct training *t, int rank, uint64_t what)
{
    uint64_t z =
        t->seed + UINT64_C(0x9e3779b97f4a7c15) * (t->calls * 64 + (uint64_t)rank * 4 + what);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static size_t batch_of(const struct training *t, int rank)
{
    return 1 + draw(t, rank, 0) % 16;
}

static bool fails(const struct training *t, int rank)
{
    return !t->trouble[0] && draw(t, rank, 1) % 16 == 0;
}

/* Every fourth step's first request finds the device full. */
static rebatch_status request(struct training *t, uint64_t what)
{
    rebatch_pool *pool = rebatch_get_pool(t->rb);
    const bool is_full = !t->has_failed && draw(t, t->rank, 2) % 4 == what;
    void *block;
    t->has_failed |= is_full;
    if (is_full) {
        (void)rebatch_pool_trim(pool, 0, NULL);
        (void)rebatch_pool_set_limit(pool, 1);
    }
    rebatch_status status = rebatch_pool_alloc(&block, pool, 4096, NULL, 0);
    if (is_full)
        (void)rebatch_pool_set_limit(pool, 0);
    return status ? status : rebatch_pool_free(pool, block);
}

static rebatch_status zero(void *user)
{
    struct training *t = user;
    t->sum = 0;
    return request(t, 0);
}

static void come_no_more(const struct training *t)
{
    if (strcmp(t->trouble, "dies") == 0)
        (void)raise(SIGKILL);
    for (;;)
        (void)pause();
}

static rebatch_status train(const rebatch_microbatch *mb, void *user)
{
    struct training *t = user;
    rebatch_status status = request(t, 1);
    if (status)
        return status;
    if (t->trouble[0] && t->rank == 1 && mb->step == TROUBLED_STEP)
        come_no_more(t);
    if (fails(t, t->rank))
        return OWN_STATUS;
    rebatch_mutating(t->rb);
    for (size_t i = mb->first; i < mb->first + mb->count; i++)
        t->sum += draw(t, t->rank, 3) + i;
    return REBATCH_OK;
}

/* Where a rank no longer comes, a collective of the program would need a timeout of its own. */
static rebatch_status reduce(bool is_abandoned, void *user)
{
    struct training *t = user;
    const rebatch_status status = is_abandoned || t->trouble[0] ? REBATCH_OK : request(t, 2);
    if (status || t->trouble[0])
        return status;
    return MPI_Allreduce(MPI_IN_PLACE, &t->sum, 1, MPI_UINT64_T, MPI_SUM, t->comm) == MPI_SUCCESS
               ? REBATCH_OK
               : OWN_STATUS;
}

static rebatch_status update(void *user)
{
    struct training *t = user;
    const rebatch_status status = request(t, 3);
    if (status)
        return status;
    rebatch_mutating(t->rb);
    t->updated += t->sum;
    return REBATCH_OK;
}

/* How the step must end here, and what the parameter is after it. */
static rebatch_status expected(const struct training *t, uint64_t *updated)
{
    rebatch_status status = REBATCH_OK;
    uint64_t sum = 0;
    for (int rank = 0; rank < t->size; rank++) {
        if (fails(t, rank))
            status = REBATCH_E_PEER;
        for (size_t i = 0; i < batch_of(t, rank); i++)
            sum += draw(t, rank, 3) + i;
    }
    if (fails(t, t->rank))
        return OWN_STATUS;
    *updated += status ? 0 : sum;
    return status;
}

static int run_step(struct training *t)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = zero;
    ops.forward_backward = train;
    ops.optimizer_step = update;
    ops.reduce = reduce;
    ops.flags = REBATCH_DECLARES_MUTATION;
    uint64_t updated = t->updated;
    t->calls++;
    t->has_failed = false;
    const rebatch_status wanted = t->trouble[0] ? REBATCH_OK : expected(t, &updated);
    const rebatch_status status = rebatch_step(t->rb, &ops, batch_of(t, t->rank), t, NULL);
    if (status == wanted && (t->trouble[0] || updated == t->updated))
        return 0;
    printf("rank %d, call %" PRIu64 ": status %d: expected %d (%s)\n", t->rank, t->calls, status,
           wanted, rebatch_last_error());
    (void)fflush(stdout);
    return 1;
}

static int run(struct training *t, rebatch_device *device, rebatch_mpi *votes)
{
    rebatch_group group;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.log_level = REBATCH_LOG_QUIET;
    options.group = &group;
    options.group_timeout_ms = t->trouble[0] ? 500 : 0;
    if (rebatch_group_mpi(&group, votes, MPI_COMM_WORLD) ||
        rebatch_open(&t->rb, device, &options)) {
        printf("no session: %s\n", rebatch_last_error());
        return 1;
    }
    int result = 0;
    for (uint64_t i = 0; i < STEPS && !result; i++)
        result = run_step(t);
    rebatch_close(t->rb);
    return result;
}

int main(int argc, char **argv)
{
    struct training t = {.seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1,
                         .trouble = argc > 2 ? argv[2] : ""};
    rebatch_device *device;
    rebatch_mpi votes;
    if (MPI_Init(&argc, &argv) || MPI_Comm_dup(MPI_COMM_WORLD, &t.comm) ||
        MPI_Comm_rank(t.comm, &t.rank) || MPI_Comm_size(t.comm, &t.size) ||
        rebatch_device_open_host(&device, (size_t)4 << 20, NULL))
        return 2;
    const int result = run(&t, device, &votes);
    rebatch_device_close(device);
    if (result)
        (void)MPI_Abort(MPI_COMM_WORLD, 3);
    if (t.rank == 0)
        printf("%d ranks, %d steps, seed %" PRIu64 ": as expected\n", t.size, STEPS, t.seed);
    rebatch_mpi_close(&votes);
    (void)MPI_Finalize();
    return 0;
}
