/* Owns the tests of the replay of traces (bench/replay): its figures and its messages.
 * Must not know the library's inside: it runs the program that REBATCH_REPLAY names. The one trace
 * that chance made has seed 12. */
#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_common.h"
#include "unit/config_files.h"

#define MIB ((size_t)1 << 20)

/* Sets a variable for the shell to a folder of the sources. */
static void name_folder(const char *variable, const char *folder)
{
    const char *source = getenv("REBATCH_SOURCE_DIR");
    char path[PATH_MAX], absolute[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s/%s", source ? source : ".", folder);
    cr_assert(realpath(path, absolute) != NULL, "%s is not there", path);
    cr_assert(setenv(variable, absolute, 1) == 0);
}

static void enter(void)
{
    name_folder("T", "tests/data/traces");
    name_folder("B", "bench/traces");
    cli_enter();
}

TestSuite(replay, .init = enter, .fini = config_leave);

/* ---- running ---- */

/* With what a shell makes of the arguments: $T and $B are the folders of traces. A later --repeat
 * is the one that counts. */
static struct run run(const char *arguments)
{
    char line[2 * PATH_MAX];
    (void)snprintf(line, sizeof line, "--repeat 1 %s", arguments);
    return cli_run_program(cli_replay, line);
}

static void expect_error(const char *arguments, int code, const char *error)
{
    AUTO_DONE(r) = run(arguments);
    cr_expect(r.code == code, "'%s' ends with %d instead of %d", arguments, r.code, code);
    cr_expect(r.out[0] == '\0', "'%s' prints\n%s", arguments, r.out);
    cr_expect(strstr(r.error, error), "'%s' complains\n%s\ninstead of\n%s", arguments, r.error,
              error);
}

/* What it prints with --json: numbers and nulls. */
struct object {
    char text[2048];
};

/* NAN: null. */
static double number(const struct object *object, const char *key)
{
    char name[64];
    const int length = snprintf(name, sizeof name, "\"%s\": ", key);
    const char *at = strstr(object->text, name);
    cr_assert(at != NULL, "there is no %s", key);
    return strncmp(at + length, "null", 4) == 0 ? NAN : strtod(at + length, NULL);
}

/* The one object of a run that must succeed. */
static struct object run_json(const char *arguments)
{
    char line[PATH_MAX];
    (void)snprintf(line, sizeof line, "--json %s", arguments);
    struct run r = run(line);
    cr_assert(r.code == 0, "'%s' ends with %d: %s", line, r.code, r.error);
    cr_expect(r.error[0] == '\0', "'%s' complains: %s", line, r.error);
    struct object object;
    const int length = snprintf(object.text, sizeof object.text, "%s", r.out);
    cr_assert(length > 2 && (size_t)length < sizeof object.text);
    cr_expect(strcmp(object.text + length - 2, "}\n") == 0 && object.text[0] == '{', "%s", r.out);
    done(&r);
    return object;
}

/* ---- figures ---- */

static void check_tiny(const struct object *o)
{
    cr_expect(number(o, "allocations") == 3);
    cr_expect(number(o, "peak_requested_bytes") == 6291456);
    cr_expect(number(o, "peak_live_bytes") == 6291456);
    cr_expect(number(o, "pool_peak_live_bytes") == 6291456);
    cr_expect(number(o, "peak_reserved_bytes") == 6291456);
    cr_expect(number(o, "utilisation") == 1);
    cr_expect(number(o, "pytorch_utilisation") == 0.75);
    cr_expect(number(o, "largest_hole_bytes") == 0);
    cr_expect(number(o, "ns_per_pair") > 0);
    cr_expect(number(o, "device_calls") >= 2, "two pieces of memory came from the device");
    cr_expect(number(o, "driver_creates") >= 1 &&
              number(o, "driver_creates") == number(o, "driver_maps"));
    cr_expect(number(o, "driver_ns") > 0, "each call of a device without memory has a price");
    cr_expect(number(o, "warm_driver_ns") == 0, "the memory is there when the trace runs again");
}

Test(replay, figures_of_a_known_trace)
{
    const struct object plain = run_json("$T/tiny.trace");
    check_tiny(&plain);
    cr_expect(!strstr(plain.text, "smallest_capacity_bytes"), "nobody asked for it");
    const struct object packed = run_json("--smallest $T/tiny.trace.gz");
    check_tiny(&packed);
    cr_expect(number(&packed, "smallest_capacity_bytes") == 6291456);
    cr_expect(number(&packed, "smallest_to_live") == 1);
    cr_expect(strstr(packed.text, "/tiny.trace.gz\", "));
}

Test(replay, sizes_round_up_to_units)
{
    config_write("t", "a 0 1 0\na 1 513 0\nf 0\nf 1\n");
    const struct object o = run_json("t");
    cr_expect(number(&o, "peak_requested_bytes") == 514);
    cr_expect(number(&o, "peak_live_bytes") == 1536);
    cr_expect(number(&o, "pool_peak_live_bytes") == 1536);
    const double reserved = number(&o, "peak_reserved_bytes");
    cr_expect(reserved >= 1536);
    cr_expect(fabs(number(&o, "utilisation") - 1536 / reserved) < 1e-6);
    cr_expect(isnan(number(&o, "pytorch_utilisation")), "the trace does not say it: null");
}

Test(replay, the_hole_is_what_could_be_allocated_at_the_peak)
{
    config_write("t", "a 0 1024 0\n");
    const struct object o = run_json("--capacity 2MiB t");
    const size_t hole = (size_t)number(&o, "largest_hole_bytes");
    cr_expect(hole >= MIB && hole <= 2 * MIB - 1024, "of the one page: %zu", hole);
    char text[128];
    for (size_t more = 0; more <= 512; more += 512) {
        (void)snprintf(text, sizeof text, "a 0 1024 0\na 1 %zu 0\n", hole + more);
        config_write("t", text);
        AUTO_DONE(r) = run("--capacity 2MiB t");
        cr_expect(r.code == (more == 0 ? 0 : 1), "%zu more than the hole: %s", more, r.error);
    }
    const struct object full = run_json("$T/tiny.trace");
    cr_expect(number(&full, "largest_hole_bytes") == 0);

    /* Holes of half a page between blocks that stay: they do not make one. */
    char comb[512] = "";
    for (int i = 0; i < 8; i++)
        (void)snprintf(comb + strlen(comb), sizeof comb - strlen(comb), "a %d 524288 0\n", i);
    (void)strcat(comb, "f 1\nf 3\nf 5\nf 7\na 8 3145728 0\n");
    config_write("t", comb);
    const struct object combed = run_json("t");
    cr_expect(number(&combed, "largest_hole_bytes") <
                  number(&combed, "peak_reserved_bytes") - number(&combed, "peak_live_bytes"),
              "nothing beyond what is reserved is had");
}

Test(replay, streams_and_ids_that_come_again)
{
    const struct object o = run_json("--smallest --capacity 64MiB $T/streams.trace");
    cr_expect(number(&o, "allocations") == 4);
    cr_expect(number(&o, "peak_live_bytes") == 2097152);
    cr_expect(number(&o, "smallest_capacity_bytes") == 2097152);
}

Test(replay, a_file_as_people_write_it)
{
    config_write("t", "\n  # a comment, then DOS line ends, blanks, and no end of the last line\n"
                      "\ta  1\t4096 0 \r\n   \r\nf 1\r\na 1 0 0\nu 1 3\nf 1\na 2 2097152 0");
    const struct object o = run_json("t");
    cr_expect(number(&o, "allocations") == 3);
    cr_expect(number(&o, "peak_live_bytes") == 2097152);
    config_write("t", "a 1 0 0\n");
    const struct object none = run_json("--smallest t");
    cr_expect(number(&none, "peak_live_bytes") == 0);
    cr_expect(number(&none, "smallest_capacity_bytes") == 2097152, "one page");
    cr_expect(isnan(number(&none, "smallest_to_live")));
}

/* 400 blocks of 1 B to 8 MiB on three streams, most of them freed in any order; seed 12. */
static void write_mixed(const char *name)
{
    char text[16384];
    size_t length = 0;
    uint32_t state = 12;
    unsigned live[400];
    size_t count = 0;
    for (unsigned i = 0; i < 400; i++) {
        state = state * 1664525 + 1013904223;
        const unsigned bytes = (1u << ((state >> 8) % 23)) + (state >> 12) % 4096;
        length += (size_t)snprintf(text + length, sizeof text - length, "a %u %u %u\n", i, bytes,
                                   (state >> 28) % 3);
        live[count++] = i;
        while (count > 0 && (state >> 16) % 100 < count) {
            state = state * 1664525 + 1013904223;
            const size_t k = (state >> 8) % count;
            length += (size_t)snprintf(text + length, sizeof text - length, "f %u\n", live[k]);
            live[k] = live[--count];
        }
    }
    cr_assert(length < sizeof text);
    config_write(name, text);
}

Test(replay, the_same_call_gives_the_same_figures)
{
    write_mixed("t");
    struct object runs[2] = {run_json("--smallest t"), run_json("--smallest --repeat 2 t")};
    cr_expect(number(&runs[0], "allocations") == 400);
    for (int i = 0; i < 2; i++) { /* but for the time */
        char *const time = strstr(runs[i].text, "\"ns_per_pair\": ");
        cr_assert(time != NULL);
        memmove(time, strchr(time, ','), strlen(strchr(time, ',')) + 1);
    }
    cr_expect_str_eq(runs[0].text, runs[1].text);
}

Test(replay, a_recorded_trace)
{
    const struct object o = run_json("$B/resnet50.trace.gz");
    /* What the file's first comment says, and what its lines add up to. */
    cr_expect(fabs(number(&o, "pytorch_utilisation") - 2487157248.0 / 2703228928.0) < 1e-6);
    cr_expect(number(&o, "allocations") == 3537);
    cr_expect(number(&o, "peak_requested_bytes") == 2408323472);
    cr_expect(number(&o, "peak_live_bytes") == 2408366592);
    cr_expect(number(&o, "pool_peak_live_bytes") == 2408366592);
    cr_expect(number(&o, "peak_reserved_bytes") >= 2408366592);
}

/* ---- the smallest capacity ---- */

static void check_smallest(const char *trace, size_t page_bytes)
{
    char line[PATH_MAX];
    (void)snprintf(line, sizeof line, "--smallest --page %zu %s", page_bytes, trace);
    const struct object o = run_json(line);
    const size_t smallest = (size_t)number(&o, "smallest_capacity_bytes");
    cr_expect(smallest % page_bytes == 0);
    cr_expect((double)smallest >= number(&o, "peak_live_bytes"));

    (void)snprintf(line, sizeof line, "--capacity %zu --page %zu %s", smallest, page_bytes, trace);
    AUTO_DONE(r) = run(line);
    cr_expect(r.code == 0, "'%s' must run: %s", line, r.error);
    done(&r);
    if (smallest == page_bytes)
        return; /* there is no smaller device */
    (void)snprintf(line, sizeof line, "--capacity %zu --page %zu %s", smallest - page_bytes,
                   page_bytes, trace);
    r = run(line);
    cr_expect(r.code == 1, "'%s' must not run", line);
    cr_expect(strstr(r.error, "the trace runs out of memory") != NULL, "%s", r.error);
}

Test(replay, smallest_is_the_smallest)
{
    config_write("holes", "a 0 3000000 0\na 1 5000000 0\na 2 3000000 1\nf 1\na 3 1000000 0\n"
                          "a 4 7000000 1\nf 0\nf 2\na 5 6000000 0\na 6 512 0\n");
    check_smallest("$T/tiny.trace", 2 * MIB);
    check_smallest("$T/streams.trace", 2 * MIB);
    check_smallest("holes", 2 * MIB);
    check_smallest("holes", 65536);
    write_mixed("mixed");
    check_smallest("mixed", 2 * MIB);
}

/* In a page less it runs once, and what that leaves behind keeps it from running again. */
Test(replay, in_the_smallest_a_trace_runs_twice)
{
    config_write("again", "a 0 152312 0\na 1 747315 0\na 2 155819 0\nf 1\na 3 194911 0\n"
                          "a 4 152547 0\na 5 128477 0\nf 5\nf 3\nf 0\nf 4\nf 2\n");
    const struct object o = run_json("--smallest --page 64KiB again");
    const size_t smallest = (size_t)number(&o, "smallest_capacity_bytes");
    char line[PATH_MAX];
    (void)snprintf(line, sizeof line, "--capacity %zu --page 64KiB again", smallest - 65536);
    AUTO_DONE(r) = run(line);
    cr_expect(r.code == 0, "%s", r.error);
    cr_expect(strstr(r.error, "runs once, but not again") != NULL, "%s", r.error);
}

Test(replay, smallest_within_a_given_capacity_and_headroom)
{
    struct object o = run_json("--smallest --headroom 4MiB $T/tiny.trace");
    cr_expect(number(&o, "smallest_capacity_bytes") == 10 * MIB);
    o = run_json("--smallest --capacity 7MiB $T/tiny.trace");
    cr_expect(number(&o, "smallest_capacity_bytes") == 6 * MIB);
}

/* ---- the snapshot ---- */

static size_t count_in(const char *text, const char *word)
{
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at += strlen(word))
        count++;
    return count;
}

