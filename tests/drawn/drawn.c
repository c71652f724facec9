/* Owns what the ranks of a test live through.
 * Must not know how they are connected, nor more of the library than its public headers say. */
#include "drawn/drawn.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "rebatch/rebatch.h"

#define SUMS 8
#define STEPS 12
#define STATUS ((rebatch_status)(REBATCH_E_USER + 9))
#define TIMEOUT_MS 60000 /* where all ranks come */
#define MISSING_MS 1000  /* where one does not */

enum trouble { NOTHING, FAILS, FAILS_TWICE, EXHAUSTED, ABANDONS, TROUBLES };
enum place { ZERO_GRAD, FORWARD, REDUCE, UPDATE, NEXT_STEP, NOWHERE };
static const char *const places[] = {"zero_grad", "forward", "reduce", "update", "silent"};

static struct {
    uint32_t rank, size;
    uint64_t seed, timeout_ms;
    const struct drawn_connection *connection;
    rebatch_status (*all_reduce)(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user); /* of the connection */
    rebatch *rb;
    rebatch_device *host, *device;
    size_t batch, samples; /* of this rank, of all */
    uint64_t first;
    uint64_t sums[SUMS], parameters[SUMS];
    enum place fails_at, dies_at;
    uint64_t steps, ooms, ended, faults;
} my;

static uint64_t mix(uint64_t z)
{
    z += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static uint64_t draw(uint64_t try, uint64_t rank, uint64_t what)
{
    return mix(mix(mix(mix(my.seed) + try) + rank) + what);
}

static uint64_t contribution(uint64_t step, uint64_t sample, size_t i)
{
    return mix((step * 1000003 + sample) * SUMS + i);
}

/* ---- the step ---- */

static rebatch_status enter(enum place place)
{
    if (place == my.dies_at)
        (void)raise(SIGKILL);
    return place == my.fails_at ? STATUS : REBATCH_OK;
}

/* Memory that is asked of the device each time, and given back. */
static rebatch_status touch(size_t bytes)
{
    rebatch_pool *const pool = rebatch_get_pool(my.rb);
    void *block;
    (void)rebatch_pool_trim(pool, 0, NULL);
    const rebatch_status status = rebatch_pool_alloc(&block, pool, bytes, NULL, 0);
    return status ? status : rebatch_pool_free(pool, block);
}

static rebatch_status zero_grad(void *user)
{
    (void)user;
    rebatch_status status = enter(ZERO_GRAD);
    if (!status)
        status = touch(4096);
    memset(my.sums, 0, sizeof my.sums);
    return status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    (void)user;
    rebatch_status status = enter(FORWARD);
    if (!status)
        status = touch(mb->count << 16);
    if (status)
        return status;
    rebatch_mutating(my.rb);
    for (size_t s = mb->first; s < mb->first + mb->count; s++)
        for (size_t i = 0; i < SUMS; i++)
            my.sums[i] += contribution(mb->step, my.first + s, i);
    my.faults += mb->batch != my.samples || mb->rank_batch != my.batch;
    return touch(mb->count << 15); /* where an OOM costs the samples so far */
}

static rebatch_status reduce(bool is_abandoned, void *user)
{
    uint64_t values[SUMS];
    rebatch_status status = is_abandoned ? REBATCH_OK : enter(REDUCE);
    (void)user;
    if (!status && !is_abandoned)
        status = touch(4096);
    if (status)
        return status;
    memcpy(values, my.sums, sizeof values);
    status = my.connection->sum(values, SUMS, my.timeout_ms);
    if (!status)
        memcpy(my.sums, values, sizeof values);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    (void)user;
    rebatch_status status = enter(UPDATE);
    if (!status)
        status = touch(8192);
    if (status)
        return status;
    rebatch_mutating(my.rb);
    for (size_t i = 0; i < SUMS; i++)
        my.parameters[i] += my.sums[i];
    return REBATCH_OK;
}

static rebatch_status step(rebatch_step_report *report)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .reduce = reduce,
                                  .flags = REBATCH_DECLARES_MUTATION};
    *report = (rebatch_step_report){0};
    rebatch_clear_error();
    return rebatch_step(my.rb, &ops, my.batch, NULL, report);
}

