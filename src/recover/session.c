/* Owns the life of a session and its options.
 * Must not know what happens in a step. */
#include <string.h>

#include "rebatch/sharing.h"
#include "recover/recover.h"

#define DEFAULT_MAX_ATTEMPTS 64u
#define MOST_ATTEMPTS 65536u
#define DEFAULT_OOM_WAIT_MS 10000u
#define MOST_OOM_WAIT_MS 3600000u
#define DEFAULT_GROW_AFTER 16u
#define DEFAULT_GROW_WAIT_MAX 1024u

static rebatch_status check_options(const rebatch_options *o)
{
    rebatch_status status = rbi_limits_check(o);
    if (!status)
        status = rbi_check_toggle(o->admission, "admission");
    if (!status)
        status = rbi_check_toggle(o->lighten, "lighten");
    if (!status)
        status = rbi_check_toggle(o->growth, "growth");
    if (!status)
        status = rbi_check_toggle(o->learn, "learn");
    if (!status)
        status = rbi_check_toggle(o->environment, "environment");
    if (!status)
        status = rbi_check_toggle(o->reclaim, "reclaim");
    if (!status)
        status = rbi_check_toggle(o->lockstep, "lockstep");
    if (!status)
        status = rbi_meter_check(o);
    if (!status)
        status = rbi_group_check(o);
    if (status)
        return status;
    if (o->on_oom > REBATCH_ON_OOM_FIT)
        return rbi_error(REBATCH_E_INVALID,
                         "on_oom is %d: expected REBATCH_ON_OOM_DEFAULT, _HALVE, _STOP or _FIT",
                         (int)o->on_oom);
    if (o->learn == REBATCH_ON && o->micro_start)
        return rbi_error(REBATCH_E_INVALID,
                         "learn is on and micro_start is %zu: expected 0 with it", o->micro_start);
    if (o->log_level > REBATCH_LOG_DEBUG)
        return rbi_error(REBATCH_E_INVALID, "log_level is %d: expected at most %d",
                         (int)o->log_level, (int)REBATCH_LOG_DEBUG);
    if (o->log_format > REBATCH_LOG_JSON)
        return rbi_error(REBATCH_E_INVALID,
                         "log_format is %d: expected REBATCH_LOG_TEXT or REBATCH_LOG_JSON",
                         (int)o->log_format);
    if (o->max_attempts > MOST_ATTEMPTS)
        return rbi_error(REBATCH_E_INVALID, "max_attempts is %u: expected at most %u",
                         o->max_attempts, MOST_ATTEMPTS);
    if (o->max_ooms_in_row > MOST_ATTEMPTS)
        return rbi_error(REBATCH_E_INVALID, "max_ooms_in_row is %u: expected at most %u",
                         o->max_ooms_in_row, MOST_ATTEMPTS);
    if (o->oom_wait_ms > MOST_OOM_WAIT_MS)
        return rbi_error(REBATCH_E_INVALID, "oom_wait_ms is %u: expected at most %u",
                         o->oom_wait_ms, MOST_OOM_WAIT_MS);
    if (o->grow_after > o->grow_wait_max)
        return rbi_error(REBATCH_E_INVALID, "grow_after is %u: expected at most grow_wait_max, %u",
                         o->grow_after, o->grow_wait_max);
    return REBATCH_OK;
}

static void set_defaults(rebatch_options *o)
{
    if (o->micro_smallest == 0)
        o->micro_smallest = 1;
    if (o->micro_multiple_of == 0)
        o->micro_multiple_of = 1;
    rbi_limits_sort(o);
    if (o->max_attempts == 0)
        o->max_attempts = DEFAULT_MAX_ATTEMPTS;
    if (o->oom_wait_ms == 0)
        o->oom_wait_ms = DEFAULT_OOM_WAIT_MS;
    if (o->grow_after == 0)
        o->grow_after = o->grow_wait_max ? (uint32_t)rbi_min(DEFAULT_GROW_AFTER, o->grow_wait_max)
                                         : DEFAULT_GROW_AFTER;
    if (o->grow_wait_max == 0)
        o->grow_wait_max = (uint32_t)rbi_max(DEFAULT_GROW_WAIT_MAX, o->grow_after);
    if (o->pool.struct_size == 0)
        o->pool = (rebatch_pool_options)REBATCH_POOL_OPTIONS_INIT;
}

void rbi_session_probe_begins(rebatch *rb, const rebatch_step_ops *ops, size_t batch, void *user,
                              const struct rebatch_probe_options *options)
{
    if (rb->launch.user)
        rb->launch.probe_begins(rb->launch.user, ops, batch, user, options);
}

