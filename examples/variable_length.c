/* Sequences of different lengths, cut by what they cost.
 *
 * The sequences of a micro-batch are padded to its longest, so its memory is its number of
 * sequences times the longest: its cost. rebatch cuts by this cost, and one long sequence does not
 * make all micro-batches small.
 *
 * A token's loss weighs one part of all tokens of the effective batch, not of the micro-batch, so
 * the cut does not change the result. The weight does not come from rebatch_microbatch.batch, which
 * REBATCH_OWN_WEIGHTS says.
 *
 *   variable_length [KIB]   with so much memory; default 128 */
#include <inttypes.h>
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHANNELS = 16, BATCH = 48, STEPS = 30 };

struct trainer {
    rebatch *rb;
    float weights[CHANNELS], gradients[CHANNELS];
    float token_weight; /* 1 / tokens of the effective batch */
    double loss;
    bool is_shown; /* print each micro-batch */
};

/* ---- the data ---- */

/* Between 8 and 40 tokens, and one with 300. */
static size_t length_of(size_t sequence)
{
    return sequence == 17 ? 300 : 8 + sequence * 7919 % 33;
}

static size_t longest_of(size_t first, size_t count)
{
    size_t longest = 0;
    for (size_t i = 0; i < count; i++)
        longest = length_of(first + i) > longest ? length_of(first + i) : longest;
    return longest;
}

static float feature(size_t sequence, size_t token, size_t channel)
{
    return (float)((sequence * 31 + token * 17 + channel * 7) % 101) / 101 - 0.5f;
}

/* ---- the step ---- */

static uint64_t cost(size_t first, size_t count, void *user)
{
    (void)user;
    return count * longest_of(first, count);
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    size_t tokens = 0;
    for (size_t i = 0; i < BATCH; i++)
        tokens += length_of(i);
    t->token_weight = 1 / (float)tokens;
    memset(t->gradients, 0, sizeof t->gradients);
    t->loss = 0;
    return REBATCH_OK;
}

/* The prediction of a token is linear in its channels. The target is the difference of two. */
static void accumulate(struct trainer *t, const float *x, size_t length)
{
    for (size_t k = 0; k < length; k++, x += CHANNELS) {
        float error = x[5] - x[0];
        for (size_t c = 0; c < CHANNELS; c++)
            error += t->weights[c] * x[c];
        t->loss += (double)(t->token_weight * error * error);
        for (size_t c = 0; c < CHANNELS; c++)
            t->gradients[c] += 2 * t->token_weight * error * x[c];
    }
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    const size_t longest = longest_of(mb->first, mb->count);
    void *memory; /* float [count][longest][CHANNELS] */
    const rebatch_status status = rebatch_pool_alloc(
        &memory, mb->pool, sizeof(float) * mb->count * longest * CHANNELS, mb->stream, 0);
    if (status)
        return status;
    float *const padded = memory;
    for (size_t i = 0; i < mb->count; i++)
        for (size_t k = 0; k < length_of(mb->first + i); k++)
            for (size_t c = 0; c < CHANNELS; c++)
                padded[(i * longest + k) * CHANNELS + c] = feature(mb->first + i, k, c);
    rebatch_mutating(t->rb);
    for (size_t i = 0; i < mb->count; i++)
        accumulate(t, padded + i * longest * CHANNELS, length_of(mb->first + i));
    if (t->is_shown)
        printf("  sequences %2zu-%2zu, longest %3zu, cost %5zu\n", mb->first,
               mb->first + mb->count - 1, longest, mb->count * longest);
    return rebatch_pool_free(mb->pool, padded);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    for (size_t c = 0; c < CHANNELS; c++)
        t->weights[c] -= 2 * t->gradients[c];
    return REBATCH_OK;
}

static rebatch_status train(struct trainer *t)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .cost = cost,
                                  .flags = REBATCH_DECLARES_MUTATION | REBATCH_OWN_WEIGHTS};
    rebatch_status status =
        rebatch_watch(t->rb, "gradients", t->gradients, sizeof t->gradients, REBATCH_GUARD_HOST,
                      REBATCH_F32); /* for `rebatch run --check` */
    for (int step = 0; step < STEPS && !status; step++) {
        t->is_shown = step == STEPS - 1;
        status = rebatch_step(t->rb, &ops, BATCH, t, NULL);
        if (!status && (step == 0 || step == STEPS - 1))
            printf("step %d: loss %.6f\n", step, t->loss);
    }
    return status;
}

int main(int argc, char **argv)
{
    struct trainer t = {.rb = NULL};
    rebatch_device *device = NULL;
    const size_t kib = argc > 1 ? strtoul(argv[1], NULL, 10) : 128;
    rebatch_status status = rebatch_device_open_host(&device, kib << 10, NULL);
    status = status ? status : rebatch_open(&t.rb, device, NULL);
    status = status ? status : train(&t);
    if (status)
        fprintf(stderr, "%s\n", rebatch_last_error());
    for (size_t c = 0; c < CHANNELS && !status; c++) {
        uint32_t bits;
        memcpy(&bits, &t.weights[c], sizeof bits);
        printf("%s%08" PRIx32 "%s", c ? " " : "weights ", bits, c == CHANNELS - 1 ? "\n" : "");
    }
    rebatch_close(t.rb);
    rebatch_device_close(device);
    return status ? 1 : 0;
}
