/* Owns the runs with other micro-batches than the first run's, and with the samples twice.
 * Must not know how a run is made. */
#include "check/check.h"

/* ---- smaller ones ---- */

static const char *const cut_advice =
    "a sample's weight is 1/batch, its place is first + i, and neither depends on count";

static void add_samples(struct rbi_text *t, size_t count)
{
    rbi_text_add(t, "%zu sample%s", count, count == 1 ? "" : "s");
}

/* Compares the run of these micro-batches with the first run. One finding is enough: a result that
 * depends on one cut depends on others. */
static rebatch_status compare_cut(struct rbi_check *c, rebatch_finding_kind kind, const char *when,
                                  const char *advice, const struct rbi_parts *parts)
{
    if (c->is_cut_wrong)
        return REBATCH_OK;
    const uint32_t mistakes = c->report->mistakes;
    const rebatch_status status = rbi_compare(
        c, &(struct rbi_comparison){kind, when, advice, &c->reference, &c->now, .parts = parts});
    c->is_cut_wrong = c->report->mistakes != mistakes;
    return status;
}

static rebatch_status run_size(struct rbi_check *c, size_t size)
{
    char when[96];
    size_t ran;
    struct rbi_text t = {when, sizeof when, 0};
    rbi_text_add(&t, "with micro-batches of ");
    add_samples(&t, size);
    rbi_text_add(&t, " instead of %zu", c->base);
    rebatch_status status = rbi_check_run(c, size, 0, &ran);
    const bool is_there = !status;
    if (is_there)
        c->report->micro_smallest = rbi_min(c->report->micro_smallest, ran);
    status = rbi_check_end(c, when, status);
    if (status || !is_there)
        return status;
    status = rbi_trend_add(c, &c->ran);
    return status ? status : compare_cut(c, REBATCH_FINDING_CUT, when, cut_advice, &c->ran);
}

static rebatch_status run_sizes(struct rbi_check *c)
{
    const size_t least = rbi_round_size_up(rbi_session_options(c->rb), 1);
    const size_t sizes[] = {c->base / 2 + c->base % 2, c->base / 3 + 1,
                            rbi_max(c->base / 8, least)};
    size_t before = c->base;
    rebatch_status status = REBATCH_OK;
    rbi_assert(c->base > 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !status && rbi_check_has_time(c); i++) {
        const size_t size = rbi_round_size(rbi_session_options(c->rb), sizes[i]);
        if (size == 0 || size >= before)
            continue;
        before = size;
        status = run_size(c, size);
    }
    return status;
}

/* The batch in micro-batches of at most `most`, the last of which may be a rest; from `first` on.
 * False: there is no host memory. */
static bool add_rest(const struct rbi_check *c, struct rbi_parts *parts, size_t first, size_t most)
{
    const size_t batch = rbi_session_batch(c->rb);
    bool is_whole = true;
    while (first < batch && is_whole) {
        const size_t left = rbi_min(most, batch - first);
        const size_t allowed = rbi_round_size(rbi_session_options(c->rb), left);
        const size_t count = allowed ? allowed : left;
        rbi_assert(count > 0 && count <= left);
        is_whole = rbi_parts_add(parts, first, count);
        first += count;
    }
    return is_whole;
}

/* ---- the samples over again, until there are enough micro-batches ---- */

/* A leak shows in RBI_CHECK_FOR_LEAKS micro-batches (rbi_check_undo()). */
static rebatch_status run_over_again(struct rbi_check *c, struct rbi_parts *parts)
{
    const size_t batch = rbi_session_batch(c->rb);
    const size_t least = rbi_round_size_up(rbi_session_options(c->rb), 1);
    size_t rounds = 0;
    if (c->most_ran >= RBI_CHECK_FOR_LEAKS || !rbi_check_has_time(c))
        return REBATCH_OK;
    parts->count = 0;
    for (; parts->count < RBI_CHECK_FOR_LEAKS; rounds++)
        if (!add_rest(c, parts, 0, least))
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    const rebatch_status status = rbi_check_run_parts(c, parts, rounds * batch, &c->now);
    const rebatch_status undone = rbi_check_undo(c);
    return rbi_check_is_fatal(status) ? status : undone;
}

/* ---- one that is followed by a larger one, or by a smaller one ---- */

static bool make_growing(const struct rbi_check *c, struct rbi_parts *parts, size_t least)
{
    parts->count = 0;
    return rbi_parts_add(parts, 0, least) && add_rest(c, parts, least, c->base);
}

/* Ends with the smallest; the first of the large ones may have to be smaller. */
static bool make_shrinking(const struct rbi_check *c, struct rbi_parts *parts, size_t least)
{
    const size_t batch = rbi_session_batch(c->rb);
    const size_t large =
        rbi_round_size(rbi_session_options(c->rb), rbi_min(c->base, batch - least));
    rbi_assert(large > 0 && large < batch);
    parts->count = 0;
    return rbi_parts_add(parts, 0, large) && add_rest(c, parts, large, c->base);
}

