/* Random numbers of cuRAND in a step: both kinds of state, and how each is guarded, so that samples
 * that run again draw the same numbers.
 *
 * A generator of the host API cannot be asked where it is in its sequence, so the program counts
 * what it draws. States of the device API are device memory like any other.
 *
 *   REBATCH_MEMORY_LIMIT=8MiB curand_dropout   the pool takes at most 8 MiB; default: no limit */
#include <cstdio>
#include <cstdlib>

#include <curand.h>
#include <curand_kernel.h>
#include <rebatch/wrap.h>

constexpr int BATCH = 256, FEATURES = 8192, STEPS = 4, THREADS = 256;

static float *sums;         /* FEATURES: what training changes */
static curandState *states; /* one for each feature */
static rebatch_wrap_generator dropout;

static __global__ void begin(curandState *states)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    curand_init(7, i, 0, &states[i]);
}

/* Each feature draws one number for each sample. */
static __global__ void draw(float *noise, curandState *states, int count)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    for (int sample = 0; sample < count; sample++)
        noise[sample * FEATURES + i] = curand_normal(&states[i]);
}

/* sums[feature] += the noise of the samples, in their order, that are not dropped */
static __global__ void accumulate(float *sums, const float *chance, const float *noise, int count)
{
    const int i = blockIdx.x * THREADS + threadIdx.x;
    for (int at = i; at < count * FEATURES; at += FEATURES)
        sums[i] += chance[at] < 0.25f ? 0.0f : noise[at];
}

static void train(int, int count)
{
    const size_t n = (size_t)count * FEATURES;
    float *chance, *noise;
    rebatch_wrap_check(cudaMalloc(&chance, n * sizeof(float)));
    if (curandGenerateUniform(dropout.generator, chance, n) != CURAND_STATUS_SUCCESS)
        exit(1);
    dropout.drawn += n;
    rebatch_wrap_check(cudaMalloc(&noise, n * sizeof(float))); /* an OOM here: drawn again */
    draw<<<FEATURES / THREADS, THREADS>>>(noise, states, count);
    rebatch_wrap_mutating();
    accumulate<<<FEATURES / THREADS, THREADS>>>(sums, chance, noise, count);
    rebatch_wrap_check(cudaFree(noise));
    rebatch_wrap_check(cudaFree(chance));
}

int main()
{
    rebatch_step_report report = {};
    rebatch_wrap_check(cudaMalloc(&sums, FEATURES * sizeof(float)));
    rebatch_wrap_check(cudaMalloc(&states, FEATURES * sizeof(curandState)));
    begin<<<FEATURES / THREADS, THREADS>>>(states);
    if (curandCreateGenerator(&dropout.generator, CURAND_RNG_PSEUDO_PHILOX4_32_10) !=
        CURAND_STATUS_SUCCESS)
        return 1;
    rebatch_wrap_check(rebatch_wrap_guard(&dropout));
    rebatch_wrap_check(rebatch_wrap_guard(states, FEATURES));
    for (int step = 0; step < STEPS; step++)
        rebatch_wrap_check(rebatch_wrap_step(
            BATCH, [] { rebatch_wrap_check(cudaMemset(sums, 0, FEATURES * sizeof(float))); }, train,
            [] { rebatch_wrap_mutating(); }, REBATCH_DECLARES_MUTATION, &report));
    static float results[FEATURES];
    double total = 0;
    rebatch_wrap_check(cudaMemcpy(results, sums, sizeof results, cudaMemcpyDeviceToHost));
    for (const float result : results)
        total += result;
    printf("weights %.17g after %llu numbers, micro-batch %zu\n", total, dropout.drawn,
           report.micro);
    return 0;
}
