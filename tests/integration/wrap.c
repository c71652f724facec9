/* Owns the tests of rebatch/wrap.h and rebatch/current.h, over a stand-in for CUDA's runtime and a
 * host device, whose streams lag as the tests want. Must not know more of the library than its
 * public headers say. */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rebatch/wrap.h"
#include "rig.h"
#include "wrap_trainer.h"

#define ROOM_BYTES (MIB(64))

/* ---- the stand-in ---- */

static struct {
    unsigned mallocs, frees; /* calls of CUDA's own, the Async ones included */
    int gpu;                 /* the current one; -1: the host device, which is no GPU */
} runtime = {.gpu = -1};

cudaError_t cudaGetDevice(int *device)
{
    *device = runtime.gpu;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer)
{
    (void)pointer;
    *out = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered};
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

/* In parentheses these are no macros. */
cudaError_t(cudaMalloc)(void **out, size_t bytes)
{
    runtime.mallocs++;
    *out = malloc(bytes);
    return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t(cudaFree)(void *pointer)
{
    runtime.frees++;
    free(pointer);
    return cudaSuccess;
}

cudaError_t(cudaMallocAsync)(void **out, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    return (cudaMalloc)(out, bytes);
}

cudaError_t(cudaFreeAsync)(void *pointer, cudaStream_t stream)
{
    (void)stream;
    return (cudaFree)(pointer);
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream)
{
    (void)pool;
    return (cudaMallocAsync)(out, bytes, stream);
}

/* ---- the rig ---- */

struct rig {
    rebatch_device *device;
    rebatch_stream own, other; /* the session's, and one that it does not know */
    rebatch *rb;
};

static struct rig rig_open(void)
{
    struct rig rig;
    OK(rebatch_device_open_host(&rig.device, ROOM_BYTES, NULL));
    OK(rebatch_stream_create(&rig.own, rig.device));
    OK(rebatch_stream_create(&rig.other, rig.device));
    OK(rebatch_open(&rig.rb, rig.device, &OPTIONS(.stream = rig.own)));
    OK(rebatch_set_current(rig.rb));
    return rig;
}

static void rig_close(struct rig *rig)
{
    rebatch_close(rig->rb);
    cr_assert_null(rebatch_get_current(), "a session that is gone is still the process's");
    rebatch_stream_destroy(rig->device, rig->own);
    rebatch_stream_destroy(rig->device, rig->other);
    rebatch_device_close(rig->device);
}

/* Work on a stream that does not end before somebody opens its gate. */
struct work {
    sem_t gate;
    atomic_int done;
    pthread_t opener;
};

static void run_work(void *user)
{
    struct work *work = user;
    (void)sem_wait(&work->gate);
    atomic_store(&work->done, 1);
}

static void enqueue_work(struct work *work, const struct rig *rig, rebatch_stream stream)
{
    cr_assert_eq(sem_init(&work->gate, 0, 0), 0);
    atomic_store(&work->done, 0);
    OK(rebatch_stream_call(rig->device, stream, run_work, work));
}

static void *open_later(void *user)
{
    const struct timespec some_time = {.tv_nsec = 5000000};
    (void)nanosleep(&some_time, NULL);
    (void)sem_post(&((struct work *)user)->gate);
    return NULL;
}

/* The gate opens while this thread waits, or does not. */
static void end_work_later(struct work *work)
{
    cr_assert_eq(pthread_create(&work->opener, NULL, open_later, work), 0);
}

static void check_waited(struct work *work)
{
    cr_assert(atomic_load(&work->done), "the work was not waited for");
    cr_assert_eq(pthread_join(work->opener, NULL), 0);
}

static cudaStream_t as_cuda(rebatch_stream stream)
{
    return (cudaStream_t)(void *)stream;
}

/* ---- where memory comes from ---- */

Test(wrap, allocations_are_the_pools)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    void *a, *b;
    cr_assert_eq(cudaMalloc(&a, MIB(1)), cudaSuccess);
    cr_assert_eq(cudaMallocAsync(&b, MIB(2), as_cuda(rig.other)), cudaSuccess);
    cr_assert_eq(live_bytes_of(rig.rb), MIB(3));
    cr_assert_eq(cudaFree(a), cudaSuccess);
    cr_assert_eq(cudaFreeAsync(b, as_cuda(rig.other)), cudaSuccess);
    cr_assert_eq(cudaFree(NULL), cudaSuccess);
    cr_assert_eq(cudaFreeAsync(NULL, NULL), cudaSuccess);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
    cr_assert_eq(runtime.mallocs + runtime.frees, 0);
}

