/* An image classifier that is trained as darknet trains: layers with buffers of their own, made
 * with the layer and made again when the size of the images changes, which is drawn every few
 * steps; convolutions of a library with codes of its own; gradients that keep the momentum of the
 * steps before; one batch in equal subdivisions. The lines under `#ifdef REBATCH` are all that is
 * new when rebatch wraps it (scripts/show-wrap darknet).
 *
 *   darknet [BATCH [SUBDIVISIONS [STEPS]]] */
#include <cuda_runtime.h>
#include <cudnn.h>
#include <curand.h>

#include "darknet.h"

#ifdef REBATCH
#include <rebatch/wrap.h>
#endif

static void check_error(cudaError_t error, const char *file, int line)
{
    if (error == cudaSuccess)
        return;
#ifdef REBATCH
    rebatch_escape_on_oom(error);
#endif
    fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(error));
    exit(1);
}

static void check_error(cudnnStatus_t error, const char *file, int line)
{
    if (error == CUDNN_STATUS_SUCCESS)
        return;
#ifdef REBATCH
    rebatch_escape_on_oom(error);
#endif
    fprintf(stderr, "%s:%d: convolution: error %d\n", file, line, (int)error);
    exit(1);
}
#define CHECK(call) check_error((call), __FILE__, __LINE__)

static curandGenerator_st sequence;
static curandGenerator_t generator = &sequence;
#ifdef REBATCH
static rebatch_wrap_generator guarded = {generator, 0, {}};
#endif

static void cuda_random(float *x, size_t count)
{
    if (curandGenerateUniform(generator, x, count) != CURAND_STATUS_SUCCESS)
        exit(1);
#ifdef REBATCH
    guarded.drawn += count;
#endif
}

static float *cuda_make_array(size_t count)
{
    float *memory;
    CHECK(cudaMalloc(&memory, count * sizeof(float)));
    CHECK(cudaMemset(memory, 0, count * sizeof(float)));
    return memory;
}

/* ---- layers ---- */

enum layer_type { CONVOLUTIONAL, MAXPOOL, DROPOUT, AVGPOOL, CONNECTED, SOFTMAX };

struct layer {
    layer_type type;
    int batch, c, h, w, out_c, out_h, out_w;
    size_t nweights;
    float *weights, *weight_updates;
    float *output, *delta; /* of a batch */
    float *chance;         /* of dropout */
    int *indexes;          /* of maxpool */
    float *loss;           /* of softmax */
};

struct network {
    int n, batch, subdivisions, c, h, w;
    size_t seen;
    layer layers[16];
    float *input, *truth; /* of a batch */
    float error;
};

constexpr int CLASSES = 10;
constexpr float MOMENTUM = 0.9f, DECAY = 0.0005f, RATE = 0.05f;

static size_t outputs(const layer &l)
{
    return (size_t)l.batch * l.out_c * l.out_h * l.out_w;
}

static void make_buffers(layer *l)
{
    l->output = cuda_make_array(outputs(*l));
    l->delta = cuda_make_array(outputs(*l));
    if (l->type == DROPOUT)
        l->chance = cuda_make_array(outputs(*l));
    if (l->type == MAXPOOL)
        CHECK(cudaMalloc(&l->indexes, outputs(*l) * sizeof(int)));
    if (l->type == SOFTMAX)
        l->loss = cuda_make_array(l->batch);
}

static void set_size(layer *l, int h, int w)
{
    l->h = h, l->w = w;
    l->out_h = l->type == MAXPOOL ? h / 2 : l->type >= AVGPOOL ? 1 : h;
    l->out_w = l->type == MAXPOOL ? w / 2 : l->type >= AVGPOOL ? 1 : w;
}

static layer make_layer(layer_type type, int batch, int c, int h, int w, int out_c)
{
    layer l = {};
    l.type = type, l.batch = batch, l.c = c, l.out_c = out_c;
    set_size(&l, h, w);
    l.nweights = type == CONVOLUTIONAL ? (size_t)c * out_c * 9
                 : type == CONNECTED   ? (size_t)c * out_c
                                       : 0;
    if (l.nweights) {
        l.weights = cuda_make_array(l.nweights);
        l.weight_updates = cuda_make_array(l.nweights);
        initialize(l.weights, l.nweights);
    }
#ifndef REBATCH
    make_buffers(&l);
#endif
    return l;
}

static void resize_layer(layer *l, int h, int w)
{
    set_size(l, h, w);
    CHECK(cudaFree(l->output));
    CHECK(cudaFree(l->delta));
    CHECK(cudaFree(l->chance));
    CHECK(cudaFree(l->indexes));
    CHECK(cudaFree(l->loss));
    make_buffers(l);
}

