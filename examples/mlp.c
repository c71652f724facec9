/* A multilayer perceptron with dropout, trained on the CPU, and what changes when rebatch wraps it.
 *
 * A sample's activations take 2 KiB and the batch has 512 samples, so a step needs 1 MiB; the
 * wrapped program has 512 KiB. The weights in the end are the same, to the last bit. The lines
 * under `#ifdef REBATCH` are all that is new (scripts/show-wrap mlp prints them as a patch);
 * without them this is the program as it was. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef REBATCH
#include <rebatch/rebatch.h>
#endif

enum { INPUTS = 2, HIDDEN = 512, BATCH = 512, STEPS = 100 };

/* y = out . tanh(in x + bias) */
struct layers {
    float in[HIDDEN][INPUTS], bias[HIDDEN], out[HIDDEN];
};

struct model {
    struct layers weights, grad;
    uint64_t random; /* of dropout */
    double loss;
};

#ifdef REBATCH
static rebatch *rb;
#endif

static void die(const char *why)
{
    fprintf(stderr, "mlp: %s\n", why);
    exit(1);
}

static void *need(size_t bytes)
{
#ifdef REBATCH
    void *memory = rebatch_alloc_or_escape(rb, bytes);
#else
    void *memory = malloc(bytes);
#endif
    if (!memory)
        die("out of memory");
    return memory;
}

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

/* Drops one activation in eight. */
static bool is_kept(uint64_t *random)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 61 != 0;
}

static void forward(struct model *m, float *hidden, size_t first, size_t count)
{
    const struct layers *w = &m->weights;
    for (size_t s = 0; s < count; s++) {
        float x[INPUTS];
        (void)data(x, first + s);
        for (int j = 0; j < HIDDEN; j++) {
            const float sum = w->in[j][0] * x[0] + w->in[j][1] * x[1] + w->bias[j];
            hidden[s * HIDDEN + j] = is_kept(&m->random) ? tanhf(sum) : 0;
        }
    }
}

/* Adds each sample's gradients, one sample after the other, so that the cut changes no bit. */
static void backward(struct model *m, const float *hidden, size_t first, size_t count)
{
    const struct layers *w = &m->weights;
    for (size_t s = 0; s < count; s++) {
        const float *h = hidden + s * HIDDEN;
        float x[INPUTS], error = -data(x, first + s);
        for (int j = 0; j < HIDDEN; j++)
            error += w->out[j] * h[j];
        m->loss += (double)(error * error) / BATCH;
        for (int j = 0; j < HIDDEN; j++) {
            const float slope = h[j] == 0 ? 0 : 2 * error * w->out[j] * (1 - h[j] * h[j]) / BATCH;
            m->grad.out[j] += 2 * error * h[j] / BATCH;
            m->grad.bias[j] += slope;
            m->grad.in[j][0] += slope * x[0];
            m->grad.in[j][1] += slope * x[1];
        }
    }
}

/* ---- the training step ---- */

#ifdef REBATCH
static void zero_grad(void *user)
#else
static void zero_grad(struct model *m)
#endif
{
#ifdef REBATCH
    struct model *m = user;
#endif
    memset(&m->grad, 0, sizeof m->grad);
    m->loss = 0;
}

#ifdef REBATCH
static void train_on(size_t first, size_t count, void *user)
#else
static void train_on(size_t first, size_t count, struct model *m)
#endif
{
#ifdef REBATCH
    struct model *m = user;
#endif
    float *hidden = need(sizeof *hidden * HIDDEN * count);
    forward(m, hidden, first, count);
#ifdef REBATCH
    rebatch_mutating(rb); /* the gradients and the loss change from here on */
#endif
    backward(m, hidden, first, count);
#ifdef REBATCH
    (void)rebatch_free(rb, hidden);
#else
    free(hidden);
#endif
}

#ifdef REBATCH
static void update(void *user)
#else
static void update(struct model *m)
#endif
{
#ifdef REBATCH
    struct model *m = user;
#endif
    float *w = &m->weights.in[0][0];
    const float *g = &m->grad.in[0][0];
#ifdef REBATCH
    rebatch_mutating(rb);
#endif
    for (size_t i = 0; i < sizeof m->weights / sizeof *w; i++)
        w[i] -= 0.002f * g[i];
}

/* A number that differs when any bit of the weights does (FNV-1a). */
static uint64_t fingerprint(const struct layers *weights)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < sizeof *weights; i++)
        hash = (hash ^ ((const unsigned char *)weights)[i]) * 1099511628211u;
    return hash;
}

int main(void)
{
    static struct model model;
    initialize(&model);
#ifdef REBATCH
    if (rebatch_open_default(&rb, "device.kind = host; device.capacity = 512KiB") ||
        rebatch_guard(rb, &model.random, sizeof model.random, REBATCH_GUARD_HOST) ||
        rebatch_watch(rb, "grad", &model.grad, sizeof model.grad, REBATCH_GUARD_HOST, REBATCH_F32))
        die(rebatch_last_error());
#endif
    for (int step = 0; step < STEPS; step++) {
#ifdef REBATCH
        if (rebatch_step_plain(rb, BATCH, zero_grad, train_on, update, &model,
                               REBATCH_DECLARES_MUTATION, NULL))
            die(rebatch_last_error());
#else
        zero_grad(&model);
        train_on(0, BATCH, &model);
        update(&model);
#endif
        if (step % 33 == 0)
            printf("step %2d  loss %.4f\n", step, model.loss);
    }
    printf("weights %016" PRIx64 "\n", fingerprint(&model.weights));
#ifdef REBATCH
    rebatch_close(rb);
#endif
    return 0;
}
