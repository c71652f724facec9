/* Owns which micro-batch sizes the limits allow, and which limits cannot hold together.
 * Must not know memory. */
#include <inttypes.h>

#include "recover/recover.h"

static size_t allowed_count(const rebatch_options *o)
{
    size_t count = 0;
    while (count < REBATCH_ALLOWED_SIZES && o->micro_allowed[count])
        count++;
    return count;
}

static size_t largest_of(const rebatch_options *o)
{
    return o->micro_largest ? o->micro_largest : SIZE_MAX;
}

static bool is_multiple(const rebatch_options *o, size_t size)
{
    return o->micro_multiple_of == 1 || size % o->micro_multiple_of == 0;
}

size_t rbi_round_size(const rebatch_options *o, size_t size)
{
    size = rbi_min(size, largest_of(o));
    if (o->micro_allowed[0] == 0) {
        if (!is_multiple(o, size))
            size -= size % o->micro_multiple_of;
        return size >= o->micro_smallest ? size : 0;
    }
    for (size_t i = allowed_count(o); i-- > 0;)
        if (o->micro_allowed[i] <= size && is_multiple(o, o->micro_allowed[i]))
            return o->micro_allowed[i] >= o->micro_smallest ? o->micro_allowed[i] : 0;
    return 0;
}

size_t rbi_round_size_up(const rebatch_options *o, size_t size)
{
    size = rbi_max(size, o->micro_smallest);
    if (o->micro_allowed[0] == 0) {
        const size_t over = size % o->micro_multiple_of;
        if (over && !rbi_add(size, o->micro_multiple_of - over, &size))
            return 0;
        return size <= largest_of(o) ? size : 0;
    }
    for (size_t i = 0; i < allowed_count(o); i++) {
        const size_t allowed = o->micro_allowed[i];
        if (allowed >= size && is_multiple(o, allowed))
            return allowed <= largest_of(o) ? allowed : 0;
    }
    return 0;
}

/* A size for all of `left` samples, in as few micro-batches as there can be, and as even, so that
 * the last one has an allowed size, or at least the smallest; 0: there is none. */
static size_t find_even(const rebatch_options *o, size_t size, size_t left, bool is_allowed)
{
    rbi_assert(size > 0 && left > 0);
    const size_t least = rbi_round_size_up(o, 1);
    for (size_t n = left / size + 1;; n++) {
        const size_t share = left / n + (left % n != 0);
        for (size_t even = rbi_round_size_up(o, share);
             even && even <= size && even * (n - 1) < left; even = rbi_round_size_up(o, even + 1)) {
            const size_t last = left - even * (n - 1);
            if (is_allowed ? rbi_round_size(o, last) == last : last >= o->micro_smallest)
                return even;
        }
        if (share <= least)
            return 0;
    }
}

/* So many nodes are looked at: what is not found then is not worth the time. */
#define MOST_NODES 4096

/* Whether `left` is the sum of `parts` sizes of the list, of its first `count`. Of the first sum
 * that is found, *largest is the largest size. */
static bool is_sum(const rebatch_options *o, size_t count, size_t parts, size_t left,
                   size_t *largest, size_t *nodes)
{
    if (parts == 0 || count == 0 || *nodes == 0)
        return parts == 0 && left == 0;
    --*nodes;
    const size_t size = o->micro_allowed[count - 1];
    if (parts < left / size + (left % size != 0))
        return false; /* not even with the largest alone */
    const bool is_usable = is_multiple(o, size) && size >= o->micro_smallest;
    for (size_t n = is_usable ? rbi_min(parts, left / size) + 1 : 1; n-- > 0 && *nodes > 0;)
        if (is_sum(o, count - 1, parts - n, left - n * size, largest, nodes)) {
            *largest = n ? size : *largest;
            return true;
        }
    return false;
}

/* The largest of the fewest sizes of the list, at most `size`, that are `left` samples together,
 * where they are fewer than `most`; 0: there are none. */
static size_t find_fewest(const rebatch_options *o, size_t size, size_t left, size_t most)
{
    size_t largest = 0, nodes = MOST_NODES, count = 0;
    while (count < allowed_count(o) && o->micro_allowed[count] <= size)
        count++;
    for (size_t n = left / size + (left % size != 0); count > 0 && n < most && nodes > 0; n++)
        if (is_sum(o, count, n, left, &largest, &nodes))
            return largest;
    return 0;
}

/* The first of micro-batches of allowed sizes that are `left` samples together: as few as there can
 * be, and then as even; 0: there are none. */
static size_t find_whole(const rebatch_options *o, size_t size, size_t left)
{
    const size_t even = find_even(o, size, left, true);
    const size_t fewest =
        o->micro_allowed[0]
            ? find_fewest(o, size, left, even ? left / even + (left % even != 0) : SIZE_MAX)
            : 0;
    return fewest ? fewest : even;
}

bool rbi_ends_short(const rebatch_options *o, size_t size, size_t left)
{
    rbi_assert(size > 0);
    const size_t last = left % size;
    return left > size && last && rbi_round_size(o, last) != last;
}

size_t rbi_even_size(const rebatch_options *o, size_t size, size_t left)
{
    const size_t n = left / size + (left % size != 0);
    const size_t share = rbi_round_size_up(o, left / n + (left % n != 0));
    if (share == 0 || share > size)
        return size; /* which is none of the limits': a map's bound is below them */
    if (o->micro_allowed[0] == 0 && o->micro_multiple_of == 1)
        return share; /* any two sizes may differ by one */
    size_t even = find_whole(o, size, left);
    if (!even && left % size >= o->micro_smallest)
        return size;
    if (!even)
        even = find_even(o, size, left, false);
    return even ? even : share;
}

