/* Owns the likely mistakes of a step: a trainer with one of them at a time, and the name that
 * rebatch_check() gives it. Must not know more of the library than its public headers say. */
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

#include "check_common.h"
#include "rig.h"

#define PARAMETERS 8
#define BATCH 24
#define FEATURE_BYTES (PARAMETERS * sizeof(float))

/* What a trainer gets wrong. */
enum mistake {
    NONE,
    ACCUMULATES_BEFORE_IT_SAYS_SO,
    NEVER_SAYS_SO,
    SAYS_SO_IN_THE_FIRST_MICRO_BATCH_ALONE,
    RUNNING_MEAN_IS_NOT_GUARDED,
    RUNNING_MEAN_OF_THE_POOL_IS_NOT_GUARDED,
    RNG_IS_NOT_GUARDED,
    ZERO_GRAD_CLEARS_NOTHING,
    ZERO_GRAD_CLEARS_A_PART,
    ZERO_GRAD_FORGETS_THE_LOSS,
    KEEPS_A_POINTER,
    READS_WHAT_WAS_TAKEN_BACK,
    WEIGHT_OF_THE_COUNT,
    WEIGHT_OF_THE_COUNT_AND_WATCHES_NOTHING,
    WEIGHT_OF_THE_COUNT_IN_WHAT_ZERO_GRAD_MAKES,
    SUM_INSTEAD_OF_MEAN,
    PLACE_OF_THE_COUNT,
    NORMALIZES_BY_THE_MICRO_BATCH,
    STEPS_ROUNDED_DOWN,
    LEAVES_OUT_THE_LAST_OF_A_REST,
    LEAVES_OUT_THE_FIRST,
    ASSIGNS_INSTEAD_OF_ADDING,
    USES_FREED_MEMORY,
    ANOTHER_STREAM_READS_FREED_MEMORY,
    READS_NEW_MEMORY,
    SWALLOWS_AN_OOM,
    COPES_WITH_AN_OOM,
    RETURNS_ANOTHER_STATUS,
    RETURNS_ANOTHER_STATUS_FOR_AN_OOM,
    ENDS_AFTER_AN_OOM,
    RETRIES_WITH_FEWER_SAMPLES,
    BUFFER_OF_THE_FIRST_MICRO_BATCH,
    LEAKS_A_BLOCK_A_MICRO_BATCH,
    UPDATES_IN_FORWARD_BACKWARD,
    UPDATES_HOST_WEIGHTS_IN_FORWARD_BACKWARD,
    NONE_LABELLED_IS_NO_NUMBER,
    IS_NO_NUMBER,
    DROPOUT_OF_A_COUNTER,
    DROPOUT_OF_A_GUARDED_COUNTER,
    HELPER_DOES_NOT_JOIN,
    COUNTS_ATTEMPTS,
    READS_WITH_A_CURSOR,
    READS_WITH_A_CURSOR_THAT_IS_NEVER_SET_BACK,
    WATCHES_NOTHING,
    WATCHES_WEIGHTS,
    WATCHES_A_NULL_POINTER
};

struct trainer {
    struct check_run run;
    enum mistake mistake;
    rebatch_device *device;
    rebatch_stream side;
    float *weights, *gradient;      /* of the pool */
    float own_weights[PARAMETERS];  /* else */
    float own_gradient[PARAMETERS]; /* else, which nobody watches */
    void *nothing;
    double loss, running;
    float *pool_running;
    uint64_t rng;
    float *kept, *buffer; /* made when they are NULL */
    uint32_t calls, attempts;
    size_t cursor, updates;
    size_t reserved; /* by each micro-batch, which does not use it */
};

static bool is(const struct trainer *t, enum mistake mistake)
{
    return t->mistake == mistake;
}

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    if (is(t, ZERO_GRAD_CLEARS_NOTHING))
        return REBATCH_OK;
    if (is(t, WEIGHT_OF_THE_COUNT_IN_WHAT_ZERO_GRAD_MAKES)) {
        void *gradient;
        const rebatch_status status =
            rebatch_pool_alloc(&gradient, rebatch_get_pool(t->run.rb), FEATURE_BYTES, NULL, 0);
        if (status)
            return status;
        t->gradient = gradient;
    }
    memset(t->gradient, 0, FEATURE_BYTES - (is(t, ZERO_GRAD_CLEARS_A_PART) ? sizeof(float) : 0));
    if (!is(t, ZERO_GRAD_FORGETS_THE_LOSS))
        t->loss = 0;
    t->attempts = 0;
    if (is(t, READS_WITH_A_CURSOR))
        t->cursor = 0;
    return REBATCH_OK;
}

/* ---- forward_backward ---- */

static size_t sample_of(struct trainer *t, const rebatch_microbatch *mb, size_t i)
{
    if (is(t, READS_WITH_A_CURSOR) || is(t, READS_WITH_A_CURSOR_THAT_IS_NEVER_SET_BACK))
        return t->cursor++ % 37;
    return is(t, PLACE_OF_THE_COUNT) ? i : mb->first + i;
}

