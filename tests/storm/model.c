/* Owns the callbacks of the program under test: a model of four parameters with lazy caches,
 * moments that move, a random state, and trouble on order.
 * Must not know how its results are judged. */
#include <string.h>

#include "fault/fault_device.h"
#include "storm.h"

/* ---- trouble ---- */

static const struct storm_fault *due(struct storm *s, enum storm_callback callback, size_t count)
{
    for (size_t i = 0; i < s->fault_count; i++) {
        struct storm_fault *const f = &s->faults[i];
        if (f->callback != callback || count <= f->more_than)
            continue;
        f->seen++;
        if (f->seen >= f->nth && f->seen - f->nth < f->times)
            return f;
    }
    return NULL;
}

static void move_room(struct storm *s)
{
    if (s->room_high == 0 || !storm_one_in(&s->dice, 3))
        return;
    rebatch_memory_info info;
    (void)rebatch_device_memory(s->host, &info);
    const size_t room = s->room_low + storm_below(&s->dice, s->room_high);
    (void)rebatch_device_set_capacity(s->host, info.used_bytes + room);
}

/* ---- what the contract says of each end of a callback ---- */

static bool is_dirty(const struct storm *s, enum storm_callback callback, bool has_mutated)
{
    return has_mutated || !(s->plan.has_flag || s->learned[callback]);
}

/* `answer` is REBATCH_OOM for one that was swallowed. `count` is of forward_backward. */
static rebatch_status conclude(struct storm *s, enum storm_callback callback, bool has_mutated,
                               size_t count, rebatch_status answer)
{
    storm_say(s, "    -> %s%s", rebatch_status_name(answer), has_mutated ? ", mutated" : "");
    if (answer)
        storm_memory_leave(s);
    else
        s->learned[callback] |= has_mutated; /* in a trial too */
    if (s->is_probing)
        return answer;
    if (answer == REBATCH_OK) {
        s->at_callback = s->keep;
        s->running_at_callback = *s->running;
        s->next = callback == STORM_ZERO ? 0 : s->next + count;
        s->may_zero = false;
        s->is_updated |= callback == STORM_UPDATE;
        return answer;
    }
    const bool dirty = is_dirty(s, callback, has_mutated);
    if (answer != REBATCH_OOM) {
        s->has_answered_own = true;
        s->next = SIZE_MAX;
        s->may_zero = false;
    } else if (callback == STORM_ZERO || (callback == STORM_FORWARD && dirty)) {
        s->may_zero = true;
        s->next = SIZE_MAX;
    }
    s->counts->dirty_ooms += callback == STORM_FORWARD && dirty;
    if (callback == STORM_UPDATE && dirty) {
        s->may_be_torn = true;
        s->next = SIZE_MAX;
    }
    return answer;
}

static void escape_from(struct storm *s, unsigned depth, rebatch_status status)
{
    if (depth > 0)
        escape_from(s, depth - 1, status);
    else
        (void)rebatch_escape(s->rb, status);
}

static rebatch_status swallow(struct storm *s)
{
    rebatch_fault_plan plan = REBATCH_FAULT_PLAN_INIT;
    plan.calls = REBATCH_FAULT_LAST_ERROR;
    plan.nth = 1;
    (void)rebatch_fault_arm(s->device, &plan);
    return REBATCH_OK;
}

/* Fails as ordered. Gives what the callback is to answer; with STORM_SWALLOW that is REBATCH_OK. */
static rebatch_status fail_as(struct storm *s, const struct storm_fault *fault,
                              enum storm_callback callback, bool has_mutated)
{
    const bool own = fault->manner == STORM_OWN || fault->manner == STORM_OWN_ESCAPE;
    const rebatch_status status = own ? STORM_STATUS : REBATCH_OOM;
    if (fault->manner == STORM_POOL && storm_alloc(s, STORM_IMPOSSIBLE_BYTES))
        storm_fail(s, "the pool gave what there is not");
    if (callback == STORM_LIGHTEN || callback == STORM_RESIZE) {
        storm_memory_leave(s);
        s->has_answered_own |= own && !s->is_updated;
    } else {
        (void)conclude(s, callback, has_mutated, 0, status);
    }
    if (fault->manner == STORM_ESCAPE || fault->manner == STORM_OWN_ESCAPE) {
        escape_from(s, 3, status);
        storm_fail(s, "rebatch_escape() came back: %s", rebatch_last_error());
    }
    return fault->manner == STORM_SWALLOW ? swallow(s) : status;
}