Test(wrap, without_a_session_they_are_cudas_own)
{
    struct rig rig;
    void *a, *b;
    cr_assert_eq((cudaMalloc)(&a, 100), cudaSuccess);
    cr_assert_eq((cudaMallocAsync)(&b, 100, NULL), cudaSuccess);
    rig = rig_open();
    cr_assert_eq(cudaFree(a), cudaSuccess); /* what came before is freed there, too */
    cr_assert_eq(cudaFreeAsync(b, NULL), cudaSuccess);
    cr_assert_eq(runtime.mallocs, 2);
    cr_assert_eq(runtime.frees, 2);
    rig_close(&rig);
    cr_assert_eq(cudaMalloc(&a, 100), cudaSuccess);
    cr_assert_eq(cudaFree(a), cudaSuccess);
    cr_assert_eq(runtime.mallocs, 3);
    cr_assert_eq(runtime.frees, 3);
}

Test(wrap, with_another_gpu_current_they_are_cudas_own)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    void *ours, *a, *b;
    cr_assert_eq(cudaMalloc(&ours, MIB(1)), cudaSuccess);
    runtime.gpu = 1;
    cr_assert_eq(cudaMalloc(&a, 100), cudaSuccess);
    cr_assert_eq(cudaMallocAsync(&b, 100, NULL), cudaSuccess);
    cr_assert_eq(runtime.mallocs, 2);
    cr_assert_eq(cudaFree(ours), cudaSuccess); /* whichever is current, as CUDA has it */
    cr_assert_eq(live_bytes_of(rig.rb), 0);
    cr_assert_eq(cudaFree(a), cudaSuccess);
    cr_assert_eq(cudaFreeAsync(b, NULL), cudaSuccess);
    cr_assert_eq(runtime.frees, 2);
}

Test(wrap, in_parentheses_they_are_cudas_own)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    void *a;
    cr_assert_eq((cudaMalloc)(&a, 100), cudaSuccess);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
    cr_assert_eq((cudaFree)(a), cudaSuccess);
    cr_assert_eq(runtime.mallocs, 1);
    cr_assert_eq(runtime.frees, 1);
}

Test(wrap, what_does_not_fit_is_cudas_code_and_rebatchs_sentence)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    void *a = &rig, *b = &rig;
    cr_assert_eq(cudaMalloc(&a, 2 * ROOM_BYTES), cudaErrorMemoryAllocation);
    cr_assert_null(a);
    cr_assert_str_neq(rebatch_last_error(), "");
    cr_assert_eq(cudaMallocAsync(&b, 2 * ROOM_BYTES, NULL), cudaErrorMemoryAllocation);
    cr_assert_null(b);
    cr_assert_eq(cudaMalloc(&a, 0), cudaSuccess);
    cr_assert_null(a);
}

Test(wrap, a_code_means_the_status_that_it_came_from)
{
    static const rebatch_status same[] = {
        REBATCH_OK,       REBATCH_OOM,           REBATCH_E_INVALID,    REBATCH_E_NO_DEVICE,
        REBATCH_E_DEVICE, REBATCH_E_DEVICE_LOST, REBATCH_E_UNSUPPORTED};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        cr_assert_eq(rebatch_from_cuda(NULL, (int)rebatch_wrap_code(same[i])), same[i]);
    cr_assert_eq(rebatch_wrap_code(REBATCH_E_EXHAUSTED), cudaErrorMemoryAllocation);
    cr_assert_eq(rebatch_wrap_code(REBATCH_E_TORN), cudaErrorMemoryAllocation);
    cr_assert_eq(rebatch_wrap_code(REBATCH_E_HOST_OOM), cudaErrorUnknown); /* it is no OOM */
}

/* ---- who waits for whom ---- */

Test(wrap, a_free_waits_for_every_stream)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    for (int i = 0; i < 3; i++) {
        struct work work;
        void *a;
        cr_assert_eq(cudaMalloc(&a, MIB(1)), cudaSuccess);
        enqueue_work(&work, &rig, i == 0 ? rig.own : rig.other);
        end_work_later(&work);
        cr_assert_eq(i < 2 ? cudaFree(a) : cudaFreeAsync(a, cudaStreamPerThread), cudaSuccess);
        check_waited(&work);
    }
    cr_assert_eq(live_bytes_of(rig.rb), 0);
}