/* Activations: an input, and noise from the RNG. */
static void forward(struct trainer *t, const rebatch_microbatch *mb, float *hidden)
{
    const bool is_counted = is(t, DROPOUT_OF_A_COUNTER) || is(t, DROPOUT_OF_A_GUARDED_COUNTER);
    uint64_t counted = ++t->calls;
    for (size_t i = 0; i < mb->count; i++) {
        const size_t sample = sample_of(t, mb, i);
        float sum = check_random(is_counted ? &counted : &t->rng);
        for (size_t p = 0; p < PARAMETERS; p++)
            sum += t->weights[p] * check_input(sample, p);
        hidden[i] = sum;
        t->running += 0.1 * ((double)sum - t->running);
        t->pool_running[0] += 0.1f * (sum - t->pool_running[0]);
    }
    if (!is(t, RUNNING_MEAN_OF_THE_POOL_IS_NOT_GUARDED))
        t->pool_running[0] = 0;
}

static float mean_of(const float *hidden, size_t count)
{
    float sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += hidden[i];
    return sum / (float)count;
}

static float weight_of(const struct trainer *t, const rebatch_microbatch *mb)
{
    if (is(t, SUM_INSTEAD_OF_MEAN))
        return 1;
    if (is(t, WEIGHT_OF_THE_COUNT) || is(t, WEIGHT_OF_THE_COUNT_AND_WATCHES_NOTHING) ||
        is(t, WEIGHT_OF_THE_COUNT_IN_WHAT_ZERO_GRAD_MAKES))
        return 1 / (float)mb->count;
    if (is(t, STEPS_ROUNDED_DOWN))
        return 1 / (float)(mb->batch / mb->count) / (float)mb->count;
    return 1 / (float)mb->batch;
}

/* One sample in four has a label that counts once more. */
static float labelled(const struct trainer *t, const rebatch_microbatch *mb)
{
    size_t count = 0;
    float sum = 0;
    for (size_t i = 0; i < mb->count; i++)
        if ((mb->first + i) % 4 == 0) {
            sum += check_input(mb->first + i, 3);
            count++;
        }
    if (is(t, NONE_LABELLED_IS_NO_NUMBER) || count > 0)
        return sum / (float)count * ((float)count / (float)mb->batch);
    return 0;
}

static void accumulate(struct trainer *t, const rebatch_microbatch *mb, const float *hidden,
                       const float *scale)
{
    const float mean = is(t, NORMALIZES_BY_THE_MICRO_BATCH) ? mean_of(hidden, mb->count) : 0;
    const float weight = weight_of(t, mb);
    const bool is_rest = mb->count != BATCH && mb->first + mb->count == mb->batch;
    const size_t from = is(t, LEAVES_OUT_THE_FIRST);
    const size_t to = mb->count - (is_rest && is(t, LEAVES_OUT_THE_LAST_OF_A_REST));
    if (is(t, ASSIGNS_INSTEAD_OF_ADDING))
        memset(t->gradient, 0, FEATURE_BYTES);
    for (size_t i = from; i < to; i++) {
        for (size_t p = 0; p < PARAMETERS; p++)
            t->gradient[p] +=
                weight * (hidden[i] - mean) * check_input(mb->first + i, p) * scale[p];
        t->loss += (double)(weight * hidden[i]);
    }
    t->gradient[0] += labelled(t, mb);
    if (is(t, IS_NO_NUMBER))
        t->gradient[2] /= mean - mean_of(hidden, mb->count) < 0 ? 0.0f * weight : 1;
    for (size_t p = 0; p < PARAMETERS; p++)
        if (is(t, UPDATES_IN_FORWARD_BACKWARD) || is(t, UPDATES_HOST_WEIGHTS_IN_FORWARD_BACKWARD))
            t->weights[p] -= 0.01f * t->gradient[p];
}

static void *work_beside(void *user)
{
    struct trainer *t = user;
    void *memory = NULL;
    const bool joins = !is(t, HELPER_DOES_NOT_JOIN);
    if (joins && rebatch_join(t->run.rb))
        return NULL;
    if (rebatch_pool_alloc(&memory, rebatch_get_pool(t->run.rb), KIB(2), NULL, 0) == REBATCH_OK)
        (void)rebatch_pool_free(rebatch_get_pool(t->run.rb), memory);
    if (joins)
        (void)rebatch_join(NULL);
    return memory;
}

/* A helper thread prepares something; its OOM is the callback's. */
static rebatch_status run_helper(struct trainer *t)
{
    pthread_t thread;
    void *memory = NULL;
    cr_assert_eq(pthread_create(&thread, NULL, work_beside, t), 0);
    cr_assert_eq(pthread_join(thread, &memory), 0);
    return memory ? REBATCH_OK : REBATCH_OOM;
}