/* Of the first peak: 3 and 2 MiB of the blocks are live. Of memory that runs out before: there. */
Test(replay, snapshot_at_the_peak_or_where_memory_runs_out)
{
    config_write("t", "a 1 1048576 0\na 2 3145728 0\nf 1\na 3 2097152 7\nf 2\na 4 1048576 0\n");
    struct run r = run("--snapshot s t");
    cr_assert(r.code == 0 && r.error[0] == '\0', "%s", r.error);
    done(&r);
    char *blocks = config_read("s.csv");
    char *events = config_read("s.events.csv");
    cr_expect(count_in(blocks, ",live,") == 2, "%s", blocks);
    cr_expect(count_in(blocks, ",3145728,3145728,live,") == 1, "%s", blocks);
    cr_expect(count_in(blocks, ",2097152,2097152,live,") == 1, "%s", blocks);
    cr_expect(count_in(events, ",alloc,") == 3 && count_in(events, ",free,") == 1, "%s", events);
    free(blocks);
    free(events);
    expect_error("--capacity 2MiB --snapshot s t", 1, "t:2: the trace runs out of memory");
    events = config_read("s.events.csv");
    cr_expect(count_in(events, ",oom,,3145728,0,\"untagged\",") == 1, "%s", events);
    free(events);
    expect_error("--snapshot none/s t", 1, "none/s.csv cannot be written: No such file");
}

