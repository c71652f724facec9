/* Owns what was learned about the memory that attempts of each size need.
 * Must not know what is done about it. */
#include "recover/recover.h"

static bool is_of(const struct rbi_need *need, size_t count, unsigned lighten)
{
    return need->count == count && need->lighten == lighten;
}

/* The entry's index, RBI_KNOWN_SIZES when there is none. Nearly always it is the one last learned.
 */
static size_t find(const rebatch *rb, size_t count, unsigned lighten)
{
    if (is_of(&rb->known[rb->known_last], count, lighten))
        return rb->known_last;
    size_t i = 0;
    while (i < RBI_KNOWN_SIZES && !is_of(&rb->known[i], count, lighten))
        i++;
    return i;
}

const struct rbi_need *rbi_need_find(const rebatch *rb, size_t count, unsigned lighten)
{
    const size_t i = find(rb, count, lighten);
    return i < RBI_KNOWN_SIZES ? &rb->known[i] : NULL;
}

static void learn(rebatch *rb, size_t count, uint64_t bytes, bool is_exact)
{
    size_t i = find(rb, count, rb->lighten);
    if (i == RBI_KNOWN_SIZES) {
        i = rb->known_next;
        rb->known_next = (i + 1) % RBI_KNOWN_SIZES;
    }
    rb->known_last = i;
    rb->known[i] = (struct rbi_need){
        .count = count, .lighten = rb->lighten, .is_exact = is_exact, .bytes = bytes};
}

void rbi_need_learn(rebatch *rb, size_t count, uint64_t bytes)
{
    learn(rb, count, bytes, true);
}

void rbi_need_learn_least(rebatch *rb, size_t count, uint64_t bytes)
{
    const struct rbi_need *known = rbi_need_find(rb, count, rb->lighten);
    if (!known || known->bytes < bytes)
        learn(rb, count, bytes, false);
}

/* The largest exact entry of a level below `count`, and with `below` the one below that. */
static const struct rbi_need *largest_exact(const rebatch *rb, unsigned lighten, size_t below)
{
    const struct rbi_need *best = NULL;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->known[i];
        if (need->count && need->is_exact && need->lighten == lighten && need->count < below &&
            (!best || need->count > best->count))
            best = need;
    }
    return best;
}

uint64_t rbi_need_predict(const rebatch *rb, size_t count, unsigned lighten)
{
    const struct rbi_need *known = rbi_need_find(rb, count, lighten);
    if (known)
        return known->bytes;
    if (rb->oracle.need && rb->oracle.lighten == lighten)
        return rb->oracle.need(rb->oracle.user, count);
    const struct rbi_need *high = largest_exact(rb, lighten, count);
    if (!high)
        return 0;
    const struct rbi_need *low = largest_exact(rb, lighten, high->count);
    /* Memory is affine in the micro-batch; from one point alone, in proportion is the safe reading,
     * since the part that does not depend on it is then counted twice. */
    double slope = (double)high->bytes / (double)high->count;
    if (low && high->bytes > low->bytes)
        slope = (double)(high->bytes - low->bytes) / (double)(high->count - low->count);
    return high->bytes + (uint64_t)(slope * (double)(count - high->count));
}

static bool is_predicted_to_fit(const rebatch *rb, size_t count, uint64_t available_bytes)
{
    const uint64_t need = rbi_need_predict(rb, count, rb->lighten);
    return need != 0 && need <= available_bytes;
}

/* SIZE_MAX when there is none. */
static size_t smallest_exact(const rebatch *rb)
{
    size_t smallest = SIZE_MAX;
    for (size_t i = 0; i < RBI_KNOWN_SIZES; i++) {
        const struct rbi_need *need = &rb->known[i];
        if (need->count && need->is_exact && need->lighten == rb->lighten)
            smallest = rbi_min(smallest, need->count);
    }
    return smallest;
}

size_t rbi_need_largest(const rebatch *rb, size_t most, uint64_t available_bytes)
{
    const rebatch_options *limits = &rb->options;
    size_t least = rbi_round_size_up(limits, 1);
    if (!rb->oracle.need || rb->oracle.lighten != rb->lighten)
        least = rbi_max(least, smallest_exact(rb)); /* nothing is known of what is below it */
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
    return rbi_round_size(limits, fits);
}

void rbi_need_set_oracle(rebatch *rb, const struct rbi_oracle *oracle)
{
    if (rb->oracle.destroy)
        rb->oracle.destroy(rb->oracle.user);
    rb->oracle = oracle ? *oracle : (struct rbi_oracle){0};
}
