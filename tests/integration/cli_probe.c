/* Owns the tests of `rebatch probe`: the table, the object, exit codes and bad input.
 * Must not know the library's inside: the reference model is the user's program here. */
#include <criterion/criterion.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"
#include "rebatch/rebatch.h"
#include "unit/config_files.h"

/* `rebatch probe OPTIONS -- gpt ARGUMENTS`, of which a part may be a redirection. */
static struct run probe_gpt(const char *options, const char *arguments)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s -- '%s' --data text %s", options, cli_gpt, arguments);
    return cli_run("", "probe", line);
}

static struct run probe_minimal(const char *setup, const char *options)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "%s -- '%s'", options, cli_minimal);
    return cli_run(setup, "probe", line);
}

TestSuite(cli_probe, .init = cli_enter_with_text, .fini = config_leave);

/* ---- a reader of JSON, strict as RFC 8259 ---- */

static const char *skip_value(const char *at);

static const char *skip_string(const char *at)
{
    if (!at || *at != '"')
        return NULL;
    for (at++; *at && *at != '"'; at++) {
        if ((unsigned char)*at < ' ' || (*at == '\\' && !strchr("\"\\/bfnrtu", *++at)))
            return NULL;
    }
    return *at == '"' ? at + 1 : NULL;
}

/* Members or elements up to `end`. */
static const char *skip_list(const char *at, char end)
{
    if (*++at == end)
        return at + 1;
    for (;;) {
        if (end == '}') {
            at = skip_string(at);
            if (!at || *at++ != ':')
                return NULL;
        }
        at = skip_value(at);
        if (!at || (*at != ',' && *at != end))
            return NULL;
        if (*at++ == end)
            return at;
    }
}

static const char *skip_number(const char *at)
{
    const char *first = at += *at == '-';
    while (isdigit((unsigned char)*at))
        at++;
    if (at == first || (*first == '0' && at > first + 1))
        return NULL;
    if (*at == '.')
        for (first = ++at; isdigit((unsigned char)*at);)
            at++;
    return at == first ? NULL : at;
}

static const char *skip_value(const char *at)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < 3; i++)
        if (strncmp(at, words[i], strlen(words[i])) == 0)
            return at + strlen(words[i]);
    return *at == '{'   ? skip_list(at, '}')
           : *at == '[' ? skip_list(at, ']')
           : *at == '"' ? skip_string(at)
                        : skip_number(at);
}

/* One object and the end of its line. */
static void expect_object(const char *text)
{
    const char *end = text[0] == '{' ? skip_value(text) : NULL;
    cr_assert(end && strcmp(end, "\n") == 0, "no object: %s", text);
}

/* The value of the first member of that name from `at` on. */
static const char *member(const char *at, const char *name)
{
    char quoted[64];
    (void)snprintf(quoted, sizeof quoted, "\"%s\":", name);
    at = strstr(at, quoted);
    cr_assert_not_null(at, "%s", name);
    return at + strlen(quoted);
}

static unsigned long long number(const char *at, const char *name)
{
    at = member(at, name);
    cr_assert(isdigit((unsigned char)*at), "%s is %.20s", name, at);
    return strtoull(at, NULL, 10);
}

static bool says(const char *at, const char *name, const char *value)
{
    return strncmp(member(at, name), value, strlen(value)) == 0;
}

/* ---- what is found ---- */

#define CAPPED "--preset tiny --batch 16 --cap 4MiB"

Test(cli_probe, the_object_says_what_every_size_needs)
{
    AUTO_DONE(r) = probe_gpt("--json", CAPPED);
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert_str_eq(r.error, "");
    expect_object(r.out);
    cr_assert(says(r.out, "status", "\"REBATCH_OK\""));
    const unsigned long long size = number(r.out, "size"), limit = number(r.out, "limit_bytes");
    cr_assert_eq(limit, 4 << 20);
    cr_assert_eq(number(r.out, "batch"), 16);
    cr_assert_eq(number(r.out, "twice"), 2 * size);
    cr_assert(size > 1 && size < 16);
    unsigned long long before = 0, before_bytes = 0, rows = 0, ran = 0;
    const char *row = member(r.out, "sizes");
    while ((row = strstr(row + 1, "{\"size\":")) != NULL) {
        const unsigned long long this = number(row, "size");
        const unsigned long long bytes = number(row, "predicted_peak_bytes");
        cr_assert_gt(this, before);
        cr_assert_gt(bytes, before_bytes);
        cr_assert_eq(says(row, "fits", "true"), this <= size, "%llu", this);
        cr_assert_eq(number(row, "steps"), (16 + this - 1) / this);
        if (says(row, "ran", "true")) {
            const double measured = (double)number(row, "measured_peak_bytes");
            cr_assert(fabs((double)bytes - measured) <= 0.01 * measured, "%llu: %llu, %.0f", this,
                      bytes, measured);
            ran++;
        }
        if (this == size)
            cr_assert_leq(number(row, "reserved_bytes"), limit);
        if (this > size)
            cr_assert_gt(number(row, "failing_bytes"), 0);
        before = this;
        before_bytes = bytes;
        rows++;
    }
    cr_assert_eq(before, 2 * size > 16 ? 2 * size : 16);
    cr_assert_geq(rows, 5);
    cr_assert_eq(ran + number(r.out, "ooms"), number(r.out, "trials"));
}