/* ---- settings ---- */

Test(replay, settings_of_the_device_and_the_pool_hold)
{
    static const struct {
        const char *arguments;
        int code;
    } cases[] = {
        {"--capacity 6MiB", 0},
        {"--capacity 6291455", 1},
        {"--limit 6MiB", 0},
        {"--limit 4MiB", 1},
        {"--limit 75% --capacity 8MiB", 0},
        {"--limit 74.9% --capacity 8MiB", 1},
        {"--headroom 2MiB --capacity 8MiB", 0},
        {"--headroom 3MiB --capacity 8MiB", 1},
        {"--caching off --capacity 6MiB", 0},
        {"--replay off --page 1MiB --capacity 6MiB", 0},
        {"--keep-room 100% --rounding 4", 0},
        {"--rounding 12", 1},
        {"--capacity 0", 2},
        {"--repeat 1001", 2},
        {"--page 3000", 2},
        {"--device cuda --smallest", 2},
        {"--nonsense", 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[PATH_MAX];
        (void)snprintf(line, sizeof line, "%s $T/tiny.trace", cases[i].arguments);
        AUTO_DONE(r) = run(line);
        cr_expect(r.code == cases[i].code, "'%s' ends with %d: %s", line, r.code, r.error);
    }
    expect_error("--capacity 12XiB t", 2,
                 "replay: --capacity is '12XiB': expected a size of at least 1 byte such as "
                 "22GiB, 512 MB or 1048576\n");
    expect_error("", 2, "usage: replay [OPTION...] TRACE...; see replay --help\n");
}

/* What the first run needs is the same: a plan is made of runs that repeat. */
Test(replay, replay_changes_no_figure_of_the_first_run)
{
    const struct object as_it_is = run_json("--repeat 9 $B/gpt2.trace.gz");
    const struct object on = run_json("--repeat 9 --replay on $B/gpt2.trace.gz");
    const struct object off = run_json("--repeat 9 --replay off $B/gpt2.trace.gz");
    static const char *const same[] = {"utilisation", "device_calls", "peak_reserved_bytes",
                                       "largest_hole_bytes"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        cr_expect(number(&off, same[i]) > 0, "%s", same[i]);
        cr_expect(number(&off, same[i]) == number(&on, same[i]), "%s", same[i]);
        cr_expect(number(&as_it_is, same[i]) == number(&on, same[i]), "%s", same[i]);
    }
}

/* Where memory is short the plan's layout decides: its memory must fit, and be had. */
Test(replay, in_a_fiftieth_more_than_the_peak_a_warm_pass_maps_nothing)
{
    static const char *const names[] = {"gpt2", "resnet50", "vit-checkpointed", "serving"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char arguments[200];
        (void)snprintf(arguments, sizeof arguments, "--repeat 1 $B/%s.trace.gz", names[i]);
        const struct object unlimited = run_json(arguments);
        const double capacity = number(&unlimited, "peak_live_bytes") * 1.02;
        (void)snprintf(arguments, sizeof arguments, "--repeat 3 --capacity %.0f $B/%s.trace.gz",
                       capacity, names[i]);
        const struct object is_short = run_json(arguments);
        cr_expect(number(&is_short, "warm_driver_ns") == 0, "%s: %.1f ms", names[i],
                  number(&is_short, "warm_driver_ns") / 1e6);
    }
}

Test(replay, out_of_memory_says_where_and_why)
{
    AUTO_DONE(r) = run("--json --capacity 4MiB $T/tiny.trace");
    cr_expect(r.code == 1);
    cr_expect(r.out[0] == '\0', "there is no object of a trace that did not run: %s", r.out);
    cr_expect(strstr(r.error, "/tiny.trace:3: the trace runs out of memory, after 1 of 5 op"), "%s",
              r.error);
    cr_expect(strstr(r.error, "asked for 2.00 MiB") != NULL, "the pool's report follows: %s",
              r.error);
}

/* ---- the table ---- */

Test(replay, the_table)
{
    AUTO_DONE(r) = run("--smallest $T/tiny.trace none.trace $T/tiny.trace.gz");
    cr_expect(r.code == 1, "one of them is not there");
    cr_expect(strcmp(r.error, "none.trace: No such file or directory\n") == 0, "%s", r.error);
    char *rest;
    const char *head = strtok_r(r.out, "\n", &rest);
    const char *first = strtok_r(NULL, "\n", &rest);
    const char *second = strtok_r(NULL, "\n", &rest);
    cr_assert(second != NULL && strtok_r(NULL, "\n", &rest) == NULL, "a head and two rows");
    cr_expect(strlen(head) == strlen(first) && strlen(first) == strlen(second), "columns");
    static const char *const cells[] = {"tiny.trace ", "6.000 MiB", "100.00 %",
                                        " 75.00 %",    " 0 B",      " 1.0000"};
    for (size_t i = 0; i < sizeof cells / sizeof *cells; i++)
        cr_expect(strstr(first, cells[i]) != NULL, "'%s' is not in %s", cells[i], first);
}

/* ---- mistakes ---- */

#define FORMS "expected 'a ID BYTES STREAM', 'f ID', 'u ID STREAM' or '# comment'\n"
#define MOST "expected no more than 549755813888 in all, 262144 pages (--page)\n"

Test(replay, mistakes_in_a_trace)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"# nothing but this\n", ": no allocation in it: expected lines 'a ID BYTES STREAM'\n"},
        {"a 0 512\n", ":1: found 'a 0 512': " FORMS},
        {"a 0 512 0 0\n", ":1: found 'a 0 512 0 0': " FORMS},
        {"a 0 5k 0\n", ":1: found 'a 0 5k 0': " FORMS},
        {"a 0 512 0\nf 0 1\n", ":2: found 'f 0 1': " FORMS},
        {"\n\nx 1\n", ":3: found 'x 1': " FORMS},
        {"a 0 1125899906842624 0\n",
         ":1: BYTES is 1125899906842624 on top of the 0 that are in use: " MOST},
        {"a 0 549755813888 0\na 1 1 0\n",
         ":2: BYTES is 1 on top of the 549755813888 that are in use: " MOST},
        {"a 0 512 0\n# x\na 0 512 0\n",
         ":3: ID 0 is in use since line 1: expected one that is new or was freed\n"},
        {"f 7\n", ":1: ID 7 is unknown: expected one that is in use\n"},
        {"a 7 1 0\nf 7\n\nf 7\n", ":4: ID 7 was freed on line 2: expected one that is in use\n"},
        {"a 7 1 0\nu 8 1\n", ":2: ID 8 is unknown: expected one that is in use\n"},
    };
    /* One run for all: a bad trace does not keep the next one from being looked at. */
    char arguments[1024] = "";
    char errors[8192] = "";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[8];
        (void)snprintf(name, sizeof name, "t%zu", i);
        config_write(name, cases[i].text);
        (void)strcat(strcat(arguments, name), " ");
        (void)strcat(strcat(errors, name), cases[i].error);
    }
    expect_error(arguments, 1, errors);
}