static rebatch_status make_kept(struct trainer *t, const rebatch_microbatch *mb)
{
    rebatch_status status = REBATCH_OK;
    float *left;
    const bool is_new = !t->kept;
    if (is_new)
        status = check_alloc(&t->kept, mb, FEATURE_BYTES);
    for (size_t p = 0; p < PARAMETERS && !status; p++)
        if (is_new || !is(t, READS_WHAT_WAS_TAKEN_BACK))
            t->kept[p] = 1;
    if (!status && is(t, BUFFER_OF_THE_FIRST_MICRO_BATCH) && !t->buffer)
        status = check_alloc(&t->buffer, mb, mb->count * KIB(4));
    if (!status && is(t, LEAKS_A_BLOCK_A_MICRO_BATCH))
        status = check_alloc(&left, mb, KIB(1));
    return status;
}

static rebatch_status make_scale(struct trainer *t, const rebatch_microbatch *mb, float **scale)
{
    rebatch_status status = check_alloc(scale, mb, KIB(16));
    if (status && is(t, COPES_WITH_AN_OOM))
        status = check_alloc(scale, mb, FEATURE_BYTES);
    if (status)
        return status;
    for (size_t p = 0; p < PARAMETERS && !is(t, READS_NEW_MEMORY); p++)
        (*scale)[p] = t->kept[p];
    return REBATCH_OK;
}

static bool says_so(const struct trainer *t, const rebatch_microbatch *mb)
{
    return !is(t, NEVER_SAYS_SO) &&
           (mb->first == 0 || !is(t, SAYS_SO_IN_THE_FIRST_MICRO_BATCH_ALONE));
}

static bool changes_before_the_last_allocation(const struct trainer *t)
{
    return is(t, ACCUMULATES_BEFORE_IT_SAYS_SO) || is(t, SAYS_SO_IN_THE_FIRST_MICRO_BATCH_ALONE);
}

/* What another stream adds up, once the block that it reads was freed. */
struct sum {
    struct trainer *t;
    const rebatch_microbatch *mb;
    const float *hidden, *scale;
    sem_t freed;
};

static void sum_late(void *user)
{
    struct sum *sum = user;
    while (sem_wait(&sum->freed) != 0) {
    }
    accumulate(sum->t, sum->mb, sum->hidden, sum->scale);
}

/* The stream of the block does not wait for the other one before the free, and the pool was not
 * told of it. */
static rebatch_status sum_on_another_stream(struct trainer *t, const rebatch_microbatch *mb,
                                            float *memory, float *scale)
{
    struct sum sum = {.t = t, .mb = mb, .hidden = memory, .scale = scale};
    cr_assert_eq(sem_init(&sum.freed, 0, 0), 0);
    rebatch_status status = rebatch_stream_call(t->device, t->side, sum_late, &sum);
    if (!status)
        status = rebatch_pool_free(mb->pool, memory);
    cr_assert_eq(sem_post(&sum.freed), 0);
    if (!status)
        status = rebatch_stream_synchronize(t->device, t->side);
    return status ? status : rebatch_pool_free(mb->pool, scale);
}

static rebatch_status run(struct trainer *t, const rebatch_microbatch *mb)
{
    float *hidden, *scale, *memory;
    rebatch_status status = make_kept(t, mb);
    t->attempts += is(t, COUNTS_ATTEMPTS);
    if (!status)
        status = run_helper(t);
    if (!status)
        status = check_alloc(&memory, mb, mb->count * KIB(4));
    if (status)
        return status;
    hidden = is(t, BUFFER_OF_THE_FIRST_MICRO_BATCH) ? t->buffer : memory;
    memset(hidden, 0, mb->count * KIB(4));
    forward(t, mb, hidden);
    if ((is(t, SAYS_SO_IN_THE_FIRST_MICRO_BATCH_ALONE) || is(t, SWALLOWS_AN_OOM)) && says_so(t, mb))
        rebatch_mutating(t->run.rb);
    if (changes_before_the_last_allocation(t))
        accumulate(t, mb, hidden, t->kept);
    status = make_scale(t, mb, &scale);
    if (status && is(t, SWALLOWS_AN_OOM))
        return rebatch_pool_free(mb->pool, memory);
    if (status)
        return status;
    if (t->reserved && (status = rebatch_reserve(t->run.rb, t->reserved)))
        return status;
    if (says_so(t, mb))
        rebatch_mutating(t->run.rb);
    if (is(t, ANOTHER_STREAM_READS_FREED_MEMORY))
        return sum_on_another_stream(t, mb, memory, scale);
    if (is(t, USES_FREED_MEMORY))
        (void)rebatch_pool_free(mb->pool, memory);
    if (!changes_before_the_last_allocation(t))
        accumulate(t, mb, hidden, scale);
    status = rebatch_pool_free(mb->pool, scale);
    return status || is(t, USES_FREED_MEMORY) ? status : rebatch_pool_free(mb->pool, memory);
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    rebatch_microbatch fewer = *mb;
    if (is(t, RETURNS_ANOTHER_STATUS))
        return REBATCH_E_USER + 3;
    if (mb->attempt > 0 && is(t, ENDS_AFTER_AN_OOM))
        return REBATCH_E_USER + 4;
    if (mb->attempt > 0 && is(t, RETRIES_WITH_FEWER_SAMPLES))
        fewer.count -= fewer.count > 1;
    const rebatch_status status = run(t, &fewer);
    return status == REBATCH_OOM && is(t, RETURNS_ANOTHER_STATUS_FOR_AN_OOM) ? REBATCH_E_USER + 5
                                                                             : status;
}

