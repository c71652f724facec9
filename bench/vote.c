/* What the votes of a group cost a step beyond the all-reduce of the program: two threads whose
 * all-reduce is a meeting that spins, and one rank whose all-reduce returns at once. The callbacks
 * do nothing, so a step with a group has beyond one without it two votes and the call of reduce. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "rebatch/rebatch.h"

enum { RANKS = 2, STEPS = 5000, RUNS = 21, SPINS = 2000 };

/* ---- a meeting of threads ---- */

static struct {
    atomic_uint arrived;
    atomic_uint_fast64_t round;
    _Alignas(64) uint64_t words[2][REBATCH_GROUP_WORDS]; /* of a round, and of the next one */
    atomic_flag is_locked;
} meeting;

static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&meeting.is_locked, memory_order_acquire))
        sched_yield();
}

static rebatch_status meet(uint64_t *words, size_t count, rebatch_reduction reduction,
                           uint64_t timeout_ms, void *user)
{
    (void)reduction, (void)timeout_ms, (void)user;
    lock();
    const uint64_t round = atomic_load(&meeting.round);
    uint64_t *const sums = meeting.words[round % 2];
    for (size_t i = 0; i < count; i++)
        sums[i] += words[i];
    const bool is_last = atomic_fetch_add(&meeting.arrived, 1) + 1 == RANKS;
    if (is_last) { /* the sums of the round before were read by all */
        memset(meeting.words[(round + 1) % 2], 0, sizeof meeting.words[0]);
        atomic_store(&meeting.arrived, 0);
        atomic_store(&meeting.round, round + 1);
    }
    atomic_flag_clear_explicit(&meeting.is_locked, memory_order_release);
    for (unsigned spins = 0; atomic_load(&meeting.round) == round; spins++)
        if (spins > SPINS)
            sched_yield();
    memcpy(words, sums, count * sizeof *words);
    return REBATCH_OK;
}

static rebatch_status meet_nobody(uint64_t *words, size_t count, rebatch_reduction reduction,
                                  uint64_t timeout_ms, void *user)
{
    (void)words, (void)count, (void)reduction, (void)timeout_ms, (void)user;
    return REBATCH_OK;
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

static rebatch_status run_steps(rebatch *rb)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = do_nothing,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .reduce = reduce,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_status status = REBATCH_OK;
    for (int i = 0; i < STEPS && !status; i++)
        status = rebatch_step(rb, &ops, 1, rb, NULL);
    return status;
}

static void vote_barely(void)
{
    for (int i = 0; i < STEPS; i++) {
        uint64_t words[10] = {1}, failed = 0;
        (void)meet(words, 10, REBATCH_SUM, 1000, NULL);
        (void)meet(&failed, 1, REBATCH_SUM, 1000, NULL);
    }
}

/* ---- measuring ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sessions of the ranks, and what they run: steps, or with NULL bare votes. */
static rebatch *sessions[RANKS];

static void *run_rank(void *session)
{
    if (!session)
        vote_barely();
    else if (run_steps(session)) {
        fprintf(stderr, "bench-vote: %s\n", rebatch_last_error());
        exit(1);
    }
    return NULL;
}

/* Nanoseconds a step of `ranks` threads, the median of RUNS. */
static double measure(rebatch *const *of, unsigned ranks)
{
    double ns[RUNS];
    for (int run = -1; run < RUNS; run++) { /* the first one warms */
        pthread_t other = 0;
        const uint64_t began = rbi_now_ns();
        if (ranks > 1 && pthread_create(&other, NULL, run_rank, of[1]))
            exit(1);
        (void)run_rank(of[0]);
        if (ranks > 1)
            (void)pthread_join(other, NULL);
        if (run >= 0)
            ns[run] = (double)(rbi_now_ns() - began) / STEPS;
    }
    qsort(ns, RUNS, sizeof *ns, by_value);
    return ns[RUNS / 2];
}

static void open_sessions(rebatch_device *device, unsigned ranks,
                          rebatch_status (*all_reduce)(uint64_t *, size_t, rebatch_reduction,
                                                       uint64_t, void *))
{
    for (uint32_t i = 0; i < ranks; i++) {
        const rebatch_group group = {
            .struct_size = sizeof group, .rank = i, .size = ranks, .all_reduce = all_reduce};
        rebatch_options options = REBATCH_OPTIONS_INIT;
        options.group = all_reduce ? &group : NULL;
        if (rebatch_open(&sessions[i], device, &options)) {
            fprintf(stderr, "bench-vote: %s\n", rebatch_last_error());
            exit(1);
        }
    }
}

static double measure_steps(rebatch_device *device, unsigned ranks,
                            rebatch_status (*all_reduce)(uint64_t *, size_t, rebatch_reduction,
                                                         uint64_t, void *))
{
    open_sessions(device, ranks, all_reduce);
    const double ns = measure(sessions, ranks);
    for (uint32_t i = 0; i < ranks; i++)
        rebatch_close(sessions[i]);
    return ns;
}

int main(void)
{
    rebatch_device *device = NULL;
    if (rebatch_device_open_host(&device, 64 << 20, NULL)) {
        fprintf(stderr, "bench-vote: %s\n", rebatch_last_error());
        return 1;
    }
    rebatch *const none[RANKS] = {NULL};
    const double alone = measure_steps(device, 1, NULL);
    const double of_one = measure_steps(device, 1, meet_nobody);
    const double apart = measure_steps(device, RANKS, NULL);
    const double bare = measure(none, RANKS);
    const double together = measure_steps(device, RANKS, meet);
    printf("medians of %d runs of %d steps, callbacks empty, ns a step: no group %.0f, one rank "
           "%.0f; %d threads: no group %.0f, two bare all-reduces %.0f, a group %.0f\n",
           RUNS, STEPS, alone, of_one, RANKS, apart, bare, together);
    printf("vote: one_rank_ns=%.0f threads_ns=%.0f bare_ns=%.0f\n", (of_one - alone) / 2,
           (together - apart) / 2, bare / 2);
    rebatch_device_close(device);
    return 0;
}