/* ---- a life ---- */

static bool open_life(const rebatch_group *group)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.group = group;
    options.group_timeout_ms = my.timeout_ms;
    options.log_level = REBATCH_LOG_QUIET;
    my.samples = 0;
    for (uint32_t i = 0; i < my.size; i++) {
        const size_t batch = 6 + 3 * (i % 4);
        if (i == my.rank) {
            my.first = my.samples;
            my.batch = batch;
        }
        my.samples += batch;
    }
    memset(my.parameters, 0, sizeof my.parameters);
    return !my.connection->open_device(&my.host) &&
           !rebatch_device_open_fault(&my.device, my.host, NULL) &&
           !rebatch_open(&my.rb, my.device, &options);
}

static void close_life(void)
{
    rebatch_close(my.rb);
    rebatch_device_close(my.device);
    rebatch_device_close(my.host);
}

/* Requests of this rank that find no memory: one or two in a row, or none. */
static void arm(uint64_t try, bool for_ever)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    if (draw(try, my.rank, 0) % 3 == 0) {
        plan.nth = 1 + draw(try, my.rank, 1) % 10;
        plan.times = 1 + draw(try, my.rank, 2) % 2;
    }
    if (for_ever) {
        plan.nth = 1;
        plan.times = REBATCH_FAULT_FOREVER;
    }
    my.faults += rebatch_fault_arm(my.device, &plan) != REBATCH_OK;
}

static void blame(uint64_t try, enum trouble trouble, rebatch_status status)
{
    if (my.faults++ < 5)
        fprintf(
            stderr, "seed %" PRIu64 ", try %" PRIu64 ", trouble %d: rank %u ended with %s: %s\n",
            my.seed, try, (int)trouble, my.rank, rebatch_status_name(status), rebatch_last_error());
}

static bool is_as_drawn(enum trouble trouble, uint32_t rank, bool is_struck, rebatch_status status)
{
    static const rebatch_status own[TROUBLES] = {[FAILS] = STATUS,
                                                 [FAILS_TWICE] = STATUS,
                                                 [EXHAUSTED] = REBATCH_E_EXHAUSTED,
                                                 [ABANDONS] = REBATCH_OK};
    char text[32];
    if (trouble == NOTHING || is_struck)
        return status == own[trouble];
    (void)snprintf(text, sizeof text, "rank %u ended step ", rank);
    return status == REBATCH_E_PEER && strstr(rebatch_last_error(), text) &&
           (trouble != ABANDONS || strstr(rebatch_last_error(), "no data"));
}

/* One try at a step. Whether it is to have updated. */
static bool try_step(uint64_t try)
{
    const uint32_t a = (uint32_t)(draw(try, my.size, 3) % my.size);
    const uint32_t b = (uint32_t)(draw(try, my.size, 4) % my.size);
    const uint64_t number = draw(try, my.size, 5) % (2 * TROUBLES);
    const enum trouble trouble = number < TROUBLES ? (enum trouble)number : NOTHING;
    const bool is_twice = trouble == FAILS_TWICE;
    const bool is_struck = my.rank == a || (is_twice && my.rank == b);
    rebatch_step_report report = {0};
    arm(try, trouble == EXHAUSTED && is_struck);
    my.fails_at = NOWHERE;
    if (is_struck && (trouble == FAILS || is_twice))
        my.fails_at = draw(try, my.rank, 6) % 2 ? ZERO_GRAD : FORWARD;
    const rebatch_status status =
        trouble == ABANDONS && is_struck ? rebatch_abandon_step(my.rb, "no data") : step(&report);
    if (!is_as_drawn(trouble, is_twice && b < a ? b : a, is_struck, status))
        blame(try, trouble, status);
    my.ooms += report.ooms;
    my.ended += trouble != NOTHING;
    return trouble == NOTHING;
}