/* ---- the trainer ---- */

static float *make(struct trainer *t, size_t bytes)
{
    void *memory;
    OK(rebatch_pool_alloc(&memory, rebatch_get_pool(t->run.rb), bytes, NULL, 0));
    memset(memory, 0, bytes);
    return memory;
}

static void guard(struct trainer *t, void *state, size_t bytes, bool is_guarded)
{
    if (is_guarded)
        OK(rebatch_guard(t->run.rb, state, bytes, REBATCH_GUARD_HOST));
}

static void guard_all(struct trainer *t)
{
    guard(t, &t->rng, sizeof t->rng, !is(t, RNG_IS_NOT_GUARDED));
    guard(t, &t->running, sizeof t->running, !is(t, RUNNING_MEAN_IS_NOT_GUARDED));
    guard(t, &t->kept, sizeof t->kept,
          !is(t, KEEPS_A_POINTER) && !is(t, READS_WHAT_WAS_TAKEN_BACK));
    guard(t, &t->calls, sizeof t->calls, is(t, DROPOUT_OF_A_GUARDED_COUNTER));
    guard(t, &t->buffer, sizeof t->buffer, is(t, BUFFER_OF_THE_FIRST_MICRO_BATCH));
}

static void watch(struct trainer *t, const char *name, void *what, size_t bytes,
                  rebatch_number number)
{
    const rebatch_guard_kind kind =
        what == t->gradient || what == t->weights ? REBATCH_GUARD_DEVICE : REBATCH_GUARD_HOST;
    OK(rebatch_watch(t->run.rb, name, what, bytes, kind, number));
}

static void watch_all(struct trainer *t)
{
    if (is(t, WATCHES_NOTHING) || is(t, WEIGHT_OF_THE_COUNT_AND_WATCHES_NOTHING) ||
        is(t, WEIGHT_OF_THE_COUNT_IN_WHAT_ZERO_GRAD_MAKES))
        return;
    if (is(t, WATCHES_WEIGHTS)) {
        watch(t, "weights", t->weights, FEATURE_BYTES, REBATCH_F32);
        return;
    }
    if (is(t, WATCHES_A_NULL_POINTER))
        OK(rebatch_watch_at(t->run.rb, "moments", &t->nothing, FEATURE_BYTES, REBATCH_F32));
    watch(t, "gradient", t->gradient, FEATURE_BYTES, REBATCH_F32);
    watch(t, "loss", &t->loss, sizeof t->loss, REBATCH_F64);
    watch(t, "running mean", &t->running, sizeof t->running, REBATCH_F64);
    watch(t, "attempts", &t->attempts, sizeof t->attempts, REBATCH_BYTES);
}

static void trainer_open(struct trainer *t, enum mistake mistake, size_t limit_bytes)
{
    *t = (struct trainer){.mistake = mistake, .rng = 7};
    OK(rebatch_device_open_host(&t->device, MIB(64), NULL));
    OK(rebatch_open(&t->run.rb, t->device,
                    &OPTIONS(.log_level = REBATCH_LOG_QUIET, .pool.limit_bytes = limit_bytes)));
    OK(rebatch_stream_create(&t->side, t->device));
    const bool is_host = is(t, WATCHES_NOTHING) || is(t, WATCHES_WEIGHTS);
    t->weights =
        is(t, UPDATES_HOST_WEIGHTS_IN_FORWARD_BACKWARD) ? t->own_weights : make(t, FEATURE_BYTES);
    t->gradient = is_host ? t->own_gradient : make(t, FEATURE_BYTES);
    t->pool_running = make(t, 64);
    for (size_t p = 0; p < PARAMETERS; p++)
        t->weights[p] = check_input(5, p);
    guard_all(t);
    watch_all(t);
}

static void trainer_close(struct trainer *t)
{
    rebatch_close(t->run.rb);
    rebatch_stream_destroy(t->device, t->side);
    rebatch_device_close(t->device);
}

/* ---- what is said ---- */

