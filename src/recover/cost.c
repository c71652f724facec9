/* Owns what a micro-batch is measured by, its samples or their cost, and where it is cut: within a
 * part of the batch, where the step has parts.
 * Must not know memory. */
#include "recover/recover.h"

/* What costs nothing still is one unit, so that a budget always means something. */
static size_t cost_of(const rebatch *rb, size_t first, size_t count)
{
    const uint64_t cost = rb->run.ops->cost(first, count, rb->run.user);
    return cost == 0 ? 1 : cost > SIZE_MAX ? SIZE_MAX : (size_t)cost;
}

size_t rbi_size_of(const rebatch *rb, size_t first, size_t count)
{
    rbi_assert(count > 0 && count <= rb->run.batch && first <= rb->run.batch - count);
    return rb->run.by_cost ? cost_of(rb, first, count) : count;
}

/* From `first` on, in the part of the batch that has it. */
static size_t left_in_part(const rebatch *rb, size_t first)
{
    const struct rbi_run *run = &rb->run;
    const size_t left = run->batch - first;
    return run->ops->part ? rbi_min(left, rbi_max(run->ops->part(first, run->user), 1)) : left;
}

void rbi_parts_begin(rebatch *rb)
{
    if (!rb->run.ops->part)
        return;
    size_t longest = 0;
    for (size_t first = 0, size; first < rb->run.batch; first += size) {
        size = left_in_part(rb, first);
        longest = rbi_max(longest, size);
    }
    rb->run.most = rbi_min(rb->run.most, longest);
}

/* Whether a part begins with the sample `first`, which has `left` in it. */
static bool begins_part(rebatch *rb, size_t first, size_t left)
{
    struct rbi_run_cut *const cut = &rb->run.cut;
    if (first < cut->part_first || first >= cut->part_end) {
        cut->part_first = first;
        cut->part_end = first + left;
    }
    return first == cut->part_first;
}

/* The most samples from `first` on, up to `most`, that cost no more than the budget; 0: not even
 * one does. Cost never falls with the number of samples. */
static size_t within_budget(const rebatch *rb, size_t first, size_t most, size_t budget)
{
    if (budget == SIZE_MAX)
        return most;
    size_t fits = 0;
    size_t fails = 1;
    rbi_assert(most > 0);
    /* From below, so that a small micro-batch of a large batch is a small question. */
    while (cost_of(rb, first, fails) <= budget) {
        if (fails == most)
            return most;
        fits = fails;
        fails = fails > most / 2 ? most : fails * 2;
    }
    while (fits + 1 < fails) {
        const size_t middle = fits + (fails - fits) / 2;
        if (cost_of(rb, first, middle) <= budget)
            fits = middle;
        else
            fails = middle;
    }
    return fits;
}

size_t rbi_cut_to(const rebatch *rb, size_t first, size_t budget)
{
    rbi_assert(first < rb->run.batch);
    const size_t most = rbi_min(rbi_micro_upper(rb, rb->run.batch), left_in_part(rb, first));
    const size_t count = within_budget(rb, first, most, budget);
    if (count == most)
        return most;
    const size_t allowed = rbi_round_size(&rb->options, count);
    /* Where cost falls with the samples, fewer of them may be too many. */
    return allowed && cost_of(rb, first, allowed) <= budget ? allowed : 0;
}

/* Whether the samples from `first` on are cut evenly holds until the size changes. What learning
 * has chosen runs as it is, unless too few samples would be left. */
static size_t cut_by_size(rebatch *rb, size_t first)
{
    const size_t size = rbi_micro_size(rb, rb->run.batch);
    const size_t left = left_in_part(rb, first);
    const bool is_first = begins_part(rb, first, left);
    rbi_assert(size > 0 && left > 0);
    if (left <= size)
        return is_first ? left : rbi_rest_size(&rb->options, left);
    if (rb->sizes.learning.chosen && left - size >= rb->options.micro_smallest) {
        rb->run.cut.even_size = 0; /* what it leaves is cut anew */
        return size;
    }
    if (is_first || rb->run.cut.even_size != size) {
        rb->run.cut.even_size = size;
        rb->run.cut.is_even = rbi_ends_short(&rb->options, size, left);
    }
    return rb->run.cut.is_even ? rbi_even_size(&rb->options, size, left) : size;
}