Test(wrap, a_free_on_a_stream_does_not_wait_and_what_comes_from_it_does)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct work work;
    void *a, *b, *c;
    cr_assert_eq(cudaMallocAsync(&a, MIB(1), as_cuda(rig.own)), cudaSuccess);
    enqueue_work(&work, &rig, rig.own);
    cr_assert_eq(cudaFreeAsync(a, as_cuda(rig.own)), cudaSuccess);
    cr_assert_not(atomic_load(&work.done)); /* its gate is closed */
    cr_assert_eq(cudaMallocAsync(&b, MIB(1), as_cuda(rig.own)), cudaSuccess);
    cr_assert_eq(b, a, "the stream itself may have it at once");
    cr_assert_eq(cudaFreeAsync(b, as_cuda(rig.own)), cudaSuccess);
    end_work_later(&work);
    cr_assert_eq(cudaMalloc(&c, MIB(1)), cudaSuccess);
    cr_assert_eq(c, a);
    check_waited(&work); /* any stream may use `c` now */
    cr_assert_eq(cudaFree(c), cudaSuccess);
}

Test(wrap, a_block_that_is_freed_on_another_stream_waits_for_that)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct work work;
    void *a, *b;
    cr_assert_eq(cudaMalloc(&a, ROOM_BYTES), cudaSuccess); /* all that there is */
    enqueue_work(&work, &rig, rig.other);
    cr_assert_eq(cudaFreeAsync(a, as_cuda(rig.other)), cudaSuccess);
    end_work_later(&work);
    cr_assert_eq(cudaMalloc(&b, ROOM_BYTES), cudaSuccess);
    check_waited(&work);
    cr_assert_eq(cudaFree(b), cudaSuccess);
}

/* ---- steps ---- */

static void check(cudaError_t code)
{
    if (code == cudaSuccess)
        return;
    rebatch_escape_on_oom((int)code);
    cr_assert_fail("check() ends the program: code %d", (int)code);
}

struct lagging {
    const struct rig *rig;
    struct work work;
    void *kept; /* from the first attempt, which is taken back */
    unsigned attempts;
};

static rebatch_status lag_and_fail_once(const rebatch_microbatch *mb, void *user)
{
    struct lagging *lagging = user;
    (void)mb;
    if (lagging->attempts++ == 0) {
        void *more;
        check(cudaMalloc(&lagging->kept, MIB(1)));
        enqueue_work(&lagging->work, lagging->rig, lagging->rig->other);
        end_work_later(&lagging->work);
        check(cudaMalloc(&more, 2 * ROOM_BYTES));
    }
    if (lagging->attempts == 2) {
        check_waited(&lagging->work);
        check(cudaFree(lagging->kept)); /* late, and no error */
    }
    rebatch_wrap_mutating();
    return REBATCH_OK;
}

Test(wrap, an_attempt_is_taken_back_when_no_stream_is_at_work)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct lagging lagging = {.rig = &rig};
    const rebatch_step_ops ops =
        OPS(nothing_to_do, lag_and_fail_once, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    rebatch_step_report report;
    OK(rebatch_step(rig.rb, &ops, 2, &lagging, &report));
    cr_assert_eq(report.ooms, 1);
    cr_assert_eq(lagging.attempts, 3);
    cr_assert_eq(runtime.frees, 0);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
}

static rebatch_status lag_and_give_up(const rebatch_microbatch *mb, void *user)
{
    struct lagging *lagging = user;
    (void)mb;
    check(cudaMalloc(&lagging->kept, MIB(1)));
    enqueue_work(&lagging->work, lagging->rig, lagging->rig->other);
    end_work_later(&lagging->work);
    return REBATCH_E_USER;
}

Test(wrap, so_is_one_that_fails_for_another_reason)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct lagging lagging = {.rig = &rig};
    const rebatch_step_ops ops =
        OPS(nothing_to_do, lag_and_give_up, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    cr_assert_eq(rebatch_step(rig.rb, &ops, 1, &lagging, NULL), REBATCH_E_USER);
    check_waited(&lagging.work);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
}

static void *allocate_there(void *user)
{
    void **const batch = user;
    return cudaMalloc(batch, MIB(3)) == cudaSuccess ? user : NULL;
}