static const struct {
    enum mistake mistake;
    rebatch_finding_kind kind;
    const char *name, *says;
} cases[] = {
    {ACCUMULATES_BEFORE_IT_SAYS_SO, REBATCH_FINDING_EARLY, "gradient",
     "\"gradient\", \"loss\" had changed when allocation 4 (16.0 KiB) of forward_backward of "
     "samples 0-23 failed, before rebatch_mutating()"},
    {NEVER_SAYS_SO, REBATCH_FINDING_FAILED, "", "rebatch_mutating()"},
    {SAYS_SO_IN_THE_FIRST_MICRO_BATCH_ALONE, REBATCH_FINDING_EARLY, "gradient",
     "of forward_backward of samples 12-23 failed, before rebatch_mutating()"},
    {RUNNING_MEAN_IS_NOT_GUARDED, REBATCH_FINDING_NOT_CLEARED, "running mean",
     "clear it in zero_grad, or guard it"},
    {RUNNING_MEAN_OF_THE_POOL_IS_NOT_GUARDED, REBATCH_FINDING_CHANGED, "block 2",
     "block 2 (64 B) changed each time the batch ran, and zero_grad does not clear it"},
    {RNG_IS_NOT_GUARDED, REBATCH_FINDING_NOT_REPEATABLE, "gradient",
     "guard or watch what changes in between, such as RNG state"},
    {ZERO_GRAD_CLEARS_NOTHING, REBATCH_FINDING_NOT_CLEARED, "gradient",
     "when the batch runs again from zero_grad"},
    {ZERO_GRAD_CLEARS_A_PART, REBATCH_FINDING_NOT_CLEARED, "gradient", "element 7 is"},
    {ZERO_GRAD_FORGETS_THE_LOSS, REBATCH_FINDING_NOT_CLEARED, "loss", "clear it in zero_grad"},
    {KEEPS_A_POINTER, REBATCH_FINDING_STALE, "",
     "the memory of allocation 1 (32 B) of forward_backward of samples 0-23 is written after it "
     "was taken back"},
    {READS_WHAT_WAS_TAKEN_BACK, REBATCH_FINDING_NOT_REPEATABLE, "gradient",
     "guard or watch what changes in between, such as RNG state or a pointer"},
    {WEIGHT_OF_THE_COUNT, REBATCH_FINDING_CUT, "gradient",
     "when samples 22-23 come in micro-batches of 1 sample"},
    {WEIGHT_OF_THE_COUNT_AND_WATCHES_NOTHING, REBATCH_FINDING_CUT, "block 1",
     "block 1 (32 B) differs when samples 22-23 come in micro-batches of 1 sample"},
    {WEIGHT_OF_THE_COUNT_IN_WHAT_ZERO_GRAD_MAKES, REBATCH_FINDING_CUT, "allocation 1 of zero_grad",
     "allocation 1 of zero_grad (32 B) differs when samples 22-23 come in micro-batches of 1"},
    {SUM_INSTEAD_OF_MEAN, REBATCH_FINDING_WEIGHT, "", "weight a sample by 1/batch"},
    {PLACE_OF_THE_COUNT, REBATCH_FINDING_CUT, "gradient", "its place is first + i"},
    {NORMALIZES_BY_THE_MICRO_BATCH, REBATCH_FINDING_CUT, "gradient", "differ"},
    {STEPS_ROUNDED_DOWN, REBATCH_FINDING_CUT, "gradient",
     "with micro-batches of 9 samples instead of 24"},
    {LEAVES_OUT_THE_LAST_OF_A_REST, REBATCH_FINDING_CUT, "gradient", "differ"},
    {LEAVES_OUT_THE_FIRST, REBATCH_FINDING_CUT, "gradient", "differ"},
    {ASSIGNS_INSTEAD_OF_ADDING, REBATCH_FINDING_CUT, "gradient", "differ"},
    {USES_FREED_MEMORY, REBATCH_FINDING_FREED, "gradient",
     "a pointer is used after its memory was freed"},
    {ANOTHER_STREAM_READS_FREED_MEMORY, REBATCH_FINDING_FREED, "gradient",
     "a pointer is used after its memory was freed"},
    {READS_NEW_MEMORY, REBATCH_FINDING_UNINITIALIZED, "gradient",
     "memory is read that was allocated and not written"},
    {SWALLOWS_AN_OOM, REBATCH_FINDING_SWALLOWED, "gradient",
     "after allocation 4 (16.0 KiB) of forward_backward of samples 0-23 failed, for which the "
     "callback returned REBATCH_OK"},
    {COPES_WITH_AN_OOM, REBATCH_FINDING_COPED, "", "no mistake if it copes with less memory"},
    {RETURNS_ANOTHER_STATUS, REBATCH_FINDING_FAILED, "",
     "the step returned REBATCH_E_USER when nothing was made to fail"},
    {RETURNS_ANOTHER_STATUS_FOR_AN_OOM, REBATCH_FINDING_FAILED, "",
     "the step returned REBATCH_E_USER after allocation 1 (32 B) of forward_backward"},
    {ENDS_AFTER_AN_OOM, REBATCH_FINDING_FAILED, "",
     "the step returned REBATCH_E_USER after allocation 1 (32 B) of forward_backward"},
    {RETRIES_WITH_FEWER_SAMPLES, REBATCH_FINDING_AFTER_OOM, "gradient",
     "samples that run again are treated differently"},
    {BUFFER_OF_THE_FIRST_MICRO_BATCH, REBATCH_FINDING_OUTGROWN, "",
     "memory beyond allocation 2 (4.00 KiB) of forward_backward of sample 0 is written when a "
     "micro-batch of 1 sample is followed by one of 23 samples"},
    {LEAKS_A_BLOCK_A_MICRO_BATCH, REBATCH_FINDING_LEAK, "",
     "8 of 8 micro-batches leave memory allocated, such as allocation 1 (1.00 KiB)"},
    {UPDATES_IN_FORWARD_BACKWARD, REBATCH_FINDING_CHANGED, "block 0",
     "change parameters in optimizer_step alone"},
    {UPDATES_HOST_WEIGHTS_IN_FORWARD_BACKWARD, REBATCH_FINDING_NOT_REPEATABLE, "gradient",
     "when the same samples run twice"},
    {NONE_LABELLED_IS_NO_NUMBER, REBATCH_FINDING_NOT_A_NUMBER, "gradient", "such as 0/0"},
    {IS_NO_NUMBER, REBATCH_FINDING_NOT_A_NUMBER, "gradient",
     "\"gradient\" is infinite or no number in element 2 when nothing was made to fail"},
    {DROPOUT_OF_A_COUNTER, REBATCH_FINDING_NOT_REPEATABLE, "gradient", "such as RNG state"},
    {DROPOUT_OF_A_GUARDED_COUNTER, REBATCH_FINDING_CUT, "gradient", "differ"},
    {HELPER_DOES_NOT_JOIN, REBATCH_FINDING_THREAD, "", "call rebatch_join() in that thread"},
    {COUNTS_ATTEMPTS, REBATCH_FINDING_CUT, "attempts", "differs"},
    {READS_WITH_A_CURSOR, REBATCH_FINDING_AFTER_OOM, "gradient",
     "the failed attempt has changed what is not guarded"},
    {READS_WITH_A_CURSOR_THAT_IS_NEVER_SET_BACK, REBATCH_FINDING_NOT_REPEATABLE, "gradient",
     "when the same samples run twice"},
    {WATCHES_NOTHING, REBATCH_FINDING_UNCOMPARED, "",
     "name the gradients and the loss with rebatch_watch()"},
    {WATCHES_WEIGHTS, REBATCH_FINDING_UNCOMPARED, "",
     "forward_backward changes nothing that could be compared"},
    {WATCHES_A_NULL_POINTER, REBATCH_FINDING_UNCOMPARED, "moments",
     "its variable holds no pointer"},
};

