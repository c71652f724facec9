/* Owns what the check_* tests share.
 * Must not know more of the library than its public headers say. */
#include "check_common.h"

#include <string.h>

float check_input(size_t sample, size_t parameter)
{
    return (float)((sample * 37 + parameter * 11) % 101) / 101;
}

float check_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(*state >> 40) / (float)(1 << 24);
}

rebatch_status check_alloc(float **out, const rebatch_microbatch *mb, size_t bytes)
{
    void *memory = NULL;
    const rebatch_status status = rebatch_pool_alloc(&memory, mb->pool, bytes, mb->stream, 0);
    *out = memory;
    return status;
}

static rebatch_status count_update(void *user)
{
    struct check_run *run = user;
    rebatch_mutating(run->rb);
    run->updates++;
    return REBATCH_OK;
}

rebatch_step_ops check_step_ops(rebatch_status (*zero_grad)(void *user),
                                rebatch_status (*forward_backward)(const rebatch_microbatch *mb,
                                                                   void *user))
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = zero_grad;
    ops.forward_backward = forward_backward;
    ops.optimizer_step = count_update;
    ops.flags = REBATCH_DECLARES_MUTATION;
    return ops;
}

const rebatch_finding *check_find(const rebatch_check_report *report, rebatch_finding_kind kind,
                                  const char *name)
{
    for (size_t i = 0; i < report->finding_count; i++)
        if (report->findings[i].kind == kind && strcmp(report->findings[i].name, name) == 0)
            return &report->findings[i];
    return NULL;
}

const char *check_texts(const rebatch_check_report *report)
{
    static char text[16384];
    (void)rebatch_check_format(text, sizeof text, report);
    return text;
}
