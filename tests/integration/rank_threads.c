/* Owns the ranks of the ranks_* tests: their meeting, and the step that they run.
 * Must not know what the tests make of it. */
#include "rank_threads.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the meeting ---- */

static void add(struct meeting *m, const uint64_t *words, size_t count, int kind)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t *const sum = &m->words[i];
        if (m->arrived == 0)
            *sum = words[i];
        else if (kind == REBATCH_MIN)
            *sum = words[i] < *sum ? words[i] : *sum;
        else if (kind == REBATCH_MAX)
            *sum = words[i] > *sum ? words[i] : *sum;
        else
            *sum += words[i];
    }
}

static void complete(struct meeting *m, size_t count, int kind)
{
    memcpy(m->result, m->words, sizeof m->result);
    memset(m->has_come, 0, m->size * sizeof *m->has_come);
    m->arrived = 0;
    m->round++;
    m->votes += kind != MEETING_PROGRAM;
    m->vote_words += kind != MEETING_PROGRAM ? count : 0;
    m->programs += kind == MEETING_PROGRAM;
    (void)pthread_cond_broadcast(&m->changed);
}

/* Those that come have all the time that a busy machine needs. */
static void wait_for_others(struct meeting *m, uint64_t timeout_ms)
{
    const uint64_t round = m->round;
    struct timespec until;
    while (m->absent && m->arrived + m->absent < m->size && !m->is_over)
        (void)pthread_cond_wait(&m->changed, &m->mutex);
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_ms / 1000);
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (!m->is_over && m->round == round)
        if (pthread_cond_timedwait(&m->changed, &m->mutex, &until) && m->round == round) {
            m->is_over = true;
            (void)pthread_cond_broadcast(&m->changed);
        }
}

void meeting_leave(struct meeting *m)
{
    (void)pthread_mutex_lock(&m->mutex);
    m->is_over = true;
    (void)pthread_cond_broadcast(&m->changed);
    (void)pthread_mutex_unlock(&m->mutex);
}

rebatch_status meeting_reduce(struct meeting *m, uint32_t rank, uint64_t *words, size_t count,
                              int kind, uint64_t timeout_ms)
{
    (void)pthread_mutex_lock(&m->mutex);
    if (m->arrived == 0) {
        m->count = count;
        m->kind = kind;
    } else if (!m->is_over && (m->count != count || m->kind != kind)) {
        m->was_mismatched = m->is_over = true;
        (void)pthread_cond_broadcast(&m->changed);
    }
    const uint64_t round = m->round;
    if (!m->is_over) {
        add(m, words, count, kind);
        m->has_come[rank] = true;
        if (++m->arrived == m->size) {
            complete(m, count, kind);
        } else {
            (void)pthread_cond_broadcast(&m->changed);
            wait_for_others(m, timeout_ms);
        }
    }
    const bool is_done = m->round != round;
    if (is_done)
        memcpy(words, m->result, count * sizeof *words);
    (void)pthread_mutex_unlock(&m->mutex);
    return is_done ? REBATCH_OK : REBATCH_E_PEER;
}

static rebatch_status all_reduce(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user)
{
    struct rank *r = user;
    if (r->vote)
        return r->vote(r, words, count, reduction, timeout_ms);
    return meeting_reduce(&r->ranks->meeting, r->number, words, count, (int)reduction, timeout_ms);
}

static uint32_t missing(void *user)
{
    const struct rank *r = user;
    const struct meeting *m = &r->ranks->meeting;
    uint32_t number = 0;
    while (number < m->size && m->has_come[number])
        number++;
    return number;
}

static void count_abort(void *user)
{
    struct rank *r = user;
    struct meeting *m = &r->ranks->meeting;
    (void)pthread_mutex_lock(&m->mutex);
    m->aborts++;
    (void)pthread_mutex_unlock(&m->mutex);
}

