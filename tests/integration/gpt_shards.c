/* Owns the tests of gradients that are summed shard by shard: on one process, and on two that share
 * memory. Must not know how the sums are laid out. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fault/fault_device.h"
#include "gpt_run.h"

#define BATCH 8
#define SHARDS 4
#define STEPS 2
#define SECONDS_MOST 300 /* a rank that waits for longer waits for ever */

/* ---- ranks that are processes ---- */

static struct {
    pthread_barrier_t barrier;
    uint64_t words[2][REBATCH_GROUP_WORDS];
    char bytes[2][1 << 20];
    char hash[2][GPT_HASH_TEXT_BYTES];
    uint64_t ooms;
    bool is_on_device; /* what is swapped; a host device's memory is the host's */
} * shared;

static uint32_t own;

static rebatch_status swap(uint32_t other, const void *mine, void *theirs, size_t bytes,
                           rebatch_stream stream)
{
    (void)stream;
    cr_assert_leq(bytes, sizeof shared->bytes[0]);
    memcpy(shared->bytes[own], mine, bytes);
    (void)pthread_barrier_wait(&shared->barrier);
    memcpy(theirs, shared->bytes[other], bytes);
    (void)pthread_barrier_wait(&shared->barrier);
    return REBATCH_OK;
}

static rebatch_status all_reduce(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user)
{
    (void)timeout_ms, (void)user;
    cr_assert_eq(reduction, REBATCH_SUM, "a rank has failed");
    memcpy(shared->words[own], words, count * sizeof *words);
    (void)pthread_barrier_wait(&shared->barrier);
    for (size_t i = 0; i < count; i++)
        words[i] = shared->words[0][i] + shared->words[1][i];
    (void)pthread_barrier_wait(&shared->barrier);
    return REBATCH_OK;
}

static rebatch_status vote_alone(uint64_t *words, size_t count, rebatch_reduction reduction,
                                 uint64_t timeout_ms, void *user)
{
    (void)words, (void)count, (void)reduction, (void)timeout_ms, (void)user;
    return REBATCH_OK;
}

static struct run_options sharded(const struct gpt_ranks *ranks)
{
    struct run_options options = tiny_run();
    options.train.batch = BATCH;
    options.train.shards = SHARDS;
    options.train.ranks = ranks;
    options.train.config.length = 8;
    options.uncached = true;
    return options;
}

/* Trains as rank `rank`, in a process of its own, with an OOM at its nth allocation. */
static void train_as(uint32_t rank, size_t micro, uint64_t nth)
{
    struct gpt_ranks ranks = {
        .group = REBATCH_GROUP_INIT, .is_on_device = shared->is_on_device, .swap = swap};
    ranks.group.rank = own = rank;
    ranks.group.size = 2;
    ranks.group.all_reduce = all_reduce;
    struct run_options options = sharded(&ranks);
    struct run run;
    (void)alarm(SECONDS_MOST);
    options.micro = micro;
    run_open(&run, &options);
    ASSERT_OK(rebatch_fault_arm(run.device, &FAULTS(.nth = nth)));
    for (int i = 0; i < STEPS; i++) {
        rebatch_step_report report;
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        if (nth)
            shared->ooms += report.ooms;
    }
    run_hash(&run, shared->hash[rank]);
    run_close(&run);
    _exit(0);
}