Test(cli_probe, the_table_says_the_same)
{
    AUTO_DONE(object) = probe_gpt("--json", CAPPED), table = probe_gpt("", CAPPED);
    char words[128];
    cr_assert_eq(table.code, 0, "%s", table.error);
    const unsigned long long size = number(object.out, "size");
    (void)snprintf(words, sizeof words, "largest micro-batch: %llu, in %llu accumulation steps",
                   size, (16 + size - 1) / size);
    cr_assert(strstr(table.out, words), "%s\ndoes not say: %s", table.out, words);
    (void)snprintf(words, sizeof words, "\n%11llu  ", 2 * size);
    const char *const twice = strstr(table.out, words);
    cr_assert(twice && strstr(twice, "  does not fit\n") < strchr(twice + 1, '\n'), "%s",
              table.out);
    cr_assert(strstr(table.out, "device  host, 4.00 MiB; 4.00 MiB for the pool\n"), "%s",
              table.out);
    cr_assert(strncmp(table.out, "batch   16 samples\n", 19) == 0, "%s", table.out);
    cr_assert(strstr(table.out, "iB  largest\n") && strstr(table.out, " -"), "%s", table.out);
    for (const char *line = table.out; *line;) { /* fits a terminal */
        const size_t length = strcspn(line, "\n");
        cr_assert_leq(length, 110);
        cr_assert(length == 0 || line[length - 1] != ' ');
        line += length + 1;
    }
    /* Where nobody looks at a terminal, trials are lines. */
    cr_assert(strstr(table.error, "rebatch: a probe's trial of 1 sample ran, at most "), "%s",
              table.error);
    cr_assert(!strchr(table.error, '\r') && !strchr(table.error, '\x1b'));
}

Test(cli_probe, everything_fits_without_a_cap)
{
    AUTO_DONE(r) = probe_gpt("--json", "--preset tiny --batch 8");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    cr_assert_eq(number(r.out, "size"), 8);
    cr_assert_eq(number(r.out, "ooms"), 0);
    done(&r);
    r = probe_gpt("", "--preset tiny --batch 1"); /* one size runs: nothing can be predicted */
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strncmp(r.out, "batch   1 sample\n", 17) == 0, "%s", r.out);
    cr_assert(strstr(r.out, "largest micro-batch: 1, in 1 accumulation step; it ran"), "%s", r.out);
    done(&r);
    r = probe_gpt("--json", "--preset tiny --batch 1");
    expect_object(r.out);
    cr_assert(says(r.out, "predicted_peak_bytes", "null"));
}

/* A program that does not probe itself has had its first update then: what that keeps counts. */
Test(cli_probe, what_the_first_update_keeps_counts_without_being_told)
{
    AUTO_DONE(untold) = probe_gpt("--json", CAPPED), told = probe_gpt("--json", CAPPED " --probe");
    cr_assert(untold.code == 0 && told.code == 0, "%s%s", untold.error, told.error);
    cr_assert_eq(number(untold.out, "size"), number(told.out, "size"));
    const double a = (double)number(untold.out, "predicted_peak_bytes");
    const double b = (double)number(told.out, "predicted_peak_bytes");
    cr_assert(fabs(a - b) <= 0.01 * b, "%.0f, %.0f", a, b);
}

/* Steps begin with as much as was found, and one more does not run. */
Test(cli_probe, what_is_found_is_what_steps_then_run_with)
{
    char line[256];
    AUTO_DONE(r) = probe_gpt("--json", CAPPED);
    const unsigned long long size = number(r.out, "size");
    for (unsigned long long micro = size; micro <= size + 1; micro++) {
        (void)snprintf(line, sizeof line, "--data text --steps 3 " CAPPED " --micro %llu", micro);
        AUTO_DONE(steps) = cli_run_program(cli_gpt, line);
        cr_assert_eq(steps.code, 0, "%s", steps.error);
        cr_assert_eq(strstr(steps.out, "out of memory") == NULL, micro == size, "%llu: %s", micro,
                     steps.out);
    }
}

