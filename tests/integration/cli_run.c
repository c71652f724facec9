/* Owns the tests of `rebatch run`: the cap, failures on purpose, what is passed on, and bad input.
 * Must not know the library's inside: the examples are the user's programs here. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_common.h"
#include "unit/config_files.h"

TestSuite(cli_run, .init = cli_enter_with_text, .fini = config_leave);

static struct run run(const char *options, const char *program, const char *arguments)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s -- '%s' %s", options, program, arguments);
    return cli_run("", "run", line);
}

#define TRAINING "--preset tiny --data text --batch 16 --steps 6"

/* The number before `words` in the line at the end. */
static unsigned long long count(const struct run *r, const char *words)
{
    const char *line = strstr(r->error, "rebatch run: ");
    const char *at = line ? strstr(line, words) : NULL;
    cr_assert_not_null(at, "%s", r->error);
    while (at > line && at[-1] >= '0' && at[-1] <= '9')
        at--;
    return strtoull(at, NULL, 10);
}

static const char *hash_of(const struct run *r)
{
    const char *hash = strstr(r->out, "sha256=");
    cr_assert_not_null(hash, "%s%s", r->out, r->error);
    return hash;
}

/* ---- failures ---- */

Test(cli_run, the_nth_request_fails_and_no_bit_changes)
{
    AUTO_DONE(plain) = cli_run_program(cli_gpt, TRAINING);
    for (int nth = 1; nth <= 201; nth += 40) {
        char options[64];
        (void)snprintf(options, sizeof options, "--oom %d", nth);
        AUTO_DONE(r) = run(options, cli_gpt, TRAINING);
        cr_assert_eq(r.code, 0, "%s", r.error);
        cr_expect_eq(count(&r, " failure injected, 1 survived; 1 OOM in all, "), 1);
        cr_expect_eq(count(&r, " steps\n"), 6);
        cr_expect(strstr(r.out, "out of memory in "), "%s", r.out);
        cr_expect_str_eq(hash_of(&r), hash_of(&plain), "request %d", nth);
    }
}

/* What a smaller micro-batch does is part of what is to be tested. */
Test(cli_run, a_failure_cuts_the_micro_batch_as_a_full_device_does)
{
    AUTO_DONE(r) = run("--oom 8", cli_gpt, TRAINING);
    cr_expect(strstr(r.out, "micro-batch 16 -> 8"), "%s", r.out);
}

Test(cli_run, a_seed_fails_the_same_requests)
{
    AUTO_DONE(plain) = cli_run_program(cli_gpt, TRAINING);
    AUTO_DONE(first) = run("--oom-chance 2%", cli_gpt, TRAINING);
    AUTO_DONE(again) = run("--oom-chance 0.02 --seed 1", cli_gpt, TRAINING);
    AUTO_DONE(other) = run("--oom-chance 0.02 --seed 2", cli_gpt, TRAINING);
    cr_assert(first.code == 0 && again.code == 0 && other.code == 0, "%s%s", first.error,
              other.error);
    const unsigned long long injected = count(&first, " failures injected");
    cr_expect_gt(injected, 3);
    cr_expect_eq(count(&first, " survived"), injected);
    cr_expect_eq(count(&again, " failures injected"), injected);
    cr_expect_str_eq(hash_of(&first), hash_of(&plain));
    cr_expect_str_eq(hash_of(&other), hash_of(&plain));
    char *a = strstr(first.out, "  ! step 0"), *b = strstr(other.out, "  ! step 0");
    cr_expect(!a || !b || strncmp(a, b, 40) != 0 || count(&other, " failures injected") != injected,
              "another seed, other requests");
}

/* A program that does not survive it: the error says that it was on purpose. */
Test(cli_run, a_failure_that_is_not_survived)
{
    config_write("t.cfg", "recovery = { on_oom = \"stop\"; max_attempts = 1; };\n");
    AUTO_DONE(r) = run("--oom 3", cli_gpt, TRAINING " --config t.cfg");
    cr_assert_eq(r.code, 1);
    cr_expect(strstr(r.error, "(the failure is injected)"), "%s", r.error);
    cr_expect_eq(count(&r, " failure injected, 0 survived"), 1);
}

Test(cli_run, a_request_that_never_comes)
{
    AUTO_DONE(r) = run("--oom 1000000", cli_minimal, "");
    cr_assert_eq(r.code, 1, "%s", r.error);
    cr_expect(strstr(r.error, " ended before a request failed, so nothing was tested: expected "),
              "%s", r.error);
    cr_expect_eq(count(&r, " failures injected, 0 survived (callbacks made "), 0);
    cr_expect_gt(count(&r, " requests)"), 7);
}

/* ---- the cap ---- */

