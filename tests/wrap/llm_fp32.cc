/* A language model that is trained as many are: all activations in one block, which the first
 * forward allocates, gradients in the first backward, moments in the first update, and validation
 * before the first step. The lines under `#ifdef REBATCH` are all that is new when rebatch wraps it
 * (scripts/show-wrap llm_fp32).
 *
 *   llm_fp32 [BATCH [STEPS]] */
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

struct parameters {
    float *wte, *w, *wout;
};

struct activations {
    float *encoded, *att, *mixed, *hidden, *logits, *losses;
};

struct activation_gradients {
    float *encoded, *mixed, *hidden;
};

struct gpt2 {
    parameters params, grads;
    float *params_memory, *grads_memory, *m_memory, *v_memory;
    activations acts;
    activation_gradients grads_acts;
    float *acts_memory, *grads_acts_memory;
    size_t num_parameters, num_grads_acts;
    int *inputs, *targets; /* on the device */
    float *cpu_losses;
    float mean_loss;
    int batch_size, seq_len;
    uint64_t random; /* of dropout */
};

static float *point_parameters(parameters *p, size_t *count)
{
    float *memory;
    *count = 2 * V * C + C * C;
    CHECK(cudaMalloc(&memory, *count * sizeof(float)));
    *p = {memory, memory + V * C, memory + V * C + C * C};
    return memory;
}

static void build(gpt2 *model)
{
    model->params_memory = point_parameters(&model->params, &model->num_parameters);
    initialize(model->params_memory, model->num_parameters);
    model->random = 1;
}

static void allocate_activations(gpt2 *model, int B, int T)
{
    const size_t n = (size_t)B * T;
    const size_t count = n * (3 * C + T + V + 1);
    float *at;
    CHECK(cudaMalloc(&model->acts_memory, count * sizeof(float)));
    CHECK(cudaMemset(model->acts_memory, 0, count * sizeof(float)));
    at = model->acts_memory;
    model->acts = {at,
                   at + n * C,
                   at + n * (C + T),
                   at + n * (2 * C + T),
                   at + n * (3 * C + T),
                   at + n * (3 * C + T + V)};
    CHECK(cudaMalloc(&model->inputs, n * sizeof(int)));
    CHECK(cudaMalloc(&model->targets, n * sizeof(int)));
}

