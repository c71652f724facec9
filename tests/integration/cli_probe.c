/* Owns the tests of `rebatch probe`: the table, the object, the progress, exit codes and bad input.
 * Must not know the library's inside: it runs the program that REBATCH_COMMAND names. */
#include <criterion/criterion.h>
#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_common.h"
#include "rebatch/rebatch.h"
#include "unit/config_files.h"

TestSuite(cli_probe, .init = cli_enter, .fini = config_leave);

static struct run run(const char *arguments)
{
    return cli_run("", "probe", arguments);
}

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
    struct run r = run(CAPPED " --json");
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
    done(&r);
}

Test(cli_probe, the_table_says_the_same)
{
    struct run object = run(CAPPED " --json"), table = run(CAPPED);
    char words[128];
    cr_assert_eq(table.code, 0, "%s", table.error);
    const unsigned long long size = number(object.out, "size");
    (void)snprintf(words, sizeof words, "largest micro-batch: %llu, in %llu accumulation steps",
                   size, (16 + size - 1) / size);
    cr_assert(strstr(table.out, words), "%s\ndoes not say: %s", table.out, words);
    (void)snprintf(words, sizeof words, "twice that, %llu, needs ", 2 * size);
    cr_assert(strstr(table.out, words), "%s", table.out);
    cr_assert(strstr(table.out, " more than there is\n"), "%s", table.out);
    cr_assert(strstr(table.out, "device  host, 4.00 MiB; 4.00 MiB for the pool\n"), "%s",
              table.out);
    cr_assert(strstr(table.out,
                     "model   2 layers x 64 channels, 2 heads, 32 tokens a sample, fp32; "
                     "batch of 16\n"),
              "%s", table.out);
    cr_assert(strstr(table.out, "]  largest\n") && strstr(table.out, ">  does not fit\n"), "%s",
              table.out);
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
    done(&object);
    done(&table);
}

Test(cli_probe, everything_fits_without_a_cap)
{
    struct run r = run("--preset tiny --batch 8 --json");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    cr_assert_eq(number(r.out, "size"), 8);
    cr_assert_eq(number(r.out, "ooms"), 0);
    done(&r);
    r = run("--preset tiny --batch 1"); /* one size has run: nothing can be predicted */
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_assert(strstr(r.out, "largest micro-batch: 1, in 1 accumulation step; it ran"), "%s", r.out);
    done(&r);
    r = run("--preset tiny --batch 1 --json");
    expect_object(r.out);
    cr_assert(says(r.out, "predicted_peak_bytes", "null"));
    done(&r);
}

Test(cli_probe, the_shape_of_the_model_is_what_was_asked_for)
{
    struct run small = run(CAPPED " --json");
    struct run large = run(CAPPED " --json --layers 3 --channels 128 --heads 4 --length 16"
                                  " --vocabulary 320 --cap 16MiB");
    cr_assert_eq(large.code, 0, "%s", large.error);
    expect_object(large.out);
    cr_assert_eq(number(large.out, "layers"), 3);
    cr_assert_eq(number(large.out, "channels"), 128);
    cr_assert_eq(number(large.out, "heads"), 4);
    cr_assert_eq(number(large.out, "length"), 16);
    cr_assert_eq(number(large.out, "vocabulary"), 320);
    cr_assert_gt(number(large.out, "measured_peak_bytes"),
                 number(small.out, "measured_peak_bytes"));
    done(&small);
    done(&large);
}