/* The first attempt runs out of memory, after another thread has prepared a batch beside it. */
static rebatch_status prepare_and_fail_once(const rebatch_microbatch *mb, void *user)
{
    pthread_t thread;
    void *prepared = NULL, *own;
    check(cudaMalloc(&own, MIB(1)));
    if (mb->attempt == 0) {
        cr_assert_eq(pthread_create(&thread, NULL, allocate_there, user), 0);
        cr_assert_eq(pthread_join(thread, &prepared), 0);
        cr_assert_not_null(prepared);
        memset(*(void **)user, 0x5a, MIB(3));
        check(cudaMalloc(&own, ROOM_BYTES));
    }
    rebatch_wrap_mutating();
    check(cudaFree(own));
    return REBATCH_OK;
}

Test(wrap, what_other_threads_allocate_beside_a_step_stays)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    unsigned char *batch = NULL;
    const rebatch_step_ops ops = OPS(nothing_to_do, prepare_and_fail_once, nothing_to_do,
                                     .flags = REBATCH_DECLARES_MUTATION);
    rebatch_step_report report;
    OK(rebatch_step(rig.rb, &ops, 2, &batch, &report));
    cr_assert_eq(report.ooms, 1);
    cr_assert_eq(live_bytes_of(rig.rb), MIB(3));
    cr_assert_eq(batch[0], 0x5a);
    cr_assert_eq(batch[MIB(3) - 1], 0x5a);
    cr_assert_eq(cudaFree(batch), cudaSuccess);
}

static void *escape_there(void *user)
{
    rebatch_escape_on_oom(cudaErrorMemoryAllocation);
    return user;
}

static rebatch_status escape_for_nothing(const rebatch_microbatch *mb, void *user)
{
    unsigned *came_back = user;
    pthread_t thread;
    void *answer = NULL;
    (void)mb;
    rebatch_escape_on_oom(cudaSuccess);
    rebatch_escape_on_oom(cudaErrorInvalidValue); /* the check's to answer */
    cr_assert_eq(pthread_create(&thread, NULL, escape_there, user), 0);
    cr_assert_eq(pthread_join(thread, &answer), 0);
    cr_assert_eq(answer, user);
    ++*came_back;
    rebatch_wrap_mutating();
    return REBATCH_OK;
}

Test(wrap, what_is_no_oom_of_a_step_comes_back)
{
    rebatch_escape_on_oom(cudaErrorMemoryAllocation); /* no session */
    AUTO_CLOSE(rig, rig) = rig_open();
    rebatch_clear_error();
    rebatch_escape_on_oom(cudaErrorMemoryAllocation); /* no step */
    cr_assert_str_eq(rebatch_last_error(), "", "what was said before is still there");
    unsigned came_back = 0;
    const rebatch_step_ops ops =
        OPS(nothing_to_do, escape_for_nothing, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    OK(rebatch_step(rig.rb, &ops, 1, &came_back, NULL));
    cr_assert_eq(came_back, 1);
}

static rebatch_status close_within(const rebatch_microbatch *mb, void *user)
{
    (void)mb;
    (void)user;
    rebatch_wrap_close();
    rebatch_wrap_mutating();
    return REBATCH_OK;
}

Test(wrap, close_within_a_step_is_refused)
{
    const rebatch_step_ops ops =
        OPS(nothing_to_do, close_within, nothing_to_do, .flags = REBATCH_DECLARES_MUTATION);
    AUTO_CLOSE(rig, rig) = rig_open();
    OK(rebatch_step(rig.rb, &ops, 2, NULL, NULL));
    cr_assert_eq(rebatch_get_current(), rig.rb);
}

Test(wrap, a_process_has_one_session)
{
    rebatch *second;
    AUTO_CLOSE(rig, rig) = rig_open();
    OK(rebatch_set_current(rig.rb)); /* it is that already */
    OK(rebatch_open(&second, rig.device, NULL));
    cr_assert_eq(rebatch_set_current(second), REBATCH_E_STATE);
    cr_assert_eq(rebatch_get_current(), rig.rb);
    rebatch_close(second);
    cr_assert_eq(rebatch_get_current(), rig.rb, "another session's end ended it");
}

Test(wrap, what_cannot_be_opened_leaves_nothing_open)
{
    cr_assert_eq(rebatch_wrap_open(NULL), cudaErrorNoDevice); /* no GPU has the ordinal -1 */
    cr_assert_null(rebatch_get_current());
    cr_assert_eq(rebatch_wrap_open("batch.smalest = 4"), cudaErrorUnknown);
    SAYS("batch.smallest");
    cr_assert_null(rebatch_get_current());
    rebatch_wrap_close();
}

/* An allocation that would open the session is not CUDA's own where that fails. */
Test(wrap, an_allocation_opens_the_session_or_fails)
{
    void *a = &runtime, *b = &runtime;
    cr_assert_eq(cudaMalloc(&a, 100), cudaErrorNoDevice);
    cr_assert_eq(cudaMallocAsync(&b, 100, NULL), cudaErrorNoDevice);
    cr_assert_eq(runtime.mallocs, 0);
    cr_assert_null(rebatch_get_current());
    cr_assert_eq(cudaFree(NULL), cudaSuccess); /* opens none */
    cr_assert_eq(runtime.frees, 1);
}

Test(wrap, wrong_arguments_are_refused)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    void *a = &rig;
    cr_assert_eq(rebatch_alloc(&a, NULL, 1), REBATCH_E_INVALID);
    cr_assert_null(a);
    cr_assert_eq(rebatch_alloc(NULL, rig.rb, 1), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_free(NULL, a), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_free(rig.rb, &rig), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_free_on(NULL, a, NULL), REBATCH_E_INVALID);
    cr_assert_eq(rebatch_free_on(rig.rb, &rig, NULL), REBATCH_E_INVALID);
    OK(rebatch_alloc(&a, rig.rb, 1));
    cr_assert_eq(rebatch_free_on(rig.rb, a, (rebatch_stream)(void *)&rig), REBATCH_E_INVALID);
    OK(rebatch_free(rig.rb, a));
}