rebatch_group rank_group(struct rank *r)
{
    rebatch_group group = REBATCH_GROUP_INIT;
    group.rank = r->number;
    group.size = r->ranks->size;
    group.all_reduce = all_reduce;
    group.missing = missing;
    group.abort = count_abort;
    group.user = r;
    return group;
}

/* ---- the step ---- */

static uint64_t contribution(uint64_t step, uint64_t sample, size_t i)
{
    uint64_t z = (step * 1000003 + sample) * RANK_SUMS + i + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return z ^ z >> 27;
}

static uint64_t samples_of_all(const struct ranks *ranks)
{
    uint64_t samples = 0;
    for (uint32_t i = 0; i < ranks->size; i++)
        samples += ranks->rank[i].batch;
    return samples;
}

/* One that fails finds the device full; a moment later it is not. */
static rebatch_status request(struct rank *r, size_t bytes, void **out)
{
    rebatch_pool *const pool = rebatch_get_pool(r->rb);
    const uint64_t number = ++r->requests;
    const bool fails = r->fail_request && (number == r->fail_request ||
                                           (r->fails_for_ever && number > r->fail_request));
    if (!fails)
        return rebatch_pool_alloc(out, pool, bytes, NULL, 0);
    (void)rebatch_pool_trim(pool, 0, NULL);
    (void)rebatch_pool_set_limit(pool, 1);
    const rebatch_status status = rebatch_pool_alloc(out, pool, bytes, NULL, 0);
    (void)rebatch_pool_set_limit(pool, r->limit_bytes);
    return status;
}

/* A request whose memory is given back at once. */
static rebatch_status touch(struct rank *r, size_t bytes)
{
    void *block;
    const rebatch_status status = request(r, bytes, &block);
    return status ? status : rebatch_pool_free(rebatch_get_pool(r->rb), block);
}

static rebatch_status enter(struct rank *r, enum rank_place place)
{
    return r->inside ? r->inside(r, place) : REBATCH_OK;
}

static rebatch_status zero_grad(void *user)
{
    struct rank *r = user;
    rebatch_status status = enter(r, RANK_ZERO);
    if (!status)
        status = touch(r, 512);
    memset(r->sums, 0, sizeof r->sums);
    return status;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct rank *r = user;
    rebatch_status status = enter(r, RANK_FORWARD);
    if (!status)
        status = touch(r, r->unit_bytes * mb->count);
    rebatch_mutating(r->rb);
    for (size_t s = mb->first; s < mb->first + mb->count && !status; s++) {
        for (size_t i = 0; i < RANK_SUMS; i++)
            r->sums[i] += contribution(mb->step, r->first + s, i);
        if (s == mb->first)
            status = touch(r, 2048);
    }
    r->weights += mb->batch != samples_of_all(r->ranks) || mb->rank_batch != r->batch ||
                  rebatch_get_batch(r->rb, 0) != mb->batch;
    return status;
}

/* ---- lockstep: collectives within a micro-batch ---- */

/* Which samples the ranks run, and the sums of these: in each micro-batch, in this order. What an
 * abandoned rank adds is nothing. */
static rebatch_status gather(struct rank *r, const rebatch_microbatch *mb)
{
    uint64_t words[] = {mb->first, mb->count, 1};
    if (mb->is_abandoned)
        memset(words, 0, sizeof words);
    const rebatch_status status =
        meeting_reduce(&r->ranks->meeting, r->number, words, 3, MEETING_PROGRAM, 20000);
    r->calls++;
    if (!status && !mb->is_abandoned)
        r->others += words[0] != mb->first * words[2] || words[1] != mb->count * words[2];
    return status;
}

static rebatch_status scatter(struct rank *r, uint64_t sums[RANK_SUMS])
{
    r->calls++;
    return meeting_reduce(&r->ranks->meeting, r->number, sums, RANK_SUMS, MEETING_PROGRAM, 20000);
}