static void add_followed(struct rbi_text *t, const struct rbi_parts *parts, size_t at)
{
    rbi_assert(at + 1 < parts->count);
    rbi_text_add(t, "when a micro-batch of ");
    add_samples(t, parts->list[at].count);
    rbi_text_add(t, " is followed by one of ");
    add_samples(t, parts->list[at + 1].count);
}

/* What new memory is filled with. */
static uint8_t fill_of(const struct rbi_check *c)
{
    return rbi_finding_has(c->report, REBATCH_FINDING_UNINITIALIZED) ? 0 : RBI_NO_NUMBER;
}

/* An allocation of the small micro-batch, which the large one uses. */
static void find_overrun(struct rbi_check *c, const char *when, uint8_t fill)
{
    struct rbi_stale_block block;
    char after[256];
    struct rbi_text t = {after, sizeof after, 0};
    if (!rbi_stale_find_overrun(&block, &c->stale, fill))
        return;
    rbi_text_add(&t,
                 " is written %s: make it anew when a micro-batch needs more, or with the callback "
                 "resize",
                 when);
    rbi_finding_add_block(c->report, REBATCH_FINDING_OUTGROWN, "memory beyond ", &block.place,
                          block.bytes, after);
}

/* `at`: the micro-batch that is followed by one of another size. */
static rebatch_status run_parts(struct rbi_check *c, const struct rbi_parts *parts, size_t at,
                                bool is_growing)
{
    char when[128];
    struct rbi_text t = {when, sizeof when, 0};
    add_followed(&t, parts, at);
    rebatch_status status = rbi_check_run_parts(c, parts, rbi_session_batch(c->rb), &c->now);
    const bool is_there = !status;
    if (is_there && is_growing)
        find_overrun(c, when, fill_of(c));
    status = rbi_check_end(c, when, status == REBATCH_OOM ? REBATCH_OK : status);
    if (status || !is_there || rbi_finding_has(c->report, REBATCH_FINDING_OUTGROWN))
        return status;
    status = rbi_trend_add(c, parts);
    return status
               ? status
               : compare_cut(c, REBATCH_FINDING_CUT, when,
                             is_growing
                                 ? "neither weight nor place of a sample depends on count, and a "
                                   "buffer that is made for one micro-batch may be too small for "
                                   "the next"
                                 : cut_advice,
                             parts);
}

/* Both orders, the smallest last and first. */
static rebatch_status run_changes(struct rbi_check *c, struct rbi_parts *parts)
{
    const size_t batch = rbi_session_batch(c->rb);
    const size_t least = rbi_round_size_up(rbi_session_options(c->rb), 1);
    if (2 * least > c->base || batch < 3 * least || !rbi_check_has_time(c))
        return REBATCH_OK;
    bool is_made = make_shrinking(c, parts, least);
    rebatch_status status = REBATCH_OK;
    if (is_made && parts->count > 1)
        status = run_parts(c, parts, parts->count - 2, false);
    if (status)
        return status;
    is_made = is_made && make_growing(c, parts, least);
    if (!is_made)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    rbi_fill_pad(c, fill_of(c));
    if (rbi_check_has_time(c))
        status = run_parts(c, parts, 0, true);
    rbi_fill_set(c, 0, 0);
    return status;
}

/* ---- few samples ---- */

/* Into c->other and c->now. */
static rebatch_status run_both(struct rbi_check *c, struct rbi_parts *parts, size_t large,
                               bool *is_there)
{
    const size_t batch = rbi_session_batch(c->rb);
    const size_t sizes[] = {large, rbi_round_size_up(rbi_session_options(c->rb), 1)};
    rebatch_status status = REBATCH_OK;
    *is_there = true;
    for (size_t i = 0; i < 2 && !status && *is_there; i++) {
        parts->count = 0;
        if (!add_rest(c, parts, batch - large, sizes[i]))
            return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
        status = rbi_check_run_parts(c, parts, batch, i ? &c->now : &c->other);
        *is_there = !status;
        const rebatch_status undone = rbi_check_undo(c);
        status = rbi_check_is_fatal(status) ? status : undone;
    }
    return status;
}

/* The last samples of the batch, as few as can be cut: they come in one micro-batch, and in the
 * smallest ones. A wrong place or weight is most of that result, and rounding is next to none. */
