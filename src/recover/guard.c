/* Owns the copies of guarded state, and when they are taken and put back.
 * Must not know what the state means. */
#include <string.h>

#include "recover/recover.h"

static rebatch_status copy(rebatch *rb, const struct rbi_guard *guard, void *to, const void *from)
{
    if (guard->kind == REBATCH_GUARD_DEVICE)
        return rebatch_copy(rb->device, to, from, guard->bytes, rb->options.stream);
    memcpy(to, from, guard->bytes);
    return REBATCH_OK;
}

static void *copy_at(const struct rbi_guard *guard, rebatch_guard_point point)
{
    return point == REBATCH_GUARD_STEP ? guard->at_step : guard->at_attempt;
}

/* ---- what pressure callbacks and lighten change ---- */

static void *before(const struct rbi_guard *guard, enum rbi_guard_change change)
{
    return change == RBI_CHANGE_CALLBACK ? guard->before_callback : guard->before_pressure;
}

void rbi_guards_begin_change(rebatch *rb, enum rbi_guard_change change)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *guard = &rb->guards[i];
        if (guard->kind == REBATCH_GUARD_HOST)
            memcpy(before(guard, change), guard->state, guard->bytes);
    }
}

bool rbi_guards_have_changed(const rebatch *rb)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *guard = &rb->guards[i];
        if (guard->kind == REBATCH_GUARD_HOST &&
            memcmp(guard->before_callback, guard->state, guard->bytes) != 0)
            return true;
    }
    return false;
}

/* How many bytes are compared and copied as one: half a pointer is none. */
static size_t unit_at(const char *state, size_t left)
{
    const size_t word = sizeof(void *);
    return (uintptr_t)state % word == 0 && left >= word ? word : 1;
}

static bool has_word(const void *state, size_t bytes, const void *address)
{
    for (size_t k = 0; k + sizeof address <= bytes; k += sizeof address)
        if (memcmp((const char *)state + k, &address, sizeof address) == 0)
            return true;
    return false;
}

static bool copies_know(const rebatch *rb, const void *address, bool with_callback)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *const guard = &rb->guards[i];
        if (guard->kind == REBATCH_GUARD_HOST &&
            (has_word(guard->at_step, guard->bytes, address) ||
             has_word(guard->at_attempt, guard->bytes, address) ||
             (with_callback && has_word(guard->before_callback, guard->bytes, address))))
            return true;
    }
    return false;
}

bool rbi_guards_bring_back(void *rb, const void *address)
{
    return copies_know(rb, address, true);
}

void rbi_guards_clear(rebatch *rb, rebatch_scope scope)
{
    (void)pthread_mutex_lock(&rb->changing);
    for (size_t i = 0; i < rb->guard_count; i++) {
        char *const state = rb->guards[i].state;
        const size_t bytes = rb->guards[i].kind == REBATCH_GUARD_HOST ? rb->guards[i].bytes : 0;
        for (size_t k = 0; k + sizeof(void *) <= bytes; k += sizeof(void *)) {
            const void *address;
            memcpy(&address, state + k, sizeof address);
            if (address && rbi_scope_has(rb->pool, scope, address))
                memset(state + k, 0, sizeof address);
        }
    }
    (void)pthread_mutex_unlock(&rb->changing);
}

/* Where the step had changed the same word before, from a pointer to a block that it freed, nobody
 * would know that block if the free were undone. */
static void replace(const rebatch *rb, char *copy, const char *now, const char *then, size_t unit)
{
    void *lost = NULL;
    if (unit == sizeof lost && memcmp(copy, then, unit) != 0)
        memcpy(&lost, copy, unit);
    memcpy(copy, now, unit);
    if (lost && !copies_know(rb, lost, false))
        rbi_scope_free_waiting(rb->pool, lost);
}

/* What was changed is changed in the copies too. */
static void keep_change(const rebatch *rb, const struct rbi_guard *guard,
                        enum rbi_guard_change change)
{
    rbi_assert(guard->kind == REBATCH_GUARD_HOST);
    const char *const now = guard->state, *const then = before(guard, change);
    char *const at_step = guard->at_step, *const at_attempt = guard->at_attempt;
    char *const at_lighten = guard->before_callback; /* pressure within it stays when it fails */
    size_t unit;
    for (size_t k = 0; k < guard->bytes; k += unit) {
        unit = unit_at(now + k, guard->bytes - k);
        if (memcmp(now + k, then + k, unit) == 0)
            continue;
        replace(rb, at_step + k, now + k, then + k, unit);
        replace(rb, at_attempt + k, now + k, then + k, unit);
        if (change == RBI_CHANGE_PRESSURE)
            memcpy(at_lighten + k, now + k, unit);
    }
}