/* It calls what it has not called yet. */
static rebatch_status abandon_collectives(struct rank *r, const rebatch_microbatch *mb)
{
    uint64_t zeros[RANK_SUMS] = {0};
    rebatch_status status = enter(r, RANK_ABANDONED);
    if (!status && r->calls == 0)
        status = gather(r, mb);
    if (!status && r->calls == 1)
        status = scatter(r, zeros);
    r->calls = 0;
    r->abandons++;
    return status;
}

static rebatch_status run_collectives(struct rank *r, const rebatch_microbatch *mb,
                                      uint64_t sums[RANK_SUMS])
{
    rebatch_status status = touch(r, r->unit_bytes * mb->count);
    if (!status)
        status = gather(r, mb);
    if (!status)
        status = touch(r, 2048);
    for (size_t s = mb->first; s < mb->first + mb->count; s++)
        for (size_t i = 0; i < RANK_SUMS; i++)
            sums[i] += contribution(mb->step, r->first + s, i);
    if (!status)
        status = scatter(r, sums);
    return status ? status : touch(r, 1024);
}

static rebatch_status forward_backward_together(const rebatch_microbatch *mb, void *user)
{
    struct rank *r = user;
    uint64_t sums[RANK_SUMS] = {0};
    if (mb->is_abandoned)
        return abandon_collectives(r, mb);
    rebatch_status status = enter(r, RANK_FORWARD);
    if (!status)
        status = run_collectives(r, mb, sums);
    if (!status) {
        r->calls = 0;
        status = rebatch_mutating_together(r->rb);
    }
    if (!status)
        status = touch(r, 512);
    for (size_t i = 0; i < RANK_SUMS && !status; i++)
        r->sums[i] += sums[i];
    if (!status)
        status = enter(r, RANK_ACCUMULATED);
    r->weights += mb->batch != samples_of_all(r->ranks) || mb->rank_batch != r->batch;
    return status;
}

static rebatch_status reduce(bool is_abandoned, void *user)
{
    struct rank *r = user;
    uint64_t values[RANK_SUMS];
    rebatch_status status = enter(r, is_abandoned ? RANK_ABANDONED : RANK_REDUCE);
    if (!status && !is_abandoned)
        status = touch(r, 4096);
    if (status)
        return status;
    memcpy(values, r->sums, sizeof values);
    status =
        meeting_reduce(&r->ranks->meeting, r->number, values, RANK_SUMS, MEETING_PROGRAM, 20000);
    r->reduces += !is_abandoned;
    r->abandons += is_abandoned;
    memcpy(r->sums, values, sizeof values);
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct rank *r = user;
    rebatch_status status = enter(r, RANK_UPDATE);
    if (!status)
        status = touch(r, 8192);
    if (status)
        return status;
    rebatch_mutating(r->rb);
    for (size_t i = 0; i < RANK_SUMS; i++)
        r->parameters[i] += r->sums[i];
    r->updates++;
    return REBATCH_OK;
}

void rank_step(struct rank *r)
{
    r->requests = 0;
    r->calls = 0;
    r->report = (rebatch_step_report){0};
    r->updates = r->reduces = r->abandons = 0;
    rebatch_clear_error();
    r->status = r->act ? r->act(r) : rebatch_step(r->rb, &r->ops, r->batch, r, &r->report);
    r->ooms += r->report.ooms;
    memset(r->error, 0, sizeof r->error);
    strncpy(r->error, r->status ? rebatch_last_error() : "", sizeof r->error - 1);
}

static void *run(void *argument)
{
    rank_step(argument);
    return NULL;
}

void ranks_step_without(struct ranks *ranks, uint32_t absent)
{
    pthread_t *const threads = calloc(ranks->size, sizeof *threads);
    ranks->meeting.absent = absent < ranks->size;
    for (uint32_t i = 0; i < ranks->size && threads; i++)
        if (i != absent && pthread_create(&threads[i], NULL, run, &ranks->rank[i]))
            abort();
    for (uint32_t i = 0; i < ranks->size && threads; i++)
        if (i != absent)
            (void)pthread_join(threads[i], NULL);
    free(threads);
}