/* ---- a step that is three functions ---- */

#define BATCH 100
#define SUM (BATCH * (BATCH - 1) / 2.0)

typedef cudaError_t step_function(struct wrap_trainer *, size_t, uint32_t, rebatch_step_report *);

static step_function *const ways[] = {wrap_trainer_step, wrap_trainer_step_by_lambdas};

Test(wrap, a_step_of_functions_recovers_and_counts_every_sample_once)
{
    for (size_t way = 0; way < 2; way++) {
        AUTO_CLOSE(rig, rig) = rig_open();
        struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
        rebatch_step_report report;
        cr_assert_eq(ways[way](&trainer, BATCH, REBATCH_DECLARES_MUTATION, &report), cudaSuccess);
        cr_assert_eq(report.ooms, 1);
        cr_assert_eq(report.microbatches, 2);
        cr_assert_eq(trainer.parameter, SUM);
        cr_assert_eq(trainer.zeros, 1);
        cr_assert_eq(trainer.trains, 3);
        cr_assert_eq(live_bytes_of(rig.rb), 0);
    }
}

/* Asked for in the environment by whoever starts the program. */
Test(wrap, a_failure_on_purpose_is_survived)
{
    for (size_t way = 0; way < 2; way++) {
        setenv("REBATCH_RUN_OOM", "1", 1);
        AUTO_CLOSE(rig, rig) = rig_open();
        struct wrap_trainer trainer = {.sample_bytes = 1};
        rebatch_step_report report;
        cr_assert_eq(ways[way](&trainer, BATCH, REBATCH_DECLARES_MUTATION, &report), cudaSuccess);
        cr_assert_eq(report.ooms, 1);
        cr_assert_eq(report.microbatches, 2);
        cr_assert_eq(trainer.parameter, SUM);
    }
}

Test(wrap, functions_that_do_not_declare_are_taken_to_change_things_at_once)
{
    for (size_t way = 0; way < 2; way++) {
        AUTO_CLOSE(rig, rig) = rig_open();
        struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
        for (int step = 0; step < 2; step++) { /* what they did before changes nothing */
            trainer = (struct wrap_trainer){.sample_bytes = step == 0 ? MIB(1) : MIB(2)};
            cr_assert_eq(ways[way](&trainer, BATCH, 0, NULL), cudaSuccess);
            cr_assert_eq(trainer.zeros, 2, "the batch did not begin again");
            cr_assert_eq(trainer.parameter, SUM);
        }
    }
}