static bool mutate(struct storm *s)
{
    if (s->plan.declares)
        rebatch_mutating(s->rb);
    return s->plan.declares;
}

/* ---- what every callback begins with ---- */

/* While a callback uses memory. */
static void move_limit(struct storm *s)
{
    if (!s->plan.lowers || s->is_calm || s->is_probing || !storm_one_in(&s->dice, 8))
        return;
    s->has_moved_limit = true;
    storm_limit_move(s);
}

static void interfere(struct storm *s)
{
    if (s->plan.nests && !s->is_calm && !s->is_probing && storm_one_in(&s->dice, 6))
        storm_neighbour_step(s);
    move_limit(s);
}

static void begin(struct storm *s, enum storm_callback callback, const rebatch_microbatch *mb)
{
    static const char *const names[] = {"zero_grad", "forward_backward", "optimizer_step",
                                        "lighten"};
    s->calls[callback]++;
    s->temp_count = 0;
    s->samples = NULL;
    memset(s->is_pinned, 0, sizeof s->is_pinned);
    if (mb)
        storm_say(s, "  %s of [%zu, %zu)%s", names[callback], mb->first, mb->first + mb->count,
                  mb->probing ? ", probing" : "");
    else
        storm_say(s, "  %s", names[callback]);
    if (!s->is_probing) {
        const bool is_zero = callback == STORM_ZERO;
        storm_check_keep(s, is_zero ? &s->at_step : &s->at_callback,
                         is_zero ? s->running_at_step : s->running_at_callback, names[callback]);
        storm_check_waiting(s, names[callback]);
    }
    if (s->plan.has_resize)
        storm_buffers_check(s, &s->buffers, mb ? mb->count : 0, names[callback]);
    storm_check_memory(s, names[callback]);
    if (callback == STORM_ZERO && !s->is_probing)
        storm_limit_check_buffers(s);
    move_room(s);
    interfere(s);
}

/* What a callback may do besides with memory of before: free it, and ask for more than there is
 * and cope. Undone with the callback. */
static void meddle(struct storm *s)
{
    if (s->is_calm)
        return;
    const size_t i = storm_below(&s->dice, STORM_SPARES);
    if (s->plan.reclaims && storm_one_in(&s->dice, 12) && s->keep.spares[i].block) {
        storm_free(s, s->keep.spares[i].block);
        s->keep.spares[i] = (struct storm_spare){NULL, 0};
    }
    const size_t cache = storm_below(&s->dice, STORM_CACHES);
    if (storm_one_in(&s->dice, 16) && s->keep.caches[cache].table)
        storm_cache_drop(s, cache);
    if (storm_one_in(&s->dice, 40) && storm_alloc(s, STORM_IMPOSSIBLE_BYTES))
        storm_fail(s, "the pool gave what there is not");
}

/* A scope of the callback's own: it ends as it began, or what it had stays. */
static rebatch_status use_scope(struct storm *s)
{
    rebatch_scope scope;
    if (!storm_one_in(&s->dice, 10))
        return REBATCH_OK;
    if (rebatch_scope_begin(&scope, s->pool) != REBATCH_OK) {
        storm_fail(s, "no scope: %s", rebatch_last_error());
        return REBATCH_OK;
    }
    const size_t temps = s->temp_count;
    const bool is_kept = storm_one_in(&s->dice, 2);
    const void *const block = storm_temp(s, 1 + storm_below(&s->dice, 6000));
    if ((is_kept ? rebatch_scope_commit(s->pool, scope) : rebatch_scope_rollback(s->pool, scope)) !=
        REBATCH_OK)
        storm_fail(s, "a scope did not end: %s", rebatch_last_error());
    if (!is_kept)
        s->temp_count = temps;
    return block || !is_kept ? REBATCH_OK : REBATCH_OOM;
}

static bool needs_cache(const struct storm *s, size_t cache)
{
    return s->keep.level < 3 || cache == 1 || cache == 3;
}

/* ---- zero_grad ---- */

