/* A CUDA trainer of the usual kind, and what changes when rebatch wraps it.
 *
 * Its CHECK macro exits on any error, and it allocates what a micro-batch needs as it goes. The
 * lines under `#ifdef REBATCH` are all that is new (scripts/show-wrap prints them as a patch);
 * without them this is the program as it was, which ends where memory does. Its model is in
 * wrap_trainer.cuh.
 *
 *   wrap_existing [FREE_MIB]   with so much memory left free on the card; default: all there is */
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

#include "wrap_trainer.cuh"

static void train_on(int first, int count)
{
    float *hidden, *slope, *error;
    unsigned *seeds;
    const float *x = samples + (size_t)first * INPUTS;
    const dim3 grid(HIDDEN / THREADS, (unsigned)count);
    CHECK(cudaMalloc(&hidden, sizeof(float) * HIDDEN * (size_t)count));
    CHECK(cudaMalloc(&error, sizeof(float) * (size_t)count));
    CHECK(cudaMalloc(&seeds, sizeof(unsigned) * (size_t)count));
    draw(seeds, count);
    forward<<<grid, THREADS>>>(hidden, x, seeds, weights);
    predict<<<(unsigned)count, THREADS>>>(error, hidden, targets + first, weights);
    CHECK(cudaMalloc(&slope, sizeof(float) * HIDDEN * (size_t)count));
    backward<<<grid, THREADS>>>(slope, hidden, error, weights);
#ifdef REBATCH
    rebatch_wrap_mutating(); /* no gradient was changed until here */
#endif
    accumulate<<<HIDDEN / THREADS, THREADS>>>(gradients, loss, hidden, slope, error, x, count);
    CHECK(cudaGetLastError());
    CHECK(cudaFree(slope));
    CHECK(cudaFree(seeds));
    CHECK(cudaFree(error));
    CHECK(cudaFree(hidden));
}

static void update(void)
{
#ifdef REBATCH
    rebatch_wrap_mutating();
#endif
    descend<<<HIDDEN / THREADS, THREADS>>>(weights, gradients);
    CHECK(cudaGetLastError());
}

int main(int argc, char **argv)
{
    if (argc > 1)
        crowd((size_t)strtoull(argv[1], NULL, 10));
#ifdef REBATCH
    CHECK(rebatch_wrap_guard(&dropout)); /* samples that run again see the same numbers */
#endif
    make_all();
    for (int i = 0; i < STEPS; i++) {
#ifdef REBATCH
        CHECK(rebatch_wrap_step(BATCH, zero_grads, train_on, update, REBATCH_DECLARES_MUTATION));
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
