/* Owns the list of what is found, and what counts as rounding.
 * Must not know how it is found. */
#include <math.h>
#include <string.h>

#include "check/check.h"

static const struct {
    const char *name;
    bool is_mistake;
} kinds[] = {
#define KIND(name, is_mistake) {#name, is_mistake},
    REBATCH_FINDINGS(KIND)
#undef KIND
};

const char *rebatch_finding_name(rebatch_finding_kind kind)
{
    static const char *const names[] = {
        "not_repeatable", "not_cleared", "freed",    "uninitialized", "stale",  "cut",      "early",
        "after_oom",      "failed",      "rounding", "coped",         "weight", "unwatched"};
    _Static_assert(sizeof names / sizeof *names == REBATCH_FINDING_COUNT, "a name for each kind");
    return (unsigned)kind < REBATCH_FINDING_COUNT ? names[kind] : "no such finding";
}

void rbi_finding_add(struct rbi_findings *f, rebatch_finding_kind kind, const char *name,
                     const char *format, ...)
{
    rebatch_check_report *report = f->report;
    report->mistakes += kinds[kind].is_mistake;
    if (report->finding_count == REBATCH_CHECK_FINDINGS)
        return;
    rebatch_finding *finding = &report->findings[report->finding_count++];
    finding->kind = kind;
    finding->is_mistake = kinds[kind].is_mistake;
    struct rbi_text n = {finding->name, sizeof finding->name, 0};
    rbi_text_add(&n, "%s", name);
    struct rbi_text t = {finding->text, sizeof finding->text, 0};
    va_list arguments;
    va_start(arguments, format);
    rbi_text_add_v(&t, format, arguments);
    va_end(arguments);
}

bool rbi_finding_has(const struct rbi_findings *f, rebatch_finding_kind kind, const char *name)
{
    for (size_t i = 0; i < f->report->finding_count; i++) {
        const rebatch_finding *finding = &f->report->findings[i];
        if (finding->kind == kind &&
            (!name || strncmp(finding->name, name, sizeof finding->name - 1) == 0))
            return true;
    }
    return false;
}

static double tolerance(const rebatch_check_options *options, rebatch_number number)
{
    if (options->exact == REBATCH_ON)
        return 0;
    if (options->tolerance > 0)
        return options->tolerance;
    return number == REBATCH_F16 || number == REBATCH_BF16 ? 0.01 : 1e-4;
}

bool rbi_finding_is_wrong(const struct rbi_findings *f, const struct rbi_watched *watched,
                          const struct rbi_difference *difference)
{
    if (!difference->differs)
        return false;
    const double most = tolerance(f->options, watched->number);
    return most <= 0 || !(difference->largest <= most);
}

void rbi_finding_add_values(struct rbi_text *t, const struct rbi_watched *watched,
                            const struct rbi_difference *difference)
{
    const char *unit = watched->number == REBATCH_BYTES ? "byte" : "element";
    rbi_text_add(t, "%s %zu is %.9g and was %.9g", unit, difference->at, difference->is,
                 difference->was);
}