static void forward(gpt2 *model, const int *inputs, const int *targets, int B, int T)
{
    const parameters p = model->params;
    if (model->acts_memory == NULL) {
        model->batch_size = B;
        model->seq_len = T;
        allocate_activations(model, B, T);
    } else if (B != model->batch_size || T != model->seq_len) {
        fprintf(stderr, "the batch is %d x %d: expected %d x %d\n", B, T, model->batch_size,
                model->seq_len);
        exit(1);
    }
    CHECK(cudaMemcpy(model->inputs, inputs, (size_t)B * T * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(model->targets, targets, (size_t)B * T * sizeof(int), cudaMemcpyHostToDevice));
    const activations a = model->acts;
    encode(a.encoded, model->inputs, p.wte, B, T);
    attend(a.att, a.mixed, a.encoded, B, T);
    hidden_forward(a.hidden, a.mixed, p.w, B, T, &model->random);
    logits_forward(a.logits, a.hidden, p.wout, B, T);
#ifdef REBATCH
    const float weight = 1.0f / (float)(rebatch_wrap_batch(B) * T);
#else
    const float weight = 1.0f / (float)(B * T);
#endif
    classify(a.logits, a.losses, model->targets, weight, B, T);
    CHECK(cudaMemcpy(model->cpu_losses, a.losses, (size_t)B * T * sizeof(float),
                     cudaMemcpyDeviceToHost));
#ifndef REBATCH
    model->mean_loss = 0;
#endif
    for (int i = 0; i < B * T; i++)
        model->mean_loss += model->cpu_losses[i] * weight;
}

static void zero_grad(gpt2 *model)
{
    if (model->grads_acts_memory != NULL)
        CHECK(cudaMemset(model->grads_acts_memory, 0, model->num_grads_acts * sizeof(float)));
    if (model->grads_memory != NULL)
        CHECK(cudaMemset(model->grads_memory, 0, model->num_parameters * sizeof(float)));
}

static void allocate_grads_acts(gpt2 *model)
{
    const size_t n = (size_t)model->batch_size * model->seq_len;
    float *at;
    model->num_grads_acts = n * 3 * C;
    CHECK(cudaMalloc(&model->grads_acts_memory, model->num_grads_acts * sizeof(float)));
    at = model->grads_acts_memory;
    model->grads_acts = {at, at + n * C, at + n * 2 * C};
}

static void backward(gpt2 *model)
{
    const int B = model->batch_size, T = model->seq_len;
    const parameters p = model->params;
    const activations a = model->acts;
#ifdef REBATCH
    allocate_grads_acts(model);
    CHECK(cudaMemset(model->grads_acts_memory, 0, model->num_grads_acts * sizeof(float)));
#endif
    if (model->grads_memory == NULL) {
        model->grads_memory = point_parameters(&model->grads, &model->num_parameters);
        allocate_grads_acts(model);
        zero_grad(model);
    }
    const activation_gradients d = model->grads_acts;
#ifdef REBATCH
    rebatch_wrap_mutating();
#endif
    logits_backward(model->grads.wout, d.hidden, a.logits, a.hidden, p.wout, B, T);
    hidden_backward(model->grads.w, d.mixed, d.hidden, a.hidden, a.mixed, p.w, B, T);
    attend_backward(d.encoded, d.mixed, a.att, B, T);
    encode_backward(model->grads.wte, d.encoded, model->inputs, B, T);
}

static void update(gpt2 *model, int step)
{
    if (model->m_memory == NULL) {
        const size_t bytes = model->num_parameters * sizeof(float);
        CHECK(cudaMalloc(&model->m_memory, bytes));
        CHECK(cudaMalloc(&model->v_memory, bytes));
        CHECK(cudaMemset(model->m_memory, 0, bytes));
        CHECK(cudaMemset(model->v_memory, 0, bytes));
    }
#ifdef REBATCH
    rebatch_wrap_mutating();
#endif
    adamw(model->params_memory, model->grads_memory, model->m_memory, model->v_memory,
          model->num_parameters, step);
}

int main(int argc, char **argv)
{
    const int B = argc > 1 ? atoi(argv[1]) : 32, steps = argc > 2 ? atoi(argv[2]) : 3, T = 32;
    gpt2 model = {};
    loader train, val;
    build(&model);
    CHECK(cudaMallocHost(&model.cpu_losses, (size_t)B * T * sizeof(float)));
    loader_init(&train, B, T);
    loader_init(&val, B, T);
#ifdef REBATCH
    model.grads_memory = point_parameters(&model.grads, &model.num_parameters);
    CHECK(rebatch_wrap_guard(&model));
#endif
    for (int step = 1; step <= steps; step++) {
        float val_loss = 0;
        loader_reset(&val);
        for (int k = 0; k < 2; k++) {
            loader_next(&val);
#ifdef REBATCH
            model.mean_loss = 0;
            const auto evaluate = [&](int first, int count) {
                forward(&model, val.inputs + first * T, val.targets + first * T, count, T);
            };
            CHECK(rebatch_wrap_map(B, evaluate, 0, NULL, REBATCH_SCOPED_MEMORY));
#else
            forward(&model, val.inputs, val.targets, B, T);
#endif
            val_loss += model.mean_loss / 2;
        }
        loader_next(&train);
#ifdef REBATCH
        CHECK(rebatch_wrap_step(
            B, [&] { model.mean_loss = 0, zero_grad(&model); },
            [&](int first, int count) {
                forward(&model, train.inputs + first * T, train.targets + first * T, count, T);
                backward(&model);
            },
            [&] { update(&model, step); }, REBATCH_DECLARES_MUTATION | REBATCH_SCOPED_MEMORY));
#else
        forward(&model, train.inputs, train.targets, B, T);
        zero_grad(&model);
        backward(&model);
        update(&model, step);
#endif
        printf("step %d  val %.6f  train %.6f\n", step, val_loss, model.mean_loss);
    }
    print_weights(model.params_memory, model.num_parameters * sizeof(float));
    return 0;
}
