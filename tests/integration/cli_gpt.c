/* Owns the tests of the reference model's program that need it whole: which settings it goes by.
 * Must not know the library's inside: it runs the program that REBATCH_GPT names. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(cli_gpt, .init = cli_enter_with_text, .fini = config_leave);

/* Two steps of 16 under 4 MiB; what is printed, with the hash last. */
static char *train(const char *settings, const char *options)
{
    char line[256];
    config_write("t.cfg", settings);
    (void)snprintf(line, sizeof line,
                   "--preset tiny --data text --batch 16 --steps 2 --cap 4MiB --config t.cfg %s",
                   options);
    const struct run r = cli_run_program(cli_gpt, line);
    cr_assert_eq(r.code, 0, "%s", r.error);
    free(r.error);
    return r.out;
}

/* ---- going on ---- */

#define SAVED "--preset tiny --batch 4 --save state --data text --seed 7 --dropout 0.2 --steps "

static void expect_failure(const char *arguments, const char *end)
{
    AUTO_DONE(r) = cli_run_program(cli_gpt, arguments);
    cr_assert_eq(r.code, 1, "%s ends with %d: %s", arguments, r.code, r.out);
    const size_t length = strlen(r.error), tail = strlen(end);
    cr_assert(length >= tail && strcmp(r.error + length - tail, end) == 0, "%s: %s", arguments,
              r.error);
}

/* The hash at the end of a run that must succeed; the caller frees it. */
static char *train_on(const char *arguments)
{
    struct run r = cli_run_program(cli_gpt, arguments);
    cr_assert_eq(r.code, 0, "%s: %s", arguments, r.error);
    const char *const hash = strstr(r.out, "sha256=");
    cr_assert_not_null(hash, "%s", r.out);
    char *copy = strdup(hash);
    done(&r);
    return copy;
}

/* Settings and text are those of the state, from whatever folder it goes on. */
Test(cli_gpt, a_training_goes_on_with_its_settings_and_its_text)
{
    free(train_on(SAVED "2"));
    char *given = train_on("--resume state --data text --steps 4");
    char *found = train_on("--resume state --steps 4");
    cr_assert_str_eq(found, given);
    free(found);
    cr_assert(mkdir("folder", 0700) == 0 && chdir("folder") == 0);
    found = train_on("--resume ../state --steps 4");
    cr_assert(unlink("out") == 0 && unlink("error") == 0 && chdir("..") == 0);
    cr_assert_eq(rmdir("folder"), 0);
    cr_assert_str_eq(found, given);
    free(found);
    cr_assert_eq(rename("text", "moved"), 0);
    expect_failure("--resume state --steps 4",
                   "/text cannot be opened: No such file or directory: state was saved in "
                   "training on it, and --data says where it is now\n");
    found = train_on("--resume state --steps 4 --data moved");
    cr_assert_str_eq(found, given);
    free(found);
    free(given);
}

/* What a state was saved with cannot be another thing afterwards. */
Test(cli_gpt, a_training_does_not_go_on_with_other_settings_or_another_text)
{
    free(train_on(SAVED "2"));
    config_write("other", "this is another text, long enough for one sample of sixty-five bytes "
                          "and for a few more of them");
    expect_failure("--resume state --seed 8", "was saved with seed=7: this run has seed=8\n");
    expect_failure("--resume state --batch 8", "was saved with batch=4: this run has batch=8\n");
    expect_failure("--resume state --data other", "/text: this run has another text\n");
    expect_failure("--resume state --root /nowhere", "/text: this run has another text\n");
    cr_assert_eq(rename("other", "text"), 0);
    expect_failure("--resume state", "/text, which is another text now\n");
}

static const char *hash_of(const char *out)
{
    const char *hash = strstr(out, "sha256=");
    cr_assert_not_null(hash, "%s", out);
    return hash;
}

Test(cli_gpt, a_file_in_the_settings_is_used_and_filled)
{
    static const char settings[] = "probe: { file = \"found\"; key = \"mine\"; };";
    char *plain = train("log: { level = \"info\"; };", "");
    cr_assert_null(strstr(plain, "probe:"), "%s", plain);
    char *first = train(settings, "");
    cr_assert(strstr(first, "the file has no entry for this model and these settings"), "%s",
              first);
    char *found = config_read("found");
    cr_assert(strstr(found, " mine | "), "%s", found);
    char *again = train(settings, "");
    cr_assert(strstr(again, "the size in the file was run and is the result"), "%s", again);
    cr_assert_str_eq(hash_of(first), hash_of(plain), "a probe changes no bit");
    cr_assert_str_eq(hash_of(again), hash_of(plain));
    free(plain);
    free(first);
    free(found);
    free(again);
}

Test(cli_gpt, the_settings_bound_a_probe_that_was_asked_for)
{
    char *one = train("probe: { max_trials = 1; };", "--probe");
    cr_assert(strstr(one, "probe: micro-batch 1 in 1 trials"), "%s", one);
    cr_assert(access("found", F_OK) != 0);
    char *more = train("log: { level = \"info\"; };", "--probe");
    cr_assert_null(strstr(more, "in 1 trials"), "%s", more);
    cr_assert_str_eq(hash_of(one), hash_of(more));
    free(one);
    free(more);
}

Test(cli_gpt, it_learns_where_the_settings_say_so)
{
    char *learned = train("batch: { learn = true; };", "");
    cr_assert(strstr(learned, "the micro-batch size was predicted from earlier micro-batches"),
              "%s", learned);
    cr_assert_null(strstr(learned, "out of memory"), "%s", learned);
    char *plain = train("log: { level = \"info\"; };", "");
    cr_assert(strstr(plain, "out of memory"), "%s", plain);
    cr_assert_str_eq(hash_of(learned), hash_of(plain));
    free(learned);
    free(plain);
}
