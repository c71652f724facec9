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
    return is_of(rb, last, size, rb->lighten) && last->is_exact && last->bytes == bytes;
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

static bool is_exact(const rebatch *rb, const struct rbi_need *need, unsigned lighten)
{
    return need->size && need->is_exact && need->lighten == lighten &&
           need->by_cost == rb->run.by_cost;
}

/* The largest exact entry of a level below `size`. */
static const struct rbi_need *largest_exact(const rebatch *rb, unsigned lighten, size_t below)
{
    const struct rbi_need *best = NULL;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (is_exact(rb, need, lighten) && need->size < below && (!best || need->size > best->size))
            best = need;
    }
    return best;
}

static const struct rbi_need *smallest_exact(const rebatch *rb, unsigned lighten)
{
    const struct rbi_need *best = NULL;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (is_exact(rb, need, lighten) && (!best || need->size < best->size))
            best = need;
    }
    return best;
}

/* ---- by cost ---- */

/* Sizes by cost hardly ever repeat, but there are many: bytes = base + slope * size, with the slope
 * between the outermost and above all of them. */
struct line {
    double base, slope;
    bool is_fitted; /* by points far enough apart; else everything is in proportion */
};

static struct line line_through(const rebatch *rb, const struct rbi_need *low,
                                const struct rbi_need *high, unsigned lighten)
{
    rbi_assert(low->size > 0 && low->size <= high->size);
    struct line line = {0, 0, high->size - low->size >= low->size / 4 + 1};
    if (line.is_fitted && high->bytes > low->bytes)
        line.slope = (double)(high->bytes - low->bytes) / (double)(high->size - low->size);
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (!is_exact(rb, need, lighten))
            continue;
        const double bytes = (double)need->bytes;
        const double size = (double)need->size;
        if (line.is_fitted && line.base < bytes - line.slope * size)
            line.base = bytes - line.slope * size;
        if (!line.is_fitted && line.slope < bytes / size)
            line.slope = bytes / size;
    }
    return line;
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
    const struct rbi_need *low = smallest_exact(rb, lighten);
    if (!low)
        return false;
    const struct line line = line_through(rb, low, largest_exact(rb, lighten, SIZE_MAX), lighten);
    *bytes = rbi_saturate(line.base + line.slope * (double)size);
    const uint64_t least = least_needed(rb, size, lighten);
    if (*bytes < least)
        *bytes = least;
    return true;
}

/* ---- prediction ---- */

/* Memory is affine in the micro-batch, with a base of its own: so a part of a size that ran needs
 * that part of its memory at least, beyond what is held for it already. */
static uint64_t least_of_part(const rebatch *rb, size_t size)
{
    uint64_t least = 0;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (!is_exact(rb, need, rb->lighten) || need->size <= size)
            continue;
        const uint64_t bytes = need->bytes - rbi_min(need->bytes, rbi_need_held(rb, need->size));
        least = rbi_max(least, rbi_saturate((double)bytes / (double)need->size * (double)size));
    }
    return least;
}

