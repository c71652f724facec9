/* A CUDA trainer that allocates its buffers once, and what changes when rebatch wraps it.
 *
 * It is the trainer of wrap_existing.cu, but its activations are in buffers that it allocates
 * before training and keeps. With rebatch the same function makes them, for the size of the
 * micro-batch. The lines under `#ifdef REBATCH` are all that is new (scripts/show-wrap
 * wrap_buffers).
 *
 *   wrap_buffers [FREE_MIB]   with so much memory left free on the card; default: all there is */
#include <stdio.h>
#include <stdlib.h>

#ifdef REBATCH
#include <rebatch/wrap.h>
#endif

static void check(cudaError_t code, const char *file, int line)
{
    if (code == cudaSuccess)
        return;
#ifdef REBATCH
    rebatch_escape_on_oom(code); /* from within a step this does not come back */
#endif
    fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(code));
    exit(1);
}
#define CHECK(call) check((call), __FILE__, __LINE__)

constexpr int INPUTS = 8, HIDDEN = 1 << 16, BATCH = 1024, STEPS = 20, THREADS = 256;
constexpr float RATE = 1e-5f;

/* ---- the model ---- */

struct parameters {
    float *in;  /* INPUTS x HIDDEN */
    float *out; /* HIDDEN */
};

static parameters weights, gradients;
static float *samples, *targets; /* BATCH x INPUTS, BATCH */
static float *loss;
static unsigned dropout = 1; /* the state of its random numbers */
/* buffers of a batch, or of a micro-batch */
static float *hidden, *slope, *error;
static unsigned *seeds;

/* Drops one of eight, by the sample's seed. */
static __device__ bool is_dropped(unsigned seed, unsigned j)
{
    unsigned bits = (seed ^ j) * 0x9e3779b1u;
    bits = (bits ^ bits >> 15) * 0x85ebca77u;
    return bits >> 29 == 0;
}

/* hidden[s][j] = tanh(sum over k of x[s][k] in[k][j]), or 0 where it is dropped */
static __global__ void forward(float *hidden, const float *x, const unsigned *seeds, parameters w)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    const size_t s = blockIdx.y;
    float sum = 0;
    for (int k = 0; k < INPUTS; k++)
        sum += x[s * INPUTS + k] * w.in[(size_t)k * HIDDEN + j];
    hidden[s * HIDDEN + j] = is_dropped(seeds[s], j) ? 0 : tanhf(sum);
}

/* error[s] = (sum over j of hidden[s][j] out[j]) - target[s], always added in the same order */
static __global__ void predict(float *error, const float *hidden, const float *target, parameters w)
{
    __shared__ float part[THREADS];
    const size_t s = blockIdx.x;
    float sum = 0;
    for (int j = threadIdx.x; j < HIDDEN; j += THREADS)
        sum += hidden[s * HIDDEN + j] * w.out[j];
    part[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        error[s] = part[0] - target[s];
}

/* slope[s][j] = how the loss of sample s changes with the sum inside hidden[s][j] */
static __global__ void backward(float *slope, const float *hidden, const float *error, parameters w)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    const size_t s = blockIdx.y;
    const float h = hidden[s * HIDDEN + j];
    slope[s * HIDDEN + j] = h == 0 ? 0 : 2 * error[s] * w.out[j] * (1 - h * h) / BATCH;
}

/* Adds the samples' shares, one after the other, to what the gradients hold. */
static __global__ void accumulate(parameters g, float *loss_sum, const float *hidden,
                                  const float *slope, const float *error, const float *x, int count)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    for (int s = 0; s < count; s++) {
        g.out[j] += 2 * error[s] * hidden[(size_t)s * HIDDEN + j] / BATCH;
        for (int k = 0; k < INPUTS; k++)
            g.in[(size_t)k * HIDDEN + j] += slope[(size_t)s * HIDDEN + j] * x[s * INPUTS + k];
        if (j == 0)
            *loss_sum += error[s] * error[s] / BATCH;
    }
}

static __global__ void descend(parameters w, parameters g)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    w.out[j] -= RATE * g.out[j];
    for (int k = 0; k < INPUTS; k++)
        w.in[(size_t)k * HIDDEN + j] -= RATE * g.in[(size_t)k * HIDDEN + j];
}

/* ---- the training step ---- */

static void zero_grads(void)
{
    CHECK(cudaMemset(gradients.in, 0, sizeof(float) * INPUTS * HIDDEN));
    CHECK(cudaMemset(gradients.out, 0, sizeof(float) * HIDDEN));
    CHECK(cudaMemset(loss, 0, sizeof(float)));
}