size_t rbi_rest_size(const rebatch_options *o, size_t left)
{
    rbi_assert(left > 0);
    const size_t size = rbi_round_size(o, left);
    if (size == 0 || size == left)
        return left;
    const size_t even = rbi_ends_short(o, size, left) ? find_whole(o, size, left) : size;
    return even ? even : left;
}

void rbi_sizes_init(struct rbi_sizes *sizes, const rebatch_options *options)
{
    sizes->micro = options->micro_start ? options->micro_start : SIZE_MAX;
    sizes->growth.wait = options->grow_after;
    sizes->model_factor = 1;
    sizes->by_memory = options->learn == REBATCH_ON;
}

size_t rbi_micro_upper(const rebatch *rb, size_t batch)
{
    const size_t most = rbi_min(batch, rb->run.most);
    const size_t size = rbi_round_size(&rb->options, most);
    return size ? size : most; /* all of it is a rest */
}

size_t rbi_micro_size(const rebatch *rb, size_t batch)
{
    const size_t most = rbi_min(batch, rb->run.most);
    const size_t size = rbi_round_size(&rb->options, rbi_min(rb->sizes.micro, most));
    return size ? size : rbi_min(rbi_round_size_up(&rb->options, 1), most);
}

rebatch_status rbi_limits_check_batch(const rebatch_options *o, size_t batch)
{
    if (batch < o->micro_multiple_of)
        return rbi_error(
            REBATCH_E_INVALID,
            "batch is %zu and micro_multiple_of is %zu: expected at least one multiple "
            "in the batch",
            batch, o->micro_multiple_of);
    if (batch < o->micro_allowed[0])
        return rbi_error(REBATCH_E_INVALID,
                         "batch is %zu and the smallest of micro_allowed is %zu: expected an "
                         "allowed size in the batch",
                         batch, o->micro_allowed[0]);
    return REBATCH_OK;
}

/* ---- limits that cannot hold together ---- */

static rebatch_status check_order(const rebatch_options *o)
{
    if (o->micro_largest && o->micro_smallest > o->micro_largest)
        return rbi_error(REBATCH_E_INVALID,
                         "micro_smallest is %zu and micro_largest is %zu: expected smallest <= "
                         "largest",
                         o->micro_smallest, o->micro_largest);
    if (o->micro_start && o->micro_start < o->micro_smallest)
        return rbi_error(REBATCH_E_INVALID,
                         "micro_start is %zu: expected at least micro_smallest, %zu",
                         o->micro_start, o->micro_smallest);
    if (o->micro_largest && o->micro_start > o->micro_largest)
        return rbi_error(REBATCH_E_INVALID,
                         "micro_start is %zu: expected at most micro_largest, %zu", o->micro_start,
                         o->micro_largest);
    return REBATCH_OK;
}

static void add_range(struct rbi_text *t, const rebatch_options *o)
{
    rbi_text_add(t, "from micro_smallest, %zu, ", o->micro_smallest);
    if (o->micro_largest)
        rbi_text_add(t, "to micro_largest, %zu", o->micro_largest);
    else
        rbi_text_add(t, "on");
}

static rebatch_status say_no_size(const rebatch_options *o)
{
    char range[128];
    struct rbi_text t = {range, sizeof range, 0};
    add_range(&t, o);
    if (o->micro_allowed[0] == 0)
        return rbi_error(REBATCH_E_INVALID,
                         "micro_multiple_of is %zu: expected a multiple of it %s",
                         o->micro_multiple_of, range);
    return rbi_error(REBATCH_E_INVALID,
                     "micro_allowed has no multiple of micro_multiple_of, %zu, %s: expected one",
                     o->micro_multiple_of, range);
}

static rebatch_status check_start(const rebatch_options *o)
{
    if (o->micro_start == 0 || rbi_round_size(o, o->micro_start) == o->micro_start)
        return REBATCH_OK;
    if (!is_multiple(o, o->micro_start))
        return rbi_error(REBATCH_E_INVALID,
                         "micro_start is %zu: expected a multiple of micro_multiple_of, %zu",
                         o->micro_start, o->micro_multiple_of);
    return rbi_error(REBATCH_E_INVALID, "micro_start is %zu: expected a size of micro_allowed",
                     o->micro_start);
}

rebatch_status rbi_limits_check(const rebatch_options *o)
{
    rebatch_status status = check_order(o);
    for (size_t i = allowed_count(o); i < REBATCH_ALLOWED_SIZES && !status; i++)
        if (o->micro_allowed[i])
            status = rbi_error(REBATCH_E_INVALID,
                               "micro_allowed[%zu] is %zu, after a 0 that ends the list", i,
                               o->micro_allowed[i]);
    if (!status && rbi_round_size_up(o, 1) == 0)
        status = say_no_size(o);
    return status ? status : check_start(o);
}

/* ---- the list in order ---- */

void rbi_limits_sort(rebatch_options *o)
{
    const size_t count = allowed_count(o);
    for (size_t i = 1; i < count; i++) {
        const size_t size = o->micro_allowed[i];
        size_t at = i;
        for (; at > 0 && o->micro_allowed[at - 1] > size; at--)
            o->micro_allowed[at] = o->micro_allowed[at - 1];
        o->micro_allowed[at] = size;
    }
}

/* FNV-1a over the sizes. */
uint64_t rbi_limits_digest(const rebatch_options *o)
{
    uint64_t digest = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < allowed_count(o); i++)
        digest = (digest ^ o->micro_allowed[i]) * UINT64_C(0x100000001b3);
    return o->micro_allowed[0] ? digest : 0;
}
