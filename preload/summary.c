/* Owns what is said of a program's allocations.
 * Must not know how it reaches people. */
#include <inttypes.h>

#include "preload/preload.h"

/* "5,310" */
static void add_count(struct rbi_text *t, uint64_t number)
{
    uint64_t unit = 1;
    while (number / unit >= 1000)
        unit *= 1000;
    rbi_text_add(t, "%" PRIu64, number / unit);
    while (unit > 1) {
        unit /= 1000;
        rbi_text_add(t, ",%03" PRIu64, number / unit % 1000);
    }
}

static void add_failures(struct rbi_text *t, const struct rbi_run_settings *settings,
                         const struct rbi_ledger_figures *figures)
{
    const char *const least = figures->is_final ? "" : "at least ";
    if (figures->injected || settings->oom || settings->chance > 0) {
        add_count(t, figures->injected);
        rbi_text_add(t, " of %s", least);
        add_count(t, figures->requests);
        rbi_text_add(t, " allocation%s failed on purpose", figures->requests == 1 ? "" : "s");
    } else {
        rbi_text_add(t, "%s", least);
        add_count(t, figures->requests);
        rbi_text_add(t, " allocation%s", figures->requests == 1 ? "" : "s");
    }
    if (figures->cap_bytes || figures->beyond_cap) {
        rbi_text_add(t, ", ");
        add_count(t, figures->beyond_cap);
        rbi_text_add(t, " beyond the cap");
    }
    if (figures->device_ooms) {
        rbi_text_add(t, ", ");
        add_count(t, figures->device_ooms);
        rbi_text_add(t, " beyond what the device has");
    }
}

void rbi_summary_add(struct rbi_text *t, const struct rbi_run_settings *settings,
                     const struct rbi_ledger_figures *figures)
{
    add_failures(t, settings, figures);
    if (figures->peak_bytes || figures->cap_bytes) {
        rbi_text_add(t, ", peak ");
        rbi_text_add_bytes(t, figures->peak_bytes);
    }
    if (figures->cap_bytes) {
        rbi_text_add(t, " of ");
        rbi_text_add_bytes(t, figures->cap_bytes);
    }
    if (figures->trace)
        rbi_text_add(t, "; recorded in %s", figures->trace);
    if (settings->shrink_count)
        rbi_text_add(t, "; without rebatch_step() there is nothing to shrink");
}
