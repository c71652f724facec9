/* Owns the runs that all others are compared with: the largest size that fits, what is compared,
 * and whether the results repeat. Must not know what other runs there are. */
#include <string.h>

#include "check/check.h"

rebatch_status rbi_check_open_values(struct rbi_check *c)
{
    struct rbi_values *const all[] = {&c->before, &c->reference, &c->now, &c->other, &c->replayed};
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all && !status; i++)
        status = rbi_values_open(all[i], &c->items);
    return status ? status : rbi_values_read(&c->before, &c->items);
}

/* ---- the largest size ---- */

/* A run at c->base. *next is the size to try instead; 0: this one will do, or nothing will. */
static rebatch_status try_size(struct rbi_check *c, size_t *next, bool *is_there)
{
    size_t ran = 0;
    const uint64_t ooms = rbi_pool_oom_count(c->pool);
    *next = 0;
    rebatch_status status = rbi_check_run(c, c->base, 0, &ran);
    *is_there = !status && rbi_pool_oom_count(c->pool) == ooms;
    const bool is_swallowed = !status && c->injection.was_swallowed;
    if (*is_there)
        status = rbi_older_note(&c->blocks);
    if (*is_there && !status && !rbi_parts_copy(&c->whole, &c->ran))
        status = rbi_error(REBATCH_E_HOST_OOM, "no host memory for a check");
    if (*is_there && !status)
        status = rbi_values_read(&c->replayed, &c->items);
    if (*is_there && !status)
        status = rbi_items_add_made(&c->items);
    c->report->allocations = c->injection.requests;
    const size_t count = c->items.count;
    rbi_assert(c->before.count <= count);
    c->items.count = c->before.count; /* new items have no values yet */
    const rebatch_status undone = rbi_check_undo(c);
    c->items.count = count;
    if (status || undone)
        return status ? status : undone;
    if (is_swallowed && !c->swallowing)
        c->swallowing = c->base;
    c->report->micro = c->report->micro_smallest = ran;
    if (!*is_there)
        *next = ran < c->base ? ran : rbi_round_size(rbi_session_options(c->rb), c->base / 2);
    return REBATCH_OK;
}

static rebatch_status find_base(struct rbi_check *c, size_t batch, bool *is_there)
{
    c->base = batch;
    for (size_t next;; c->base = next) {
        rbi_assert(c->base > 0 && c->base <= batch);
        const rebatch_status status = try_size(c, &next, is_there);
        if (status == REBATCH_E_EXHAUSTED && c->injection.was_swallowed)
            rbi_finding_add_block(c->report, REBATCH_FINDING_SWALLOWED, "", &c->injection.swallowed,
                                  c->injection.swallowed_bytes,
                                  " failed for want of memory, the callback returned REBATCH_OK, "
                                  "and no size fitted then; return the status of the allocation");
        if (status == REBATCH_E_EXHAUSTED)
            return status;
        if (status)
            return rbi_check_fail(c, "when nothing was made to fail", status);
        if (*is_there || next == 0)
            return REBATCH_OK;
    }
}

/* ---- what there is to compare ---- */

/* A block without a name is a result if zero_grad clears or allocates it; else it may be scratch
 * memory. c->other has the values after zero_grad. */
static void choose_items(struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        const char *const before = c->before.copies[i], *const cleared = c->other.copies[i];
        const char *const after = c->reference.copies[i];
        if (!item->has_name) {
            item->number = rbi_values_guess(after, item->bytes);
            item->is_compared |= memcmp(before, cleared, item->bytes) != 0;
        }
        if (!item->has_name && item->is_compared) {
            c->report->blocks++;
            c->report->block_bytes += item->bytes;
        }
    }
}

/* Whether forward_backward has changed something that is compared. */
static bool is_written(const struct rbi_check *c, const struct rbi_values *after)
{
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *const item = &c->items.list[i];
        if (item->is_compared && memcmp(c->other.copies[i], after->copies[i], item->bytes) != 0)
            return true;
    }
    return false;
}

/* Dropout may drop all of a small batch, but not in each of so many rounds. */
#define ROUNDS 64

static rebatch_status find_unwritten(struct rbi_check *c)
{
    const rebatch_status status = rbi_check_run_repeated(c, ROUNDS);
    if (rbi_check_is_fatal(status))
        return status;
    if (!status && is_written(c, &c->now))
        rbi_finding_add(c->report, REBATCH_FINDING_UNWATCHED, "",
                        "forward_backward adds nothing for this batch, and does when the batch "
                        "comes %d times: dropout may have dropped all of it, and nothing but zeros "
                        "was compared; check a larger batch",
                        ROUNDS);
    else
        rbi_finding_add(c->report, REBATCH_FINDING_UNCOMPARED, "",
                        "forward_backward changes nothing that could be compared, neither what is "
                        "watched nor memory of the pool that zero_grad clears: name the gradients "
                        "and the loss with rebatch_watch()");
    return rbi_check_undo(c);
}

/* A watched variable that holds no pointer to memory of the pool. */
static void find_missing(struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *item = &c->items.list[i];
        if (item->has_name && !rbi_item_place(&c->items, item))
            rbi_finding_add(c->report, REBATCH_FINDING_UNCOMPARED, item->name,
                            "\"%s\" was not compared: its variable holds no pointer to %zu bytes "
                            "of the pool after forward_backward",
                            item->name, item->bytes);
    }
}

