/* Owns what is said of a callback's answer that is no OOM.
 * Must not know how callbacks run. */
#include <inttypes.h>

#include "recover/recover.h"

rebatch_status rbi_answer_say_undeclared(const rebatch *rb, const rebatch_microbatch *mb)
{
    char samples[64];
    struct rbi_text t = {samples, sizeof samples, 0};
    rbi_text_add_samples(&t, mb->first, mb->count);
    return rbi_error(REBATCH_E_STATE,
                     "step %" PRIu64 ": forward_backward of %s returned without "
                     "rebatch_mutating(), which REBATCH_DECLARES_MUTATION promises",
                     rb->step, samples);
}

void rbi_answer_say_torn(const rebatch *rb, rebatch_status status)
{
    char answer[32];
    struct rbi_text t = {answer, sizeof answer, 0};
    if (status < REBATCH_E_USER)
        rbi_text_add(&t, "%s", rebatch_status_name(status));
    else
        rbi_text_add(&t, "%d", (int)status);
    (void)rbi_error(status,
                    "step %" PRIu64 ": optimizer_step failed with %s after it began to change "
                    "parameters: some are new, some old; restore a checkpoint",
                    rb->step, answer);
}
