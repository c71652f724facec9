/* What wrap_existing.cu and wrap_buffers.cu train: a function of 8 numbers, with one wide hidden
 * layer and dropout. The programs define CHECK before they include this file.
 *
 * Sums over samples run in the order of the samples and start from what is there, so the result is
 * the same to the bit however the batch is cut. */
#ifndef EXAMPLES_WRAP_TRAINER_CUH
#define EXAMPLES_WRAP_TRAINER_CUH

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

static void zero_grads(void)
{
    CHECK(cudaMemset(gradients.in, 0, sizeof(float) * INPUTS * HIDDEN));
    CHECK(cudaMemset(gradients.out, 0, sizeof(float) * HIDDEN));
    CHECK(cudaMemset(loss, 0, sizeof(float)));
}

/* The seeds of the samples that come next. */
static void draw(unsigned *seeds, int count)
{
    static unsigned host[BATCH];
    for (int i = 0; i < count; i++)
        host[i] = dropout = dropout * 1664525u + 1013904223u;
    CHECK(cudaMemcpy(seeds, host, sizeof(unsigned) * (size_t)count, cudaMemcpyHostToDevice));
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

#endif
