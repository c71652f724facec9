/* A small depthwise-separable network with batch norm, trained in memory that is too small for its
 * batch, on a GPU. separable_cnn.c is the same program on the CPU.
 *
 * Batch norm over a whole micro-batch would depend on the cut. Here it normalizes groups of 8
 * samples ("ghost batch norm"). The session cuts between groups, because micro_multiple_of is the
 * group's size and the batch is a multiple of it. So the cut changes no bit.
 *
 * The running means and variances change in the forward pass, once for each group, in the order of
 * the samples. The memory of the backward pass is allocated behind it, and where that fails, the
 * forward pass runs again. Its groups must not count twice. So the running statistics are guarded
 * in device memory: rebatch restores them before samples run again.
 *
 * Each operation is a kernel with one thread for each element of the result, and that thread adds
 * in a fixed order. There are no atomics.
 *
 *   separable_cnn-cuda [LIMIT]   LIMIT: the most MiB that the pool takes; default: no limit */
#include <cuda_runtime.h>
#include <inttypes.h>
#include <rebatch/rebatch.h>
#include <stdio.h>
#include <stdlib.h>

/* Runs an operation on the session's stream, which is the default stream. */
#define EACH(operation, what, count) launch<operation>(*(what), (size_t)(count))

template <auto operation, class What> static __global__ void each(const What what, size_t count)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < count)
        operation(&what, i);
}

template <auto operation, class What> static void launch(const What &what, size_t count)
{
    constexpr unsigned threads = 128;
    each<operation><<<(unsigned)((count + threads - 1) / threads), threads>>>(what, count);
}

#include "output.h"
#include "separable_cnn.h"

struct trainer {
    rebatch_device *device;
    rebatch *rb;
    struct network network;
};

/* What has become of the launches and of a call of the CUDA runtime. */
static rebatch_status check(const struct trainer *t, cudaError_t code)
{
    const cudaError_t launched = cudaGetLastError();
    return rebatch_from_cuda(t->device, code ? code : launched);
}

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
        *list[k].at = (float *)memory;
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
    const struct trainer *t = (struct trainer *)user;
    const struct network *n = &t->network;
    const rebatch_status status =
        check(t, cudaMemsetAsync(n->gradients, 0, PARAMETERS * sizeof(float)));
    return status ? status : check(t, cudaMemsetAsync(n->results, 0, RESULTS * sizeof(float)));
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    const struct trainer *t = (struct trainer *)user;
    struct network n = t->network;
    n.image = mb->step * BATCH % IMAGES + mb->first;
    n.count = mb->count;
    n.weight = 1.0f / (float)mb->batch;
    rebatch_status status = take(&n, mb, 0, FORWARD_BUFFERS);
    if (status)
        return status;
    forward(&n, true); /* changes the running statistics */
    if ((status = check(t, cudaSuccess)) || (status = take(&n, mb, FORWARD_BUFFERS, BUFFERS)))
        return status; /* rebatch restores them: the same samples run again, fewer at a time */
    rebatch_mutating(t->rb); /* from here on gradients and results change */
    backward(&n);
    status = check(t, cudaSuccess);
    return status ? status : release(&n, mb, BUFFERS);
}

static rebatch_status optimizer_step(void *user)
{
    const struct trainer *t = (struct trainer *)user;
    rebatch_mutating(t->rb);
    EACH(descend, &t->network, PARAMETERS);
    return check(t, cudaSuccess);
}

/* ---- evaluation, with the running statistics ---- */

static rebatch_status evaluate(const rebatch_microbatch *mb, void *user)
{
    const struct trainer *t = (struct trainer *)user;
    struct network n = t->network;
    n.image = IMAGES + mb->first;
    n.count = mb->count;
    rebatch_status status = take(&n, mb, 0, FORWARD_BUFFERS);
    if (status)
        return status;
    forward(&n, false);
    EACH(keep_right, &n, n.count);
    status = check(t, cudaSuccess);
    return status ? status : release(&n, mb, FORWARD_BUFFERS);
}

/* ---- the program ---- */

/* Makes the network, guards what a repetition must not change, and names the results for
 * `rebatch run --check`. */