static rebatch_status zero_memory(struct storm *s)
{
    if (!s->keep.gradients) {
        s->keep.gradients = storm_alloc(s, STORM_PARAMETERS * sizeof(double));
        if (!s->keep.gradients)
            return REBATCH_OOM;
    }
    if (needs_cache(s, 0)) {
        if (storm_cache_ensure(s, 0, 1 + (size_t)s->step))
            return REBATCH_OOM;
        if (storm_cache_look_up(s, 0, (size_t)s->step) != storm_entry(0, (size_t)s->step))
            storm_fail(s, "cache 0 is wrong");
        storm_cache_done(s, 0);
    }
    if (storm_one_in(&s->dice, 4) && storm_cache_ensure(s, 3, storm_between(&s->dice, 1, 12)))
        return REBATCH_OOM;
    storm_cache_done(s, 3);
    if (s->plan.zero_bytes && !storm_temp(s, s->plan.zero_bytes))
        return REBATCH_OOM;
    return use_scope(s);
}

static rebatch_status zero_grad(void *user)
{
    struct storm *const s = user;
    begin(s, STORM_ZERO, NULL);
    if (!s->is_probing && !s->may_zero)
        storm_fail(s, "zero_grad runs where it is not next");
    const struct storm_fault *const fault = due(s, STORM_ZERO, 1);
    s->keep.rng = storm_rng_next(s->keep.rng);
    meddle(s);
    if (zero_memory(s))
        return conclude(s, STORM_ZERO, false, 0, REBATCH_OOM);
    if (fault && !fault->is_late)
        return fail_as(s, fault, STORM_ZERO, false);
    const bool has_mutated = mutate(s);
    for (size_t i = 0; i < STORM_PARAMETERS; i++)
        s->keep.gradients[i] = 0;
    if (fault)
        return fail_as(s, fault, STORM_ZERO, has_mutated);
    if (!storm_temps_hold(s))
        storm_fail(s, "a block of zero_grad was overwritten");
    storm_temps_free(s);
    return conclude(s, STORM_ZERO, has_mutated, 0, REBATCH_OK);
}

/* ---- forward_backward ---- */

static size_t activation_bytes(const struct storm *s, size_t first, size_t count)
{
    size_t sum = 0, most = 0;
    for (size_t k = first; k < first + count; k++) {
        const size_t length = storm_length(s->lengths, k);
        sum += length;
        most = length > most ? length : most;
    }
    const size_t units = s->plan.is_padded ? count * most : sum;
    return units * s->plan.unit_bytes >> (s->keep.level >= 3 ? 2 : s->keep.level >= 1 ? 1 : 0);
}

static size_t longest(const struct storm *s, const rebatch_microbatch *mb)
{
    size_t most = 0;
    for (size_t k = mb->first; k < mb->first + mb->count; k++) {
        const size_t length = storm_length(s->lengths, k);
        most = length > most ? length : most;
    }
    return most;
}

static rebatch_status forward_memory(struct storm *s, const rebatch_microbatch *mb)
{
    if (storm_cache_ensure(s, 3, mb->count))
        return REBATCH_OOM;
    for (size_t i = 0; i < mb->count; i++)
        if (storm_cache_look_up(s, 3, i) != storm_entry(3, i))
            storm_fail(s, "cache 3 is wrong at %zu", i);
    storm_cache_done(s, 3);
    move_limit(s);
    if (storm_cache_ensure(s, 1, longest(s, mb)))
        return REBATCH_OOM;
    const size_t bytes = activation_bytes(s, mb->first, mb->count);
    if (!storm_temp(s, bytes / 2 + 1) || !storm_temp(s, bytes - bytes / 2 + 1))
        return REBATCH_OOM;
    if (s->plan.base_bytes && !storm_temp(s, s->plan.base_bytes))
        return REBATCH_OOM;
    return use_scope(s);
}

/* Draws in the order of the samples, whatever their micro-batches are. */
static rebatch_status run_forward(struct storm *s, const rebatch_microbatch *mb,
                                  struct storm_sample **samples)
{
    *samples = s->samples = storm_alloc(s, mb->count * sizeof **samples);
    if (!*samples)
        return REBATCH_OOM;
    for (size_t i = 0; i < mb->count; i++) {
        s->keep.rng = storm_rng_next(s->keep.rng);
        struct storm_sample *const sample = &(*samples)[i];
        sample->length = storm_length(s->lengths, mb->first + i);
        sample->draw = storm_unit(s->keep.rng);
        sample->entry = storm_cache_look_up(s, 1, sample->length - 1);
        *s->running = storm_running(*s->running, sample);
    }
    return REBATCH_OK;
}