Test(cli_run, a_cap_holds_for_a_session_without_options)
{
    AUTO_DONE(r) = run("--limit 4MiB", cli_minimal, "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "step 7: w = 3.0004, micro-batch 4 x 16, 0 out of memory"), "%s",
              r.out);
}

Test(cli_run, a_limit_that_shrinks_and_comes_back)
{
    AUTO_DONE(r) = run("--shrink 25%@step:2 --shrink 100%@step:5", cli_minimal, "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "step 1: w = 2.6666, micro-batch 16 x 4"), "%s", r.out);
    cr_expect(strstr(r.out, "step 2: w = 2.8884, micro-batch 4 x 16"), "%s", r.out);
    cr_expect_eq(count(&r, " failures injected"), 0);
    cr_expect_eq(count(&r, " OOMs in all"), 4);
    done(&r);
    AUTO_DONE(plain) = cli_run_program(cli_gpt, TRAINING " --cap 16MiB");
    r = run("--limit 12MiB --shrink 30%@step:2 --shrink 100%@step:4", cli_gpt,
            TRAINING " --cap 16MiB");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "! step 2: not started"), "%s", r.out);
    cr_expect_str_eq(hash_of(&r), hash_of(&plain));
}

/* ---- without the command ---- */

Test(cli_run, variables_alone)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "REBATCH_RUN_OOM=3 exec '%s'; true", cli_minimal);
    AUTO_DONE(r) = cli_run(line, "", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_eq(count(&r, " failure injected, 1 survived"), 1);
    cr_expect_eq(count(&r, " steps\n"), 8);
    done(&r);
    (void)snprintf(line, sizeof line, "REBATCH_RUN_OOM=no exec '%s'; true", cli_minimal);
    r = cli_run(line, "", "");
    cr_assert_eq(r.code, 1);
    cr_expect_str_eq(r.error, "REBATCH_RUN_OOM is \"no\": expected a whole number, 1 or more\n");
}

/* Settings in a file look at variables, too. */
Test(cli_run, variables_of_a_run_are_no_mistakes_in_settings)
{
    config_write("t.cfg", "batch = { smallest = 1; };\n");
    struct run r =
        cli_run("export REBATCH_PROBE_ONLY=1 REBATCH_RUN_SEED=2;", "config", "check t.cfg");
    cr_expect_eq(r.code, 0, "%s", r.error);
    done(&r);
}

/* ---- how it ends ---- */

Test(cli_run, the_exit_status_is_the_programs)
{
    char line[4 * PATH_MAX];
    (void)snprintf(line, sizeof line, "-- sh -c '\"$0\" >/dev/null; exit 7' '%s'", cli_minimal);
    struct run r = cli_run("", "run", line);
    cr_expect_eq(r.code, 7);
    cr_expect(strstr(r.error, "; 8 steps\n"), "%s", r.error);
    done(&r);
    (void)snprintf(line, sizeof line, "'%s' run -- sh -c 'kill -TERM $$' 2>error", cli_command);
    (void)snprintf(line + strlen(line), sizeof line - strlen(line), "; test $? -eq 143");
    cr_expect_eq(system(line), 0);
}

static void expect_refused(const char *arguments, int code, const char *words)
{
    cli_expect_refused("unset REBATCH_RUN_SHRINK;", "run", arguments, code, words);
}

Test(cli_run, wrong_usage)
{
    expect_refused("--ooms 3 -- true", 2,
                   "rebatch: there is no option '--ooms'; see 'rebatch help run'\n");
    expect_refused("true", 2,
                   "rebatch: \"true\" is not an option: expected \"--\" before the program; see "
                   "'rebatch help run'\n");
    expect_refused("--", 2, "rebatch: there is no program after \"--\"; see 'rebatch help run'\n");
    expect_refused("--oom 0 -- true", 2,
                   "rebatch: --oom is \"0\": expected a whole number, 1 or more\n");
    static const char *const chances[] = {"0", "1.5", "101%", "-1", "x", "%", ".", "1e-2", ""};
    for (size_t i = 0; i < sizeof chances / sizeof *chances; i++) {
        char arguments[64], words[160];
        (void)snprintf(arguments, sizeof arguments, "--oom-chance '%s' -- true", chances[i]);
        (void)snprintf(words, sizeof words,
                       "rebatch: --oom-chance is \"%s\": expected a chance above 0 and at most 1, "
                       "0.05 or 5%%\n",
                       chances[i]);
        expect_refused(arguments, 2, words);
    }
    expect_refused("--oom 1 --oom-chance 1% -- true", 2,
                   "rebatch: --oom and --oom-chance are both set: expected one of them\n");
    cli_expect_refused("unset REBATCH_RUN_SHRINK; export REBATCH_RUN_OOM=1;", "run",
                       "--oom-chance 1% -- true", 2,
                       "rebatch: REBATCH_RUN_OOM and --oom-chance are both set: expected one of "
                       "them\n");
    expect_refused("--seed -1 -- true", 2,
                   "rebatch: --seed is \"-1\": expected a whole number, 0 or more\n");
    static const char *const shares[] = {
        "50%",       "50%@20",      "50@step:2",   "0%@step:1", "101%@step:1",
        "50%@step:", "50%@step:-1", "1MiB@step:3", ""};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        char arguments[64], words[160];
        (void)snprintf(arguments, sizeof arguments, "--shrink '%s' -- true", shares[i]);
        (void)snprintf(
            words, sizeof words,
            "rebatch: --shrink is \"%s\": expected a share of the memory and a step, for "
            "example 50%%@step:20\n",
            shares[i]);
        expect_refused(arguments, 2, words);
    }
    expect_refused(
        "--shrink 50%@step:3 --shrink 60%@step:3 -- true", 2,
        "rebatch: --shrink is \"50%@step:3,60%@step:3\": expected steps in ascending order\n");
}

