/* Owns the check that runs instead of the training: whoever starts the program asks for it with
 * REBATCH_CHECK. Must not know how a step is checked. */
#include "launch/launch.h"

enum { EXIT_CLEAN, EXIT_FAILED, EXIT_NOTHING_FITS = 3, EXIT_MISTAKES = 4 };

/* What the program would be told of the check's own OOMs is nobody's news. */
static void ignore(const rebatch_event *event, void *user)
{
    (void)event;
    (void)user;
}

static void note_undeclared(const rebatch_event *event, void *user)
{
    *(bool *)user |= event->kind == REBATCH_EVENT_UNDECLARED;
}

/* A check runs optimizer_step in copies of the process, which have no GPU. As the program ends, it
 * may run here, once. */
static void run_update(struct rbi_run *run, const rebatch_step_ops *ops, size_t batch, void *user,
                       rebatch_check_report *report)
{
    bool is_undeclared = false;
    run->settings.check = false;
    rbi_event_redirect(run->rb, note_undeclared, &is_undeclared);
    const rebatch_status status = rebatch_step(run->rb, ops, batch, user, NULL);
    if (status || !is_undeclared || report->finding_count == REBATCH_CHECK_FINDINGS)
        return;
    rebatch_finding *const finding = &report->findings[report->finding_count++];
    struct rbi_text t = {finding->text, sizeof finding->text, 0};
    finding->kind = REBATCH_FINDING_UNWATCHED;
    rbi_text_add(&t, "optimizer_step never calls rebatch_mutating(), which "
                     "REBATCH_DECLARES_MUTATION promises: call it before the first change, unless "
                     "it changes nothing");
}

_Noreturn void rbi_only_check(struct rbi_run *run, const rebatch_step_ops *ops, size_t batch,
                              void *user)
{
    static rebatch_check_report report; /* the process ends here: some 20,000 bytes, and one */
    static char text[32 * 1024], complaint[1024];
    rbi_event_redirect(run->rb, ignore, NULL);
    const rebatch_status status = rebatch_check(run->rb, ops, batch, user, NULL, &report);
    if (status == REBATCH_OK && report.updates == 0)
        run_update(run, ops, batch, user, &report);
    struct rbi_text c = {complaint, sizeof complaint, 0};
    if (status == REBATCH_OK || report.mistakes)
        (void)rebatch_check_format(text, sizeof text, &report);
    else
        rbi_text_add(&c, "rebatch: %s\n", rebatch_last_error());
    rbi_report_end(run,
                   report.mistakes                 ? EXIT_MISTAKES
                   : status == REBATCH_OK          ? EXIT_CLEAN
                   : status == REBATCH_E_EXHAUSTED ? EXIT_NOTHING_FITS
                                                   : EXIT_FAILED,
                   complaint, text);
}