bool rbi_need_predict_surely(uint64_t *bytes, const rebatch *rb, size_t size)
{
    *bytes = 0;
    if (rb->run.by_cost) {
        const struct rbi_need *high = largest_exact(rb, rb->lighten, SIZE_MAX);
        return (rbi_need_has_model(rb, rb->lighten) || (high && size <= high->size)) &&
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

/* Memory is affine in the micro-batch; from one point alone, in proportion is the safe reading,
 * since the part that does not depend on it is then counted twice. */
static uint64_t extrapolate(const rebatch *rb, const struct rbi_need *high, size_t size,
                            unsigned lighten)
{
    rbi_assert(high->size > 0 && high->size <= size);
    const struct rbi_need *low = largest_exact(rb, lighten, high->size);
    double slope = (double)high->bytes / (double)high->size;
    if (low && high->bytes > low->bytes)
        slope = (double)(high->bytes - low->bytes) / (double)(high->size - low->size);
    return rbi_saturate((double)high->bytes + slope * (double)(size - high->size));
}

bool rbi_need_predict_live(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    *bytes = 0;
    if (rb->run.by_cost)
        return predict_cost(bytes, rb, size, lighten);
    const struct rbi_need *known = rbi_need_find(rb, size, lighten);
    const struct rbi_need *high = known ? NULL : largest_exact(rb, lighten, size);
    if (known)
        *bytes = known->bytes;
    else if (rbi_need_has_model(rb, lighten))
        *bytes = rb->sizes.model.need(rb->sizes.model.user, size);
    else if (high)
        *bytes = extrapolate(rb, high, size, lighten);
    else
        return false;
    return true;
}

/* ---- what an allocator in pieces reserves ---- */

static bool has_reserved(const rebatch *rb, const struct rbi_need *need, unsigned lighten)
{
    return is_exact(rb, need, lighten) && need->reserved_bytes;
}

/* Above all points, with the slope between the outermost. False: there are no two. */
static bool find_reserved_line(struct line *line, const rebatch *rb, unsigned lighten)
{
    const struct rbi_need *low = NULL, *high = NULL;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (!has_reserved(rb, need, lighten))
            continue;
        low = !low || need->size < low->size ? need : low;
        high = !high || need->size > high->size ? need : high;
    }
    *line = (struct line){0, 0, high && low->size < high->size};
    if (!line->is_fitted)
        return false;
    if (high->reserved_bytes > low->reserved_bytes)
        line->slope =
            (double)(high->reserved_bytes - low->reserved_bytes) / (double)(high->size - low->size);
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->sizes.known[i];
        if (has_reserved(rb, need, lighten))
            line->base = rbi_max(line->base,
                                 (double)need->reserved_bytes - line->slope * (double)need->size);
    }
    return true;
}

/* False where a meter does not tell it. */
static bool predict_reserved(uint64_t *bytes, const rebatch *rb, size_t size, unsigned lighten)
{
    const struct rbi_need *known = rbi_need_find(rb, size, lighten);
    struct line line;
    if (rb->run.by_cost || (known && !has_reserved(rb, known, lighten)) ||
        (!known && !find_reserved_line(&line, rb, lighten)))
        return false;
    *bytes = known ? known->reserved_bytes : rbi_saturate(line.base + line.slope * (double)size);
    return true;
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
    const bool has_line = rb->run.by_cost || rbi_meter_is_set(rb);
    const struct rbi_need *low = has_line ? smallest_exact(rb, rb->lighten) : NULL;
    return low &&
           line_through(rb, low, largest_exact(rb, rb->lighten, SIZE_MAX), rb->lighten).is_fitted;
}

static bool is_predicted_to_fit(const rebatch *rb, size_t size, uint64_t available_bytes)
{
    uint64_t need;
    return rbi_need_predict(&need, rb, size, rb->lighten) &&
           need - rbi_min(need, rbi_need_held(rb, size)) <= available_bytes;
}

size_t rbi_need_largest(const rebatch *rb, size_t most, uint64_t available_bytes)
{
    const rebatch_options *limits = &rb->options;
    size_t least = rb->run.by_cost ? 1 : rbi_round_size_up(limits, 1);
    if (!rb->run.by_cost && !rbi_need_has_model(rb, rb->lighten)) {
        const struct rbi_need *known = smallest_exact(rb, rb->lighten);
        if (!known)
            return 0;
        least = rbi_max(least, known->size); /* nothing is known of what is below it */
    }
    if (least > most || !is_predicted_to_fit(rb, least, available_bytes))
        return 0;
    size_t fits = least;
    while (fits < most) {
        const size_t middle = fits + (most - fits + 1) / 2;
        if (is_predicted_to_fit(rb, middle, available_bytes))
            fits = middle;
        else
            most = middle - 1;
    }
    return rb->run.by_cost ? fits : rbi_round_size(limits, fits);
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