void ranks_step(struct ranks *ranks)
{
    ranks_step_without(ranks, UINT32_MAX);
}

/* ---- opening ---- */

static rebatch_status open_rank(struct rank *r, const rebatch_options *options, size_t capacity)
{
    rebatch_options o = options ? *options : (rebatch_options)REBATCH_OPTIONS_INIT;
    const rebatch_group group = rank_group(r);
    o.group = &group;
    o.group_timeout_ms = o.group_timeout_ms ? o.group_timeout_ms : 120000;
    if (o.log_level == REBATCH_LOG_DEFAULT)
        o.log_level = REBATCH_LOG_QUIET;
    r->ops = (rebatch_step_ops)REBATCH_STEP_OPS_INIT;
    r->ops.zero_grad = zero_grad;
    r->ops.forward_backward = forward_backward;
    r->ops.optimizer_step = optimizer_step;
    r->ops.reduce = reduce;
    r->ops.flags = REBATCH_DECLARES_MUTATION;
    if (o.lockstep == REBATCH_ON) {
        r->ops.forward_backward = forward_backward_together;
        r->ops.reduce = NULL;
    }
    const rebatch_status status = capacity
                                      ? rebatch_device_open_dry(&r->device, capacity, 65536)
                                      : rebatch_device_open_host(&r->device, (size_t)4 << 20, NULL);
    return status ? status : rebatch_open(&r->rb, r->device, &o);
}

bool ranks_open(struct ranks *ranks, uint32_t size, const rebatch_options *options,
                size_t capacity_bytes)
{
    *ranks = (struct ranks){.size = size, .rank = calloc(size, sizeof *ranks->rank)};
    ranks->meeting.size = size;
    ranks->meeting.has_come = calloc(size, sizeof *ranks->meeting.has_come);
    (void)pthread_mutex_init(&ranks->meeting.mutex, NULL);
    (void)pthread_cond_init(&ranks->meeting.changed, NULL);
    uint64_t first = 0;
    for (uint32_t i = 0; i < size && ranks->rank && !ranks->status; i++) {
        struct rank *const r = &ranks->rank[i];
        r->ranks = ranks;
        r->number = i;
        r->unit_bytes = 1024;
        r->batch = options && options->lockstep == REBATCH_ON ? 12 : 6 + 3 * (i % 4);
        r->first = first;
        first += r->batch;
        ranks->status = open_rank(r, options, capacity_bytes);
    }
    return ranks->rank && ranks->meeting.has_come && !ranks->status;
}

void ranks_close(struct ranks *ranks)
{
    for (uint32_t i = 0; i < ranks->size; i++) {
        rebatch_close(ranks->rank[i].rb);
        rebatch_device_close(ranks->rank[i].device);
    }
    (void)pthread_mutex_destroy(&ranks->meeting.mutex);
    (void)pthread_cond_destroy(&ranks->meeting.changed);
    free(ranks->meeting.has_come);
    free(ranks->rank);
}

void ranks_expected(uint64_t out[RANK_SUMS], const struct ranks *ranks, uint64_t steps)
{
    memset(out, 0, RANK_SUMS * sizeof *out);
    const uint64_t samples = samples_of_all(ranks);
    for (uint64_t step = 0; step < steps; step++)
        for (uint64_t s = 0; s < samples; s++)
            for (size_t i = 0; i < RANK_SUMS; i++)
                out[i] += contribution(step, s, i);
}

bool ranks_have_stepped(const struct ranks *ranks, uint64_t steps)
{
    uint64_t expected[RANK_SUMS];
    ranks_expected(expected, ranks, steps);
    bool is_right = !ranks->meeting.was_mismatched;
    for (uint32_t i = 0; i < ranks->size; i++)
        is_right &= memcmp(ranks->rank[i].parameters, expected, sizeof expected) == 0 &&
                    ranks->rank[i].weights + ranks->rank[i].others == 0;
    return is_right;
}