Test(cli_run, a_wrong_limit_names_the_option_and_a_value_too_many_is_said)
{
    static const char *const verbs[] = {"run", "probe"};
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++) {
        AUTO_DONE(r) = cli_run("", verbs[i], "--limit 12GB3 -- true");
        cr_expect_eq(r.code, 2);
        cr_expect(strncmp(r.error, "rebatch: --limit: memory.limit is \"12GB3\", ", 43) == 0, "%s",
                  r.error);
        done(&r);
        r = cli_run("export REBATCH_MEMORY_LIMIT=12GB3;", verbs[i], "-- true");
        cr_expect_eq(r.code, 2);
        cr_expect(
            strncmp(r.error, "rebatch: REBATCH_MEMORY_LIMIT: memory.limit is \"12GB3\"", 54) == 0,
            "%s", r.error);
    }
    expect_refused("--check=1 -- true", 2,
                   "rebatch: --check=1 has a value: expected none; see 'rebatch help run'\n");
}

Test(cli_run, an_option_that_would_do_nothing_is_refused)
{
    static const char *const options[] = {"--oom 3", "--oom-chance 5%", "--shrink 50%@step:3"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char arguments[64], words[160];
        (void)snprintf(arguments, sizeof arguments, "--check %s -- true", options[i]);
        (void)snprintf(words, sizeof words,
                       "rebatch: %.*s does nothing with --check, which makes each allocation fail "
                       "once: expected one of the two\n",
                       (int)strcspn(options[i], " "), options[i]);
        expect_refused(arguments, 2, words);
    }
    expect_refused("--seed 4 -- true", 2,
                   "rebatch: --seed does nothing without --oom-chance: expected both\n");
    expect_refused("--oom 3 --seed 4 -- true", 2,
                   "rebatch: --seed does nothing without --oom-chance: expected both\n");
}

/* The program opens its session by settings, so it is a setting that is wrong. */
Test(cli_run, a_limit_of_less_than_a_page_names_the_setting)
{
    AUTO_DONE(r) = run("--limit 1KiB", cli_minimal, "");
    cr_expect(strncmp(r.error,
                      "memory.limit is \"1KiB\" (REBATCH_MEMORY_LIMIT): expected at least a page "
                      "of the device, 65536 bytes\n",
                      98) == 0,
              "%s", r.error);
}

/* A variable that nothing reads would leave the run without its limit. */
Test(cli_run, a_variable_that_is_nearly_one_is_named)
{
    for (int is_probe = 0; is_probe < 2; is_probe++)
        cli_expect_refused("export REBATCH_MEM_LIMIT=1GiB;", is_probe ? "probe" : "run", "-- true",
                           2,
                           "rebatch: REBATCH_MEM_LIMIT is not a setting's variable; did you mean "
                           "REBATCH_MEMORY_LIMIT?\n");
    AUTO_DONE(r) = cli_run("", "run", "--oom 3 -- true");
    cr_expect(!strstr(r.error, "variable"), "those of other programs are theirs: %s", r.error);
}