void rbi_guards_end_change(rebatch *rb, enum rbi_guard_change change, bool is_kept)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *guard = &rb->guards[i];
        if (guard->kind != REBATCH_GUARD_HOST)
            continue;
        if (is_kept)
            keep_change(rb, guard, change);
        else
            memcpy(guard->state, before(guard, change), guard->bytes);
    }
}

/* What pressure callbacks free is free at once and for good, so what they do to guarded state is
 * too. The session whose callback runs this step is told as well: its state may point there. */
static void on_pressure(void *user, bool begins)
{
    rebatch *rb = user;
    const struct rbi_pool_pressure_watch *const outer = &rb->outer.watch;
    if (begins) {
        if (outer->on_pressure)
            outer->on_pressure(outer->user, true);
        (void)pthread_mutex_lock(&rb->changing);
        rbi_guards_begin_change(rb, RBI_CHANGE_PRESSURE);
        return;
    }
    rbi_guards_end_change(rb, RBI_CHANGE_PRESSURE, true);
    (void)pthread_mutex_unlock(&rb->changing);
    if (outer->on_pressure)
        outer->on_pressure(outer->user, false);
}

void rbi_guards_watch_pressure(rebatch *rb)
{
    const struct rbi_pool_pressure_watch own = {.on_pressure = on_pressure, .user = rb};
    const struct rbi_pool_pressure_watch before = rbi_pool_watch_pressure(rb->pool, &own);
    if (before.user != rb)
        rb->outer.watch = before;
}

void rbi_guards_unwatch_pressure(rebatch *rb)
{
    (void)rbi_pool_watch_pressure(rb->pool, &rb->outer.watch);
}

/* ---- saving and restoring ---- */

/* A block that the program has freed may be another's by now. */
static rebatch_status check_in_use(rebatch *rb)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *const guard = &rb->guards[i];
        if (guard->block && !rbi_pool_is_in_use(rb->pool, guard->block))
            return rbi_error(REBATCH_E_STATE,
                             "what is guarded at %p has been freed: expected it to stay until "
                             "rebatch_close()",
                             guard->state);
    }
    return REBATCH_OK;
}

/* Pressure of another thread waits until all copies are made, and is waited for. */
static rebatch_status copy_all(rebatch *rb, rebatch_guard_point point, bool restores)
{
    rebatch_status first = REBATCH_OK; /* each gets its try */
    if (rb->guard_count == 0)
        return REBATCH_OK;
    (void)pthread_mutex_lock(&rb->changing);
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *guard = &rb->guards[i];
        void *const kept = copy_at(guard, point);
        rbi_assert(kept);
        if (point == REBATCH_GUARD_ATTEMPT && kept == guard->at_step)
            continue; /* what is discarded has not changed it */
        const rebatch_status status =
            restores ? copy(rb, guard, guard->state, kept) : copy(rb, guard, kept, guard->state);
        if (!first)
            first = status;
    }
    (void)pthread_mutex_unlock(&rb->changing);
    return first;
}

bool rbi_guards_exist(const rebatch *rb)
{
    return rb->guard_count > 0;
}

bool rbi_guards_hold(const rebatch *rb, const void *address)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const uintptr_t from = (uintptr_t)rb->guards[i].state, at = (uintptr_t)address;
        if (at >= from && at - from < rb->guards[i].bytes)
            return true;
    }
    return false;
}

/* An OOM is no answer: nothing that could be taken back has run. */
static rebatch_status call_saver(const rebatch *rb, const struct rbi_saver *saver,
                                 rebatch_guard_point point, bool restores)
{
    const char *const function = restores ? "restore" : "save";
    const uint64_t changes = rbi_error_changes();
    const rebatch_status status =
        (restores ? saver->ops.restore : saver->ops.save)(point, saver->user);
    if (status == REBATCH_OOM)
        return rbi_error(REBATCH_E_STATE,
                         "%s of rebatch_guard_with() returned REBATCH_OOM: expected it to allocate "
                         "its copies beforehand",
                         function);
    if (status)
        rbi_result_say_guard(rb, function, status, changes);
    return status;
}

