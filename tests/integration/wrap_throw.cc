/* Owns a trainer of the tests of rebatch/wrap.h whose objects have destructors: memory that runs
 * out is an exception. Must not know the tests. */
#define REBATCH_WRAP_THROWS

#include "wrap_trainer.h"

#include <rebatch/wrap.h>
#include <stdlib.h>

#include <stdexcept>

namespace
{
class buffer
{
  public:
    buffer(wrap_trainer *trainer, size_t bytes) : t(trainer)
    {
        rebatch_wrap_check(cudaMalloc(&memory, bytes));
        t->objects++;
    }
    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;
    ~buffer()
    {
        t->objects--;
        rebatch_wrap_check(cudaFree(memory));
    }

  private:
    wrap_trainer *t;
    void *memory = nullptr;
};
} // namespace

cudaError_t wrap_trainer_step_of_objects(wrap_trainer *t, size_t batch, rebatch_step_report *report)
{
    return rebatch_wrap_step(
        batch, [=] { t->sum = 0; },
        [=](size_t first, size_t count) {
            const buffer half(t, count * t->sample_bytes / 2);
            const buffer other(t, count * t->sample_bytes / 2);
            t->trains++;
            rebatch_wrap_mutating();
            for (size_t i = first; i < first + count; i++)
                t->sum += (double)i;
        },
        [=] {
            rebatch_wrap_mutating();
            t->updates++;
            t->parameter += t->sum;
        },
        REBATCH_DECLARES_MUTATION, report);
}

int wrap_trainer_throws_another(wrap_trainer *t)
{
    try {
        (void)rebatch_wrap_step(
            4, [] {},
            [=](size_t, size_t) {
                const buffer own(t, t->sample_bytes);
                throw std::runtime_error("no more data");
            },
            [] {});
    } catch (const std::runtime_error &) {
        return 1;
    }
    return 0;
}

int wrap_trainer_throws_out_of_a_block(wrap_trainer *t)
{
    try {
        REBATCH_STEP (rebatch_get_current(), 4, part, 0) {
            const buffer own(t, part.count * t->sample_bytes);
            throw std::runtime_error("no more data");
        }
    } catch (const std::runtime_error &) {
        return 1;
    }
    return 0;
}

enum late { LATE_OUT_OF_MEMORY = 2 }; /* of a header that comes after wrap.h */

template <class Code, class = void> struct compiles : std::false_type {
};
template <class Code>
struct compiles<Code, decltype(rebatch_wrap_throw_on_oom(std::declval<Code>()))> : std::true_type {
};
static_assert(compiles<int>::value && compiles<cudaError_t>::value && !compiles<late>::value,
              "no code is taken for another library's");

int wrap_trainer_own_check_throws(wrap_trainer *t)
{
    const auto check = [](cudaError_t code) {
        if (code == cudaSuccess)
            return;
        rebatch_wrap_throw_on_oom(code);
        abort();
    };
    rebatch_wrap_throw_on_oom(cudaErrorMemoryAllocation); /* outside a step it comes back */
    return rebatch_wrap_map(8, [=](size_t, size_t count) {
               void *memory;
               check(cudaMalloc(&memory, count * t->sample_bytes));
               check(cudaFree(memory));
           }) == cudaSuccess;
}
