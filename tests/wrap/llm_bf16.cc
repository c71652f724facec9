/* A language model in bfloat16 that is trained as many are: everything is allocated at the start,
 * activations in one block, and the step accumulates gradients over equal micro-batches. The lines
 * under `#ifdef REBATCH` are all that is new when rebatch wraps it (scripts/show-wrap llm_bf16).
 *
 *   llm_bf16 [BATCH [MICRO_BATCH [STEPS]]] */
#include <cuda_runtime.h>

#include "llm.h"

#ifdef REBATCH
#include <rebatch/wrap.h>
#endif

static void check(cudaError_t error, const char *file, int line)
{
    if (error == cudaSuccess)
        return;
#ifdef REBATCH
    rebatch_escape_on_oom(error);
#endif
    fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(error));
    exit(1);
}
#define CHECK(call) check((call), __FILE__, __LINE__)

typedef bfloat16 floatX;

struct parameters {
    floatX *wte, *w, *wout;
};

struct activations {
    floatX *encoded, *att, *mixed, *hidden, *logits;
    floatX *dencoded, *dmixed, *dhidden;
};

struct gpt2 {
    parameters params, grads;
    floatX *params_memory, *grads_memory;
    float *m_memory, *v_memory;
    size_t num_parameters;
    activations acts;
    floatX *acts_memory;
    float *losses; /* on the device */
    int *inputs, *targets;
    float *cpu_losses;
    float mean_loss;
    int batch_size;
    uint64_t random; /* of dropout */
};

static floatX *point_parameters(parameters *p, size_t *count)
{
    floatX *memory;
    *count = 2 * V * C + C * C;
    CHECK(cudaMalloc(&memory, *count * sizeof(floatX)));
    *p = {memory, memory + V * C, memory + V * C + C * C};
    return memory;
}

static void allocate_state(gpt2 *model, int B, int T)
{
    model->params_memory = point_parameters(&model->params, &model->num_parameters);
    initialize(model->params_memory, model->num_parameters);
    model->grads_memory = point_parameters(&model->grads, &model->num_parameters);
    CHECK(cudaMalloc(&model->m_memory, model->num_parameters * sizeof(float)));
    CHECK(cudaMalloc(&model->v_memory, model->num_parameters * sizeof(float)));
    CHECK(cudaMemset(model->m_memory, 0, model->num_parameters * sizeof(float)));
    CHECK(cudaMemset(model->v_memory, 0, model->num_parameters * sizeof(float)));
    CHECK(cudaMallocHost(&model->cpu_losses, (size_t)B * T * sizeof(float)));
    model->random = 1;
#ifdef REBATCH
}

static void allocate_activations(gpt2 *model, int B, int T)
{
#endif
    const size_t n = (size_t)B * T;
    const size_t count = n * (6 * C + T + V);
    model->batch_size = B;
    CHECK(cudaMalloc(&model->acts_memory, count * sizeof(floatX)));
    CHECK(cudaMemset(model->acts_memory, 0, count * sizeof(floatX)));
    floatX *at = model->acts_memory, *behind = at + n * (3 * C + T + V);
    model->acts = {
        at,     at + n * C,     at + n * (C + T),  at + n * (2 * C + T), at + n * (3 * C + T),
        behind, behind + n * C, behind + n * 2 * C};
    CHECK(cudaMalloc(&model->losses, n * sizeof(float)));
    CHECK(cudaMalloc(&model->inputs, n * sizeof(int)));
    CHECK(cudaMalloc(&model->targets, n * sizeof(int)));
}

static void forward(gpt2 *model, const int *inputs, int B, int T, uint64_t *random)
{
    const parameters p = model->params;
    const activations a = model->acts;
    if (B > model->batch_size) {
        fprintf(stderr, "a batch of %d: expected at most %d\n", B, model->batch_size);
        exit(1);
    }
    CHECK(cudaMemcpy(model->inputs, inputs, (size_t)B * T * sizeof(int), cudaMemcpyHostToDevice));
    encode(a.encoded, model->inputs, p.wte, B, T);
    attend(a.att, a.mixed, a.encoded, B, T);
    hidden_forward(a.hidden, a.mixed, p.w, B, T, random);
    logits_forward(a.logits, a.hidden, p.wout, B, T);
}

