/* Owns a training: its session, its steps, how each is judged, and the way back when all is well.
 * Must not know what the callbacks do. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fault/fault_device.h"
#include "storm.h"

/* ---- opening and closing ---- */

static void on_event(const rebatch_event *event, void *user)
{
    struct storm *const s = user;
    char text[512];
    s->counts->shrunk += event->kind == REBATCH_EVENT_SHRINK;
    s->counts->grown += event->kind == REBATCH_EVENT_GROW;
    s->counts->growths_failed += event->kind == REBATCH_EVENT_GROWTH_FAILED;
    if (!s->is_verbose)
        return;
    (void)rebatch_event_format(text, sizeof text, event);
    storm_say(s, "    ! %s", text);
}

static void guard(struct storm *s, void *state, size_t bytes, rebatch_guard_kind kind)
{
    if (rebatch_guard(s->rb, state, bytes, kind) != REBATCH_OK)
        storm_fail(s, "a guard was refused: %s", rebatch_last_error());
}

static void set_guards(struct storm *s)
{
    struct storm_keep *const keep = &s->keep;
    guard(s, s->running, sizeof *s->running, REBATCH_GUARD_DEVICE);
    if (s->plan.guards_buffers)
        guard(s, s->buffers.blocks, sizeof s->buffers.blocks, REBATCH_GUARD_HOST);
    if (!s->plan.reclaims) { /* what points to blocks is the program's own affair */
        guard(s, &keep->rng, sizeof keep->rng, REBATCH_GUARD_HOST);
        guard(s, keep->spares, sizeof keep->spares, REBATCH_GUARD_HOST);
        return;
    }
    if (s->plan.is_one_guard) {
        guard(s, keep, sizeof *keep, REBATCH_GUARD_HOST);
        return;
    }
    guard(s, &keep->rng, sizeof keep->rng, REBATCH_GUARD_HOST);
    for (size_t i = 0; i < STORM_CACHES; i++)
        guard(s, &keep->caches[i], sizeof keep->caches[i], REBATCH_GUARD_HOST);
    guard(s, &keep->moments, sizeof keep->moments, REBATCH_GUARD_HOST);
    guard(s, &keep->moments_are, sizeof keep->moments_are, REBATCH_GUARD_HOST);
    guard(s, &keep->gradients, sizeof keep->gradients, REBATCH_GUARD_HOST);
    for (size_t i = 0; i < STORM_SPARES; i++) {
        guard(s, &keep->spares[i].block, sizeof keep->spares[i].block, REBATCH_GUARD_HOST);
        guard(s, &keep->spares[i].bytes, sizeof keep->spares[i].bytes, REBATCH_GUARD_HOST);
    }
    guard(s, &keep->level, sizeof keep->level, REBATCH_GUARD_HOST);
}

/* Two sessions on one pool have one that is there. */
static bool open_on_pool(struct storm *s)
{
    rebatch_options given = storm_settings_set(s);
    bool is_open = true;
    if (s->plan.has_neighbour) {
        given.pool = (rebatch_pool_options){0};
        is_open = rebatch_pool_create(&s->pool, s->device, &s->plan.options.pool) == REBATCH_OK;
        given.existing_pool = s->pool;
    }
    is_open = is_open && rebatch_open(&s->rb, s->device, &given) == REBATCH_OK;
    storm_settings_clear(s);
    return is_open;
}

static bool open_session(struct storm *s)
{
    rebatch_options *const o = &s->plan.options;
    const rebatch_host_options host = {sizeof host, s->plan.page_bytes, s->plan.overflow_bytes};
    o->on_event = on_event;
    o->on_event_user = s;
    if (rebatch_device_open_host(&s->host, STORM_PLENTY_BYTES, &host) != REBATCH_OK ||
        rebatch_device_open_fault(&s->device, s->host, NULL) != REBATCH_OK || !open_on_pool(s)) {
        storm_fail(s, "cannot open: %s", rebatch_last_error());
        return false;
    }
    s->pool = rebatch_get_pool(s->rb);
    s->ops = storm_model_ops(&s->plan);
    s->buffers.salt = storm_hash(s->seed, 6000);
    s->map_buffers.salt = storm_hash(s->seed, 6001);
    s->buffers.manner = storm_frees_draw(s, &s->dice);
    s->map_buffers.manner = storm_frees_draw(s, &s->dice);
    s->buffers.is_backwards = storm_one_in(&s->dice, 2);
    storm_neighbour_open(s);
    return !s->has_failed;
}