/* The OOM comes when samples are in the sum, which the program alone clears, before the step. */
Test(wrap, a_guarded_sum_that_the_program_clears_needs_no_zero_grad)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
    rebatch_step_report report;
    cr_assert_eq(wrap_trainer_guard_sums(&trainer), cudaSuccess);
    for (int step = 1; step <= 3; step++) {
        cr_assert_eq(wrap_trainer_step_of_sums(&trainer, BATCH, 0, &report), cudaSuccess);
        cr_assert_eq(report.ooms, step == 1);
        cr_assert_eq(trainer.sum, SUM);
        cr_assert_eq(trainer.parameter, step * SUM);
    }
}

/* As a loader gives them: 30, 30, 30, 10. */
Test(wrap, no_call_of_train_goes_beyond_a_multiple_of_largest)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
    rebatch_step_report report;
    cr_assert_eq(wrap_trainer_step_of_sums(&trainer, BATCH, 30, &report), cudaSuccess);
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(report.microbatches, 4);
    cr_assert_eq(trainer.longest, 30);
    cr_assert_eq(trainer.parameter, SUM);
}

Test(wrap, events_are_printed_for_people)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch_device *device;
    rebatch *rb;
    options.on_event = rebatch_wrap_print;
    open_on_host(&device, &rb, ROOM_BYTES, &options);
    OK(rebatch_set_current(rb));
    char printed[512] = "";
    FILE *const file = tmpfile();
    cr_assert_not_null(file);
    cr_assert_eq(dup2(fileno(file), STDERR_FILENO), STDERR_FILENO);
    struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
    cr_assert_eq(wrap_trainer_step(&trainer, BATCH, 0, NULL), cudaSuccess);
    rewind(file);
    cr_assert_not_null(fgets(printed, sizeof printed, file));
    cr_assert(strstr(printed, "rebatch: step 0: out of memory in ") == printed, "%s", printed);
    HAS(printed, "micro-batch 100 -> 50");
    cr_assert_null(fgets(printed, sizeof printed, file), "%s", printed);
    fclose(file);
    rebatch_wrap_close();
    cr_assert_null(rebatch_get_current());
    rebatch_device_close(device);
}

Test(wrap, an_update_that_had_begun_is_torn_and_a_step_that_never_fits_exhausted)
{
    for (size_t way = 0; way < 2; way++) {
        AUTO_CLOSE(rig, rig) = rig_open();
        struct wrap_trainer trainer = {.sample_bytes = 1, .fail_updates = 1};
        rebatch_step_report report;
        cr_assert_eq(ways[way](&trainer, BATCH, REBATCH_DECLARES_MUTATION, &report),
                     cudaErrorMemoryAllocation);
        cr_assert_eq(report.status, REBATCH_E_TORN);
        cr_assert_eq(trainer.updates, 1);
        trainer = (struct wrap_trainer){.sample_bytes = 2 * ROOM_BYTES};
        cr_assert_eq(ways[way](&trainer, BATCH, REBATCH_DECLARES_MUTATION, &report),
                     cudaErrorMemoryAllocation);
        cr_assert_eq(report.status, REBATCH_E_EXHAUSTED);
        cr_assert_eq(trainer.updates, 0);
    }
}

Test(wrap, a_step_without_a_session_is_refused)
{
    struct wrap_trainer trainer = {.sample_bytes = 1};
    struct rig rig;
    cr_assert_eq(wrap_trainer_step(&trainer, BATCH, 0, NULL), cudaErrorNoDevice);
    cr_assert_eq(wrap_trainer_guard(&trainer), cudaErrorNoDevice);
    rig = rig_open();
    rig_close(&rig);
    cr_assert_eq(wrap_trainer_step(&trainer, BATCH, 0, NULL), cudaErrorInvalidValue);
    cr_assert_eq(trainer.zeros + trainer.trains + trainer.updates, 0);
}

