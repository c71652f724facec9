/* Owns the tests of what the reference model is built on: random numbers, threads, SHA-256, error
 * text. Must not know private headers of the library. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt/hash.h"
#include "gpt/parallel.h"
#include "gpt/random.h"
#include "gpt_common.h"

TestSuite(gpt_basics);

/* ---- Philox4x32-10 ---- */

/* The known answers that the authors of Philox publish with it. */
Test(gpt_basics, philox_gives_the_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } known[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                 {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                  {0xffffffff, 0xffffffff},
                  {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                 {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                  {0xa4093822, 0x299f31d0},
                  {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t words[4];
        gpt_philox(words, known[i].counter, (uint64_t)known[i].key[1] << 32 | known[i].key[0]);
        cr_assert_arr_eq(words, known[i].want, sizeof words);
    }
}

/* ---- SHA-256 ---- */

Test(gpt_basics, sha256_gives_the_known_answers)
{
    char text[GPT_HASH_TEXT_BYTES];
    struct gpt_hash hash;
    gpt_hash_begin(&hash);
    gpt_hash_end(&hash, text);
    cr_assert_str_eq(text, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    gpt_hash_begin(&hash);
    gpt_hash_add(&hash, "a", 1);
    gpt_hash_add(&hash, "bc", 2);
    gpt_hash_end(&hash, text);
    cr_assert_str_eq(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/* ---- threads ---- */

enum { ITEMS = 1000 };

struct visits {
    atomic_int count[ITEMS];
    size_t grain;
    atomic_int too_small;
};

static void visit(size_t begin, size_t end, const void *user)
{
    struct visits *visits = *(struct visits *const *)user;
    if (end - begin < visits->grain && end != ITEMS)
        atomic_fetch_add(&visits->too_small, 1);
    for (size_t i = begin; i < end; i++)
        atomic_fetch_add(&visits->count[i], 1);
}

static void check_visits(size_t count, size_t grain)
{
    static struct visits visits;
    const struct visits *const handed = &visits;
    memset(&visits, 0, sizeof visits);
    visits.grain = count == ITEMS ? grain : 1;
    gpt_parallel_for(count, grain, visit, &handed);
    for (size_t i = 0; i < ITEMS; i++)
        cr_assert_eq(atomic_load(&visits.count[i]), i < count ? 1 : 0, "item %zu of %zu", i, count);
    cr_assert_eq(atomic_load(&visits.too_small), 0);
}

static void check_all_visits(void)
{
    static const size_t counts[] = {0, 1, 2, 3, 17, 64, ITEMS};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (size_t grain = 1; grain <= ITEMS; grain = grain * 3 + 1)
            check_visits(counts[i], grain);
}

Test(gpt_basics, every_item_is_worked_on_once)
{
    for (size_t threads = 1; threads <= 5; threads++) {
        ASSERT_OK(gpt_parallel_set_threads(threads));
        cr_assert_eq(gpt_parallel_threads(), threads);
        check_all_visits();
    }
}

static void visit_within(size_t begin, size_t end, const void *user)
{
    for (size_t i = begin; i < end; i++)
        gpt_parallel_for(ITEMS, 1, visit, user);
}

Test(gpt_basics, work_within_work_runs_too)
{
    static struct visits visits;
    struct visits *const handed = &visits;
    ASSERT_OK(gpt_parallel_set_threads(3));
    gpt_parallel_for(20, 1, visit_within, &handed);
    for (size_t i = 0; i < ITEMS; i++)
        cr_assert_eq(atomic_load(&visits.count[i]), 20);
}

Test(gpt_basics, a_child_process_has_threads_of_its_own)
{
    ASSERT_OK(gpt_parallel_set_threads(3));
    check_visits(ITEMS, 1);
    const pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        check_all_visits();
        _exit(0);
    }
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_visits(ITEMS, 1);
}

Test(gpt_basics, the_number_of_threads_is_checked)
{
    ASSERT_ERROR(gpt_parallel_set_threads(GPT_THREADS_MOST + 1), REBATCH_E_INVALID,
                 "threads is 65: expected 1 to 64");
    setenv("GPT_THREADS", "3", 1);
    ASSERT_OK(gpt_parallel_set_threads(0));
    cr_assert_eq(gpt_parallel_threads(), 3);
    ASSERT_OK(gpt_parallel_prepare()); /* decided already */
    static const char *const bad[] = {"", "0", "-1", "65", "2x", "99999999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("GPT_THREADS", bad[i], 1);
        ASSERT_ERROR(gpt_parallel_set_threads(0), REBATCH_E_INVALID, "expected a number from 1");
    }
    unsetenv("GPT_THREADS");
    ASSERT_OK(gpt_parallel_set_threads(0));
    cr_assert_geq(gpt_parallel_threads(), 1);
    cr_assert_leq(gpt_parallel_threads(), GPT_THREADS_DEFAULT_MOST);
}

/* ---- error text ---- */

Test(gpt_basics, the_last_sentence_is_the_latest)
{
    gpt_error(REBATCH_E_INVALID, "ours %d", 1);
    cr_assert_str_eq(gpt_last_error(), "ours 1");
    cr_assert_neq(rebatch_step(NULL, NULL, 0, NULL, NULL), REBATCH_OK);
    cr_assert_str_eq(gpt_last_error(), rebatch_last_error());
    cr_assert_eq(gpt_error(REBATCH_E_IO, "ours again"), REBATCH_E_IO);
    cr_assert_str_eq(gpt_last_error(), "ours again");
}
