/* A C++ trainer whose device memory belongs to objects: constructors allocate, destructors free.
 *
 * When memory runs out in a step, longjmp() would skip the destructors of the objects on the way.
 * So the check throws: rebatch_wrap_throw_on_oom() throws rebatch_out_of_memory, the destructors
 * run, and rebatch_wrap_step() catches it and runs the same samples again, fewer at a time. Any
 * other failure is an exception too; it leaves rebatch_wrap_step() and ends the program.
 *
 * Evaluation adds the losses of held-out samples to a sum, one after the other. The sum is guarded,
 * so samples that run again count once.
 *
 *   REBATCH_MEMORY_LIMIT=8MiB cpp_raii   the pool takes at most 8 MiB; default: no limit */
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include <rebatch/wrap.h>

static void check(cudaError_t code)
{
    if (code == cudaSuccess)
        return;
    rebatch_wrap_throw_on_oom(code);
    throw std::runtime_error(cudaGetErrorString(code));
}

/* The session: open for as long as this object lives. */
struct session {
    session()
    {
        check(rebatch_wrap_open(nullptr));
    }
    ~session()
    {
        rebatch_wrap_close();
    }
    session(const session &) = delete;
    session &operator=(const session &) = delete;
};

/* Floats in device memory. */
class buffer
{
  public:
    explicit buffer(size_t count) : count(count)
    {
        check(cudaMalloc(&floats, count * sizeof(float)));
    }
    ~buffer()
    {
        if (cudaFree(floats) != cudaSuccess)
            fprintf(stderr, "cpp_raii: %s\n", rebatch_last_error());
    }
    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;

    operator float *() const
    {
        return floats;
    }
    void clear() const
    {
        check(cudaMemset(floats, 0, count * sizeof(float)));
    }
    std::vector<float> fetch() const
    {
        std::vector<float> out(count);
        check(cudaMemcpy(out.data(), floats, count * sizeof(float), cudaMemcpyDeviceToHost));
        return out;
    }

  private:
    float *floats = nullptr;
    const size_t count;
};

/* ---- the model: out . tanh(in x), which learns sin(3 x) ---- */

constexpr int HIDDEN = 4096, BATCH = 1024, HELD_OUT = 1000, STEPS = 50, THREADS = 256;
constexpr float RATE = 2e-4f;

/* Sample s, in [-1, 1). Held-out samples lie between those of the batch. */
static __device__ float input(size_t s)
{
    return (float)(s % BATCH) / (BATCH / 2) - 1 + (s < BATCH ? 0 : 0.5f / (BATCH / 2));
}

/* w[0][j]: in, w[1][j]: out */
static __global__ void initialize(float *w)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    w[j] = 6 * sinf(3.0f * j + 1);
    w[HIDDEN + j] = 0.01f * sinf(7.0f * j + 2);
}

/* hidden[s][j] */
static __global__ void activate(float *hidden, const float *w, size_t first)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    hidden[(size_t)blockIdx.y * HIDDEN + j] = tanhf(w[j] * input(first + blockIdx.y));
}

/* error[s]: one thread adds in the order of j, so its bits do not depend on the cut. */
static __global__ void compare(float *error, const float *hidden, const float *w, size_t first,
                               size_t count)
{
    const size_t s = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (s >= count)
        return;
    float sum = -sinf(3 * input(first + s));
    for (int j = 0; j < HIDDEN; j++)
        sum += w[HIDDEN + j] * hidden[s * HIDDEN + j];
    error[s] = sum;
}

/* gradients[.][j] and loss: sample after sample. */
static __global__ void accumulate(float *gradients, float *loss, const float *hidden,
                                  const float *error, const float *w, size_t first, size_t count)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    for (size_t s = 0; s < count; s++) {
        const float h = hidden[s * HIDDEN + j], slope = 2 * error[s] / BATCH;
        gradients[j] += slope * w[HIDDEN + j] * (1 - h * h) * input(first + s);
        gradients[HIDDEN + j] += slope * h;
        if (j == 0)
            *loss += error[s] * error[s] / BATCH;
    }
}

static __global__ void descend(float *w, const float *gradients)
{
    const int j = blockIdx.x * THREADS + threadIdx.x;
    w[j] -= RATE * gradients[j];
}

/* ---- the trainer ---- */

struct trainer {
    double held_out = 0; /* guarded, so it outlives the session: members are destroyed last first */
    session rebatch;
    buffer weights{2 * HIDDEN}, gradients{2 * HIDDEN}, loss{1};

    trainer()
    {
        check(rebatch_wrap_guard(&held_out));
        initialize<<<HIDDEN / THREADS, THREADS>>>(weights);
        check(cudaGetLastError());
    }
    void forward(const buffer &hidden, const buffer &error, size_t first, size_t count) const
    {
        const dim3 all(HIDDEN / THREADS, (unsigned)count);
        activate<<<all, THREADS>>>(hidden, weights, first);
        compare<<<(unsigned)(count / THREADS + 1), THREADS>>>(error, hidden, weights, first, count);
        check(cudaGetLastError());
    }
    void train_on(size_t first, size_t count) const
    {
        const buffer hidden(count * HIDDEN), error(count);
        forward(hidden, error, first, count);
        rebatch_wrap_mutating(); /* nothing was changed until here */
        accumulate<<<HIDDEN / THREADS, THREADS>>>(gradients, loss, hidden, error, weights, first,
                                                  count);
        check(cudaGetLastError());
    }
    void update() const
    {
        rebatch_wrap_mutating();
        descend<<<2 * HIDDEN / THREADS, THREADS>>>(weights, gradients);
        check(cudaGetLastError());
    }
    void evaluate(size_t first, size_t count)
    {
        const buffer hidden(count * HIDDEN), error(count);
        forward(hidden, error, BATCH + first, count);
        for (const float e : error.fetch())
            held_out += (double)e * (double)e / HELD_OUT;
    }
};

static void run(trainer &t)
{
    rebatch_step_report report;
    for (int i = 0; i < STEPS; i++) {
        const auto zero_grad = [&] {
            t.gradients.clear();
            t.loss.clear();
        };
        const auto train = [&](size_t first, size_t count) { t.train_on(first, count); };
        check(rebatch_wrap_step(
            BATCH, zero_grad, train, [&] { t.update(); }, REBATCH_DECLARES_MUTATION, &report));
        if (i % 10 != 0 && i != STEPS - 1)
            continue;
        const size_t micro = report.micro;
        t.held_out = 0;
        const auto evaluate = [&](size_t first, size_t count) { t.evaluate(first, count); };
        check(rebatch_wrap_map(HELD_OUT, evaluate, 0, &report));
        printf("step %2d: loss %.6f, held out %.6f, micro-batch %zu, evaluated %zu at once\n", i,
               t.loss.fetch()[0], t.held_out, micro, report.micro);
    }
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const float w : t.weights.fetch())
        for (const unsigned char *b = (const unsigned char *)&w, *end = b + sizeof w; b < end; b++)
            hash = (hash ^ *b) * 1099511628211u;
    printf("weights %016llx\n", (unsigned long long)hash);
}

int main()
{
    try {
        trainer t;
        run(t);
    } catch (const std::exception &e) {
        fprintf(stderr, "cpp_raii: %s\n", e.what()); /* rebatch has said what it knows */
        return 1;
    }
    return 0;
}