Test(cli_probe, settings_come_from_a_file_and_results_are_kept)
{
    config_write("t.cfg", "device = { capacity = \"4MiB\"; };\n"
                          "batch = { largest = 4; };\n"
                          "probe = { file = \"sizes\"; };\n");
    struct run r = run("--config t.cfg --preset tiny --batch 16 --json");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_object(r.out);
    cr_assert_eq(number(r.out, "size"), 4);
    cr_assert_eq(number(r.out, "device_bytes"), 4 << 20);
    cr_assert(says(r.out, "saved", "\"ABSENT\""));
    done(&r);
    r = run("--config t.cfg --preset tiny --batch 16 --json");
    cr_assert(says(r.out, "saved", "\"HELD\""));
    cr_assert_eq(number(r.out, "saved_size"), 4);
    done(&r);
    r = run("--config t.cfg --preset tiny --batch 16 --layers 1");
    cr_assert(strstr(r.out, "saved: the file has no size for this\n"), "another model: %s", r.out);
    done(&r);
    config_write("sizes", "what is this\n");
    r = run("--config t.cfg --preset tiny --batch 16 --json");
    cr_assert_eq(r.code, 0);
    expect_object(r.out);
    cr_assert(says(r.out, "saved", "\"IGNORED\""));
    cr_assert(strstr(r.error, "sizes has no results of probes in it"), "%s", r.error);
    done(&r);
}

/* ---- nothing fits ---- */

Test(cli_probe, nothing_fits_is_said_with_a_report_and_a_code_of_its_own)
{
    struct run r = run("--preset tiny --batch 16 --cap 2MiB");
    cr_assert_eq(r.code, 3);
    cr_assert_str_eq(r.out, "");
    cr_assert(strstr(r.error, "rebatch: nothing fits: out of memory in forward_backward of the "
                              "smallest micro-batch"),
              "%s", r.error);
    cr_assert(strstr(r.error, "held by: "), "%s", r.error);
    cr_assert(strstr(r.error, "reserve_bytes"), "what is for the update has its name: %s", r.error);
    done(&r);
    r = run("--preset tiny --batch 16 --cap 2MiB --json");
    cr_assert_eq(r.code, 3);
    expect_object(r.out);
    cr_assert(says(r.out, "status", "\"REBATCH_E_EXHAUSTED\""));
    cr_assert_eq(number(r.out, "size"), 0);
    cr_assert_gt(number(r.out, "oom_asked_bytes"), 0);
    cr_assert(says(r.out, "measured_peak_bytes", "null"));
    done(&r);
    r = run("--preset tiny --batch 16 --cap 128KiB --json");
    cr_assert_eq(r.code, 3);
    expect_object(r.out);
    cr_assert(says(r.out, "status", "\"REBATCH_OOM\""));
    cr_assert(strstr(r.error, "rebatch: nothing fits, not even the weights: "), "%s", r.error);
    done(&r);
}

/* ---- bad input ---- */

static void expect_refused(const char *arguments, int code, const char *words)
{
    struct run r = run(arguments);
    cr_expect(r.code == code, "'%s' ends with %d instead of %d", arguments, r.code, code);
    cr_expect(r.out[0] == '\0', "'%s' prints %s", arguments, r.out);
    cr_expect(strstr(r.error, words) != NULL, "'%s' complains\n%s\nnot\n%s", arguments, r.error,
              words);
    done(&r);
}

Test(cli_probe, wrong_usage)
{
    expect_refused("--colour red", 2,
                   "rebatch: there is no option '--colour'; see 'rebatch help probe'\n");
    expect_refused("-xh", 2, "rebatch: there is no option '-x'; see 'rebatch help probe'\n");
    expect_refused("train.cfg", 2, "rebatch: \"train.cfg\" is no option; see 'rebatch help probe'");
    expect_refused("--batch", 2, "rebatch: --batch has no value; see 'rebatch help probe'\n");
    expect_refused("--batch 0", 2, "--batch is \"0\": expected a number from 1 to 4294967295");
    expect_refused("--batch 4294967296", 2, "expected a number from 1 to 4294967295");
    expect_refused("--batch 8x", 2, "--batch is \"8x\"");
    expect_refused("--layers -1", 2, "--layers is \"-1\"");
    expect_refused("--preset huge", 2, "rebatch: preset is \"huge\"");
    expect_refused("--dtype int8", 2, "rebatch: dtype is \"int8\"");
    expect_refused("--channels 100", 2, "100");
    expect_refused("--heads 3", 2, "3");
    expect_refused("--json=1", 2, "rebatch: there is no option '--json=1'");
    expect_refused("--preset tiny --batch 4 --dtype bf16", 2,
                   "rebatch: dtype is bf16: expected fp32 on the host device");
}