static void close_launch(struct rbi_launch *launch)
{
    if (launch->user)
        launch->destroy(launch->user);
    *launch = (struct rbi_launch){0};
}

static rebatch_status start_learning(rebatch *rb, const struct rbi_session_parts *parts)
{
    struct rbi_tuner tuner = {0}; /* which goes by the pool's allocations */
    const rebatch_status status =
        rbi_meter_is_set(rb) ? REBATCH_OK : parts->create_tuner(&tuner, rb);
    if (!status)
        rbi_learn_start(rb, &tuner);
    return status;
}

static rebatch_status check_pool(const rebatch_options *o, rebatch_device *device)
{
    const rebatch_pool_options *p = &o->pool;
    if (!o->existing_pool)
        return REBATCH_OK;
    if (rebatch_pool_device(o->existing_pool) != device)
        return rbi_error(REBATCH_E_INVALID,
                         "existing_pool is of another device %s: expected one of device %s",
                         rebatch_pool_device(o->existing_pool)->name, device->name);
    if (p->limit_bytes || p->limit_permille || p->headroom_bytes || p->caching ||
        p->rounding_divisions || p->events || p->keep_room_permille || p->replay || p->overflow ||
        p->overflow_bytes || o->floor_bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "existing_pool and options for a new pool are both set: expected one");
    return REBATCH_OK;
}

static rebatch_status open_residents(rebatch *rb)
{
    rbi_assert(rb->pool && !rb->residents);
    if (!rbi_is_on(rb->options.reclaim))
        return REBATCH_OK;
    rb->residents = rbi_residents_open(rb->pool);
    return rb->residents ? REBATCH_OK
                         : rbi_error(REBATCH_E_UNSUPPORTED,
                                     "%d sessions use existing_pool already: the most there are "
                                     "with reclaim on",
                                     RBI_POOL_RESIDENTS - 1);
}

/* Of a pool that is there, the environment's limit holds from here on. */
static rebatch_status open_pool(rebatch *rb)
{
    const rebatch_options *o = &rb->options;
    rb->borrows_pool = o->existing_pool != NULL;
    if (!rb->borrows_pool) {
        rebatch_status status = rebatch_pool_create(&rb->pool, rb->device, &o->pool);
        if (status)
            return status;
        rbi_pool_set_destroyed_by(rb->pool, "rebatch_close()");
        status = o->floor_bytes ? rebatch_pool_set_floor(rb->pool, o->floor_bytes) : REBATCH_OK;
        return status ? status : open_residents(rb);
    }
    rb->pool = o->existing_pool;
    rbi_pool_hold(rb->pool);
    rbi_pool_lower_limit(rb->pool, o->pool.limit_bytes, o->pool.limit_permille);
    return open_residents(rb);
}

/* The pool goes on: it must not keep buffers that nobody takes back. */
static void close_residents(rebatch *rb)
{
    rb->outer.residents = rbi_residents_enter(rb->pool, rb->residents);
    rbi_resize_release(rb);
    (void)rbi_residents_enter(rb->pool, rb->outer.residents);
    if (rb->residents)
        rbi_residents_close(rb->pool, rb->residents);
}

static void close_pool(rebatch *rb)
{
    if (!rb->pool)
        return;
    if (rb->borrows_pool) {
        close_residents(rb);
        rbi_pool_let_go(rb->pool);
        return;
    }
    rbi_pool_set_destroyed_by(rb->pool, NULL);
    rebatch_pool_destroy(rb->pool);
}

/* The options as they will hold: every zero replaced by its default. */
static rebatch_status read_options(rebatch_options *out, rebatch_device *device,
                                   const rebatch_options *given)
{
    *out = (rebatch_options)REBATCH_OPTIONS_INIT;
    rebatch_status status = rbi_options_copy(out, sizeof *out, RBI_SIZE_TO(rebatch_options, learn),
                                             given, "rebatch_options");
    if (status)
        return status;
    set_defaults(out);
    status = check_options(out);
    if (!status)
        status = check_pool(out, device);
    if (!status && !rbi_device_stream_is_valid(device, out->stream))
        status = rbi_error(REBATCH_E_INVALID, "stream %p is not a stream of device %s",
                           (void *)out->stream, device->name);
    return status;
}

