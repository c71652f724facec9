/* Owns the tests of programs that end while they are checked: what is said of it.
 * Must not know more of the library than its public headers say. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check_common.h"
#include "rig.h"

#define BATCH 12

enum way {
    KEEPS_A_POINTER,
    ABORTS_AFTER_AN_OOM,
    EXITS_AFTER_AN_OOM,
    FREES_ITS_BLOCK,
    FREES_AN_OLDER_BLOCK,
    FREES_A_FREED_BLOCK,
    NONE
};

struct trainer {
    struct check_run run;
    rebatch_device *device;
    enum way way;
    float *kept, *older;
    double sum;
};

static rebatch_status zero_grad(void *user)
{
    struct trainer *t = user;
    t->sum = 0;
    return rebatch_pool_trim(rebatch_get_pool(t->run.rb), 0, NULL); /* cached memory is gone */
}

/* What free() and realloc() begin with; those of a sanitizer begin otherwise. */
static void give_to_heap(const void *block)
{
    (void)((const volatile size_t *)block)[-1];
}

/* An allocation, and one of a fixed size. */
static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct trainer *t = user;
    float *inputs, *fixed;
    rebatch_status status = REBATCH_OK;
    if (t->way != KEEPS_A_POINTER || !t->kept)
        status = check_alloc(&t->kept, mb, MIB(2));
    inputs = t->kept;
    if (!status)
        status = check_alloc(&fixed, mb, 4096);
    if (status && t->way == ABORTS_AFTER_AN_OOM)
        abort();
    if (status && t->way == EXITS_AFTER_AN_OOM)
        exit(1);
    if (status)
        return status;
    if (t->way == FREES_ITS_BLOCK)
        give_to_heap(t->kept);
    if (t->way == FREES_AN_OLDER_BLOCK)
        give_to_heap(t->older);
    if (t->way == FREES_A_FREED_BLOCK && !rebatch_pool_free(mb->pool, t->kept))
        give_to_heap(t->kept);
    rebatch_mutating(t->run.rb);
    for (size_t i = 0; i < mb->count; i++) {
        inputs[i] = check_input(mb->first + i, 0);
        t->sum += (double)inputs[i] / (double)mb->batch;
    }
    return REBATCH_OK;
}

static void check(enum way way)
{
    static struct trainer t;
    const rebatch_step_ops ops = check_step_ops(zero_grad, forward_backward);
    t = (struct trainer){.way = way};
    open_on_host(&t.device, &t.run.rb, MIB(64), &OPTIONS(.log_level = REBATCH_LOG_QUIET));
    if (way == FREES_AN_OLDER_BLOCK)
        OK(rebatch_pool_alloc((void **)&t.older, rebatch_get_pool(t.run.rb), MIB(1), NULL, 0));
    OK(rebatch_watch(t.run.rb, "sum", &t.sum, sizeof t.sum, REBATCH_GUARD_HOST, REBATCH_F64));
    (void)!rebatch_check(t.run.rb, &ops, BATCH, &t, NULL, NULL);
    rebatch_close(t.run.rb);
    rebatch_device_close(t.device);
}

static void check_apart(void *user)
{
    for (int number = 1; number < 16; number++)
        (void)signal(number, SIG_DFL); /* the test's own handlers */
    check(*(const enum way *)user);
}

/* What it says on standard error, and its status. */
static int end_of(enum way way, char *text, size_t size)
{
    return output_of(check_apart, &way, STDERR_FILENO, text, size);
}

Test(check_ending, a_program_that_ends_says_which_request_it_did_not_survive)
{
    char text[4096];
    int status = end_of(ABORTS_AFTER_AN_OOM, text, sizeof text);
    cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "%d: %s", status, text);
    cr_expect_str_eq(text,
                     "rebatch: the program ended by signal 6 (Aborted) in forward_backward of "
                     "samples 0-11, after allocation 1 (2.00 MiB) of forward_backward of "
                     "samples 0-11 had failed on purpose\n");
    status = end_of(EXITS_AFTER_AN_OOM, text, sizeof text);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%d: %s", status, text);
    HAS(text, "the program ended by a call of exit in forward_backward of samples 0-11, after "
              "allocation 1 (2.00 MiB) of");
    status = end_of(NONE, text, sizeof text);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0 && !text[0], "%d: %s", status, text);
}

Test(check_ending, a_fault_in_memory_that_was_taken_back_names_its_allocation)
{
    char text[4096];
    const int status = end_of(KEEPS_A_POINTER, text, sizeof text);
    cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "%d: %s", status, text);
    HAS(text, " is in the memory of allocation 1 (2.00 MiB) of forward_backward of samples 0-11, "
              "which was taken back: its pointer is kept");
}

/* Nothing is in front of the first block of a range. */
Test(check_ending, what_the_heap_is_given_of_the_pool_is_named)
{
    static const char *const given[] = {
        [FREES_ITS_BLOCK] = "allocation 1 (2.00 MiB) of forward_backward of samples 0-11",
        [FREES_AN_OLDER_BLOCK] = "one of its blocks",
        [FREES_A_FREED_BLOCK] = "one of its blocks",
    };
    for (enum way way = FREES_ITS_BLOCK; way <= FREES_A_FREED_BLOCK; way++) {
        char text[4096];
        const int status = end_of(way, text, sizeof text);
        cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "%d: %s", status, text);
        HAS(text, " is the pool's, in or in front of ");
        HAS(text, given[way]);
        HAS(text, ": give blocks back by rebatch_pool_free(), not by C's free, and ");
    }
}

static void own_handler(int number)
{
    (void)number;
}

Test(check_ending, handlers_of_the_program_are_as_they_were)
{
    struct sigaction own = {.sa_handler = own_handler}, after;
    cr_assert_eq(sigaction(SIGSEGV, &own, NULL), 0);
    check(NONE);
    cr_assert_eq(sigaction(SIGSEGV, NULL, &after), 0);
    cr_expect_eq(after.sa_handler, own_handler);
}