/* Two ranks, the second one with an OOM. */
static void train_two(const size_t micro[2], uint64_t nth)
{
    pid_t children[2];
    memset(shared->hash, 0, sizeof shared->hash);
    shared->ooms = 0;
    for (uint32_t i = 0; i < 2; i++) {
        children[i] = fork();
        cr_assert_neq(children[i], -1);
        if (children[i] == 0)
            train_as(i, micro[i], i == 1 ? nth : 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        int code = -1;
        (void)waitpid(children[i], &code, 0);
        cr_assert_eq(code, 0, "rank %u ended with %d, OOM at allocation %llu", i, code,
                     (unsigned long long)nth);
    }
}

static void share(void)
{
    pthread_barrierattr_t attributes;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq((void *)shared, MAP_FAILED);
    (void)pthread_barrierattr_init(&attributes);
    (void)pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    (void)pthread_barrier_init(&shared->barrier, &attributes, 2);
}

static void share_no_more(void)
{
    (void)munmap(shared, sizeof *shared);
}

TestSuite(gpt_shards, .init = share, .fini = share_no_more);

/* ---- the tests ---- */

static struct gpt_ranks alone(void)
{
    struct gpt_ranks ranks = {.group = REBATCH_GROUP_INIT};
    ranks.group.size = 1;
    ranks.group.all_reduce = vote_alone;
    return ranks;
}

/* In a process of its own, since threads that compute do not come along in a fork. */
static void hash_alone(char text[GPT_HASH_TEXT_BYTES], size_t micro)
{
    const struct gpt_ranks ranks = alone();
    struct run_options options = sharded(&ranks);
    options.micro = micro;
    const pid_t child = fork();
    cr_assert_neq(child, -1);
    if (child == 0) {
        run_whole(shared->hash[0], &options, STEPS);
        _exit(0);
    }
    int code = -1;
    (void)waitpid(child, &code, 0);
    cr_assert_eq(code, 0);
    memcpy(text, shared->hash[0], GPT_HASH_TEXT_BYTES);
}

Test(gpt_shards, bits_depend_on_neither_ranks_nor_micro_batches, .description = "seed 1")
{
    char want[GPT_HASH_TEXT_BYTES], got[GPT_HASH_TEXT_BYTES];
    hash_alone(want, 0);
    for (size_t micro = 1; micro <= BATCH; micro++) {
        hash_alone(got, micro);
        cr_assert_str_eq(got, want, "micro-batches of %zu", micro);
    }
    for (size_t micro = 1; micro <= BATCH / 2; micro++) {
        shared->is_on_device = micro % 2;
        train_two((const size_t[2]){micro, BATCH / 2 + 1 - micro}, 0);
        for (int rank = 0; rank < 2; rank++)
            cr_assert_str_eq(shared->hash[rank], want, "rank %d of 2", rank);
    }
}

Test(gpt_shards, an_oom_at_any_allocation_of_a_rank_does_not_matter, .description = "seed 1")
{
    char want[GPT_HASH_TEXT_BYTES];
    const size_t stride = stride_of_cases(17);
    uint64_t nth = 1;
    hash_alone(want, 0);
    for (;; nth += stride) {
        shared->is_on_device = nth / stride % 2;
        train_two((const size_t[2]){0, 0}, nth);
        if (shared->ooms == 0)
            break;
        for (int rank = 0; rank < 2; rank++)
            cr_assert_str_eq(shared->hash[rank], want, "OOM at allocation %llu, rank %d",
                             (unsigned long long)nth, rank);
    }
    cr_assert_gt(nth, 50, "no allocation after %llu had an OOM", (unsigned long long)nth);
}

Test(gpt_shards, what_does_not_divide_is_refused)
{
    const struct gpt_ranks ranks = alone();
    const size_t wrong[] = {3, 16, 0};
    struct run_options options = sharded(&ranks);
    struct run run;
    struct gpt_trainer *trainer;
    ASSERT_OK(rebatch_device_open_host(&run.device, REBATCH_UNLIMITED, NULL));
    ASSERT_OK(rebatch_open(&run.rb, run.device, &OPTIONS(.group = &ranks.group)));
    run.data = open_text(options.train.config.length);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        options.train.shards = wrong[i];
        ASSERT_ERROR(
            gpt_trainer_create(&trainer, run.rb, &gpt_host_ops, NULL, run.data, &options.train),
            REBATCH_E_INVALID, "shards is ");
        cr_assert_null(trainer);
    }
    gpt_data_close(run.data);
    rebatch_close(run.rb);
    rebatch_device_close(run.device);
}