static void forward_layer(const layer &l, network *net, const float *input)
{
    const int planes = l.batch * l.c, pixels = l.h * l.w;
    const convolution v = {l.batch, l.c, l.out_c, l.h, l.w};
    CHECK(cudaMemset(l.delta, 0, outputs(l) * sizeof(float)));
    switch (l.type) {
    case CONVOLUTIONAL:
        CHECK(convolution_forward(l.output, input, l.weights, v));
        return leaky(l.output, outputs(l));
    case MAXPOOL:
        return maxpool(l.output, l.indexes, input, planes, l.out_h, l.out_w);
    case DROPOUT:
        cuda_random(l.chance, outputs(l));
        CHECK(cudaMemset(l.output, 0, outputs(l) * sizeof(float)));
        return drop(l.output, input, l.chance, 0.25f, outputs(l));
    case AVGPOOL:
        return average(l.output, input, planes, pixels);
    case CONNECTED:
        return connect(l.output, input, l.weights, l.batch, l.c, l.out_c);
    case SOFTMAX:
        return softmax(l.delta, l.loss, input, net->truth, l.batch, CLASSES);
    }
}

static void backward_layer(const layer &l, const float *input, float *delta)
{
    const int planes = l.batch * l.c, pixels = l.h * l.w;
    const convolution v = {l.batch, l.c, l.out_c, l.h, l.w};
    switch (l.type) {
    case CONVOLUTIONAL:
        leaky_gradient(l.delta, l.output, outputs(l));
        CHECK(convolution_backward_filter(l.weight_updates, l.delta, input, v));
        if (delta)
            convolution_backward_data(delta, l.delta, l.weights, v);
        return;
    case MAXPOOL:
        return scatter(delta, l.delta, l.indexes, outputs(l));
    case DROPOUT:
        return drop(delta, l.delta, l.chance, 0.25f, outputs(l));
    case AVGPOOL:
        return average_gradient(delta, l.delta, planes, pixels);
    case CONNECTED:
        return connect_gradient(l.weight_updates, delta, l.delta, input, l.weights, l.batch, l.c,
                                l.out_c);
    case SOFTMAX:
        return axpy(delta, 1, l.delta, outputs(l));
    }
}

/* ---- the network ---- */

static void make_inputs(network *net)
{
    net->input = cuda_make_array((size_t)net->batch * net->c * net->h * net->w);
    net->truth = cuda_make_array((size_t)net->batch * CLASSES);
}

static network parse_network(int batch, int subdivisions)
{
    static const struct {
        layer_type type;
        int filters;
    } section[] = {{CONVOLUTIONAL, 8},   {MAXPOOL, 0},      {CONVOLUTIONAL, 16}, {CONVOLUTIONAL, 8},
                   {CONVOLUTIONAL, 16},  {MAXPOOL, 0},      {CONVOLUTIONAL, 16}, {CONVOLUTIONAL, 8},
                   {CONVOLUTIONAL, 24},  {DROPOUT, 0},      {CONVOLUTIONAL, 16}, {AVGPOOL, 0},
                   {CONNECTED, CLASSES}, {SOFTMAX, CLASSES}};
    network net = {};
    net.batch = batch / subdivisions, net.subdivisions = subdivisions;
    net.c = 3, net.h = net.w = 16;
    int c = net.c, h = net.h, w = net.w;
    for (const auto &s : section) {
        layer &l = net.layers[net.n++];
        l = make_layer(s.type, net.batch, c, h, w, s.filters ? s.filters : c);
        c = l.out_c, h = l.out_h, w = l.out_w;
    }
#ifndef REBATCH
    make_inputs(&net);
#endif
    return net;
}

static void resize_network(network *net, int h, int w)
{
    net->h = h, net->w = w;
    CHECK(cudaFree(net->input));
    CHECK(cudaFree(net->truth));
    make_inputs(net);
    for (int i = 0; i < net->n; i++) {
        resize_layer(&net->layers[i], h, w);
        h = net->layers[i].out_h, w = net->layers[i].out_w;
    }
}

static void set_batch_network(network *net, int batch)
{
    net->batch = batch;
    for (int i = 0; i < net->n; i++)
        net->layers[i].batch = batch;
}

static void forward_network(network *net)
{
    const float *input = net->input;
    for (int i = 0; i < net->n; i++) {
        forward_layer(net->layers[i], net, input);
        input = net->layers[i].output;
    }
}