Test(cli_probe, settings_that_cannot_be_used)
{
    expect_refused("--config none.cfg", 1, "rebatch: none.cfg cannot be read: No such file");
    config_write("bad.cfg", "memory = { limt = \"22GiB\"; };\n");
    expect_refused("--config bad.cfg", 1,
                   "rebatch: bad.cfg:1: memory.limt is not a setting; did you mean memory.limit?");
    expect_refused("--cap much", 1,
                   "rebatch: REBATCH_DEVICE_CAPACITY: device.capacity is \"much\"");
    config_write("cuda.cfg", "device = { kind = \"cuda\"; ordinal = 9999; };\n");
    expect_refused("--config cuda.cfg", 1, "rebatch: ");
}

Test(cli_probe, the_object_says_what_failed)
{
    struct run r = run("--cap much --json");
    cr_assert_eq(r.code, 1);
    cr_assert(strstr(r.out, "\"status\":\"REBATCH_E_PARSE\",\"error\":\"REBATCH_DEVICE_CAPACITY: "),
              "%s", r.out);
    const char *end = skip_value(r.out);
    cr_assert(end && strcmp(end, "\n") == 0, "%s", r.out);
    done(&r);
}

Test(cli_probe, help)
{
    struct run r = run("--help");
    struct run brief = run("-h");
    cr_assert_eq(r.code, 0);
    cr_assert(brief.code == 0 && strcmp(brief.out, r.out) == 0, "%s", brief.error);
    done(&brief);
    cr_assert(strstr(r.out, "usage: rebatch probe [OPTION]...\n"), "%s", r.out);
    cr_assert(strstr(r.out, "3 nothing fits"), "%s", r.out);
    done(&r);
}

Test(cli_probe, a_full_disk)
{
    struct run r = run("--preset tiny --batch 4 --json >/dev/full");
    cr_expect_eq(r.code, 1);
    cr_expect(strstr(r.error, "rebatch: cannot write the output"), "%s", r.error);
    done(&r);
}

/* ---- a terminal ---- */

/* Runs it with its complaints on a terminal, and reads what is drawn there. */
static void watch(char *drawn, size_t room, const char *arguments)
{
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0) /* in a root without /dev/pts */
        cr_skip_test("there is no terminal to be had here");
    cr_assert(grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "exec >out 2>%s; exec '%s' probe %s", ptsname(terminal),
                   cli_command, arguments);
    const int held = open(ptsname(terminal), O_RDWR | O_NOCTTY); /* so that nothing is lost */
    const int status = system(line);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    /* A terminal hands on in order what is written, but later: up to a last word of ours. */
    static const char last[] = "(the end)";
    cr_assert_eq(write(held, last, sizeof last - 1), (ssize_t)sizeof last - 1);
    size_t length = 0;
    char *end = NULL;
    while (!end) {
        const ssize_t got = read(terminal, drawn + length, room - 1 - length);
        cr_assert_gt(got, 0, "%zu bytes were read and the end is not there", length);
        length += (size_t)got;
        drawn[length] = '\0';
        end = strstr(drawn, last);
    }
    *end = '\0';
    close(held);
    close(terminal);
}

Test(cli_probe, on_a_terminal_a_bar_grows_and_goes_away)
{
    static char drawn[16384];
    watch(drawn, sizeof drawn, CAPPED);
    cr_assert(strstr(drawn, "\r\x1b[K[....................] one sample"), "%s", drawn);
    cr_assert(strstr(drawn, "\r\x1b[K[######..............] a probe's trial of 1 sample ran"), "%s",
              drawn);
    cr_assert_null(strchr(drawn, '\n'), "%s", drawn);
    const size_t length = strlen(drawn);
    cr_assert(length > 4 && strcmp(drawn + length - 4, "\r\x1b[K") == 0, "the line is left empty");
}