static bool make_model(struct storm *s)
{
    const size_t bytes = STORM_PARAMETERS * sizeof(double);
    s->parameters = storm_alloc(s, bytes);
    s->running = storm_alloc(s, sizeof *s->running);
    if (!s->plan.makes_gradients)
        s->keep.gradients = storm_alloc(s, bytes);
    if (!s->parameters || !s->running) {
        storm_fail(s, "no memory for the parameters");
        return false;
    }
    s->keep.rng = storm_hash(s->seed, 1);
    *s->running = 0;
    if (s->plan.makes_before && !storm_buffers_make_before(s, &s->buffers))
        return false;
    s->before.rng = s->keep.rng;
    for (size_t i = 0; i < STORM_PARAMETERS; i++)
        s->before.parameters[i] = s->parameters[i] = storm_unit(storm_hash(s->seed, 50 + i));
    set_guards(s);
    for (size_t i = 0; i < s->plan.pressures; i++)
        if (rebatch_pool_add_pressure(s->pool, storm_give_up, s) != REBATCH_OK)
            storm_fail(s, "no pressure: %s", rebatch_last_error());
    rebatch_pool_stats stats;
    (void)rebatch_pool_get_stats(&stats, s->pool);
    s->other_bytes =
        stats.live_bytes - storm_held(s, "at the beginning") - storm_buffers_held(s, &s->buffers);
    return !s->has_failed;
}

/* What the program still holds goes with the pool; guards and buffers of the session are gone. */
static void check_closed(struct storm *s)
{
    rebatch_pool_stats stats;
    (void)rebatch_pool_get_stats(&stats, s->pool);
    const uint64_t held = storm_held(s, "after closing") + storm_buffers_held(s, &s->buffers) +
                          storm_buffers_held(s, &s->neighbour.buffers);
    if (!s->has_failed && stats.live_bytes > held + s->other_bytes)
        storm_fail(s, "after closing: %" PRIu64 " bytes live, of them %" PRIu64 " the program's",
                   stats.live_bytes, held + s->other_bytes);
}

static void close_session(struct storm *s)
{
    rebatch_memory_info info = {0};
    rebatch_close(s->rb);
    s->buffers.are_there = s->map_buffers.are_there = false;
    if (s->plan.has_neighbour) {
        storm_buffers_find(s, &s->neighbour.buffers);
        check_closed(s);
        storm_neighbour_close(s);
        rebatch_pool_destroy(s->pool);
    }
    (void)rebatch_device_memory(s->host, &info);
    if (info.used_bytes)
        storm_fail(s, "%zu bytes were not given back to the device", info.used_bytes);
    rebatch_device_close(s->device);
    rebatch_device_close(s->host);
}

/* ---- between steps ---- */

static void set_room(struct storm *s, size_t bytes)
{
    if (rebatch_device_set_capacity(s->host, bytes) != REBATCH_OK)
        storm_fail(s, "a capacity was refused: %s", rebatch_last_error());
    storm_say(s, "  room: %zu bytes", bytes);
}

/* A co-tenant leaves so much beyond what is in use. */
static void move_tenant(struct storm *s)
{
    if (s->plan.trouble == 1 ? !storm_one_in(&s->dice, 20) : !storm_one_in(&s->dice, 2))
        return;
    if (storm_one_in(&s->dice, 5)) {
        set_room(s, STORM_PLENTY_BYTES);
        return;
    }
    rebatch_memory_info info;
    if (storm_one_in(&s->dice, 2))
        (void)rebatch_pool_trim(s->pool, 0, NULL);
    (void)rebatch_device_memory(s->host, &info);
    const size_t most =
        s->plan.unit_bytes * STORM_BATCH_MOST * (size_t)(1 << storm_below(&s->dice, 4));
    set_room(s, info.used_bytes + storm_below(&s->dice, most) + s->plan.page_bytes);
}