/* A session that has nothing yet but its options; NULL: no host memory. */
static rebatch *create(rebatch_device *device, const rebatch_options *o,
                       const struct rbi_launch *launch)
{
    rebatch *rb = rbi_heap_calloc(1, sizeof *rb);
    struct rbi_failed_range *failed = NULL;
    const size_t room = rbi_max(o->max_attempts, DEFAULT_MAX_ATTEMPTS);
    if (rb)
        failed = rbi_heap_calloc(room, sizeof *failed);
    if (!failed) {
        rbi_heap_free(rb);
        return NULL;
    }
    rb->device = device;
    rb->launch = *launch;
    rb->options = *o;
    rb->options.log_file = NULL; /* borrowed, as the two below */
    rb->options.meter = NULL;
    rb->options.group = NULL;
    if (o->meter)
        memcpy(&rb->meter, o->meter, rbi_min(o->meter->struct_size, sizeof rb->meter));
    rbi_group_open(rb, o);
    rb->log.file = -1;
    rbi_sizes_init(&rb->sizes, o);
    rb->run = (struct rbi_run){.most = SIZE_MAX, .samples_callback = RBI_FORWARD_BACKWARD};
    rb->failed = failed;
    rb->failed_room = room;
    rbi_assert(room >= rb->options.max_attempts);
    (void)pthread_mutex_init(&rb->changing, NULL);
    return rb;
}

static rebatch_status start(rebatch *rb, const rebatch_options *o,
                            const struct rbi_session_parts *parts)
{
    rebatch_status status = rbi_log_open(&rb->log, o);
    if (!status)
        status = open_pool(rb);
    if (!status)
        status = rebatch_pool_tag(&rb->guard_tag, rb->pool, "guards");
    if (!status && o->learn == REBATCH_ON)
        status = start_learning(rb, parts);
    if (!status && rb->launch.user)
        status = rb->launch.begin(rb->launch.user, rb);
    return status;
}

rebatch_status rbi_session_open(rebatch **out, rebatch_device *device,
                                const rebatch_options *options,
                                const struct rbi_session_parts *parts)
{
    if (!out)
        return rbi_error(REBATCH_E_INVALID, "out is NULL");
    *out = NULL;
    if (!device)
        return rbi_error(REBATCH_E_INVALID, "device is NULL");
    rebatch_options o;
    struct rbi_launch launch;
    rebatch_status status = read_options(&o, device, options);
    if (!status)
        status = parts->open_launch(&launch, &o);
    if (status)
        return status;
    rebatch *rb = create(device, &o, &launch);
    if (!rb) {
        close_launch(&launch);
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a session");
    }
    status = start(rb, &o, parts);
    if (status) {
        rebatch_close(rb);
        return status;
    }
    *out = rb;
    return REBATCH_OK;
}

void rbi_session_own_device(rebatch *rb)
{
    rb->owns_device = true;
}

void rebatch_close(rebatch *rb)
{
    if (!rb || rbi_session_check_idle(rb, "rebatch_close") ||
        (rb->pool && rbi_pool_check_caller(rb->pool, "rebatch_close")))
        return;
    rbi_current_forget(rb);
    rbi_asked_turn(rb, RBI_TURN_CLOSES);
    close_launch(&rb->launch);
    rbi_log_close(&rb->log);
    rbi_learn_stop(rb);
    rbi_need_set_model(rb, NULL);
    rbi_guards_release(rb);
    rbi_maps_release(rb);
    rbi_captured_drop(rb);
    rbi_watched_release(rb);
    close_pool(rb);
    if (rb->owns_device)
        rebatch_device_close(rb->device);
    (void)pthread_mutex_destroy(&rb->changing);
    rbi_heap_free(rb->failed);
    rbi_heap_free(rb);
}

rebatch_pool *rebatch_get_pool(const rebatch *rb)
{
    return rb ? rb->pool : NULL;
}

rebatch_status rebatch_join(rebatch *rb)
{
    rbi_pool_thread_join(rb ? rb->pool : NULL);
    return REBATCH_OK;
}

size_t rebatch_get_batch(const rebatch *rb, size_t otherwise)
{
    return rb && rb->callback.is_running ? rb->run.total : otherwise;
}

size_t rebatch_get_micro(const rebatch *rb, size_t batch)
{
    return rb ? rbi_micro_size(rb, batch) : 0;
}

rebatch_status rebatch_set_step(rebatch *rb, uint64_t step)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_set_step");
    if (status)
        return status;
    rb->step = step;
    rb->group.owes = false; /* a checkpoint is restored: the ranks compare where they stand */
    return REBATCH_OK;
}

rebatch_status rebatch_set_lighten(rebatch *rb, unsigned level)
{
    if (!rb)
        return rbi_error(REBATCH_E_INVALID, "rb is NULL");
    const rebatch_status status = rbi_session_check_idle(rb, "rebatch_set_lighten");
    if (status)
        return status;
    rb->lighten = level;
    return REBATCH_OK;
}