static void expect_parameters(uint64_t steps)
{
    uint64_t expected[SUMS] = {0};
    for (uint64_t step = 0; step < steps; step++)
        for (uint64_t s = 0; s < my.samples; s++)
            for (size_t i = 0; i < SUMS; i++)
                expected[i] += contribution(step, s, i);
    if (memcmp(my.parameters, expected, sizeof expected)) {
        fprintf(stderr, "seed %" PRIu64 ": rank %u has other parameters\n", my.seed, my.rank);
        my.faults++;
    }
}

static void live(uint64_t seed)
{
    rebatch_group group;
    my.seed = seed;
    if (my.connection->open(&group) || !open_life(&group)) {
        fprintf(stderr, "rank %u does not open: %s\n", my.rank, rebatch_last_error());
        my.connection->end(1);
    }
    uint64_t done = 0;
    for (uint64_t try = 0; try < STEPS; try++)
        done += try_step(try);
    my.steps += done;
    expect_parameters(done);
    close_life();
    my.connection->close();
}

/* ---- a rank that does not come ---- */

/* The steps in which all ranks come have the time that a busy machine needs. */
static rebatch_status all_reduce_in_time(uint64_t *words, size_t count, rebatch_reduction reduction,
                                         uint64_t timeout_ms, void *user)
{
    (void)timeout_ms;
    return my.all_reduce(words, count, reduction, my.timeout_ms, user);
}

/* Ends the process. The others find out within their timeouts, and so at every later step. */
static void live_with_death(enum place place)
{
    rebatch_group group;
    rebatch_step_report report;
    const bool is_dying = my.rank == my.size - 1;
    bool is_right = !my.connection->open(&group);
    my.all_reduce = group.all_reduce;
    group.all_reduce = all_reduce_in_time;
    is_right = is_right && open_life(&group);
    for (int i = 0; i < 2 && is_right; i++)
        is_right = step(&report) == REBATCH_OK;
    my.timeout_ms = MISSING_MS;
    if (is_dying && place == NEXT_STEP) {
        sleep(3 * MISSING_MS / 1000);
        _exit(0);
    }
    my.dies_at = is_dying ? place : NOWHERE;
    rebatch_status status = step(&report);
    if (place == UPDATE && status == REBATCH_OK) /* it died when all had voted */
        status = step(&report);
    is_right = is_right && status == REBATCH_E_PEER && step(&report) == REBATCH_E_PEER &&
               strstr(rebatch_last_error(), "did not vote");
    close_life();
    my.connection->close(); /* waits for nobody */
    printf("rank %u %s: %s\n", my.rank, is_right ? "was told" : "ended otherwise",
           rebatch_last_error());
    (void)fflush(stdout);
    _exit(is_right ? 0 : 1); /* a regular end would wait for the rank that is gone */
}

int drawn_live(const struct drawn_connection *connection, uint32_t rank, uint32_t size,
               const char *what)
{
    my.connection = connection;
    my.rank = rank;
    my.size = size;
    my.fails_at = my.dies_at = NOWHERE;
    my.timeout_ms = TIMEOUT_MS;
    for (int place = 0; place < NOWHERE; place++)
        if (strcmp(what, places[place]) == 0)
            live_with_death((enum place)place);
    const uint64_t seeds = strtoull(what, NULL, 10);
    for (uint64_t seed = 1; seed <= seeds; seed++)
        live(seed);
    uint64_t totals[2] = {my.ooms, my.faults};
    if (connection->sum(totals, 2, TIMEOUT_MS))
        connection->end(1);
    if (rank == 0)
        printf("%u ranks, %" PRIu64 " seeds: %" PRIu64 " steps, %" PRIu64
               " that ranks ended, %" PRIu64 " OOMs, %" PRIu64 " faults\n",
               size, seeds, my.steps, my.ended, totals[0], totals[1]);
    return totals[1] != 0 || my.steps == 0 || totals[0] == 0;
}