static void find_no_numbers(struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        size_t at;
        if (!item->is_compared || !rbi_values_find_no_number(&at, item, c->reference.copies[i]))
            continue;
        if (!rbi_finding_has(c->report, REBATCH_FINDING_NOT_A_NUMBER))
            rbi_finding_add(c->report, REBATCH_FINDING_NOT_A_NUMBER, item->name,
                            "\"%s\" is infinite or no number in element %zu when nothing was made "
                            "to fail: nothing shows there; with a loss scaler, begin with a scale "
                            "that does not overflow",
                            item->name, at);
        item->is_settled = true;
    }
}

static void say_unwatched(struct rbi_check *c, uint64_t left_out)
{
    char text[64] = "";
    struct rbi_text t = {text, sizeof text, 0};
    if (c->report->watched)
        return;
    if (left_out) {
        rbi_text_add(&t, "; ");
        rbi_text_add_bytes(&t, left_out);
        rbi_text_add(&t, " more were too large for that");
    }
    if (c->report->blocks)
        rbi_finding_add(c->report, REBATCH_FINDING_UNWATCHED, "",
                        "nothing is watched; what zero_grad clears in the pool was compared by "
                        "itself%s: name what is elsewhere, such as the loss, with rebatch_watch()",
                        text);
}

static const char *const not_repeatable_when = "when the same samples run twice";
static const char *const not_repeatable_advice =
    "guard or watch what changes in between, such as RNG state or a pointer, or make the "
    "arithmetic deterministic";

/* With the run before the first, which has values of names only. */
static rebatch_status compare_with_names(struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++)
        if (!c->items.list[i].has_name)
            memcpy(c->replayed.copies[i], c->reference.copies[i], c->items.list[i].bytes);
    return rbi_compare(c, &(struct rbi_comparison){REBATCH_FINDING_NOT_REPEATABLE,
                                                   not_repeatable_when, not_repeatable_advice,
                                                   &c->replayed, .is = &c->reference});
}

/* The run that all others are compared with. */
static rebatch_status run_reference(struct rbi_check *c, uint64_t left_out, bool *is_there)
{
    size_t ran;
    const uint64_t ooms = rbi_pool_oom_count(c->pool);
    c->is_first = true;
    rebatch_status status = rbi_check_run(c, c->base, 0, &ran);
    c->is_first = false;
    *is_there = !status && rbi_pool_oom_count(c->pool) == ooms;
    if (!status)
        status = rbi_values_read(&c->reference, &c->items);
    if (*is_there && !status) {
        rbi_assert(c->reference.count == c->items.count);
        find_missing(c);
        choose_items(c);
        rbi_rounding_note_sizes(c);
        find_no_numbers(c);
        say_unwatched(c, left_out);
    }
    rebatch_status undone = rbi_check_undo(c);
    if (*is_there && !status && !undone && !is_written(c, &c->reference))
        undone = find_unwritten(c);
    return status ? rbi_check_fail(c, "when it ran a second time", status) : undone;
}

rebatch_status rbi_reference_run(struct rbi_check *c, size_t batch, bool *is_there)
{
    uint64_t left_out = 0;
    rebatch_status status = rbi_older_note(&c->blocks);
    if (!status)
        status = find_base(c, batch, is_there);
    if (!status && *is_there)
        status = rbi_older_add_changed(&c->items, &c->blocks, &left_out);
    if (!status && *is_there)
        status = rbi_check_open_values(c);
    if (!status && *is_there)
        status = run_reference(c, left_out, is_there);
    if (!status && !*is_there && c->report->mistakes == 0)
        rbi_finding_add(c->report, REBATCH_FINDING_UNCOMPARED, "",
                        c->swallowing
                            ? "nothing was compared: with each size an allocation failed, for "
                              "which the callback returned REBATCH_OK, so no smaller one is tried "
                              "in training either; return the status of the allocation"
                            : "nothing was compared: with each size memory ran out within the run");
    return status;
}

/* ---- again ---- */

static void settle_all(struct rbi_check *c)
{
    for (size_t i = 0; i < c->items.count; i++)
        c->items.list[i].is_settled = true;
}

rebatch_status rbi_reference_run_again(struct rbi_check *c)
{
    size_t ran;
    struct rbi_comparison what = {REBATCH_FINDING_NOT_REPEATABLE, not_repeatable_when,
                                  not_repeatable_advice, &c->reference, .is = &c->now};
    rebatch_status status = rbi_check_run(c, c->base, 0, &ran);
    if (!status)
        status = rbi_compare(c, &what);
    /* As when a batch runs again: state without a guard stays changed. */
    const rebatch_status undone = rbi_check_take_back(c);
    if (!status)
        status = undone;
    if (!status)
        status = rbi_check_run(c, c->base, 0, &ran);
    if (!status && !rbi_finding_has(c->report, REBATCH_FINDING_NOT_REPEATABLE)) {
        what.kind = REBATCH_FINDING_CHANGED;
        what.verb = "changed";
        what.when = "each time the batch ran, and zero_grad does not clear it";
        what.advice = "guard it if it is state, such as running statistics or RNG state, and "
                      "change parameters in optimizer_step alone";
        status = rbi_compare(c, &what);
    }
    if (rbi_finding_has(c->report, REBATCH_FINDING_CHANGED))
        settle_all(c); /* it explains differences of all results */
    if (!status) {
        what.kind = REBATCH_FINDING_NOT_CLEARED;
        what.verb = NULL;
        what.when = "when the batch runs again from zero_grad";
        what.advice = "clear it in zero_grad, or guard it; a parameter is changed in "
                      "optimizer_step alone";
        status = rbi_compare(c, &what);
    }
    const rebatch_status restored = rbi_check_undo(c);
    if (status)
        return rbi_check_fail(c, "when it ran again", status);
    return restored ? restored : compare_with_names(c);
}