static void add(struct storm *s, const rebatch_microbatch *mb, const struct storm_sample *samples,
                size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        storm_accumulate(s->keep.gradients, s->parameters, &samples[i], mb->batch);
}

static rebatch_status run_backward(struct storm *s, const rebatch_microbatch *mb,
                                   struct storm_sample *samples, const struct storm_fault *fault)
{
    const bool is_reserved = s->plan.reserves && s->plan.late_bytes;
    if (is_reserved && rebatch_reserve(s->rb, storm_rounded(s->plan.late_bytes)))
        return conclude(s, STORM_FORWARD, false, 0, REBATCH_OOM);
    const bool has_mutated = mutate(s);
    add(s, mb, samples, 0, mb->count / 2);
    if (s->plan.late_bytes && !storm_temp(s, s->plan.late_bytes)) {
        if (is_reserved && s->plan.options.pool.caching != REBATCH_OFF &&
            s->plan.options.pool.rounding_divisions == 0)
            storm_fail(s, "what was reserved was not to be had");
        return conclude(s, STORM_FORWARD, has_mutated, 0, REBATCH_OOM);
    }
    if (fault && fault->is_late)
        return fail_as(s, fault, STORM_FORWARD, has_mutated);
    add(s, mb, samples, mb->count / 2, mb->count);
    if (!storm_temps_hold(s))
        storm_fail(s, "a block of forward_backward was overwritten");
    storm_free(s, samples);
    s->samples = NULL;
    storm_temps_free(s);
    return conclude(s, STORM_FORWARD, has_mutated, mb->count, REBATCH_OK);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct storm *const s = user;
    struct storm_sample *samples;
    begin(s, STORM_FORWARD, mb);
    storm_check_cut(s, mb);
    const struct storm_fault *const fault = due(s, STORM_FORWARD, mb->count);
    meddle(s);
    if (!s->keep.gradients)
        storm_fail(s, "there are no gradients");
    if (forward_memory(s, mb) || run_forward(s, mb, &samples) || s->has_failed)
        return conclude(s, STORM_FORWARD, false, 0, REBATCH_OOM);
    if (fault && !fault->is_late)
        return fail_as(s, fault, STORM_FORWARD, false);
    return run_backward(s, mb, samples, fault);
}

/* ---- optimizer_step ---- */

static double *moments(struct storm *s)
{
    return s->keep.moments_are == 1 ? s->keep.moments : s->moments_on_host;
}

static rebatch_status update_memory(struct storm *s)
{
    if (s->keep.moments_are == 0) {
        s->keep.moments = storm_alloc(s, STORM_PARAMETERS * sizeof(double));
        if (!s->keep.moments)
            return REBATCH_OOM;
        memset(s->keep.moments, 0, STORM_PARAMETERS * sizeof(double));
        s->keep.moments_are = 1;
    }
    if (s->plan.update_bytes && !storm_temp(s, s->plan.update_bytes))
        return REBATCH_OOM;
    if (needs_cache(s, 2) && storm_cache_ensure(s, 2, 1 + storm_update_index(s->step)))
        return REBATCH_OOM;
    return use_scope(s);
}

/* Where an OOM tears an update, host memory serves it, unless calls of the device fail. */
static void check_overflow(struct storm *s, bool has_mutated, const char *what)
{
    if (is_dirty(s, STORM_UPDATE, has_mutated) && !s->is_armed && !s->is_probing &&
        !s->has_failed && rebatch_pool_overflow_room(s->pool) > STORM_PLENTY_BYTES / 64)
        storm_fail(s, "%s found no memory, and the host has some", what);
}

static void change(struct storm *s, double entry, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        storm_update(&s->parameters[i], &moments(s)[i], s->keep.gradients[i],
                     storm_unit(s->keep.rng), entry);
}