static void change_spares(struct storm *s)
{
    for (size_t i = 0; i < STORM_SPARES; i++) {
        struct storm_spare *const spare = &s->keep.spares[i];
        if (!storm_one_in(&s->dice, 3))
            continue;
        if (spare->block) {
            storm_free(s, spare->block);
            *spare = (struct storm_spare){NULL, 0};
            continue;
        }
        const size_t bytes = 1 + storm_below(&s->dice, s->plan.spare_bytes);
        void *const block = storm_alloc(s, bytes);
        if (!block)
            continue;
        storm_fill(block, bytes, storm_spare_marker(s, i));
        *spare = (struct storm_spare){block, bytes};
    }
}

/* From here on a step, or a probe, may have to be undone. */
static void mark(struct storm *s)
{
    s->at_step = s->at_callback = s->keep;
    s->running_at_step = s->running_at_callback = *s->running;
}

static void disarm(struct storm *s)
{
    (void)rebatch_fault_arm(s->device, NULL);
    s->is_armed = false;
}

/* After a call of the session. */
static void find_buffers(struct storm *s)
{
    storm_buffers_find(s, &s->buffers);
    storm_buffers_find(s, &s->map_buffers);
}

static void probe(struct storm *s)
{
    rebatch_probe_options options = REBATCH_PROBE_OPTIONS_INIT;
    rebatch_probe_report report;
    options.max_trials = (uint32_t)storm_below(&s->dice, 5);
    if (storm_one_in(&s->dice, 3))
        options.reserve_bytes = storm_below(&s->dice, 20000);
    storm_say(s, "  probe");
    s->is_probing = true;
    mark(s);
    const rebatch_status status = rebatch_probe(s->rb, &s->ops, s->batch, s, &options, &report);
    s->is_probing = false;
    disarm(s);
    s->counts->probes++;
    storm_say(s, "  probe: %s, %zu", rebatch_status_name(status), report.size);
    if (status != REBATCH_OK && status != REBATCH_E_EXHAUSTED && status != STORM_STATUS)
        storm_fail(s, "the probe answered %s: %s", rebatch_status_name(status),
                   rebatch_last_error());
    find_buffers(s);
    storm_check_keep(s, &s->at_step, s->running_at_step, "after a probe");
    storm_check_memory(s, "after a probe");
}

/* A correct step has no mistakes, and is as before after a check. */
static void check(struct storm *s)
{
    static rebatch_check_report report;
    rebatch_check_options options = REBATCH_CHECK_OPTIONS_INIT;
    options.exact = REBATCH_ON;
    options.most_ooms = 12;
    storm_say(s, "  check");
    s->is_probing = s->is_checked = s->is_calm = true;
    storm_plan_step(s); /* which is no trouble then */
    set_room(s, STORM_PLENTY_BYTES);
    storm_limit_set(s, 0);
    mark(s);
    if (rebatch_watch_at(s->rb, "gradients", &s->keep.gradients, STORM_PARAMETERS * sizeof(double),
                         REBATCH_F64) ||
        rebatch_watch(s->rb, "running", s->running, sizeof *s->running, REBATCH_GUARD_DEVICE,
                      REBATCH_F64))
        storm_fail(s, "a watch was refused: %s", rebatch_last_error());
    const rebatch_status status = rebatch_check(s->rb, &s->ops, s->batch, s, &options, &report);
    s->is_probing = s->is_checked = s->is_calm = false;
    s->counts->checks++;
    if (status != REBATCH_OK)
        storm_fail(s, "the check answered %s: %s", rebatch_status_name(status),
                   rebatch_last_error());
    find_buffers(s);
    for (size_t i = 0; i < report.finding_count; i++)
        if (report.findings[i].kind != REBATCH_FINDING_COPED &&
            report.findings[i].kind != REBATCH_FINDING_WEIGHT) /* of few samples, by chance */
            storm_fail(s, "the check says: %s", report.findings[i].text);
    storm_check_keep(s, &s->at_step, s->running_at_step, "after a check");
    storm_check_memory(s, "after a check");
}

