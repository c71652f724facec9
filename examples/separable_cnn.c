/* A small depthwise-separable network with batch norm, trained in memory that is too small for its
 * batch, on the CPU. separable_cnn.cu is the same program on a GPU.
 *
 * Batch norm over a whole micro-batch would depend on the cut. Here it normalizes groups of 8
 * samples ("ghost batch norm"). The session cuts between groups, because micro_multiple_of is the
 * group's size and the batch is a multiple of it. So the cut changes no bit.
 *
 * The running means and variances change in the forward pass, once for each group, in the order of
 * the samples. The memory of the backward pass is allocated behind it, and where that fails, the
 * forward pass runs again. Its groups must not count twice. So the running statistics are guarded:
 * rebatch restores them before samples run again.
 *
 *   separable_cnn [LIMIT]   LIMIT: the most MiB that the pool takes; default: no limit */
#include <inttypes.h>
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EACH(operation, what, count)                                                               \
    for (size_t i = 0; i < (size_t)(count); i++)                                                   \
    operation(what, i)

#include "output.h"
#include "separable_cnn.h"

struct trainer {
    rebatch *rb;
    struct network network;
};

/* Allocates buffers [from, to) of the micro-batch. */
static rebatch_status take(struct network *n, const rebatch_microbatch *mb, int from, int to)
{
    struct buffer list[BUFFERS];
    rebatch_status status = REBATCH_OK;
    list_buffers(list, n);
    for (int k = from; k < to && !status; k++) {
        void *memory;
        status =
            rebatch_pool_alloc(&memory, mb->pool, list[k].floats * sizeof(float), mb->stream, 0);
        *list[k].at = memory;
    }
    return status;
}

/* Frees the first `count`. */
static rebatch_status release(struct network *n, const rebatch_microbatch *mb, int count)
{
    struct buffer list[BUFFERS];
    rebatch_status status = REBATCH_OK;
    list_buffers(list, n);
    while (count > 0 && !status)
        status = rebatch_pool_free(mb->pool, *list[--count].at);
    return status;
}

/* ---- training ---- */

static rebatch_status zero_grad(void *user)
{
    struct network *n = &((struct trainer *)user)->network;
    memset(n->gradients, 0, PARAMETERS * sizeof(float));
    memset(n->results, 0, RESULTS * sizeof(float));
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    struct network n = t->network;
    n.image = mb->step * BATCH % IMAGES + mb->first;
    n.count = mb->count;
    n.weight = 1.0f / (float)mb->batch;
    rebatch_status status = take(&n, mb, 0, FORWARD_BUFFERS);
    if (status)
        return status;
    forward(&n, true); /* changes the running statistics */
    if ((status = take(&n, mb, FORWARD_BUFFERS, BUFFERS)))
        return status; /* rebatch restores them: the same samples run again, fewer at a time */
    rebatch_mutating(t->rb); /* from here on gradients and results change */
    backward(&n);
    return release(&n, mb, BUFFERS);
}

static rebatch_status optimizer_step(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    EACH(descend, &t->network, PARAMETERS);
    return REBATCH_OK;
}

/* ---- evaluation, with the running statistics ---- */

static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    struct network n = ((struct trainer *)user)->network;
    n.image = IMAGES + mb->first;
    n.count = mb->count;
    const rebatch_status status = take(&n, mb, 0, FORWARD_BUFFERS);
    if (status)
        return status;
    forward(&n, false);
    EACH(keep_right, &n, n.count);
    return release(&n, mb, FORWARD_BUFFERS);
}

/* ---- the program ---- */

/* Makes the network, guards what a repetition must not change, and names the results for
 * `rebatch run --check`. */
static rebatch_status make_network(struct trainer *t)
{
    struct network *n = &t->network;
    void *state;
    rebatch_status status =
        rebatch_pool_alloc(&state, rebatch_get_pool(t->rb), STATE * sizeof(float), NULL, 0);
    if (status)
        return status;
    memset(state, 0, STATE * sizeof(float));
    place_state(n, state);
    initialize(n);
    status = rebatch_guard(t->rb, n->running, STATISTICS * sizeof(float), REBATCH_GUARD_HOST);
    if (!status)
        status = rebatch_watch(t->rb, "gradients", n->gradients, PARAMETERS * sizeof(float),
                               REBATCH_GUARD_HOST, REBATCH_F32);
    if (!status)
        status = rebatch_watch(t->rb, "loss and accuracy", n->results, RESULTS * sizeof(float),
                               REBATCH_GUARD_HOST, REBATCH_F32);
    if (!status)
        status = rebatch_watch(t->rb, "running statistics", n->running, STATISTICS * sizeof(float),
                               REBATCH_GUARD_HOST, REBATCH_F32);
    return status;
}

static rebatch_status train_epoch(struct trainer *t, int epoch)
{
    const rebatch_step_ops ops = {.struct_size = sizeof ops,
                                  .zero_grad = zero_grad,
                                  .forward_backward = forward_backward,
                                  .optimizer_step = optimizer_step,
                                  .flags = REBATCH_DECLARES_MUTATION};
    const rebatch_map_ops map = {.struct_size = sizeof map, .run = evaluate};
    const struct network *n = &t->network;
    double loss = 0, accuracy = 0, held_out = 0;
    rebatch_step_report report = {0};
    rebatch_status status = REBATCH_OK;
    for (int step = 0; step < IMAGES / BATCH && !status; step++) {
        status = rebatch_step(t->rb, &ops, BATCH, t, &report);
        loss += (double)n->results[0] * BATCH / IMAGES;
        accuracy += (double)n->results[1] * BATCH / IMAGES;
    }
    const size_t micro = report.micro;
    if (!status)
        status = rebatch_map(t->rb, &map, HELD_OUT, t, &report);
    for (int i = 0; i < HELD_OUT; i++)
        held_out += (double)n->held_out[i] / HELD_OUT;
    if (!status)
        printf("epoch %d: loss %.4f, accuracy %.1f %%, held out %.1f %%, micro-batch %zu\n", epoch,
               loss, 100 * accuracy, 100 * held_out, micro);
    return status;
}

int main(int argc, char **argv)
{
    output_begin();
    struct trainer t = {0};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device = NULL;
    options.micro_multiple_of = GROUP;
    options.pool.limit_bytes = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) << 20 : 0;
    rebatch_status status = rebatch_device_open_host(&device, 64 << 20, NULL);
    if (!status)
        status = rebatch_open(&t.rb, device, &options);
    if (!status)
        status = make_network(&t);
    for (int epoch = 0; epoch < EPOCHS && !status; epoch++)
        status = train_epoch(&t, epoch);
    if (status)
        fprintf(stderr, "separable_cnn: %s\n", rebatch_last_error());
    else /* of the weights and all that lies behind them, running statistics included */
        printf("weights %016" PRIx64 "\n", fingerprint(t.network.weights, STATE));
    rebatch_close(t.rb);
    rebatch_device_close(device);
    return output_end("separable_cnn", status ? 1 : 0);
}