static rebatch_status optimizer_step(void *user)
{
    struct storm *const s = user;
    begin(s, STORM_UPDATE, NULL);
    if (!s->is_probing && s->next != s->batch)
        storm_fail(s, "optimizer_step runs after sample %zu of %zu", s->next, s->batch);
    if (!s->is_probing && !storm_same_bits(s->keep.gradients, s->after.gradients, STORM_PARAMETERS))
        storm_fail(s, "the gradients are not those of every sample once, in order");
    const struct storm_fault *const fault = due(s, STORM_UPDATE, 1);
    meddle(s);
    s->keep.rng = storm_rng_next(s->keep.rng);
    if (update_memory(s) || s->has_failed) {
        check_overflow(s, false, "an update of which nothing is undone");
        return conclude(s, STORM_UPDATE, false, 0, REBATCH_OOM);
    }
    if (fault && !fault->is_late)
        return fail_as(s, fault, STORM_UPDATE, false);
    const size_t index = storm_update_index(s->step);
    const double entry =
        needs_cache(s, 2) ? storm_cache_look_up(s, 2, index) : storm_entry(2, index);
    const size_t late = s->plan.update_bytes / 2;
    const bool is_reserved = s->plan.reserves && late;
    if (is_reserved && rebatch_reserve(s->rb, storm_rounded(late))) {
        check_overflow(s, false, "a reservation of which nothing is undone");
        return conclude(s, STORM_UPDATE, false, 0, REBATCH_OOM);
    }
    const bool has_mutated = mutate(s);
    change(s, entry, 0, STORM_PARAMETERS / 2);
    if (late && !storm_temp(s, late)) {
        if (is_reserved && s->plan.options.pool.caching != REBATCH_OFF &&
            s->plan.options.pool.rounding_divisions == 0 &&
            !(s->plan.overflow_bytes && s->is_armed)) /* host memory is had when it is needed */
            storm_fail(s, "an update was torn that had reserved its memory");
        check_overflow(s, has_mutated, "an update that has begun");
        return conclude(s, STORM_UPDATE, has_mutated, 0, REBATCH_OOM);
    }
    if (fault)
        return fail_as(s, fault, STORM_UPDATE, has_mutated);
    change(s, entry, STORM_PARAMETERS / 2, STORM_PARAMETERS);
    if (!storm_temps_hold(s))
        storm_fail(s, "a block of optimizer_step was overwritten");
    storm_temps_free(s);
    return conclude(s, STORM_UPDATE, has_mutated, 0, REBATCH_OK);
}

/* ---- lighten ---- */

/* Level 1 halves the activations, 2 keeps the moments on the host, 3 does without two caches. */
static rebatch_status move_to(struct storm *s, unsigned level)
{
    if (level >= 2 && s->keep.moments_are != 2) {
        for (size_t i = 0; i < STORM_PARAMETERS; i++)
            s->moments_on_host[i] = s->keep.moments_are == 1 ? s->keep.moments[i] : 0;
        if (s->keep.moments)
            storm_free(s, s->keep.moments);
        s->keep.moments = NULL;
        s->keep.moments_are = 2;
    }
    if (level < 2 && s->keep.moments_are == 2) {
        s->keep.moments = storm_alloc(s, STORM_PARAMETERS * sizeof(double));
        if (!s->keep.moments)
            return REBATCH_OOM;
        memcpy(s->keep.moments, s->moments_on_host, sizeof s->moments_on_host);
        s->keep.moments_are = 1;
    }
    for (size_t cache = 0; level >= 3 && cache < STORM_CACHES; cache += 2)
        if (s->keep.caches[cache].table)
            storm_cache_drop(s, cache);
    s->keep.level = level;
    return REBATCH_OK;
}

static bool same_cache(const struct storm_cache *a, const struct storm_cache *b)
{
    return a->table == b->table && a->count == b->count;
}

/* The level is in force: what it has changed stays changed, whatever becomes of the step. */
static void keep_level(struct storm *s, const struct storm_keep *was)
{
    struct storm_keep *const points[] = {&s->at_step, &s->at_callback};
    for (size_t p = 0; p < 2; p++) {
        if (s->keep.moments_are != was->moments_are) {
            points[p]->moments = s->keep.moments;
            points[p]->moments_are = s->keep.moments_are;
        }
        points[p]->level = s->keep.level;
        for (size_t i = 0; i < STORM_CACHES; i++)
            if (!same_cache(&s->keep.caches[i], &was->caches[i]))
                points[p]->caches[i] = s->keep.caches[i];
    }
}