/* A micro-batch after which too few samples would be left leaves the smallest size, if it can. */
static size_t leave_smallest(const rebatch *rb, size_t count, size_t left)
{
    const size_t smallest = rb->options.micro_smallest;
    rbi_assert(count > 0 && count <= left);
    if (count == left || left - count >= smallest || left < smallest)
        return count;
    const size_t less = rbi_round_size(&rb->options, left - smallest);
    return less ? less : count;
}

/* Sets *is_cut where the budget is why there are not more. */
static size_t cut_by_budget(const rebatch *rb, size_t first, bool *is_cut)
{
    const size_t left = left_in_part(rb, first);
    const size_t most = rbi_min(rbi_micro_upper(rb, rb->run.batch), left);
    const size_t count = rbi_cut_to(rb, first, rb->sizes.budget);
    *is_cut |= count < most;
    return leave_smallest(rb, count ? count : rbi_min(rbi_round_size_up(&rb->options, 1), most),
                          left);
}

void rbi_cut_survey(rebatch *rb)
{
    struct rbi_run *run = &rb->run;
    if (!run->by_cost || !run->ops->resize ||
        (run->cut.most_samples && run->cut.most_budget == rb->sizes.budget))
        return;
    run->cut.most_samples = run->cut.most_cost = 0;
    run->cut.most_budget = rb->sizes.budget;
    bool is_cut = false;
    for (size_t first = 0; first < run->batch;) {
        const size_t count = cut_by_budget(rb, first, &is_cut);
        run->cut.most_samples = rbi_max(run->cut.most_samples, count);
        run->cut.most_cost = rbi_max(run->cut.most_cost, cost_of(rb, first, count));
        first += count;
    }
}

size_t rbi_cut(rebatch *rb, size_t first)
{
    if (!rb->run.by_cost)
        return cut_by_size(rb, first);
    rbi_cut_survey(rb); /* an OOM may have lowered the budget */
    return cut_by_budget(rb, first, &rb->run.cut.by_budget);
}

void rbi_size_set(rebatch *rb, size_t size)
{
    rbi_assert(size > 0 || rb->run.by_cost);
    rb->sizes.by_memory |= size < rbi_size_now(rb);
    if (rb->run.by_cost)
        rb->sizes.budget = size;
    else
        rb->sizes.micro = size;
}

size_t rbi_size_now(const rebatch *rb)
{
    return rb->run.by_cost ? rb->sizes.budget : rbi_micro_size(rb, rb->run.batch);
}

size_t rbi_size_allowed(const rebatch *rb, size_t size)
{
    return rb->run.by_cost ? size : rbi_round_size(&rb->options, size);
}

bool rbi_size_is_cut(const rebatch *rb)
{
    return rb->run.by_cost ? rb->run.cut.by_budget
                           : rbi_size_now(rb) < rbi_micro_upper(rb, rb->run.batch);
}

bool rbi_size_can_shrink(const rebatch *rb, size_t samples)
{
    return rbi_round_size(&rb->options, samples - 1) > 0;
}

size_t rbi_size_get(const rebatch *rb)
{
    return rb->run.cut.size;
}

uint64_t rbi_budget(const rebatch *rb)
{
    return rb->run.by_cost && rb->sizes.budget != SIZE_MAX ? rbi_max(rb->sizes.budget, 1) : 0;
}

/* The first step by cost: the size to start with is in samples. */
void rbi_budget_begin(rebatch *rb)
{
    if (!rb->run.by_cost || rb->sizes.has_budget)
        return;
    rb->sizes.has_budget = true;
    const size_t start = rbi_learn_is_on(&rb->sizes.learning) ? rbi_round_size_up(&rb->options, 1)
                                                              : rb->options.micro_start;
    rb->sizes.budget = start && start < rb->run.batch ? cost_of(rb, 0, start) : SIZE_MAX;
}