static rebatch_status call_saves(rebatch *rb, rebatch_guard_point point)
{
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < rb->saver_count && !status; i++)
        status = call_saver(rb, &rb->savers[i], point, false);
    return status;
}

static rebatch_status call_restores(rebatch *rb, rebatch_guard_point point)
{
    rebatch_status first = REBATCH_OK;
    for (size_t i = 0; i < rb->saver_count; i++) {
        const rebatch_status status = call_saver(rb, &rb->savers[i], point, true);
        if (!first)
            first = status;
    }
    return first;
}

rebatch_status rbi_guards_save(rebatch *rb, rebatch_guard_point point)
{
    rebatch_status status = point == REBATCH_GUARD_STEP ? check_in_use(rb) : REBATCH_OK;
    if (!status)
        status = call_saves(rb, point);
    return status ? status : copy_all(rb, point, false);
}

/* Where a wait for a wake was interrupted, what is guarded may sleep. */
rebatch_status rbi_guards_restore(rebatch *rb, rebatch_guard_point point)
{
    if (rbi_pool_sleeps(rb->pool))
        return REBATCH_E_STATE;
    const rebatch_status called = call_restores(rb, point);
    const rebatch_status copied = copy_all(rb, point, true);
    return called ? called : copied;
}

bool rbi_guards_know(const rebatch *rb, const void *address)
{
    for (size_t i = 0; i < rb->guard_count; i++)
        if (rb->guards[i].kind == REBATCH_GUARD_HOST &&
            has_word(rb->guards[i].state, rb->guards[i].bytes, address))
            return true;
    return false;
}

bool rbi_guards_forget(const rebatch *rb, const void *address, rebatch_guard_point point)
{
    for (size_t i = 0; i < rb->guard_count; i++) {
        const struct rbi_guard *guard = &rb->guards[i];
        const char *now = guard->state, *then = copy_at(guard, point);
        const size_t words = guard->kind == REBATCH_GUARD_HOST ? guard->bytes / sizeof address : 0;
        for (size_t k = 0; k < words; k++) {
            const size_t at = k * sizeof address;
            if (memcmp(now + at, &address, sizeof address) == 0 &&
                memcmp(then + at, &address, sizeof address) != 0)
                return true;
        }
    }
    return false;
}

static void release(rebatch *rb, const struct rbi_guard *guard)
{
    if (guard->kind == REBATCH_GUARD_DEVICE) {
        (void)rebatch_pool_free(rb->pool, guard->at_step);
        if (guard->at_attempt != guard->at_step)
            (void)rebatch_pool_free(rb->pool, guard->at_attempt);
    } else {
        rbi_heap_free(guard->at_step);
        if (guard->at_attempt != guard->at_step)
            rbi_heap_free(guard->at_attempt);
        rbi_heap_free(guard->before_callback);
        rbi_heap_free(guard->before_pressure);
    }
}

void rbi_guards_release(rebatch *rb)
{
    for (size_t i = 0; i < rb->guard_count; i++)
        release(rb, &rb->guards[i]);
    rb->guard_count = 0;
    rbi_heap_free(rb->guards);
    rbi_heap_free(rb->savers);
}

/* `array` of `count` members with a place for one more; NULL: no host memory, and it stays as it
 * is. It doubles, so there is a place unless the count is a power of two, or 0. */
static void *with_place(void *array, size_t count, size_t size)
{
    if (count && !rbi_is_power_of_two(count))
        return array;
    return rbi_heap_resize(array, count ? 2 * count : 1, size);
}

static rebatch_status make_copy(rebatch *rb, void **out, size_t bytes, rebatch_guard_kind kind)
{
    if (kind == REBATCH_GUARD_DEVICE)
        return rebatch_pool_alloc(out, rb->pool, bytes, rb->options.stream, rb->guard_tag);
    *out = rbi_heap_calloc(1, bytes);
    return *out ? REBATCH_OK
                : rbi_error(REBATCH_E_HOST_OOM, "no host memory to guard %zu bytes", bytes);
}