static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    struct storm *const s = user;
    if (mb->first != s->map_next || mb->count == 0 || mb->first + mb->count > mb->batch)
        storm_fail(s, "samples [%zu, +%zu) of a map come after %zu", mb->first, mb->count,
                   s->map_next);
    if (s->of_map)
        storm_buffers_check(s, s->of_map, mb->count, "a map");
    storm_check_memory(s, "a map");
    char *const memory = storm_alloc(s, mb->count * s->plan.unit_bytes * 8);
    const bool fails = !memory || (!s->is_calm && storm_one_in(&s->dice, 9));
    if (fails && memory && !s->plan.reclaims)
        storm_free(s, memory);
    if (fails)
        return REBATCH_OOM;
    memory[0] = 1;
    s->map_next += mb->count;
    s->map_largest = mb->count > s->map_largest ? mb->count : s->map_largest;
    storm_free(s, memory);
    return REBATCH_OK;
}

static void map(struct storm *s)
{
    rebatch_map_ops ops = {
        .struct_size = sizeof ops, .run = evaluate, .largest = storm_below(&s->dice, 9)};
    rebatch_step_report report;
    s->map_next = s->map_largest = 0;
    s->of_map = NULL;
    if (s->plan.reclaims && storm_one_in(&s->dice, 2)) {
        const bool is_shared = s->plan.has_resize && storm_one_in(&s->dice, 2);
        ops.resize = is_shared ? s->ops.resize : storm_map_resize;
        s->of_map = is_shared ? &s->buffers : &s->map_buffers;
    }
    const size_t count = storm_below(&s->dice, STORM_MAP_MOST),
                 micro = rebatch_get_micro(s->rb, s->batch);
    mark(s);
    const rebatch_status status = rebatch_map(s->rb, &ops, count, s, &report);
    disarm(s);
    find_buffers(s);
    s->counts->maps++;
    storm_say(s, "  map of %zu: %s", count, rebatch_status_name(status));
    if (status != REBATCH_OK && status != REBATCH_E_EXHAUSTED &&
        !(status == STORM_STATUS && s->of_map == &s->buffers))
        storm_fail(s, "the map answered %s: %s", rebatch_status_name(status), rebatch_last_error());
    if (status == REBATCH_OK && s->map_next != count)
        storm_fail(s, "the map ran %zu samples of %zu", s->map_next, count);
    /* Buffers of its own are as large as its size; an even cut has more than half of that. */
    if (status == REBATCH_OK && count > 0 && report.ooms == 0 && s->of_map != &s->buffers &&
        s->plan.options.micro_allowed[0] == 0 && 2 * s->map_largest < report.micro_before)
        storm_fail(s, "a map of %zu whose size is %zu ran %zu samples at once at the most", count,
                   report.micro_before, s->map_largest);
    if (rebatch_get_micro(s->rb, s->batch) != micro)
        storm_fail(s, "a map has changed the size of steps");
    storm_check_keep(s, &s->at_step, s->running_at_step, "after a map");
    storm_check_memory(s, "after a map");
}

/* ---- a step ---- */

static void begin_step(struct storm *s)
{
    mark(s);
    s->after = s->before;
    storm_reference_step(&s->after, s->step, s->batch, s->lengths);
    memset(s->calls, 0, sizeof s->calls);
    s->next = SIZE_MAX;
    s->may_zero = true;
    s->made_at_step = s->buffers.made;
    s->may_be_torn = s->is_updated = s->has_answered_own = s->has_moved_limit = false;
}

/* As a checkpoint would. */
static void restore_torn(struct storm *s)
{
    storm_temps_free(s);
    memcpy(s->parameters, s->before.parameters, sizeof s->before.parameters);
    memcpy(s->keep.moments_are == 1 ? s->keep.moments : s->moments_on_host, s->before.moments,
           sizeof s->before.moments);
    s->keep.rng = s->before.rng;
    *s->running = s->before.running;
    s->counts->torn++;
}

