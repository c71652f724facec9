/* The smallest training loop that survives running out of memory: it fits w in y = w x + noise.
 * A sample takes 1 MiB and the device has 24 MiB, so the batch of 64 cannot run as one. */
#include <rebatch/rebatch.h>
#include <stdio.h>

struct model {
    rebatch *rb;
    double w, gradient;
    unsigned random;
};

static double noise(struct model *model) /* in [-0.5, 0.5) */
{
    model->random = model->random * 1664525u + 1013904223u;
    return (model->random >> 8) / 16777216.0 - 0.5;
}

static rebatch_status zero_grad(void *user)
{
    ((struct model *)user)->gradient = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct model *model = user;
    void *memory; /* taken back by rebatch if anything after it fails */
    if (rebatch_pool_alloc(&memory, mb->pool, mb->count << 20, mb->stream, 0))
        return REBATCH_OOM; /* the same samples come again, fewer at a time */
    double *error = memory;
    for (size_t i = 0; i < mb->count; i++)
        error[i] = (model->w - 3) * (double)(mb->first + i) + noise(model);
    rebatch_mutating(model->rb); /* from here on the gradient changes */
    for (size_t i = 0; i < mb->count; i++)
        model->gradient += error[i] * (double)(mb->first + i) / (double)mb->batch;
    return rebatch_pool_free(mb->pool, memory);
}

static rebatch_status optimizer_step(void *user)
{
    struct model *model = user;
    rebatch_mutating(model->rb);
    model->w -= 5e-4 * model->gradient;
    return REBATCH_OK;
}

int main(void)
{
    const rebatch_step_ops ops = {sizeof ops, zero_grad, forward_backward, optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    struct model model = {0};
    rebatch_step_report report;
    rebatch_status status =
        rebatch_open_default(&model.rb, "device.kind = host; device.capacity = 24MiB");
    if (!status) /* samples that run again get the same noise */
        status = rebatch_guard(model.rb, &model.random, sizeof model.random, REBATCH_GUARD_HOST);
    if (!status) /* what `rebatch run --check` compares */
        status = rebatch_watch(model.rb, "gradient", &model.gradient, sizeof model.gradient,
                               REBATCH_GUARD_HOST, REBATCH_F64);
    for (int step = 0; step < 8 && !status; step++) {
        status = rebatch_step(model.rb, &ops, 64, &model, &report);
        printf("step %d: w = %.4f, micro-batch %zu x %u, %u out of memory\n", step, model.w,
               report.micro_after, report.microbatches, report.ooms);
    }
    if (status)
        fprintf(stderr, "%s\n", rebatch_last_error());
    rebatch_close(model.rb);
    return status ? 1 : 0;
}
