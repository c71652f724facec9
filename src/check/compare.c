/* Owns which differences are findings: one for each cause, about all that it changes.
 * Must not know which runs are made. */
#include <math.h>

#include "check/check.h"

/* The most that are named. */
#define NAMED 3

/* What one finding is about. */
struct about {
    char names[256];
    struct rbi_text t;
    size_t count;
    const struct rbi_item *first;
    struct rbi_difference difference; /* of the first */
};

static void add_name(struct about *about, const struct rbi_item *item,
                     const struct rbi_difference *difference)
{
    if (about->count++ == 0) {
        about->t = (struct rbi_text){about->names, sizeof about->names, 0};
        about->first = item;
        about->difference = *difference;
    }
    if (about->count > NAMED)
        return;
    rbi_text_add(&about->t, about->count > 1 ? ", " : "");
    rbi_item_add(&about->t, item);
}

/* "element 3 of \"gradient\" is 0.5 and was 0.25" */
static void add_values(struct rbi_text *t, const struct about *about)
{
    const struct rbi_difference *difference = &about->difference;
    rbi_text_add(t, "%s %zu", about->first->number == REBATCH_BYTES ? "byte" : "element",
                 difference->at);
    if (about->count > 1) {
        rbi_text_add(t, " of ");
        rbi_item_add(t, about->first);
    }
    rbi_text_add(t, " is %.9g and was %.9g", difference->is, difference->was);
}

static void add_finding(struct rbi_check *c, const struct rbi_comparison *what, struct about *about)
{
    rbi_assert(about->count > 0 && about->first);
    const bool is_number = isfinite(about->difference.is) || !isfinite(about->difference.was);
    const bool has_none = what->kind == REBATCH_FINDING_CUT && !is_number;
    char values[192];
    struct rbi_text t = {values, sizeof values, 0};
    add_values(&t, about);
    if (about->count > NAMED)
        rbi_text_add(&about->t, " and %zu more", about->count - NAMED);
    rbi_finding_add(c->report, has_none ? REBATCH_FINDING_NOT_A_NUMBER : what->kind,
                    about->first->name, "%s %s %s: %s; %s", about->names,
                    what->verb          ? what->verb
                    : about->count == 1 ? "differs"
                                        : "differ",
                    what->when, values,
                    has_none ? "look for a division by what a small micro-batch has none of, such "
                               "as 0/0"
                             : what->advice);
}

static struct rbi_difference difference_of(const struct rbi_comparison *what,
                                           const struct rbi_item *item, size_t i)
{
    rbi_assert(i < what->was->count && i < what->is->count);
    return rbi_values_compare(item, what->was->copies[i], what->is->copies[i], 1);
}

/* An item with a finding is settled: no later comparison would add to it. */
static bool is_asked(const struct rbi_comparison *what, const struct rbi_item *item)
{
    const bool is_state = !item->is_compared && !item->has_name;
    return !item->is_settled &&
           (what->kind == REBATCH_FINDING_CHANGED ? is_state : item->is_compared);
}

static bool needs_measuring(const struct rbi_check *c, const struct rbi_comparison *what)
{
    for (size_t i = 0; i < c->items.count; i++) {
        const struct rbi_item *item = &c->items.list[i];
        if (!is_asked(what, item))
            continue;
        const struct rbi_difference difference = difference_of(what, item, i);
        if (rbi_rounding_is_worth_measuring(c, item, &difference))
            return true;
    }
    return false;
}

static rebatch_status measure(struct rbi_check *c, const struct rbi_comparison *what)
{
    rebatch_status status = REBATCH_OK;
    rbi_assert(what->parts);
    if (!c->is_uncut_measured)
        status = rbi_rounding_measure(c, &c->whole, &c->reference);
    return status ? status : rbi_rounding_measure(c, what->parts, what->is);
}

static void note_rounding(struct rbi_check *c, const struct rbi_comparison *what,
                          const struct rbi_item *item, const struct rbi_difference *difference,
                          bool is_unsure)
{
    c->is_rounding_unsure |= is_unsure;
    if (what->parts && rbi_rounding_is_all(c, item, difference))
        return;
    if (difference->largest <= c->rounding && c->rounding_of[0])
        return;
    c->rounding = difference->largest;
    struct rbi_text t = {c->rounding_of, sizeof c->rounding_of, 0};
    rbi_item_add(&t, item);
    rbi_text_add(&t, " differs by rounding %s", what->when);
}

rebatch_status rbi_compare(struct rbi_check *c, const struct rbi_comparison *what)
{
    struct about about = {.count = 0};
    if (what->parts && needs_measuring(c, what)) {
        const rebatch_status status = measure(c, what);
        if (status)
            return status;
    }
    for (size_t i = 0; i < c->items.count; i++) {
        struct rbi_item *const item = &c->items.list[i];
        if (!is_asked(what, item))
            continue;
        const struct rbi_difference difference = difference_of(what, item, i);
        const enum rbi_verdict verdict =
            what->is_exact && difference.differs
                ? RBI_WRONG
                : rbi_rounding_judge(c, item, &difference,
                                     what->is_few  ? RBI_FEW_SAMPLES
                                     : what->parts ? RBI_OTHER_ORDER
                                                   : RBI_SAME_ORDER,
                                     what->was->copies[i], what->is->copies[i]);
        if (verdict == RBI_WRONG) {
            add_name(&about, item, &difference);
            item->is_settled = true;
        } else if (verdict != RBI_EQUAL) {
            note_rounding(c, what, item, &difference, verdict == RBI_UNSURE);
        }
    }
    if (about.count)
        add_finding(c, what, &about);
    return REBATCH_OK;
}

void rbi_compare_say_coped(struct rbi_check *c, const char *when)
{
    if (!rbi_finding_has(c->report, REBATCH_FINDING_COPED))
        rbi_finding_add(c->report, REBATCH_FINDING_COPED, "",
                        "the result is right %s: no mistake if it copes with less memory", when);
}

void rbi_compare_end(struct rbi_check *c)
{
    if (c->rounding_of[0])
        rbi_finding_add(c->report, REBATCH_FINDING_ROUNDING, "",
                        "%s, by %.1e of its largest value, which is the most of all%s",
                        c->rounding_of, c->rounding,
                        c->is_rounding_unsure
                            ? "; more than float rounds, and how this program rounds could not be "
                              "measured, since its results do not follow mb->batch: see that it "
                              "computes in TF32, bf16 or fp16"
                            : "");
}