static rebatch_status lighten(unsigned level, void *user)
{
    struct storm *const s = user;
    const struct storm_keep was = s->keep;
    s->calls[STORM_LIGHTEN]++;
    s->temp_count = 0;
    s->samples = NULL;
    memset(s->is_pinned, 0, sizeof s->is_pinned);
    storm_say(s, "  lighten from %u to %u", (unsigned)s->keep.level, level);
    if (level != s->keep.level + 1 && level + 1 != s->keep.level)
        storm_fail(s, "lighten is to go from level %u to %u", (unsigned)s->keep.level, level);
    if (level > s->plan.levels)
        return REBATCH_E_UNSUPPORTED;
    const struct storm_fault *const fault = due(s, STORM_LIGHTEN, 1);
    const bool fails = fault && fault->manner != STORM_SWALLOW;
    if (fails && !s->plan.is_sloppy)
        return fail_as(s, fault, STORM_LIGHTEN, false);
    if (!storm_temp(s, 600) || move_to(s, level)) {
        storm_memory_leave(s);
        return REBATCH_OOM;
    }
    if (fails)
        return fail_as(s, fault, STORM_LIGHTEN, false);
    storm_temps_free(s);
    keep_level(s, &was);
    s->counts->lightened += level > was.level;
    if (fault)
        (void)swallow(s);
    return REBATCH_OK;
}

/* ---- resize ---- */

static rebatch_status resize(size_t samples, void *user)
{
    struct storm *const s = user;
    s->map_buffers.are_there = false; /* those of a map give way */
    s->calls[STORM_RESIZE]++;
    s->counts->resized++;
    s->temp_count = 0;
    s->samples = NULL;
    s->buffers.are_there = false; /* taken back */
    memset(s->is_pinned, 0, sizeof s->is_pinned);
    storm_say(s, "  resize to %zu", samples);
    if (samples == 0 || samples > STORM_MAP_MOST)
        storm_fail(s, "resize is to make buffers for %zu samples", samples);
    storm_check_memory(s, "resize");
    move_room(s);
    const struct storm_fault *const fault = due(s, STORM_RESIZE, samples);
    const bool fails = fault && fault->manner != STORM_SWALLOW;
    if (fails && !fault->is_late)
        return fail_as(s, fault, STORM_RESIZE, false);
    const bool is_made = storm_buffers_make(s, &s->buffers, samples);
    s->buffers.are_there = is_made && !fault;
    if (!is_made)
        return REBATCH_OOM;
    return fails ? fail_as(s, fault, STORM_RESIZE, false) : fault ? swallow(s) : REBATCH_OK;
}

rebatch_status storm_map_resize(size_t samples, void *user)
{
    struct storm *const s = user;
    s->buffers.are_there = s->map_buffers.are_there = false; /* those of the step give way */
    storm_say(s, "  resize of a map to %zu", samples);
    storm_check_memory(s, "resize of a map");
    return storm_buffers_make(s, &s->map_buffers, samples) ? REBATCH_OK : REBATCH_OOM;
}

/* ---- the table ---- */

/* Right, or a wrong one that only costs OOMs; never falling with the samples. */
static uint64_t cost(size_t first, size_t count, void *user)
{
    const struct storm *const s = user;
    uint64_t sum = 0, most = 0, wrong = 0;
    for (size_t k = first; k < first + count; k++) {
        const uint64_t length = storm_length(s->lengths, k);
        sum += length;
        most = length > most ? length : most;
        wrong += storm_hash(s->lengths, k + 5000) % 9;
    }
    switch (s->plan.cost_kind) {
    case 0:
    case 1:
        return count * most;
    case 2:
        return sum;
    case 3:
        return count;
    case 4:
        return most;
    default:
        return wrong;
    }
}

rebatch_step_ops storm_model_ops(const struct storm_plan *plan)
{
    return (rebatch_step_ops){.struct_size = sizeof(rebatch_step_ops),
                              .zero_grad = zero_grad,
                              .forward_backward = forward_backward,
                              .optimizer_step = optimizer_step,
                              .lighten = plan->levels ? lighten : NULL,
                              .flags = plan->has_flag ? REBATCH_DECLARES_MUTATION : 0,
                              .cost = plan->has_cost ? cost : NULL,
                              .resize = plan->has_resize ? resize : NULL};
}
