/* Owns what a check's report looks like as text.
 * Must not know how it was made. */
#include <inttypes.h>

#include "check/check.h"

/* The width of a line. */
#define COLUMNS 100
#define INDENT 16

/* The words of a sentence, in lines behind a kind of INDENT columns. */
static void add_wrapped(struct rbi_text *t, const char *sentence)
{
    size_t column = INDENT;
    for (const char *at = sentence; *at;) {
        size_t length = 0;
        while (at[length] && at[length] != ' ')
            length++;
        if (column > INDENT && column + 1 + length > COLUMNS) {
            rbi_text_add(t, "\n%*s", INDENT, "");
            column = INDENT;
        } else if (column > INDENT) {
            rbi_text_add(t, " ");
            column++;
        }
        rbi_text_add(t, "%.*s", (int)length, at);
        column += length;
        at += length;
        while (*at == ' ')
            at++;
    }
    rbi_text_add(t, "\n");
}

static void add_findings(struct rbi_text *t, const rebatch_check_report *report, bool mistakes)
{
    for (size_t i = 0; i < report->finding_count && i < REBATCH_CHECK_FINDINGS; i++) {
        const rebatch_finding *finding = &report->findings[i];
        if (finding->is_mistake != mistakes)
            continue;
        rbi_text_add(t, "%-*s", INDENT, mistakes ? rbi_finding_name(finding->kind) : "note");
        add_wrapped(t, finding->text);
    }
}

static const char *ending(uint64_t count)
{
    return count == 1 ? "" : "s";
}

static void add_compared(struct rbi_text *t, const rebatch_check_report *report)
{
    rbi_text_add(t, report->watched || report->blocks ? "compared " : "compared nothing");
    if (report->watched)
        rbi_text_add(t, "%u name%s", report->watched, ending(report->watched));
    if (report->blocks) {
        rbi_text_add(t, "%s%u block%s without a name, ", report->watched ? " and " : "",
                     report->blocks, ending(report->blocks));
        rbi_text_add_bytes(t, report->block_bytes);
    }
}

/* ": 13 runs, micro-batches of 3 to 24, an OOM at 3 of 3 allocations, compared 2 names, 0.1 s" */
static void add_summary(struct rbi_text *t, const rebatch_check_report *report)
{
    rbi_text_add(t, ": %u run%s, ", report->runs, ending(report->runs));
    if (report->micro)
        rbi_text_add(t, "micro-batches of %zu to %zu, ", report->micro_smallest, report->micro);
    if (report->allocations)
        rbi_text_add(t, "an OOM at %" PRIu64 " of %" PRIu64 " allocation%s, ", report->ooms,
                     report->allocations, ending(report->allocations));
    if (report->update_allocations)
        rbi_text_add(t, "at %" PRIu64 " of %" PRIu64 " of optimizer_step, ", report->update_ooms,
                     report->update_allocations);
    add_compared(t, report);
    rbi_text_add(t, ", %.1f s%s\n", report->seconds,
                 report->is_cut_short ? ", cut short by max_seconds" : "");
}

static void add_not_looked_at(struct rbi_text *t, const char *what)
{
    rbi_text_add(t, "%-*s", INDENT, "not looked at");
    add_wrapped(t, what);
}

size_t rebatch_check_format(char *text, size_t size, const rebatch_check_report *report)
{
    struct rbi_text t = {text, size, 0};
    if (text && size)
        text[0] = '\0';
    if (!report)
        return 0;
    add_findings(&t, report, true);
    add_findings(&t, report, false);
    if (report->mistakes)
        rbi_text_add(&t, "%u mistake%s", report->mistakes, ending(report->mistakes));
    else
        rbi_text_add(&t, "no mistakes");
    add_summary(&t, report);
    if (report->not_looked_at)
        add_not_looked_at(&t, report->not_looked_at);
    if (!report->mistakes)
        add_not_looked_at(&t, "memory outside the pool that has no name: name with "
                              "rebatch_watch() what is summed there, such as a loss");
    return t.length;
}