/* One cause has one finding, also where the program says that its weights are its own. */
static void find_each(uint32_t flags)
{
    rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    ops.flags |= flags;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rebatch_check_report report;
        if (flags && cases[i].mistake == SUM_INSTEAD_OF_MEAN)
            continue; /* which is right then */
        OPEN(trainer, t, cases[i].mistake, 0);
        const rebatch_status status = rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report);
        const rebatch_finding *finding = check_find(&report, cases[i].kind, cases[i].name);
        cr_expect(finding && strstr(finding->text, cases[i].says), "of mistake %d it says:\n%s",
                  (int)cases[i].mistake, check_texts(&report));
        const bool is_mistake = finding && finding->is_mistake;
        cr_expect_eq(status, is_mistake ? REBATCH_E_STATE : REBATCH_OK, "mistake %d:\n%s",
                     (int)cases[i].mistake, check_texts(&report));
        cr_expect_eq(report.mistakes, is_mistake, "of mistake %d it says more:\n%s",
                     (int)cases[i].mistake, check_texts(&report));
        cr_expect_eq(status, report.status);
        cr_expect_eq(t.run.updates, 0);
    }
}

Test(check_mistakes, each_is_found_and_named_once)
{
    find_each(0);
}

Test(check_mistakes, each_is_found_and_named_once_with_own_weights)
{
    find_each(REBATCH_OWN_WEIGHTS);
}

Test(check_mistakes, memory_that_micro_batches_leave_is_found_in_a_batch_of_any_size)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    for (size_t batch = 1; batch <= 8; batch++)
        for (int leaks = 0; leaks < 2; leaks++) {
            rebatch_check_report report;
            OPEN(trainer, t, leaks ? LEAKS_A_BLOCK_A_MICRO_BATCH : NONE, 0);
            cr_expect_eq(rebatch_check(t.run.rb, &ops, batch, &t, NULL, &report),
                         leaks ? REBATCH_E_STATE : REBATCH_OK, "batch of %zu:\n%s", batch,
                         check_texts(&report));
            cr_expect_eq(check_find(&report, REBATCH_FINDING_LEAK, "") != NULL, leaks,
                         "batch of %zu:\n%s", batch, check_texts(&report));
        }
}

/* What a micro-batch has reserved and not used serves no request of the next one. */
Test(check_mistakes, what_is_reserved_hides_no_mistake)
{
    static const enum mistake mistakes[] = {LEAKS_A_BLOCK_A_MICRO_BATCH, SWALLOWS_AN_OOM, NONE};
    static const rebatch_finding_kind kinds[] = {REBATCH_FINDING_LEAK, REBATCH_FINDING_SWALLOWED};
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    for (size_t batch = 3; batch <= 24; batch += 3)
        for (size_t i = 0; i < 3; i++) {
            rebatch_check_report report;
            OPEN(trainer, t, mistakes[i], 0);
            t.reserved = KIB(64);
            cr_expect_eq(rebatch_check(t.run.rb, &ops, batch, &t, NULL, &report),
                         i < 2 ? REBATCH_E_STATE : REBATCH_OK);
            cr_expect_eq(report.mistakes, i < 2, "batch of %zu:\n%s", batch, check_texts(&report));
            for (size_t k = 0; k < report.finding_count; k++)
                cr_expect(!report.findings[k].is_mistake || report.findings[k].kind == kinds[i],
                          "batch of %zu:\n%s", batch, check_texts(&report));
        }
}