static void allocate_buffers(size_t count)
{
    CHECK(cudaMalloc(&hidden, sizeof(float) * HIDDEN * count));
    CHECK(cudaMalloc(&slope, sizeof(float) * HIDDEN * count));
    CHECK(cudaMalloc(&error, sizeof(float) * count));
    CHECK(cudaMalloc(&seeds, sizeof(unsigned) * count));
}

/* The seeds of the samples that come next. */
static void draw(unsigned *seeds, int count)
{
    static unsigned host[BATCH];
    for (int i = 0; i < count; i++)
        host[i] = dropout = dropout * 1664525u + 1013904223u;
    CHECK(cudaMemcpy(seeds, host, sizeof(unsigned) * (size_t)count, cudaMemcpyHostToDevice));
}

static void train_on(int first, int count)
{
    const float *x = samples + (size_t)first * INPUTS;
    const dim3 grid(HIDDEN / THREADS, (unsigned)count);
    draw(seeds, count);
    forward<<<grid, THREADS>>>(hidden, x, seeds, weights);
    predict<<<(unsigned)count, THREADS>>>(error, hidden, targets + first, weights);
    backward<<<grid, THREADS>>>(slope, hidden, error, weights);
#ifdef REBATCH
    rebatch_wrap_mutating(); /* no gradient was changed until here */
#endif
    accumulate<<<HIDDEN / THREADS, THREADS>>>(gradients, loss, hidden, slope, error, x, count);
    CHECK(cudaGetLastError());
}

static void update(void)
{
#ifdef REBATCH
    rebatch_wrap_mutating();
#endif
    descend<<<HIDDEN / THREADS, THREADS>>>(weights, gradients);
    CHECK(cudaGetLastError());
}

/* ---- data, and a card that others use as well ---- */

static float uniform(void) /* in [-1, 1), the same numbers every time */
{
    static unsigned state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

static float *filled(size_t count, float scale)
{
    float *host = (float *)malloc(sizeof(float) * count), *out;
    for (size_t i = 0; i < count; i++)
        host[i] = scale * uniform();
    CHECK(cudaMalloc(&out, sizeof(float) * count));
    CHECK(cudaMemcpy(out, host, sizeof(float) * count, cudaMemcpyHostToDevice));
    free(host);
    return out;
}

static void make_all(void)
{
    samples = filled((size_t)BATCH * INPUTS, 1);
    targets = filled(BATCH, 1);
    weights = {filled((size_t)INPUTS * HIDDEN, 1), filled(HIDDEN, 0.01f)};
    gradients = {filled((size_t)INPUTS * HIDDEN, 0), filled(HIDDEN, 0)};
    loss = filled(1, 0);
}

/* Somebody else: takes all but `free_mib` of what is free on the card, by CUDA's own function. */
static void crowd(size_t free_mib)
{
    size_t left, total;
    void *theirs;
    CHECK(cudaMemGetInfo(&left, &total));
    if (left > free_mib << 20)
        CHECK((cudaMalloc)(&theirs, left - (free_mib << 20)));
}

/* A number that differs when any bit of the output weights does (FNV-1a). */
static unsigned long long fingerprint(void)
{
    static unsigned char bytes[sizeof(float) * HIDDEN];
    unsigned long long hash = 14695981039346656037ull;
    CHECK(cudaMemcpy(bytes, weights.out, sizeof bytes, cudaMemcpyDeviceToHost));
    for (const unsigned char byte : bytes)
        hash = (hash ^ byte) * 1099511628211ull;
    return hash;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        crowd((size_t)strtoull(argv[1], NULL, 10));
#ifdef REBATCH
    CHECK(rebatch_wrap_guard(&dropout)); /* samples that run again see the same numbers */
#endif
    make_all();
#ifndef REBATCH
    allocate_buffers(BATCH);
#endif
    for (int i = 0; i < STEPS; i++) {
#ifdef REBATCH
        CHECK(rebatch_wrap_step(BATCH, zero_grads, train_on, update, allocate_buffers,
                                REBATCH_DECLARES_MUTATION));
#else
        zero_grads();
        train_on(0, BATCH);
        update();
#endif
        float last;
        CHECK(cudaMemcpy(&last, loss, sizeof last, cudaMemcpyDeviceToHost));
        if (i == 0 || i == STEPS - 1)
            printf("step %2d  loss %.6f\n", i, last);
    }
    printf("weights %016llx\n", fingerprint());
    return 0;
}