static rebatch_status make_network(struct trainer *t)
{
    static float first[STATE];
    struct network host = {}, *n = &t->network;
    void *state;
    rebatch_status status =
        rebatch_pool_alloc(&state, rebatch_get_pool(t->rb), sizeof first, NULL, 0);
    if (status)
        return status;
    place_state(&host, first);
    initialize(&host);
    place_state(n, (float *)state);
    status = check(t, cudaMemcpy(state, first, sizeof first, cudaMemcpyHostToDevice));
    if (!status)
        status = rebatch_guard(t->rb, n->running, STATISTICS * sizeof(float), REBATCH_GUARD_DEVICE);
    if (!status)
        status = rebatch_watch(t->rb, "gradients", n->gradients, PARAMETERS * sizeof(float),
                               REBATCH_GUARD_DEVICE, REBATCH_F32);
    if (!status)
        status = rebatch_watch(t->rb, "loss and accuracy", n->results, RESULTS * sizeof(float),
                               REBATCH_GUARD_DEVICE, REBATCH_F32);
    if (!status)
        status = rebatch_watch(t->rb, "running statistics", n->running, STATISTICS * sizeof(float),
                               REBATCH_GUARD_DEVICE, REBATCH_F32);
    return status;
}

static rebatch_status fetch(const struct trainer *t, float *out, const float *from, size_t floats)
{
    return check(t, cudaMemcpy(out, from, floats * sizeof(float), cudaMemcpyDeviceToHost));
}

static rebatch_status train_epoch(struct trainer *t, int epoch)
{
    rebatch_step_ops ops = REBATCH_STEP_OPS_INIT;
    ops.zero_grad = zero_grad;
    ops.forward_backward = forward_backward;
    ops.optimizer_step = optimizer_step;
    ops.flags = REBATCH_DECLARES_MUTATION;
    rebatch_map_ops map = REBATCH_MAP_OPS_INIT;
    map.run = evaluate;
    double loss = 0, accuracy = 0, held_out = 0;
    float results[RESULTS], right[HELD_OUT];
    rebatch_step_report report = {};
    rebatch_status status = REBATCH_OK;
    for (int step = 0; step < IMAGES / BATCH && !status; step++) {
        status = rebatch_step(t->rb, &ops, BATCH, t, &report);
        status = status ? status : fetch(t, results, t->network.results, RESULTS);
        if (!status) {
            loss += (double)results[0] * BATCH / IMAGES;
            accuracy += (double)results[1] * BATCH / IMAGES;
        }
    }
    const size_t micro = report.micro;
    status = status ? status : rebatch_map(t->rb, &map, HELD_OUT, t, &report);
    status = status ? status : fetch(t, right, t->network.held_out, HELD_OUT);
    if (status)
        return status;
    for (const float is_right : right)
        held_out += (double)is_right / HELD_OUT;
    printf("epoch %d: loss %.4f, accuracy %.1f %%, held out %.1f %%, micro-batch %zu\n", epoch,
           loss, 100 * accuracy, 100 * held_out, micro);
    return REBATCH_OK;
}

/* Of the weights and all that lies behind them, running statistics included. */
static rebatch_status print_fingerprint(const struct trainer *t)
{
    float state[STATE];
    const rebatch_status status = fetch(t, state, t->network.weights, STATE);
    if (!status)
        printf("weights %016" PRIx64 "\n", fingerprint(state, STATE));
    return status;
}

int main(int argc, char **argv)
{
    output_begin();
    struct trainer t = {};
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.micro_multiple_of = GROUP;
    options.pool.limit_bytes = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) << 20 : 0;
    rebatch_status status = rebatch_device_open_cuda(&t.device, NULL);
    if (!status)
        status = rebatch_open(&t.rb, t.device, &options);
    if (!status)
        status = make_network(&t);
    for (int epoch = 0; epoch < EPOCHS && !status; epoch++)
        status = train_epoch(&t, epoch);
    if (!status)
        status = print_fingerprint(&t);
    if (status)
        fprintf(stderr, "separable_cnn: %s\n", rebatch_last_error());
    rebatch_close(t.rb);
    rebatch_device_close(t.device);
    return output_end("separable_cnn", status ? 1 : 0);
}