/* The sum of the losses over tokens; in place of the logits are their gradients then. */
static float sum_losses(gpt2 *model, const int *targets, float dloss, int B, int T)
{
    const size_t n = (size_t)B * T;
    float sum = 0;
    CHECK(cudaMemcpy(model->targets, targets, n * sizeof(int), cudaMemcpyHostToDevice));
    classify(model->acts.logits, model->losses, model->targets, dloss, B, T);
    CHECK(cudaMemcpy(model->cpu_losses, model->losses, n * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++)
        sum += model->cpu_losses[i];
    return sum;
}

static float validate(gpt2 *model, const int *inputs, const int *targets, int B, int T)
{
    forward(model, inputs, B, T, NULL);
    return sum_losses(model, targets, 0, B, T) / (float)(B * T);
}

static void backward(gpt2 *model, const int *targets, int accumulation_steps, int micro_step, int B,
                     int T)
{
    const parameters p = model->params;
    const activations a = model->acts;
    if (micro_step == 0) {
        CHECK(cudaMemset(model->grads_memory, 0, model->num_parameters * sizeof(floatX)));
        model->mean_loss = 0;
    }
#ifdef REBATCH
    const float dloss = 1.0f / (float)(rebatch_wrap_batch(B) * T);
#else
    const float dloss = 1.0f / (float)(B * T * accumulation_steps);
#endif
    model->mean_loss += sum_losses(model, targets, dloss, B, T) * dloss;
    CHECK(cudaMemset(a.dencoded, 0, (size_t)B * T * C * sizeof(floatX)));
    logits_backward(model->grads.wout, a.dhidden, a.logits, a.hidden, p.wout, B, T);
    hidden_backward(model->grads.w, a.dmixed, a.dhidden, a.hidden, a.mixed, p.w, B, T);
    attend_backward(a.dencoded, a.dmixed, a.att, B, T);
    encode_backward(model->grads.wte, a.dencoded, model->inputs, B, T);
}

static void update(gpt2 *model, int step)
{
    adamw(model->params_memory, model->grads_memory, model->m_memory, model->v_memory,
          model->num_parameters, step);
}

int main(int argc, char **argv)
{
    const int batch = argc > 1 ? atoi(argv[1]) : 32, B = argc > 2 ? atoi(argv[2]) : batch, T = 32;
    const int steps = argc > 3 ? atoi(argv[3]) : 3, accumulation_steps = batch / B;
    gpt2 model = {};
    loader train, val;
    allocate_state(&model, B, T);
    loader_init(&train, batch, T);
    loader_init(&val, B, T);
#ifdef REBATCH
    CHECK(rebatch_wrap_guard(&model.random));
    CHECK(rebatch_wrap_watch("gradients", model.grads_memory, model.num_parameters));
    const auto resize = [&](int size) { allocate_activations(&model, size, T); };
#endif
    for (int step = 1; step <= steps; step++) {
        float val_loss = 0;
        loader_reset(&val);
        for (int k = 0; k < 2; k++) {
            loader_next(&val);
#ifdef REBATCH
            const auto evaluate = [&](int i, int n) {
                val_loss += validate(&model, val.inputs + i * T, val.targets + i * T, n, T) * n / B;
            };
            CHECK(rebatch_wrap_map(B, evaluate, resize));
#else
            val_loss += validate(&model, val.inputs, val.targets, B, T);
#endif
        }
        loader_next(&train);
#ifdef REBATCH
        const auto train_on = [&](int first, int n) {
            forward(&model, train.inputs + first * T, n, T, &model.random);
            backward(&model, train.targets + first * T, 1, first, n, T);
        };
        CHECK(rebatch_wrap_step(
            batch, [] {}, train_on, [&] { update(&model, step); }, resize));
#else
        for (int micro_step = 0; micro_step < accumulation_steps; micro_step++) {
            const int first = micro_step * B;
            forward(&model, train.inputs + first * T, B, T, &model.random);
            backward(&model, train.targets + first * T, accumulation_steps, micro_step, B, T);
        }
        update(&model, step);
#endif
        printf("step %d  val %.4f  train %.6f\n", step, val_loss / 2, model.mean_loss);
    }
    print_weights(model.params_memory, model.num_parameters * sizeof(floatX));
    return 0;
}