static void judge_failure(struct storm *s, const rebatch_step_report *report, rebatch_status status)
{
    const bool is_known = status == REBATCH_E_EXHAUSTED || status == REBATCH_E_TORN ||
                          (status == STORM_STATUS && s->has_answered_own);
    if (!is_known)
        storm_fail(s, "the step answered %s: %s", rebatch_status_name(status),
                   rebatch_last_error());
    if (report->torn != s->may_be_torn || (status == REBATCH_E_TORN && !report->torn))
        storm_fail(s, "the step answered %s, torn is %d: expected %d", rebatch_status_name(status),
                   report->torn, s->may_be_torn);
    s->counts->exhausted += status == REBATCH_E_EXHAUSTED;
    s->counts->own += status == STORM_STATUS;
    if (report->torn) {
        restore_torn(s);
    } else {
        s->counts->undone++;
        storm_check_keep(s, &s->at_step, s->running_at_step, "after a failed step");
    }
    storm_check_numbers(s, &s->before, "after a failed step");
}

static void judge(struct storm *s, const rebatch_step_report *report, rebatch_status status)
{
    storm_say(s, "  step: %s", rebatch_status_name(status));
    s->counts->steps++;
    s->counts->ooms += report->ooms;
    if (status == REBATCH_OK) {
        s->counts->ok++;
        if (!s->is_updated || s->may_be_torn || s->has_answered_own)
            storm_fail(s, "the step answered REBATCH_OK, and the update was not made");
        storm_check_keep(s, &s->at_callback, s->running_at_callback, "after the step");
        storm_check_numbers(s, &s->after, "after the step");
        s->before = s->after;
        s->step++;
    } else {
        judge_failure(s, report, status);
    }
    if (report->lighten_level > s->plan.levels)
        storm_fail(s, "the report's level is %u", report->lighten_level);
    storm_check_memory(s, "after the step");
    storm_limit_check(s, "after the step");
}

static rebatch_status run_step(struct storm *s, rebatch_step_report *report)
{
    storm_say(s, "step %" PRIu64 ": %zu samples", s->step, s->batch);
    begin_step(s);
    const rebatch_status status = rebatch_step(s->rb, &s->ops, s->batch, s, report);
    disarm(s);
    find_buffers(s);
    judge(s, report, status);
    return status;
}

static void stormy_step(struct storm *s, uint32_t number)
{
    rebatch_step_report report;
    s->batch = storm_between(&s->dice, s->plan.batch_least, s->plan.batch_most);
    s->lengths = storm_hash(s->seed, 10000 + number);
    change_spares(s);
    if (s->plan.checks && storm_one_in(&s->dice, s->plan.checks))
        check(s);
    move_tenant(s);
    storm_limit_move(s);
    storm_neighbour_step(s);
    storm_plan_step(s);
    if (s->plan.probes && storm_one_in(&s->dice, s->plan.probes))
        probe(s);
    if (s->plan.maps && storm_one_in(&s->dice, s->plan.maps) && !s->has_failed)
        map(s);
    if (!s->has_failed)
        (void)run_step(s, &report);
}

/* ---- the way back ---- */

static size_t doublings(size_t n)
{
    size_t count = 0;
    for (; n > 1; n = (n + 1) / 2)
        count++;
    return count;
}

/* A growth takes at most the longest wait, and as long again where a prediction refuses it: once
 * for each level and each doubling, from one sample, or a cost of one, to all. Learning has its own
 * few steps before. */
static uint32_t most_steps_back(const struct storm *s)
{
    const size_t all = s->plan.has_cost ? STORM_BATCH_MOST * STORM_LENGTH_MOST : STORM_BATCH_MOST;
    const size_t growths = s->plan.levels + doublings(all) + 2;
    return (uint32_t)(growths * 2 * s->plan.options.grow_wait_max) + 4;
}

