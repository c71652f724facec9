/* Owns what was learned about the memory that attempts of each size need.
 * Must not know what is done about it. */
#include <string.h>

#include "recover/recover.h"

static bool is_of(const rebatch *rb, const struct rbi_need *need, size_t size, unsigned lighten)
{
    return need->size == size && need->lighten == lighten && need->by_cost == rb->run.by_cost;
}

/* The entry's index, RBI_KNOWN_SIZES when there is none. Nearly always it is the one last learned.
 */
static size_t find(const rebatch *rb, size_t size, unsigned lighten)
{
    if (is_of(rb, &rb->sizes.known[rb->sizes.known_last], size, lighten))
        return rb->sizes.known_last;
    size_t i = 0;
    while (i < RBI_KNOWN_SIZES && !is_of(rb, &rb->sizes.known[i], size, lighten))
        i++;
    return i;
}

const struct rbi_need *rbi_need_find(const rebatch *rb, size_t size, unsigned lighten)
{
    const size_t i = find(rb, size, lighten);
    return i < RBI_KNOWN_SIZES ? &rb->sizes.known[i] : NULL;
}

bool rbi_need_has_model(const rebatch *rb, unsigned lighten)
{
    return rb->sizes.model.need && !rb->sizes.model_is_refuted &&
           rb->sizes.model.lighten == lighten && rb->sizes.model.by_cost == rb->run.by_cost;
}

/* Micro-batches of equal cost can need different memory: the model is scaled by the worst ratio
 * that was seen at half the budget or more. */
static void correct_model(rebatch *rb, size_t size, uint64_t bytes)
{
    if (!rb->run.by_cost || !rbi_need_has_model(rb, rb->lighten) || size < rb->sizes.budget / 2)
        return;
    const uint64_t predicted = rb->sizes.model.need(rb->sizes.model.user, size);
    const double factor = predicted ? (double)bytes / (double)predicted : 1;
    if (rb->sizes.model_factor < factor)
        rb->sizes.model_factor = factor;
}

/* What failed with at most that size, now that this ran in less, did so for another reason. */
static void forget_failures(rebatch *rb, size_t size, uint64_t bytes)
{
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        struct rbi_need *need = &rb->sizes.known[i];
        if (need->size && need->size <= size && !need->is_exact && need->bytes > bytes &&
            need->by_cost == rb->run.by_cost && need->lighten == rb->lighten)
            *need = (struct rbi_need){0};
    }
}

static void learn(rebatch *rb, size_t size, uint64_t bytes, bool is_exact)
{
    size_t i = find(rb, size, rb->lighten);
    if (i == RBI_KNOWN_SIZES) {
        i = rb->sizes.known_next;
        rb->sizes.known_next = (i + 1) % RBI_KNOWN_SIZES;
    }
    rbi_assert(size > 0 && i < RBI_KNOWN_SIZES);
    rb->sizes.known_last = i;
    rb->sizes.known[i] = (struct rbi_need){.size = size,
                                           .by_cost = rb->run.by_cost,
                                           .lighten = rb->lighten,
                                           .is_exact = is_exact,
                                           .bytes = bytes,
                                           .added_bytes = bytes};
    correct_model(rb, size, bytes);
}

/* Whether this was learned last, so that it says nothing new. */
static bool is_known(const rebatch *rb, size_t size, uint64_t bytes)
{
    const struct rbi_need *last = &rb->sizes.known[rb->sizes.known_last];
    return is_of(rb, last, size, rb->lighten) && last->is_exact && last->bytes == bytes &&
           !last->has_memory;
}

void rbi_need_has_memory(rebatch *rb, size_t size)
{
    const size_t i = find(rb, size, rb->lighten);
    if (i < RBI_KNOWN_SIZES)
        rb->sizes.known[i].has_memory = true;
}

void rbi_need_learn(rebatch *rb, size_t size, uint64_t bytes)
{
    if (is_known(rb, size, bytes))
        return;
    forget_failures(rb, size, bytes);
    learn(rb, size, bytes, true);
}

static uint64_t live_of_zero_grad(const rebatch *rb)
{
    return rbi_pool_live_between(rb->pool, rb->run.zeroed_from, rb->run.zeroed_to);
}

uint64_t rbi_need_held(const rebatch *rb, size_t size)
{
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    if (!known || known->kept_from == known->kept_to)
        return 0;
    const uint64_t left = rbi_pool_live_between(rb->pool, known->kept_from, known->kept_to);
    const uint64_t zeroed = live_of_zero_grad(rb);
    const uint64_t made = zeroed - rbi_min(zeroed, known->zeroed_bytes);
    return rbi_min(known->bytes, rbi_max(left, rbi_min(made, known->bytes - known->added_bytes)));
}