Test(replay, a_comment_may_be_longer_than_a_line)
{
    char text[3000];
    memset(text, '1', sizeof text);
    text[0] = '#';
    memcpy(text + sizeof text - sizeof "\na 0 512 0\n", "\na 0 512 0\n", sizeof "\na 0 512 0\n");
    config_write("t", text);
    const struct object o = run_json("t");
    cr_expect(number(&o, "allocations") == 1);
}

/* IDs that many a table would put into one place: minutes of looking for them. */
Test(replay, ids_that_are_far_apart_are_found)
{
    const char *stride = getenv("REBATCH_TEST_STRIDE");
    const bool is_slow = stride && strcmp(stride, "1") != 0; /* valgrind, a sanitizer, a check */
    const uint64_t ids = is_slow ? 20000 : 300000;
    FILE *file = fopen("t", "w");
    cr_assert(file != NULL);
    for (uint64_t i = 0; i < ids; i++)
        (void)fprintf(file, "a %llu 1 0\n", (unsigned long long)(i << 44));
    cr_assert(fclose(file) == 0);
    const struct object o = run_json("t");
    cr_expect(number(&o, "allocations") == (double)ids);
}

Test(replay, too_many_streams)
{
    char *text = calloc(2000, 32);
    cr_assert(text != NULL);
    size_t length = 0;
    for (int i = 0; i < 2000; i++)
        length += (size_t)sprintf(text + length, "a %d 512 %d\n", i, i);
    config_write("t", text);
    free(text);
    expect_error("t", 1, "t:1025: STREAM is 1024: expected at most 1024 different ones\n");
}

#define A_SIZE "expected a size of at least 1 byte such as 22GiB, 512 MB or 1048576"

Test(replay, files_that_cannot_be_read)
{
    expect_error("none", 1, "none: No such file or directory\n");
    expect_error(".", 1, ".: Is a directory\n");
    expect_error("$T/truncated.trace.gz", 1, "/truncated.trace.gz: the gzip data end too early\n");
    expect_error("$T/damaged.trace.gz", 1, "/damaged.trace.gz: the gzip data are damaged\n");
}
