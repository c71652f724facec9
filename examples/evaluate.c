/* Evaluation between training steps, in memory that is too small for all held-out samples at once.
 *
 * rebatch_map() runs a function over samples without an update. It recovers from OOMs as a step
 * does, and has a micro-batch size of its own: here training keeps two buffers for a sample and
 * evaluation one, so evaluation runs twice as many samples at once. The sum of the losses is
 * guarded and grows sample by sample, so it has the same bits whatever the cut. */
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <stdlib.h>

enum { FEATURES = 4096, BATCH = 64, HELD_OUT = 500, STEPS = 6 };

struct model {
    rebatch *rb;
    float weights[FEATURES], gradients[FEATURES];
    double loss;     /* of the step */
    double held_out; /* sum over held-out samples: guarded */
};

/* Sample number `sample`, whose target is the mean of its features. */
static float load(float *x, size_t sample)
{
    float target = 0;
    for (size_t k = 0; k < FEATURES; k++) {
        x[k] = (float)((sample * 7919 + k * 104729) % 1009) / 1009;
        target += x[k] / FEATURES;
    }
    return target;
}

static float error_of(const struct model *m, const float *x, float target)
{
    float sum = -target;
    for (size_t k = 0; k < FEATURES; k++)
        sum += m->weights[k] * x[k];
    return sum;
}

static rebatch_status take(float **out, const rebatch_microbatch *mb)
{
    void *memory = NULL;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count * FEATURES * sizeof(float), mb->stream, 0);
    *out = memory;
    return status;
}

/* ---- training ---- */

static rebatch_status zero_grad(void *user)
{
    struct model *m = user;
    for (size_t k = 0; k < FEATURES; k++)
        m->gradients[k] = 0;
    m->loss = 0;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct model *m = user;
    float *x, *slope;
    rebatch_status status;
    if ((status = take(&x, mb)) || (status = take(&slope, mb)))
        return status;
    rebatch_mutating(m->rb);
    for (size_t i = 0; i < mb->count; i++) {
        float *xi = x + i * FEATURES, *si = slope + i * FEATURES;
        const float error = error_of(m, xi, load(xi, mb->first + i));
        m->loss += (double)(error * error) / (double)mb->batch;
        for (size_t k = 0; k < FEATURES; k++) {
            si[k] = 2 * error * xi[k] / (float)mb->batch;
            m->gradients[k] += si[k];
        }
    }
    status = rebatch_pool_free(mb->pool, slope);
    return status ? status : rebatch_pool_free(mb->pool, x);
}

static rebatch_status optimizer_step(void *user)
{
    struct model *m = user;
    rebatch_mutating(m->rb);
    for (size_t k = 0; k < FEATURES; k++)
        m->weights[k] -= 1e-4f * m->gradients[k];
    return REBATCH_OK;
}

/* ---- evaluation ---- */

/* Held-out samples come after those of the batch. */
static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    struct model *m = user;
    float *x;
    const rebatch_status status = take(&x, mb);
    if (status)
        return status;
    for (size_t i = 0; i < mb->count; i++) {
        float *xi = x + i * FEATURES;
        const float error = error_of(m, xi, load(xi, BATCH + mb->first + i));
        m->held_out += (double)(error * error);
    }
    return rebatch_pool_free(mb->pool, x);
}

static rebatch_status run(struct model *m)
{
    const rebatch_step_ops step = {.struct_size = sizeof step,
                                   .zero_grad = zero_grad,
                                   .forward_backward = forward_backward,
                                   .optimizer_step = optimizer_step,
                                   .flags = REBATCH_DECLARES_MUTATION};
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = evaluate};
    rebatch_step_report trained, evaluated;
    rebatch_status status =
        rebatch_guard(m->rb, &m->held_out, sizeof m->held_out, REBATCH_GUARD_HOST);
    if (!status)
        status = rebatch_watch(m->rb, "gradients", m->gradients, sizeof m->gradients,
                               REBATCH_GUARD_HOST, REBATCH_F32); /* for `rebatch run --check` */
    for (int i = 0; i < STEPS && !status; i++) {
        status = rebatch_step(m->rb, &step, BATCH, m, &trained);
        m->held_out = 0;
        if (!status)
            status = rebatch_map(m->rb, &map, HELD_OUT, m, &evaluated);
        if (!status)
            printf("step %d: loss %.6f in micro-batches of %zu; held out: %.6f, %zu at once\n", i,
                   m->loss, trained.micro, m->held_out / HELD_OUT, evaluated.micro);
    }
    return status;
}

/* evaluate [MIB]: with so much memory; default 1 */
int main(int argc, char **argv)
{
    static struct model model;
    rebatch_device *device = NULL;
    const size_t mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
    rebatch_status status = rebatch_device_open_host(&device, mib << 20, NULL);
    status = status ? status : rebatch_open(&model.rb, device, NULL);
    status = status ? status : run(&model);
    if (status)
        fprintf(stderr, "%s\n", rebatch_last_error());
    rebatch_close(model.rb);
    rebatch_device_close(device);
    return status ? 1 : 0;
}