/* The session has no options: neither a limit nor somebody to tell. */
Test(cli_probe, a_session_without_options_is_probed_and_capped)
{
    AUTO_DONE(r) = probe_minimal("", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strstr(r.out, "largest micro-batch: 24, in 3 accumulation steps"), "%s", r.out);
    cr_assert(strstr(r.out, "device  host, 24.0 MiB; 24.0 MiB for the pool\n"), "%s", r.out);
    cr_assert(!strstr(r.error, "step 0"), "nothing was trained: %s", r.error);
    done(&r);
    r = probe_minimal("", "--limit 10MiB");
    cr_assert(strstr(r.out, "largest micro-batch: 10, in 7 accumulation steps"), "%s", r.out);
    done(&r);
    r = probe_minimal("", "--limit 50%");
    cr_assert(strstr(r.out, "largest micro-batch: 12, in 6 accumulation steps"), "%s", r.out);
}

/* What the program prints does not come between. */
Test(cli_probe, standard_output_has_the_result_alone)
{
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "--json -- sh -c 'echo begins; exec \"$0\"' '%s'",
                   cli_minimal);
    AUTO_DONE(r) = cli_run("", "probe", line);
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    cr_assert_str_eq(r.error, "begins\n");
}

/* One that lives on, here a shell, is not waited for. */
Test(cli_probe, the_program_ends_there)
{
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "-- sh -c '\"$0\"; exec sleep 600' '%s'", cli_minimal);
    AUTO_DONE(r) = cli_run("", "probe", line);
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strstr(r.out, "largest micro-batch: 24"), "%s", r.out);
}

Test(cli_probe, without_the_command)
{
    static char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "REBATCH_PROBE_ONLY=1 exec '%s'; true", cli_minimal);
    AUTO_DONE(r) = cli_run(line, "", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strstr(r.out, "largest micro-batch: 24"), "%s", r.out);
    cr_assert_str_eq(r.error, "");
    done(&r);
    (void)snprintf(line, sizeof line, "REBATCH_PROBE_ONLY=json exec '%s'; true", cli_minimal);
    r = cli_run(line, "", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    done(&r);
    (void)snprintf(line, sizeof line,
                   "REBATCH_MEMORY_LIMIT=512KiB REBATCH_PROBE_ONLY=1 exec '%s'; true", cli_minimal);
    r = cli_run(line, "", "");
    cr_assert_eq(r.code, 3);
    cr_assert_str_eq(r.out, "");
    cr_assert(strstr(r.error, "rebatch: nothing fits: "), "%s", r.error);
    done(&r);
    (void)snprintf(line, sizeof line, "REBATCH_PROBE_ONLY=1 exec '%s' >/dev/full; true",
                   cli_minimal);
    r = cli_run(line, "", "");
    cr_assert_eq(r.code, 1);
    cr_assert_str_eq(r.error, "rebatch: cannot write the output\n");
    done(&r);
    (void)snprintf(line, sizeof line, "REBATCH_PROBE_ONLY=0 exec '%s'; true", cli_minimal);
    r = cli_run(line, "", "");
    cr_assert(r.code == 0 && strstr(r.out, "step 7: "), "%s", r.out);
    done(&r);
    (void)snprintf(line, sizeof line, "REBATCH_PROBE_ONLY=yes exec '%s'; true", cli_minimal);
    r = cli_run(line, "", "");
    cr_assert_eq(r.code, 1);
    cr_assert_str_eq(r.error,
                     "REBATCH_PROBE_ONLY is \"yes\": expected 1, json, or 0 for no probe\n");
}

/* The program's own options of a probe hold. */
Test(cli_probe, a_file_of_results_is_the_programs)
{
    config_write("t.cfg", "device = { capacity = \"4MiB\"; };\n"
                          "batch = { largest = 4; };\n"
                          "probe = { file = \"sizes\"; };\n");
    AUTO_DONE(r) = probe_gpt("--json", "--config t.cfg --preset tiny --batch 16");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    cr_assert_eq(number(r.out, "size"), 4);
    cr_assert_eq(number(r.out, "device_bytes"), 4 << 20);
    cr_assert(says(r.out, "saved", "\"ABSENT\""));
    done(&r);
    r = probe_gpt("--json", "--config t.cfg --preset tiny --batch 16");
    cr_assert(says(r.out, "saved", "\"HELD\""));
    cr_assert_eq(number(r.out, "saved_size"), 4);
    done(&r);
    config_write("sizes", "what is this\n");
    r = probe_gpt("--json", "--config t.cfg --preset tiny --batch 16");
    cr_assert_eq(r.code, 0);
    expect_object(r.out);
    cr_assert(says(r.out, "saved", "\"IGNORED\""));
    cr_assert(strstr(r.error, "sizes has no results of probes in it"), "%s", r.error);
}