/* A run that has left no blocks has used those that were held, which stay what is held. */
void rbi_need_learn_run(rebatch *rb, size_t size, const struct rbi_run_need *run)
{
    const struct rbi_need *const found = rbi_need_find(rb, size, rb->lighten);
    const struct rbi_need before = found ? *found : (struct rbi_need){0};
    struct rbi_need kept = before;
    uint64_t held = 0;
    if (run->kept_from != run->kept_to)
        kept = (struct rbi_need){.kept_from = run->kept_from,
                                 .kept_to = run->kept_to,
                                 .zeroed_bytes = live_of_zero_grad(rb)};
    else if ((held = rbi_need_held(rb, size)) == 0)
        kept = (struct rbi_need){0};
    rbi_need_learn(rb, size, run->peak_bytes + held);
    struct rbi_need *known = &rb->sizes.known[rb->sizes.known_last];
    known->reserved_bytes = run->reserved_bytes ? run->reserved_bytes : before.reserved_bytes;
    known->added_bytes = run->peak_bytes;
    known->kept_from = kept.kept_from;
    known->kept_to = kept.kept_to;
    known->zeroed_bytes = kept.zeroed_bytes;
    rbi_assert(known->added_bytes <= known->bytes && known->kept_from <= known->kept_to);
}

void rbi_need_learn_least(rebatch *rb, size_t size, uint64_t bytes)
{
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    if (!known || known->bytes < bytes)
        learn(rb, size, bytes, false);
}

/* ---- lines over size ---- */

/* Memory is affine in the size, with a base of its own. What ran says of other sizes:
 *
 *            | needs at most                       | needs at least
 *   samples  | the upper line, beyond the smallest | a part of a larger size in proportion
 *   cost     | the upper line                      | the upper line, up to the largest; failures
 *   reserved | the upper line, where it is fitted  | -
 *
 * The upper line has the slope between the outermost points and is above all of them. */
struct line {
    double base, slope;
    size_t from, to; /* the outermost sizes that ran; 0: none has */
    bool is_fitted;  /* by points far enough apart; else everything is in proportion */
};

enum value { LIVE, RESERVED };

static bool is_point(const rebatch *rb, const struct rbi_need *need, unsigned lighten,
                     enum value value)
{
    return need->size && need->is_exact && need->lighten == lighten &&
           need->by_cost == rb->run.by_cost && (value == LIVE || need->reserved_bytes);
}

static double bytes_of(const struct rbi_need *need, enum value value)
{
    return (double)(value == LIVE ? need->bytes : need->reserved_bytes);
}

static struct line upper_line(const rebatch *rb, unsigned lighten, enum value value)
{
    const struct rbi_need *const known = rb->sizes.known;
    const struct rbi_need *low = NULL, *high = NULL;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        if (!is_point(rb, &known[i], lighten, value))
            continue;
        low = !low || known[i].size < low->size ? &known[i] : low;
        high = !high || known[i].size > high->size ? &known[i] : high;
    }
    if (!low)
        return (struct line){0};
    struct line line = {.from = low->size,
                        .to = high->size,
                        .is_fitted = high->size - low->size >= low->size / 4 + 1};
    if (line.is_fitted && bytes_of(high, value) > bytes_of(low, value))
        line.slope =
            (bytes_of(high, value) - bytes_of(low, value)) / (double)(high->size - low->size);
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        if (!is_point(rb, &known[i], lighten, value))
            continue;
        const double bytes = bytes_of(&known[i], value), size = (double)known[i].size;
        if (line.is_fitted && line.base < bytes - line.slope * size)
            line.base = bytes - line.slope * size;
        if (!line.is_fitted && line.slope < bytes / size)
            line.slope = bytes / size;
    }
    return line;
}

static uint64_t line_at(const struct line *line, size_t size)
{
    return rbi_saturate(line->base + line->slope * (double)size);
}

/* A part of a size that ran needs that part of its memory at least, beyond what is held for it
 * already. */
static uint64_t least_of_part(const rebatch *rb, size_t size)
{
    uint64_t least = 0;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (!is_point(rb, need, rb->lighten, LIVE) || need->size <= size)
            continue;
        const uint64_t bytes = need->bytes - rbi_min(need->bytes, rbi_need_held(rb, need->size));
        least = rbi_max(least, rbi_saturate((double)bytes / (double)need->size * (double)size));
    }
    return least;
}

/* What attempts needed at least that failed with this size or less. */
static uint64_t least_needed(const rebatch *rb, size_t size, unsigned lighten)
{
    uint64_t most = 0;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (need->size && need->size <= size && !need->is_exact && need->by_cost &&
            need->lighten == lighten && need->bytes > most)
            most = need->bytes;
    }
    return most;
}

static bool predict_cost(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    *bytes = 0;
    if (rbi_need_has_model(rb, lighten)) {
        const double need = (double)rb->sizes.model.need(rb->sizes.model.user, size);
        *bytes = rbi_saturate(need * rb->sizes.model_factor);
        return true;
    }
    const struct line line = upper_line(rb, lighten, LIVE);
    if (!line.to)
        return false;
    *bytes = rbi_max(line_at(&line, size), least_needed(rb, size, lighten));
    return true;
}