static void backward_network(network *net)
{
    for (int i = net->n - 1; i >= 0; i--) {
        const layer *before = i ? &net->layers[i - 1] : NULL;
        backward_layer(net->layers[i], before ? before->output : net->input,
                       before ? before->delta : NULL);
    }
    for (int i = 0; i < net->batch; i++)
        net->error += net->layers[net->n - 1].loss[i];
}

static void update_network(network *net)
{
#ifdef REBATCH
    const int batch = (int)rebatch_wrap_batch(net->batch);
#else
    const int batch = net->batch * net->subdivisions;
#endif
    for (int i = 0; i < net->n; i++) {
        const layer &l = net->layers[i];
        axpy(l.weight_updates, -DECAY * (float)batch, l.weights, l.nweights);
        axpy(l.weights, RATE / (float)batch, l.weight_updates, l.nweights);
        scale(l.weight_updates, MOMENTUM, l.nweights);
    }
}

/* ---- data ---- */

struct data {
    int images;
    float *X, *y; /* in host memory */
};

static data load_data(int images, int c, int h, int w, uint64_t *random)
{
    const size_t size = (size_t)c * h * w;
    const data d = {images, (float *)malloc(images * size * sizeof(float)),
                    (float *)calloc((size_t)images * CLASSES, sizeof(float))};
    for (int i = 0; i < images; i++) {
        const int truth = (int)(random_u32(random) % CLASSES);
        uniform(d.X + i * size, size, random);
        for (size_t k = truth; k < size; k += CLASSES)
            d.X[i * size + k] += 1;
        d.y[i * CLASSES + truth] = 1;
    }
    return d;
}

static void get_next_batch(const network *net, const data &d, int offset)
{
    const size_t size = (size_t)net->c * net->h * net->w;
    CHECK(cudaMemcpy(net->input, d.X + offset * size, net->batch * size * sizeof(float),
                     cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(net->truth, d.y + (size_t)offset * CLASSES,
                     net->batch * CLASSES * sizeof(float), cudaMemcpyHostToDevice));
}

static float train_network(network *net, const data &d)
{
    net->error = 0;
#ifdef REBATCH
    const auto train = [=, &d](int first, int count) {
        set_batch_network(net, count);
        get_next_batch(net, d, first);
        forward_network(net);
        rebatch_wrap_mutating();
        backward_network(net);
    };
    const auto resize = [=](int count) {
        set_batch_network(net, count);
        resize_network(net, net->h, net->w);
    };
    CHECK(rebatch_wrap_step(
        d.images, [=] { net->error = 0; }, train,
        [=] { rebatch_wrap_mutating(), update_network(net); }, resize, REBATCH_DECLARES_MUTATION,
        NULL, d.images / net->subdivisions));
    net->seen += d.images;
#else
    for (int i = 0; i < net->subdivisions; i++) {
        get_next_batch(net, d, i * net->batch);
        forward_network(net);
        backward_network(net);
        net->seen += net->batch;
        if (net->seen / net->batch % net->subdivisions == 0)
            update_network(net);
    }
#endif
    return net->error / (float)d.images;
}

int main(int argc, char **argv)
{
    const int batch = argc > 1 ? atoi(argv[1]) : 64, subdivisions = argc > 2 ? atoi(argv[2]) : 1;
    const int steps = argc > 3 ? atoi(argv[3]) : 6;
    network net = parse_network(batch, subdivisions);
    uint64_t random = 7; /* of the loader */
#ifdef REBATCH
    CHECK(rebatch_wrap_guard(&guarded));
    for (int i = 0; i < net.n; i++)
        if (net.layers[i].nweights) {
            CHECK(rebatch_wrap_guard_sums(net.layers[i].weight_updates, net.layers[i].nweights));
            CHECK(rebatch_wrap_watch("updates", net.layers[i].weight_updates,
                                     net.layers[i].nweights));
        }
#endif
    for (int step = 0; step < steps; step++) {
        if (step % 2 == 1) {
            const int dim = 4 + 4 * (int)(random_u32(&random) % 4);
#ifdef REBATCH
            net.h = net.w = dim;
            CHECK(rebatch_wrap_remake_buffers());
#else
            resize_network(&net, dim, dim);
#endif
        }
        const data d = load_data(batch, net.c, net.h, net.w, &random);
        printf("step %d  %d x %d  loss %.6f\n", step, net.w, net.h, train_network(&net, d));
        free(d.X);
        free(d.y);
    }
    for (int i = 0; i < net.n; i++)
        if (net.layers[i].nweights)
            print_weights(net.layers[i].weights, net.layers[i].nweights * sizeof(float));
    return 0;
}