static bool is_back(const struct storm *s, const rebatch_step_report *report)
{
    const size_t upper = storm_upper(&s->plan.options, s->batch);
    const size_t least = (s->batch + upper - 1) / upper;
    const bool is_large = s->plan.has_cost || rebatch_get_micro(s->rb, s->batch) == upper;
    const bool is_even = !s->plan.has_cost && s->batch % upper != 0 &&
                         !storm_is_allowed(&s->plan.options, s->batch % upper);
    const size_t most = is_even ? storm_most(&s->plan.options, s->batch) : least;
    return report->microbatches >= least && report->microbatches <= most && is_large &&
           s->keep.level == 0;
}

static void come_back(struct storm *s)
{
    rebatch_step_report report = {0};
    s->is_calm = true;
    s->batch = s->plan.batch_most;
    s->lengths = storm_hash(s->seed, 9999);
    storm_plan_step(s);
    set_room(s, STORM_PLENTY_BYTES);
    storm_limit_set(s, 0);
    const bool grows = s->plan.options.growth != REBATCH_OFF;
    const uint32_t most = grows ? most_steps_back(s) : 2;
    for (uint32_t i = 0; i < most && !s->has_failed; i++) {
        const rebatch_status status = run_step(s, &report);
        s->counts->recovery_steps++;
        /* What once asked for more than there is may be refused once more, as what runs is not. */
        if (status != REBATCH_OK || report.ooms > report.ooms_in[REBATCH_PHASE_ADMISSION])
            storm_fail(s, "with all memory there, %s and %u OOMs: %s", rebatch_status_name(status),
                       report.ooms, status ? rebatch_last_error() : "");
        if (is_back(s, &report))
            return;
    }
    if (grows)
        storm_fail(s,
                   "after %u steps with all memory there, %u micro-batches of %zu, at level %u: "
                   "expected %zu samples each, at level 0",
                   most, report.microbatches, rebatch_get_micro(s->rb, s->batch),
                   (unsigned)s->keep.level, storm_upper(&s->plan.options, s->batch));
}

/* ---- all of it ---- */

static void say_plan(const struct storm *s)
{
    const struct storm_plan *const p = &s->plan;
    const rebatch_options *const o = &p->options;
    storm_say(s,
              "start %zu smallest %zu largest %zu multiple %zu allowed %zu %zu %zu %zu %zu learn "
              "%d fit %d "
              "admission %d caching %d growth %d after %u most %u attempts %u in row %u",
              o->micro_start, o->micro_smallest, o->micro_largest, o->micro_multiple_of,
              o->micro_allowed[0], o->micro_allowed[1], o->micro_allowed[2], o->micro_allowed[3],
              o->micro_allowed[4], o->learn == REBATCH_ON, o->on_oom == REBATCH_ON_OOM_FIT,
              o->admission != REBATCH_OFF, o->pool.caching != REBATCH_OFF, o->growth != REBATCH_OFF,
              o->grow_after, o->grow_wait_max, o->max_attempts, o->max_ooms_in_row);
    storm_say(s, "batch %zu-%zu levels %u flag %d declares %d cost %d trouble %u unit %zu late %zu",
              p->batch_least, p->batch_most, p->levels, p->has_flag, p->declares,
              p->has_cost ? (int)p->cost_kind : -1, p->trouble, p->unit_bytes, p->late_bytes);
}

static void run(struct storm *s)
{
    if (!open_session(s))
        return;
    say_plan(s);
    if (make_model(s)) {
        for (uint32_t i = 0; i < s->plan.steps && !s->has_failed; i++)
            stormy_step(s, i);
        if (!s->has_failed)
            come_back(s);
    }
    close_session(s);
}

bool storm_run(uint64_t seed, bool is_verbose, struct storm_counts *counts, char *failure)
{
    struct storm *const s = calloc(1, sizeof *s);
    if (!s) {
        (void)snprintf(failure, 512, "no host memory");
        return false;
    }
    s->seed = seed;
    s->dice = storm_hash(seed, 0);
    s->is_verbose = is_verbose;
    s->counts = counts;
    storm_plan_draw(&s->plan, &s->dice);
    run(s);
    counts->trainings++;
    const bool has_passed = !s->has_failed;
    if (!has_passed)
        (void)snprintf(failure, 512, "step %" PRIu64 ": %s", s->step, s->failure);
    free(s);
    return has_passed;
}