/* ---- prediction ---- */

bool rbi_need_predict_surely(uint64_t *bytes, const rebatch *rb, size_t size)
{
    *bytes = 0;
    if (rb->run.by_cost) {
        return (rbi_need_has_model(rb, rb->lighten) ||
                size <= upper_line(rb, rb->lighten, LIVE).to) &&
               predict_cost(bytes, rb, size, rb->lighten);
    }
    /* A size that ran into an OOM is known only as far as it got. */
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    if (known && known->is_exact)
        *bytes = known->bytes;
    else if (!known && rbi_need_has_model(rb, rb->lighten))
        *bytes = rb->sizes.model.need(rb->sizes.model.user, size);
    else if (!known)
        *bytes = least_of_part(rb, size);
    return *bytes > 0;
}

bool rbi_need_predict_live(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    *bytes = 0;
    if (rb->run.by_cost)
        return predict_cost(bytes, rb, size, lighten);
    const struct rbi_need *known = rbi_need_find(rb, size, lighten);
    if (known) {
        *bytes = known->bytes;
        return true;
    }
    if (rbi_need_has_model(rb, lighten)) {
        *bytes = rb->sizes.model.need(rb->sizes.model.user, size);
        return true;
    }
    const struct line line = upper_line(rb, lighten, LIVE);
    *bytes = line_at(&line, size);
    return line.to && line.from < size;
}

/* False where a meter does not tell it. */
static bool predict_reserved(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    const struct rbi_need *known = rb->run.by_cost ? NULL : rbi_need_find(rb, size, lighten);
    if (known) {
        *bytes = known->reserved_bytes;
        return is_point(rb, known, lighten, RESERVED);
    }
    const struct line line = upper_line(rb, lighten, RESERVED);
    *bytes = line_at(&line, size);
    return !rb->run.by_cost && line.is_fitted;
}

bool rbi_need_predict(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    uint64_t reserved;
    const bool is_known = rbi_need_predict_live(bytes, rb, size, lighten);
    if (is_known && rbi_meter_is_set(rb) && predict_reserved(&reserved, rb, size, lighten))
        *bytes = rbi_max(*bytes, reserved);
    return is_known;
}

bool rbi_need_has_run(const rebatch *rb, size_t size)
{
    const struct rbi_need *known = rbi_need_find(rb, size, rb->lighten);
    return known && known->is_exact;
}

bool rbi_need_can_choose(const rebatch *rb)
{
    if (rbi_need_has_model(rb, rb->lighten))
        return true;
    return (rb->run.by_cost || rbi_meter_is_set(rb)) && upper_line(rb, rb->lighten, LIVE).is_fitted;
}

size_t rbi_need_known_from(const rebatch *rb)
{
    const bool is_any = rb->run.by_cost || rbi_need_has_model(rb, rb->lighten);
    return is_any ? 1 : upper_line(rb, rb->lighten, LIVE).from;
}

void rbi_need_set_model(rebatch *rb, const struct rbi_memory_model *model)
{
    if (rb->sizes.model.destroy)
        rb->sizes.model.destroy(rb->sizes.model.user);
    rbi_assert(!model || model->need);
    rb->sizes.model = model ? *model : (struct rbi_memory_model){0};
    rb->sizes.model_factor = 1;
    rb->sizes.model_is_refuted = false;
}

const struct rbi_memory_model *rbi_need_get_model(const rebatch *rb)
{
    return rb->sizes.model.need ? &rb->sizes.model : NULL;
}

void rbi_need_refute_model(rebatch *rb)
{
    if (rbi_need_has_model(rb, rb->lighten))
        rb->sizes.model_is_refuted = true;
}

void rbi_need_forget(rebatch *rb)
{
    memset(rb->sizes.known, 0, sizeof rb->sizes.known);
    rb->sizes.known_next = rb->sizes.known_last = 0;
}

void rbi_sizes_forget(struct rbi_sizes *sizes)
{
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++)
        if (!sizes->known[i].by_cost)
            sizes->known[i] = (struct rbi_need){0};
    if (!sizes->growth.failed_by_cost)
        sizes->growth.failed_size = 0;
    if (!sizes->model.by_cost)
        sizes->model_is_refuted = true;
}

/* Of more blocks than there is space for the last ones count as one. */
void rbi_need_set_made(rebatch *rb, const size_t *bytes, size_t count)
{
    rb->sizes.made_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (rb->sizes.made_count < RBI_MADE_MOST)
            rb->sizes.made[rb->sizes.made_count++] = bytes[i];
        else
            rb->sizes.made[RBI_MADE_MOST - 1] += bytes[i];
    }
}

size_t rbi_need_get_made(const size_t **bytes, const rebatch *rb)
{
    *bytes = rb->sizes.made;
    return rb->sizes.made_count;
}