Test(cli_run, what_is_injected_says_so_in_its_line)
{
    AUTO_DONE(r) = run("--oom 3", cli_minimal, "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.error, " (injected)"), "%s", r.error);
    done(&r);
    r = run("--limit 4MiB", cli_minimal, "");
    cr_expect(strstr(r.error, "out of memory") && !strstr(r.error, "injected)"), "%s", r.error);
}

Test(cli_run, a_record_in_no_folder_is_refused)
{
    expect_refused("--record none/x.trace -- true", 2,
                   "rebatch: --record is 'none/x.trace': expected the path of a file in a folder "
                   "that exists\n");
}

Test(cli_run, a_record_without_a_trace_says_why)
{
    if (!getenv("REBATCH_PRELOAD"))
        cr_skip_test("nothing can be preloaded in this build");
    AUTO_DONE(r) = run("--record none.trace", cli_minimal, "");
    cr_expect_eq(r.code, 0);
    cr_expect(strstr(r.error, "rebatch: --record wrote no trace to /") &&
                  strstr(r.error, "/none.trace: the program called none of CUDA's functions for "
                                  "memory; those of rebatch are not recorded\n"),
              "%s", r.error);
}

/* The program writes its process id into a file. */
static pid_t start_sleeper(void)
{
    static const char program[] = "echo $$ > started; exec sleep 600";
    const pid_t command = fork();
    if (command == 0) {
        const struct rlimit none = {0, 0};
        (void)setrlimit(RLIMIT_CORE, &none);
        (void)signal(SIGINT, SIG_DFL); /* what runs in the background ignores both */
        (void)signal(SIGQUIT, SIG_DFL);
        (void)signal(SIGHUP, SIG_DFL); /* and what nohup runs this one */
        (void)freopen("error", "w", stderr);
        (void)execl(cli_command, "rebatch", "run", "--", "sh", "-c", program, (char *)NULL);
        _exit(1);
    }
    return command;
}

/* `kill` reaches the command alone, a key of the terminal both. */
Test(cli_run, a_signal_to_the_command_ends_the_program_too)
{
    static const int numbers[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int status = 0;
        long program = 0;
        (void)remove("started");
        const pid_t command = start_sleeper();
        while (program == 0) {
            FILE *file = fopen("started", "r");
            if (file && fscanf(file, "%ld", &program) != 1)
                program = 0;
            if (file)
                (void)fclose(file);
            (void)usleep(10000);
        }
        cr_assert_eq(kill(command, numbers[i]), 0);
        cr_assert_eq(waitpid(command, &status, 0), command);
        cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == numbers[i], "signal %d: status %d",
                  numbers[i], status);
        cr_expect_eq(kill((pid_t)program, 0), -1, "signal %d: the program lives on", numbers[i]);
    }
}

Test(cli_run, a_program_that_does_not_step)
{
    static const char absent[] = "\nrebatch: there is no librebatch_wrap.so beside this command or "
                                 "in ../lib: only programs that use rebatch were looked at";
    const bool has_library = getenv("REBATCH_PRELOAD") != NULL;
    cli_expect_programs_refused("unset REBATCH_RUN_SHRINK;", "run", 7,
                                has_library ? ", nor did it allocate CUDA memory" : absent,
                                has_library ? " or allocation of CUDA memory" : absent);
}

/* It says as the library does that a step begins. */
Test(cli_run, a_program_that_ends_within_its_first_step)
{
    static const char program[] =
        "-- sh -c 'printf \"begun 0\" >&${REBATCH_REPORT_FD%%:*}; exit 7'";
    cli_expect_refused("", "run", program, 7,
                       "rebatch: sh ended with status 7 within its first step\n");
    char check[160];
    (void)snprintf(check, sizeof check, "--check %s", program);
    cli_expect_refused(
        "", "run", check, 7,
        "rebatch: sh ended with status 7 within its first step, which was being checked\n");
}

Test(cli_run, every_exit_status_is_in_the_help)
{
    AUTO_DONE(r) = cli_run("", "--help", "");
    cr_assert(strstr(r.out, "3 nothing fits, 4 mistakes\n"), "%s", r.out);
}

Test(cli_run, help)
{
    AUTO_DONE(r) = cli_run("", "run", "--help");
    AUTO_DONE(topic) = cli_run("", "help", "run");
    cr_assert_eq(r.code, 0);
    cr_assert(topic.code == 0 && strcmp(topic.out, r.out) == 0, "%s", topic.error);
    cr_assert(strstr(r.out, "usage: rebatch run [OPTION]... -- PROGRAM [ARGUMENT]...\n"), "%s",
              r.out);
}

/* ---- checks ---- */

Test(cli_run, a_check_of_the_reference_model_finds_nothing)
{
    AUTO_DONE(r) = run("--check", cli_gpt, "--preset tiny --data text --batch 16 --lighten 3");
    cr_expect_eq(r.code, 0, "%s%s", r.out, r.error);
    cr_expect(strncmp(r.out, "no mistakes: ", 13) == 0, "%s%s", r.out, r.error);
    cr_expect_str_eq(r.error, "");
}

Test(cli_run, a_check_says_what_it_compared)
{
    AUTO_DONE(r) = run("--check", cli_minimal, "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strncmp(r.out, "no mistakes: ", 13) == 0, "%s", r.out);
    cr_assert(strstr(r.out, ", compared 1 name, "), "%s", r.out);
    done(&r);
    r = cli_run("REBATCH_CHECK=yes", "run", "-- true");
    cr_assert_eq(r.code, 2);
    cr_assert(strstr(r.error, "REBATCH_CHECK is \"yes\": expected 1, or 0 for no check"), "%s",
              r.error);
}