/* 40 samples of 1 MiB in 64 MiB. */
Test(wrap, a_trainer_that_keeps_its_buffer_makes_it_in_resize)
{
    cudaError_t (*const steps[])(struct wrap_trainer *, size_t, rebatch_step_report *) = {
        wrap_trainer_step_with_resize, wrap_trainer_step_with_lambda};
    for (size_t i = 0; i < 2; i++) {
        AUTO_CLOSE(rig, rig) = rig_open();
        rebatch_step_report report;
        struct wrap_trainer trainer = {.sample_bytes = MIB(1)};
        cr_assert_eq(steps[i](&trainer, 80, &report), cudaSuccess, "%s", rebatch_last_error());
        cr_expect_eq(trainer.made, 2, "80 and 40 samples");
        cr_expect_eq(trainer.room, 40);
        cr_expect_eq(report.microbatches, 2);
        cr_expect_eq(trainer.sum, 80 * 79 / 2);
        for (int step = 0; step < 3; step++)
            cr_assert_eq(steps[i](&trainer, 80, &report), cudaSuccess);
        cr_expect_eq(trainer.made, 2, "%u calls of resize", trainer.made);
        cr_expect_eq(live_bytes_of(rig.rb), MIB(40));
    }
}

Test(wrap, each_trainer_of_a_process_has_its_own_buffers)
{
    AUTO_CLOSE(rig, rig) = rig_open();
    struct wrap_trainer one = {.sample_bytes = MIB(1)}, other = {.sample_bytes = MIB(1)};
    cr_assert_eq(wrap_trainer_step_with_resize(&one, 8, NULL), cudaSuccess);
    cr_assert_eq(wrap_trainer_step_with_lambda(&other, 8, NULL), cudaSuccess);
    cr_assert_eq(wrap_trainer_step_with_resize(&one, 8, NULL), cudaSuccess);
    cr_expect_eq(one.made, 2);
    cr_expect_eq(other.made, 1);
    cr_expect_eq(live_bytes_of(rig.rb), MIB(8));
}

/* ---- evaluation, checks, and exceptions ---- */

static double sum_to(size_t count)
{
    return (double)count * (double)(count - 1) / 2;
}

Test(wrap, an_evaluation_uses_the_steps_buffer)
{
    rebatch_step_report report;
    struct wrap_trainer t = {.sample_bytes = MIB(3)};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert_eq(wrap_trainer_step_with_resize(&t, 32, NULL), cudaSuccess);
    const size_t room = t.room;
    const unsigned made = t.made;
    cr_assert_lt(room, 32);
    cr_assert_eq(wrap_trainer_map_in_buffer(&t, 100, &report), cudaSuccess);
    cr_assert_eq(t.evaluated, sum_to(100));
    cr_assert_eq(t.evaluations, (100 + room - 1) / room);
    cr_assert_eq(t.made, made, "the buffer was made anew");
    cr_assert_eq(report.ooms, 0);
    cr_assert_eq(wrap_trainer_step_with_resize(&t, 32, NULL), cudaSuccess);
    cr_assert_eq(t.made, made);
}

Test(wrap, an_evaluation_with_a_guarded_sum_recovers)
{
    rebatch_step_report report;
    struct wrap_trainer t = {.sample_bytes = MIB(1)};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert_eq(wrap_trainer_guard(&t), cudaSuccess);
    cr_assert_eq(wrap_trainer_map(&t, 100, &report), cudaSuccess);
    cr_assert_eq(t.evaluated, sum_to(100));
    cr_assert_gt(report.ooms, 0);
}

