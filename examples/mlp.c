/* A multilayer perceptron, trained twice: by a plain loop, and wrapped in rebatch, with too little
 * memory for the batch. What the network computes is the same code, and so are the weights in the
 * end, to the last bit.
 *
 * A sample's activations take 2 KiB, and the batch has 512 samples, so the plain loop needs 1 MiB.
 * The wrapped one gets 512 KiB. */
#include <math.h>
#include <rebatch/rebatch.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 2, HIDDEN = 512, BATCH = 512, STEPS = 100 };

/* y = out . tanh(in x + bias) */
struct layers {
    float in[HIDDEN][INPUTS], bias[HIDDEN], out[HIDDEN];
};

struct model {
    rebatch *rb; /* of the wrapped one */
    struct layers weights, gradients;
    double loss;
};

/* ---- what the network computes ---- */

/* Point `sample` of a square, and what the network is to say of it. */
static float data(float x[INPUTS], size_t sample)
{
    x[0] = (float)(sample * 7 % BATCH) / (BATCH / 2) - 1;
    x[1] = (float)(sample * 61 % BATCH) / (BATCH / 2) - 1;
    return x[0] * x[1];
}

static void initialize(struct model *m)
{
    for (int j = 0; j < HIDDEN; j++) {
        m->weights.in[j][0] = sinf((float)(3 * j + 1));
        m->weights.in[j][1] = sinf((float)(5 * j + 2));
        m->weights.bias[j] = sinf((float)(7 * j + 3));
        m->weights.out[j] = 0.01f * sinf((float)(11 * j + 4));
    }
}

static void clear(struct model *m)
{
    memset(&m->gradients, 0, sizeof m->gradients);
    m->loss = 0;
}

static void forward(const struct layers *w, float *hidden, size_t first, size_t count)
{
    for (size_t s = 0; s < count; s++) {
        float x[INPUTS];
        (void)data(x, first + s);
        for (int j = 0; j < HIDDEN; j++)
            hidden[s * HIDDEN + j] = tanhf(w->in[j][0] * x[0] + w->in[j][1] * x[1] + w->bias[j]);
    }
}

/* Adds each sample's gradients, one sample after the other, so that the cut changes no bit. */
static void backward(struct model *m, const float *hidden, size_t first, size_t count, float weight)
{
    const struct layers *w = &m->weights;
    for (size_t s = 0; s < count; s++) {
        const float *h = hidden + s * HIDDEN;
        float x[INPUTS], error = -data(x, first + s);
        for (int j = 0; j < HIDDEN; j++)
            error += w->out[j] * h[j];
        m->loss += (double)(weight * error * error);
        for (int j = 0; j < HIDDEN; j++) {
            const float slope = 2 * weight * error * w->out[j] * (1 - h[j] * h[j]);
            m->gradients.out[j] += 2 * weight * error * h[j];
            m->gradients.bias[j] += slope;
            m->gradients.in[j][0] += slope * x[0];
            m->gradients.in[j][1] += slope * x[1];
        }
    }
}

static void descend(struct model *m)
{
    float *w = &m->weights.in[0][0];
    const float *g = &m->gradients.in[0][0];
    for (size_t i = 0; i < sizeof m->weights / sizeof *w; i++)
        w[i] -= 0.002f * g[i];
}

/* ---- the plain loop ---- */

static bool train_plainly(struct model *m)
{
    double first = 0;
    float *hidden = malloc(sizeof *hidden * HIDDEN * BATCH);
    if (!hidden)
        return false;
    for (int step = 0; step < STEPS; step++) {
        clear(m);
        forward(&m->weights, hidden, 0, BATCH);
        backward(m, hidden, 0, BATCH, 1.0f / BATCH);
        descend(m);
        first = step == 0 ? m->loss : first;
    }
    printf("plain:    loss %.4f -> %.4f\n", first, m->loss);
    free(hidden);
    return true;
}

/* ---- the same in rebatch ---- */

static rebatch_status zero_grad(void *user)
{
    clear(user);
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct model *m = user;
    void *hidden;
    const rebatch_status status =
        rebatch_pool_alloc(&hidden, mb->pool, sizeof(float) * HIDDEN * mb->count, mb->stream, 0);
    if (status)
        return status;
    forward(&m->weights, hidden, mb->first, mb->count);
    rebatch_mutating(m->rb); /* from here on the gradients change */
    backward(m, hidden, mb->first, mb->count, 1.0f / (float)mb->batch);
    return rebatch_pool_free(mb->pool, hidden);
}

static rebatch_status optimizer_step(void *user)
{
    struct model *m = user;
    rebatch_mutating(m->rb);
    descend(m);
    return REBATCH_OK;
}

static rebatch_status train_wrapped(struct model *m)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    rebatch_step_report report;
    rebatch_status status =
        rebatch_watch(m->rb, "gradients", &m->gradients, sizeof m->gradients, REBATCH_GUARD_HOST,
                      REBATCH_F32); /* for `rebatch run --check` */
    double first = 0;
    for (int step = 0; step < STEPS && !status; step++) {
        status = rebatch_step(m->rb, &ops, BATCH, m, &report);
        first = step == 0 ? m->loss : first;
    }
    if (!status)
        printf("wrapped:  loss %.4f -> %.4f, micro-batch %zu x %u\n", first, m->loss, report.micro,
               report.microbatches);
    return status;
}

int main(void)
{
    static struct model plain, wrapped;
    rebatch_device *device = NULL;
    initialize(&plain);
    initialize(&wrapped);
    if (!train_plainly(&plain)) {
        fprintf(stderr, "no memory for the plain loop\n");
        return 1;
    }
    rebatch_status status = rebatch_device_open_host(&device, 512 << 10, NULL);
    status = status ? status : rebatch_open(&wrapped.rb, device, NULL);
    status = status ? status : train_wrapped(&wrapped);
    if (status)
        fprintf(stderr, "%s\n", rebatch_last_error());
    else
        printf("the same weights: %s\n",
               memcmp(&plain.weights, &wrapped.weights, sizeof plain.weights) ? "no" : "yes");
    rebatch_close(wrapped.rb);
    rebatch_device_close(device);
    return status ? 1 : 0;
}