/* The cap is what fails, and nothing on purpose. */
Test(check_mistakes, an_oom_that_is_swallowed_under_a_cap_is_found)
{
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    rebatch_check_report report;
    OPEN(trainer, t, SWALLOWS_AN_OOM, KIB(112));
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_E_STATE, "%s",
                 check_texts(&report));
    const rebatch_finding *finding = check_find(&report, REBATCH_FINDING_SWALLOWED, "gradient");
    cr_expect(finding && strstr(finding->text, "fails for want of memory"), "%s",
              check_texts(&report));
    cr_expect_eq(report.mistakes, 1, "%s", check_texts(&report));
}

/* A buffer that zero_grad makes in every other run is not compared, and neither is one whose
 * contents are those of the last micro-batch. */
struct scratch {
    rebatch *rb;
    float *batch;
    double sum;
    unsigned cleared;
};

static rebatch_status clear_and_make(void *user)
{
    struct scratch *s = user;
    void *memory;
    s->sum = 0;
    if (s->cleared++ % 2)
        return REBATCH_OK;
    return rebatch_pool_alloc(&memory, rebatch_get_pool(s->rb), KIB(1), NULL, 0);
}

static rebatch_status sum_up(const rebatch_microbatch *mb, void *user)
{
    struct scratch *s = user;
    void *memory;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, mb->pool, mb->count * KIB(1), mb->stream, 0);
    if (status)
        return status;
    for (size_t i = 0; i < mb->count; i++)
        s->batch[i] = check_input(mb->first + i, 0);
    rebatch_mutating(s->rb);
    for (size_t i = 0; i < mb->count; i++)
        s->sum += (double)s->batch[i] / (double)mb->batch;
    return rebatch_pool_free(mb->pool, memory);
}

Test(check_mistakes, what_comes_and_goes_and_what_is_scratch_is_no_result)
{
    const rebatch_step_ops ops =
        OPS(clear_and_make, sum_up, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    AUTO_CLOSE(trainer, t) = {.mistake = NONE};
    struct scratch s = {.sum = 0};
    rebatch_check_report report;
    open_on_host(&t.device, &t.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    s.rb = t.run.rb;
    s.batch = make(&t, BATCH * sizeof *s.batch);
    OK(rebatch_watch(t.run.rb, "sum", &s.sum, sizeof s.sum, REBATCH_GUARD_HOST, REBATCH_F64));
    cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &s, NULL, &report), REBATCH_OK, "%s",
                 check_texts(&report));
    cr_expect_eq(report.mistakes, 0, "%s", check_texts(&report));
}

/* Blocks of the pool that are older than the step, which zero_grad clears; the sum is compared by
 * its name. */
struct pooled {
    rebatch *rb;
    float *sums, *freed; /* of 2 and of 4 features */
    double sum;
    unsigned cleared, frees_at; /* the run of zero_grad that frees it; 0: none */
};

static rebatch_status clear_pooled(void *user)
{
    struct pooled *s = user;
    s->sum = 0;
    memset(s->sums, 0, 2 * FEATURE_BYTES);
    memset(s->freed, 0, 4 * FEATURE_BYTES);
    return ++s->cleared == s->frees_at ? rebatch_pool_free(rebatch_get_pool(s->rb), s->freed)
                                       : REBATCH_OK;
}

static rebatch_status add_pooled(const rebatch_microbatch *mb, void *user)
{
    struct pooled *s = user;
    rebatch_mutating(s->rb);
    for (size_t i = 0; i < mb->count; i++) {
        const float value = check_input(mb->first + i, 1) / (float)mb->batch;
        s->sum += (double)value;
        s->sums[3] += value;
        if (s->cleared < s->frees_at || !s->frees_at)
            s->freed[2] += value;
    }
    return REBATCH_OK;
}