/* What a program that ends writes to standard error; its exit status. */
static int read_end_of(void (*program)(void *user), char *text, size_t size)
{
    const int status = output_of(program, NULL, STDERR_FILENO, text, size);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void check_a_failure(void *user)
{
    (void)user;
    wrap_trainer_check(cudaSuccess);
    wrap_trainer_check(cudaErrorLaunchFailure);
}

static void check_a_step_that_is_exhausted(void *user)
{
    (void)user;
    struct wrap_trainer t = {.sample_bytes = 2 * ROOM_BYTES};
    (void)rig_open();
    wrap_trainer_check(wrap_trainer_step(&t, 4, REBATCH_DECLARES_MUTATION, NULL));
}

static void check_a_session_that_is_open_already(void *user)
{
    (void)user;
    (void)rig_open();
    (void)wrap_trainer_step(&(struct wrap_trainer){.sample_bytes = 1}, 0, 0, NULL);
}

Test(wrap, a_check_that_ends_the_program_says_where_and_why)
{
    char text[4096];
    cr_assert_eq(read_end_of(check_a_failure, text, sizeof text), 1);
    HAS(text, "wrap_trainer.cc:");
    HAS(text, ": code: ");
    HAS(text, "719");
    cr_assert_eq(read_end_of(check_a_step_that_is_exhausted, text, sizeof text), 1);
    HAS(text, "wrap_trainer.cc:");
    HAS(text, "out of memory in forward_backward of 1 sample");
}

Test(wrap, the_message_of_a_failure_that_cuda_has_no_code_for_is_on_standard_error)
{
    char text[4096];
    cr_assert_eq(read_end_of(check_a_session_that_is_open_already, text, sizeof text), 0);
    cr_assert_str_eq(text, "rebatch: batch is 0: expected at least 1 sample\n");
}

Test(wrap, an_oom_may_be_an_exception_and_destructors_run)
{
    rebatch_step_report report;
    struct wrap_trainer t = {.sample_bytes = MIB(4)};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert_eq(wrap_trainer_step_of_objects(&t, 32, &report), cudaSuccess, "%s",
                 rebatch_last_error());
    cr_assert_eq(t.parameter, sum_to(32));
    cr_assert_gt(report.ooms, 0);
    cr_assert_eq(t.objects, 0);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
    cr_assert(wrap_trainer_own_check_throws(&t));
    cr_assert_eq(live_bytes_of(rig.rb), 0);
}

Test(wrap, another_exception_leaves_the_step_and_the_session_goes_on)
{
    struct wrap_trainer t = {.sample_bytes = MIB(1)};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert(wrap_trainer_throws_another(&t));
    cr_assert_eq(t.objects, 0);
    cr_assert_eq(live_bytes_of(rig.rb), 0);
    cr_assert_eq(wrap_trainer_step_of_objects(&t, 4, NULL), cudaSuccess);
    cr_assert_eq(t.parameter, sum_to(4));
}

Test(wrap, a_step_written_in_place_in_cpp_recovers)
{
    rebatch_step_report report;
    struct wrap_trainer t = {.sample_bytes = MIB(4), .fail_updates = 0};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert_eq(wrap_trainer_step_in_place(&t, 32, &report), cudaSuccess);
    cr_expect_eq(t.parameter, sum_to(32));
    cr_expect_gt(report.ooms, 0);
    cr_expect_eq(t.updates, 1);
    cr_expect_eq(live_bytes_of(rig.rb), 0);
    t.fail_updates = 1;
    cr_expect_eq(wrap_trainer_step_in_place(&t, 32, &report), cudaErrorMemoryAllocation);
    cr_expect(report.torn);
}

Test(wrap, an_exception_that_leaves_a_block_ends_its_step)
{
    struct wrap_trainer t = {.sample_bytes = MIB(1)};
    AUTO_CLOSE(rig, rig) = rig_open();
    cr_assert(wrap_trainer_throws_out_of_a_block(&t));
    FAILS(rebatch_step_end(rig.rb, NULL), REBATCH_E_STATE,
          "step 0: a block was left by break, return, goto or an exception");
    cr_expect_eq(t.objects, 0);
    cr_expect_eq(live_bytes_of(rig.rb), 0);
    cr_expect_eq(wrap_trainer_step_in_place(&t, 4, NULL), cudaSuccess);
    cr_expect_eq(t.parameter, sum_to(4));
}

/* ---- checks ---- */

static void check_with_resize(void *user)
{
    (void)user;
    struct wrap_trainer t = {.sample_bytes = MIB(3)};
    (void)setenv("REBATCH_CHECK", "1", 1);
    (void)rig_open();
    (void)dup2(STDERR_FILENO, STDOUT_FILENO);
    (void)wrap_trainer_watch(&t);
    (void)wrap_trainer_step_with_resize(&t, 32, NULL);
}

static void check_with_objects(void *user)
{
    (void)user;
    struct wrap_trainer t = {.sample_bytes = MIB(1)};
    (void)setenv("REBATCH_CHECK", "1", 1);
    (void)rig_open();
    (void)dup2(STDERR_FILENO, STDOUT_FILENO);
    (void)wrap_trainer_watch(&t);
    (void)wrap_trainer_step_of_objects(&t, 16, NULL);
}

Test(wrap, a_check_of_wrapped_trainers_finds_nothing)
{
    char text[4096];
    cr_assert_eq(read_end_of(check_with_resize, text, sizeof text), 0, "%s", text);
    cr_assert(strncmp(text, "no mistakes: ", 13) == 0, "%s", text);
    cr_assert_eq(read_end_of(check_with_objects, text, sizeof text), 0, "%s", text);
    cr_assert(strncmp(text, "no mistakes: ", 13) == 0, "%s", text);
}
