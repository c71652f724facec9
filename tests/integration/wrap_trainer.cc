/* Owns the trainer of the tests of rebatch/wrap.h in C++. Must not know the tests. */
#include "wrap_trainer.h"

#include <rebatch/wrap.h>
#include <stdlib.h>

static wrap_trainer *t;

static void check(cudaError_t code)
{
    if (code == cudaSuccess)
        return;
    rebatch_escape_on_oom(code);
    abort();
}

static void zero_gradients()
{
    t->zeros++;
    t->sum = 0;
}

static void train_on(int first, int count)
{
    float *memory;
    t->trains++;
    check(cudaMalloc(&memory, (size_t)count * t->sample_bytes));
    rebatch_wrap_mutating();
    for (int i = first; i < first + count; i++)
        t->sum += i;
    check(cudaFree(memory));
}

static void update()
{
    t->updates++;
    rebatch_wrap_mutating();
    if (t->fail_updates > 0) {
        t->fail_updates--;
        check(cudaErrorMemoryAllocation);
    }
    t->parameter += t->sum;
}

cudaError_t wrap_trainer_step(wrap_trainer *trainer, size_t batch, uint32_t flags,
                              rebatch_step_report *report)
{
    t = trainer;
    return rebatch_wrap_step(batch, zero_gradients, train_on, update, flags, report);
}

cudaError_t wrap_trainer_step_by_lambdas(wrap_trainer *trainer, size_t batch, uint32_t flags,
                                         rebatch_step_report *report)
{
    t = trainer;
    auto train = [trainer](size_t first, size_t count) {
        void *memory;
        trainer->trains++;
        check(cudaMallocAsync(&memory, count * trainer->sample_bytes, NULL));
        rebatch_wrap_mutating();
        for (size_t i = first; i < first + count; i++)
            trainer->sum += (double)i;
        check(cudaFreeAsync(memory, NULL));
    };
    return rebatch_wrap_step(
        batch,
        [=] {
            trainer->zeros++;
            trainer->sum = 0;
        },
        train, [&] { update(); }, flags, report);
}

/* As it was before training began, in a trainer that allocates once. */
static void allocate_buffer(size_t samples)
{
    t->made++;
    check(cudaMalloc(&t->buffer, samples * t->sample_bytes));
    t->room = samples;
}

static void train_in_buffer(size_t first, size_t count)
{
    t->trains++;
    if (count > t->room)
        abort();
    rebatch_wrap_mutating();
    for (size_t i = first; i < first + count; i++)
        t->sum += (double)i;
}

cudaError_t wrap_trainer_step_with_resize(wrap_trainer *trainer, size_t batch,
                                          rebatch_step_report *report)
{
    t = trainer;
    return rebatch_wrap_step(batch, zero_gradients, train_in_buffer, update, allocate_buffer,
                             REBATCH_DECLARES_MUTATION, report);
}

cudaError_t wrap_trainer_step_with_lambda(wrap_trainer *trainer, size_t batch,
                                          rebatch_step_report *report)
{
    char elsewhere[256]; /* the functions are not at the same address of the stack each time */
    t = trainer;
    elsewhere[0] = 0;
    (void)elsewhere;
    return rebatch_wrap_step(
        batch, zero_gradients, train_in_buffer, update,
        [trainer](size_t samples) {
            (void)trainer;
            allocate_buffer(samples);
        },
        REBATCH_DECLARES_MUTATION, report);
}

cudaError_t wrap_trainer_guard_sums(wrap_trainer *trainer)
{
    return rebatch_wrap_guard_sums(&trainer->sum);
}

cudaError_t wrap_trainer_step_of_sums(wrap_trainer *trainer, size_t batch, size_t largest,
                                      rebatch_step_report *report)
{
    t = trainer;
    t->sum = 0;
    const auto train = [](size_t first, size_t count) {
        void *memory;
        t->trains++;
        t->longest = count > t->longest ? count : t->longest;
        rebatch_wrap_mutating();
        for (size_t i = first; i < first + count; i++)
            t->sum += (double)i;
        check(cudaMalloc(&memory, count * t->sample_bytes));
        check(cudaFree(memory));
    };
    return rebatch_wrap_step(batch, nullptr, train, update, REBATCH_DECLARES_MUTATION, report,
                             largest);
}

cudaError_t wrap_trainer_step_in_place(wrap_trainer *trainer, size_t batch,
                                       rebatch_step_report *report)
{
    rebatch *const rb = rebatch_get_current();
    t = trainer;
    REBATCH_STEP (rb, batch, part, REBATCH_DECLARES_MUTATION) {
        if (part.first == 0)
            zero_gradients();
        train_on((int)part.first, (int)part.count);
    }
    REBATCH_UPDATE (rb)
        update();
    return rebatch_wrap_code(rebatch_step_end(rb, report));
}

/* ---- evaluation ---- */

static void evaluate_in_buffer(int first, int count)
{
    t->evaluations++;
    if ((size_t)count > t->room)
        abort();
    for (int i = first; i < first + count; i++)
        t->evaluated += i;
}

cudaError_t wrap_trainer_map_in_buffer(wrap_trainer *trainer, size_t count,
                                       rebatch_step_report *report)
{
    t = trainer;
    return rebatch_wrap_map(count, evaluate_in_buffer, allocate_buffer, 0, report);
}

static void evaluate(size_t first, size_t count)
{
    void *memory;
    t->evaluations++;
    for (size_t i = first; i < first + count; i++)
        t->evaluated += (double)i;
    rebatch_wrap_check(cudaMalloc(&memory, count * t->sample_bytes));
    rebatch_wrap_check(cudaFree(memory));
}

cudaError_t wrap_trainer_map(wrap_trainer *trainer, size_t count, rebatch_step_report *report)
{
    t = trainer;
    return rebatch_wrap_map(count, evaluate, 0, report);
}

cudaError_t wrap_trainer_watch(wrap_trainer *trainer)
{
    return rebatch_wrap_watch("sum", &trainer->sum);
}

cudaError_t wrap_trainer_guard(wrap_trainer *trainer)
{
    return rebatch_wrap_guard(&trainer->evaluated);
}

void wrap_trainer_check(cudaError_t code)
{
    rebatch_wrap_check(code);
}