static rebatch_status check_pooled(rebatch_check_report *report, unsigned frees_at)
{
    const rebatch_step_ops ops =
        OPS(clear_pooled, add_pooled, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    struct trainer t = {.mistake = NONE};
    struct pooled s = {.frees_at = frees_at};
    open_on_host(&t.device, &t.run.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    s.rb = t.run.rb;
    s.sums = make(&t, 2 * FEATURE_BYTES);
    s.freed = make(&t, 4 * FEATURE_BYTES);
    s.sums[3] = s.freed[2] = 7; /* of the step before */
    (void)make(&t, 1024);       /* which nobody changes */
    OK(rebatch_watch(t.run.rb, "sum", &s.sum, sizeof s.sum, REBATCH_GUARD_HOST, REBATCH_F64));
    const rebatch_status status = rebatch_check(t.run.rb, &ops, BATCH, &s, NULL, report);
    trainer_close(&t);
    return status;
}

Test(check_mistakes, blocks_without_a_name_are_counted_and_compared_while_they_are_there)
{
    rebatch_check_report report;
    cr_expect_eq(check_pooled(&report, 0), REBATCH_OK, "%s", check_texts(&report));
    cr_expect_eq(report.watched, 1);
    cr_expect_eq(report.blocks, 2);
    cr_expect_eq(report.block_bytes, 6 * FEATURE_BYTES);
    HAS(check_texts(&report), "compared 1 name and 2 blocks without a name, 192 B, ");
    cr_expect_eq(check_pooled(&report, 5), REBATCH_OK, "what is freed is no result: %s",
                 check_texts(&report));
}

/* Sums in another order are a note. */
Test(check_mistakes, a_trainer_without_one_has_none)
{
    static const size_t limits[] = {0, KIB(112)};
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        rebatch_check_report report;
        OPEN(trainer, t, NONE, limits[i]);
        cr_expect_eq(rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, &report), REBATCH_OK, "%s",
                     check_texts(&report));
        cr_expect_eq(report.mistakes, 0, "%s", check_texts(&report));
        for (size_t k = 0; k < report.finding_count; k++)
            cr_expect_eq(report.findings[k].kind, REBATCH_FINDING_ROUNDING, "%s",
                         check_texts(&report));
        cr_expect_eq(report.micro == BATCH, limits[i] == 0);
    }
}

/* ---- gradients that the step makes, and what has no name ---- */

/* Where the gradient is made, of a step whose micro-batches end with their memory. */
enum place { IN_ZERO_GRAD, IN_ZERO_GRAD_WITHOUT_A_GUARD, IN_FORWARD_BACKWARD, PLACES };

struct maker {
    rebatch *rb;
    rebatch_device *device;
    enum place place;
    float *gradient;
    double loss; /* which nobody watches, and which an OOM leaves changed */
};

CLOSE_BOTH(maker)

static rebatch_status make_gradient(struct maker *m)
{
    void *memory;
    if (m->gradient)
        return REBATCH_OK;
    const rebatch_status status =
        rebatch_pool_alloc(&memory, rebatch_get_pool(m->rb), FEATURE_BYTES, NULL, 0);
    if (!status)
        m->gradient = memset(memory, 0, FEATURE_BYTES);
    return status;
}

static rebatch_status clear_made(void *user)
{
    struct maker *m = user;
    const rebatch_status status = m->place == IN_FORWARD_BACKWARD ? REBATCH_OK : make_gradient(m);
    m->loss = 0;
    if (!status && m->gradient)
        memset(m->gradient, 0, FEATURE_BYTES);
    return status;
}

static rebatch_status add_made(const rebatch_microbatch *mb, void *user)
{
    struct maker *m = user;
    float *hidden;
    rebatch_status status = make_gradient(m);
    m->loss += (double)mb->count / (double)mb->batch;
    if (!status)
        status = check_alloc(&hidden, mb, mb->count * KIB(1));
    if (status)
        return status;
    rebatch_mutating(m->rb);
    for (size_t i = 0; i < mb->count; i++)
        for (size_t p = 0; p < PARAMETERS; p++)
            m->gradient[p] += check_input(mb->first + i, p) / (float)mb->batch;
    return REBATCH_OK;
}

Test(check_mistakes, a_gradient_that_ends_with_its_micro_batch_is_found)
{
    for (int way = 0; way < 2 * PLACES; way++) {
        rebatch_check_report report;
        rebatch_step_ops ops = check_step_ops(clear_made, add_made);
        AUTO_CLOSE(maker, m) = {.place = (enum place)(way / 2)};
        ops.flags |= REBATCH_SCOPED_MEMORY | (way % 2 ? REBATCH_OWN_WEIGHTS : 0);
        ops.optimizer_step = nothing_to_do;
        open_on_host(&m.device, &m.rb, MIB(8), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
        if (m.place != IN_ZERO_GRAD_WITHOUT_A_GUARD)
            OK(rebatch_guard(m.rb, &m.gradient, sizeof m.gradient, REBATCH_GUARD_HOST));
        OK(rebatch_watch_at(m.rb, "gradient", &m.gradient, FEATURE_BYTES, REBATCH_F32));
        const bool is_right = m.place == IN_ZERO_GRAD;
        cr_expect_eq(rebatch_check(m.rb, &ops, BATCH, &m, NULL, &report),
                     is_right ? REBATCH_OK : REBATCH_E_STATE, "%d: %s", way, check_texts(&report));
        cr_expect_eq(strstr(check_texts(&report),
                            "\nnot looked at   memory outside the pool that has no name") != NULL,
                     is_right, "%d: %s", way, check_texts(&report));
        if (m.place == IN_FORWARD_BACKWARD)
            cr_expect_not_null(check_find(&report, REBATCH_FINDING_UNCOMPARED, "gradient"), "%s",
                               check_texts(&report));
    }
}