/* ---- nothing fits ---- */

Test(cli_probe, nothing_fits_is_said_with_a_report_and_a_code_of_its_own)
{
    AUTO_DONE(r) = probe_gpt("", "--preset tiny --batch 16 --cap 2MiB --probe");
    cr_assert_eq(r.code, 3, "%s", r.error);
    cr_assert_str_eq(r.out, "");
    cr_assert(
        strstr(
            r.error,
            "rebatch: nothing fits: out of memory in forward_backward of the smallest micro-batch"),
        "%s", r.error);
    cr_assert(strstr(r.error, "held by: "), "%s", r.error);
    done(&r);
    r = probe_gpt("", "--preset tiny --batch 16 --cap 1500KiB");
    cr_assert_eq(r.code, 3, "%s", r.error);
    cr_assert(strstr(r.error, "rebatch: nothing fits: out of memory in optimizer_step after a "
                              "micro-batch of 1 sample: free memory, or raise the limit\n"),
              "%s", r.error);
    done(&r);
    r = probe_gpt("--json", "--preset tiny --batch 16 --cap 1500KiB");
    cr_assert_eq(r.code, 3);
    expect_object(r.out);
    cr_assert(says(r.out, "status", "\"REBATCH_E_EXHAUSTED\""));
    cr_assert_eq(number(r.out, "size"), 0);
    cr_assert_gt(number(r.out, "oom_asked_bytes"), 0);
    cr_assert(says(r.out, "measured_peak_bytes", "null"));
}

/* ---- bad input ---- */

static void expect_refused(const char *arguments, int code, const char *words)
{
    cli_expect_refused("", "probe", arguments, code, words);
}

Test(cli_probe, wrong_usage)
{
    expect_refused("--colour red -- true", 2,
                   "rebatch: there is no option '--colour'; see 'rebatch help probe'\n");
    expect_refused("-xh -- true", 2,
                   "rebatch: there is no option '-x'; see 'rebatch help probe'\n");
    expect_refused("true", 2,
                   "rebatch: \"true\" is not an option: expected \"--\" before the program; see "
                   "'rebatch help probe'\n");
    expect_refused("--json", 2,
                   "rebatch: there is no program: expected \"-- PROGRAM [ARGUMENT]...\"; see "
                   "'rebatch help probe'\n");
    expect_refused("--", 2,
                   "rebatch: there is no program after \"--\"; see 'rebatch help probe'\n");
    expect_refused("--limit", 2, "rebatch: --limit has no value; see 'rebatch help probe'\n");
    expect_refused("--json=1 -- true", 2,
                   "rebatch: --json=1 has a value: expected none; see 'rebatch help probe'\n");
    expect_refused(
        "--limit much -- true", 2,
        "rebatch: --limit: memory.limit is \"much\", not a size: expected bytes such "
        "as 1048576 or \"22GiB\", a share such as \"90%\" of the device's memory, or \"none\"\n");
}

Test(cli_probe, a_program_that_does_not_probe)
{
    cli_expect_programs_refused("", "probe", 1, "", "");
    expect_refused("-- sh -c 'kill -9 $$'", 1,
                   "rebatch: sh was ended by signal 9 (Killed) before its first rebatch_step()\n");
}

Test(cli_probe, help)
{
    AUTO_DONE(r) = cli_run("", "probe", "--help");
    struct run brief = cli_run("", "probe", "-h");
    cr_assert_eq(r.code, 0);
    cr_assert(brief.code == 0 && strcmp(brief.out, r.out) == 0, "%s", brief.error);
    done(&brief);
    cr_assert(strstr(r.out, "usage: rebatch probe [OPTION]... -- PROGRAM [ARGUMENT]...\n"), "%s",
              r.out);
    cr_assert(strstr(r.out, "3 nothing fits"), "%s", r.out);
}

Test(cli_probe, a_full_disk)
{
    AUTO_DONE(r) = probe_gpt("--json", "--preset tiny --batch 4 >/dev/full");
    cr_expect_eq(r.code, 1);
    cr_expect(strstr(r.error, "rebatch: cannot write the output"), "%s", r.error);
}