static rebatch_status run_few(struct rbi_check *c, struct rbi_parts *parts)
{
    char when[128];
    bool is_there;
    struct rbi_text t = {when, sizeof when, 0};
    const rebatch_options *const options = rbi_session_options(c->rb);
    const size_t batch = rbi_session_batch(c->rb), least = rbi_round_size_up(options, 1);
    const size_t large = rbi_round_size_up(options, least + 1);
    if (!large || large > c->base || large > batch || !rbi_check_has_time(c))
        return REBATCH_OK;
    rebatch_status status = run_both(c, parts, large, &is_there);
    if (status || !is_there)
        return status;
    rbi_text_add(&t, "when samples %zu-%zu come in micro-batches of ", batch - large, batch - 1);
    add_samples(&t, least);
    status = rbi_compare(c, &(struct rbi_comparison){REBATCH_FINDING_CUT, when, cut_advice,
                                                     &c->other, &c->now, .is_few = true});
    c->is_cut_wrong = rbi_finding_has(c->report, REBATCH_FINDING_CUT);
    return status;
}

/* ---- a size at which an OOM is swallowed ---- */

static rebatch_status run_swallowing(struct rbi_check *c)
{
    char when[224];
    size_t ran;
    if (!c->swallowing || !rbi_check_has_time(c))
        return REBATCH_OK;
    rebatch_status status = rbi_check_run(c, c->swallowing, 0, &ran);
    const bool is_there = !status && c->injection.was_swallowed;
    struct rbi_text t = {when, sizeof when, 0};
    rbi_text_add(&t, "where ");
    rbi_place_add(&t, &c->injection.swallowed, c->injection.swallowed_bytes);
    rbi_text_add(&t, " fails for want of memory and the callback returns REBATCH_OK");
    const rebatch_status undone = rbi_check_undo(c);
    if (undone || !is_there)
        return rbi_check_is_fatal(status) ? status : undone;
    const uint32_t mistakes = c->report->mistakes;
    status = compare_cut(c, REBATCH_FINDING_SWALLOWED, when, "return the status of the allocation",
                         &c->ran);
    if (!status && c->report->mistakes == mistakes)
        rbi_compare_say_coped(c, when);
    return status;
}

/* ---- what each micro-batch adds ---- */

static void find_trend(struct rbi_check *c)
{
    char text[192];
    struct rbi_text t = {text, sizeof text, 0};
    size_t found = 0;
    const struct rbi_item *first = NULL;
    struct rbi_difference gain, most = {.differs = false};
    for (size_t i = 0; i < c->items.count && !c->is_cut_wrong; i++) {
        struct rbi_item *const item = &c->items.list[i];
        if (!item->is_compared || item->is_settled || !rbi_trend_find(&gain, c, i))
            continue;
        item->is_settled = true;
        if (found++ == 0) {
            first = item;
            most = gain;
        }
        rbi_text_add(&t, found > 1 ? ", " : "");
        rbi_item_add(&t, item);
    }
    if (!found)
        return;
    c->is_cut_wrong = true;
    c->rounding_of[0] = '\0'; /* the note may be about this term */
    rbi_finding_add(c->report, REBATCH_FINDING_CUT, first->name,
                    "%s grow%s with the number of micro-batches: with each one more, element %zu "
                    "gains %.3g, %.1e of the largest; a term that no sample has, such as weight "
                    "decay, is added once, or by count/batch of it in each micro-batch",
                    text, found > 1 ? "" : "s", most.at, most.is, most.largest);
}

rebatch_status rbi_cuts_run(struct rbi_check *c)
{
    struct rbi_parts parts = {NULL, 0, 0};
    rebatch_status status = run_few(c, &parts);
    if (!status)
        status = run_sizes(c);
    if (!status)
        status = run_changes(c, &parts);
    if (!status)
        find_trend(c);
    if (!status)
        status = run_over_again(c, &parts);
    if (!status)
        status = run_swallowing(c);
    rbi_parts_release(&parts);
    return status;
}

/* ---- the samples twice ---- */

/* One note for all. Guarded memory is state, not a sum over the batch. */
static void note_weights(struct rbi_check *c)
{
    char names[160];
    struct rbi_text t = {names, sizeof names, 0};
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *item = &c->items.list[i];
        const double growth = rbi_values_growth(item, c->reference.copies[i], c->now.copies[i]);
        if (!item->is_compared || item->is_settled || growth < 1.8 || growth > 2.2 ||
            (item->pointer && rbi_guards_hold(c->rb, item->pointer)))
            continue;
        rbi_text_add(&t, "%s", t.length ? ", " : "");
        rbi_item_add(&t, item);
    }
    if (t.length)
        rbi_finding_add(c->report, REBATCH_FINDING_WEIGHT, "",
                        "twice as large when the samples come twice, in a batch of twice the size: "
                        "%s; weight a sample by 1/batch, or set REBATCH_OWN_WEIGHTS if its weight "
                        "is of the whole effective batch already, such as 1/tokens",
                        names);
}

rebatch_status rbi_cuts_run_twice(struct rbi_check *c)
{
    if (c->has_own_weights || c->is_cut_wrong || !rbi_check_has_time(c))
        return REBATCH_OK;
    const rebatch_status status = rbi_check_run_repeated(c, 2);
    if (rbi_check_is_fatal(status))
        return status;
    if (!status)
        note_weights(c);
    return rbi_check_undo(c);
}