static bool is_gpu(const rebatch_device *device)
{
    int ordinal;
    return device->ops->ordinal && device->ops->ordinal(device->self, &ordinal) == REBATCH_OK;
}

static rebatch_status find_block(const void **out, rebatch *rb, const void *state, size_t bytes,
                                 rebatch_guard_kind kind)
{
    const rebatch_status status = rbi_pool_find_block(out, rb->pool, state, bytes, "state");
    if (status || !*out || kind == REBATCH_GUARD_DEVICE || !is_gpu(rb->device))
        return status;
    return rbi_error(REBATCH_E_INVALID,
                     "kind is REBATCH_GUARD_HOST, and state is %p, which is memory of the pool: "
                     "expected REBATCH_GUARD_DEVICE",
                     state);
}

static rebatch_status guard_state(rebatch *rb, void *state, size_t bytes, rebatch_guard_kind kind,
                                  bool is_sums)
{
    if (!rb || !state)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "state" : "rb");
    if (bytes == 0)
        return rbi_error(REBATCH_E_INVALID, "bytes is 0: expected the size of state");
    if (kind != REBATCH_GUARD_HOST && kind != REBATCH_GUARD_DEVICE)
        return rbi_error(REBATCH_E_INVALID,
                         "kind is %d: expected REBATCH_GUARD_HOST or REBATCH_GUARD_DEVICE",
                         (int)kind);
    if (kind == REBATCH_GUARD_DEVICE && !rbi_device_has_contents(rb->device))
        return rbi_error(REBATCH_E_UNSUPPORTED,
                         "device memory of device %s cannot be guarded: it cannot be copied",
                         rb->device->name);
    struct rbi_guard guard = {.state = state, .bytes = bytes, .kind = kind};
    rebatch_status status = rbi_session_check_idle(rb, "rebatch_guard");
    if (!status)
        status = find_block(&guard.block, rb, state, bytes, kind);
    if (status)
        return status;
    struct rbi_guard *const guards = with_place(rb->guards, rb->guard_count, sizeof *guards);
    if (!guards)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to guard %zu bytes", bytes);
    rb->guards = guards;
    status = make_copy(rb, &guard.at_step, bytes, kind);
    if (is_sums)
        guard.at_attempt = guard.at_step;
    else if (!status)
        status = make_copy(rb, &guard.at_attempt, bytes, kind);
    if (!status && kind == REBATCH_GUARD_HOST)
        status = make_copy(rb, &guard.before_callback, bytes, kind);
    if (!status && kind == REBATCH_GUARD_HOST)
        status = make_copy(rb, &guard.before_pressure, bytes, kind);
    if (status) {
        release(rb, &guard);
        return status;
    }
    rb->guards[rb->guard_count++] = guard;
    return REBATCH_OK;
}

rebatch_status rebatch_guard(rebatch *rb, void *state, size_t bytes, rebatch_guard_kind kind)
{
    return guard_state(rb, state, bytes, kind, false);
}

rebatch_status rebatch_guard_sums(rebatch *rb, void *sums, size_t bytes, rebatch_guard_kind kind)
{
    return guard_state(rb, sums, bytes, kind, true);
}

rebatch_status rebatch_guard_with(rebatch *rb, const rebatch_guard_ops *ops, void *user)
{
    if (!rb || !ops)
        return rbi_error(REBATCH_E_INVALID, "%s is NULL", rb ? "ops" : "rb");
    rebatch_guard_ops own = {0};
    rebatch_status status = rbi_options_copy(
        &own, sizeof own, RBI_SIZE_TO(rebatch_guard_ops, restore), ops, "rebatch_guard_ops");
    if (status)
        return status;
    if (!own.save || !own.restore)
        return rbi_error(REBATCH_E_INVALID, "ops.%s is NULL: expected a function",
                         own.save ? "restore" : "save");
    status = rbi_session_check_idle(rb, "rebatch_guard_with");
    if (status)
        return status;
    struct rbi_saver *const savers = with_place(rb->savers, rb->saver_count, sizeof *savers);
    if (!savers)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to guard state by functions");
    rb->savers = savers;
    rb->savers[rb->saver_count++] = (struct rbi_saver){own, user};
    return REBATCH_OK;
}
