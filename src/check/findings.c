/* Owns the list of what is found.
 * Must not know how it is found. */
#include "check/check.h"

static const struct {
    const char *name;
    bool is_mistake;
} kinds[] = {
#define KIND(name, is_mistake) {#name, is_mistake},
    REBATCH_FINDINGS(KIND)
#undef KIND
};

const char *rbi_finding_name(rebatch_finding_kind kind)
{
    static const char *const names[] = {
        "not_repeatable", "not_cleared", "freed",        "uninitialized", "stale",    "cut",
        "early",          "after_oom",   "failed",       "rounding",      "coped",    "weight",
        "unwatched",      "swallowed",   "not_a_number", "changed",       "outgrown", "leak",
        "thread",         "uncompared"};
    _Static_assert(sizeof names / sizeof *names == REBATCH_FINDING_COUNT, "a name for each kind");
    return (unsigned)kind < REBATCH_FINDING_COUNT ? names[kind] : "no such finding";
}

void rbi_finding_add(rebatch_check_report *report, rebatch_finding_kind kind, const char *name,
                     const char *format, ...)
{
    rbi_assert((unsigned)kind < REBATCH_FINDING_COUNT);
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

void rbi_finding_add_block(rebatch_check_report *report, rebatch_finding_kind kind,
                           const char *before, const struct rbi_place *place, uint64_t bytes,
                           const char *after)
{
    char which[160];
    struct rbi_text t = {which, sizeof which, 0};
    rbi_place_add(&t, place, bytes);
    rbi_finding_add(report, kind, "", "%s%s%s", before, which, after);
}

bool rbi_finding_has(const rebatch_check_report *report, rebatch_finding_kind kind)
{
    for (size_t i = 0; i < report->finding_count; i++)
        if (report->findings[i].kind == kind)
            return true;
    return false;
}
