/* Owns the tests of `rebatch replay`: its figures, its messages and its exit status.
 * Must not know the library's inside: it runs the program that REBATCH_COMMAND names. The one
 * trace that chance made has seed 12. */
#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_common.h"
#include "unit/config_files.h"
#include "unit/pickle_reader.h"

#define MIB ((size_t)1 << 20)
#define FIELDS_MOST 24

static char traces[PATH_MAX]; /* tests/data/traces */
static char bench[PATH_MAX];  /* bench/traces */

static void find_folder(char absolute[PATH_MAX], const char *folder)
{
    const char *source = getenv("REBATCH_SOURCE_DIR");
    char path[PATH_MAX];
    (void)snprintf(path, sizeof path, "%s/%s", source ? source : ".", folder);
    cr_assert(realpath(path, absolute) != NULL, "%s is not there", path);
}

static void enter(void)
{
    find_folder(traces, "tests/data/traces");
    find_folder(bench, "bench/traces");
    cli_enter();
}

TestSuite(cli_replay, .init = enter, .fini = config_leave);

/* ---- running ---- */

/* Runs `rebatch replay --repeat 1` with what a shell makes of the arguments: $T and $B are the
 * folders of traces. A later --repeat is the one that counts. */
static struct run run(const char *arguments)
{
    char setup[2 * PATH_MAX + 16];
    (void)snprintf(setup, sizeof setup, "T='%s'; B='%s';", traces, bench);
    return cli_run(setup, "replay --repeat 1", arguments);
}

static void expect_error(const char *arguments, int code, const char *error)
{
    struct run r = run(arguments);
    cr_expect(r.code == code, "'%s' ends with %d instead of %d", arguments, r.code, code);
    cr_expect(r.out[0] == '\0', "'%s' prints\n%s", arguments, r.out);
    cr_expect(strcmp(r.error, error) == 0, "'%s' complains\n%s\ninstead of\n%s", arguments, r.error,
              error);
    done(&r);
}

/* ---- reading JSON: one object of strings, numbers and nulls, on a line of its own ---- */

struct field {
    char key[40];
    char text[128]; /* of a string */
    double number;  /* NAN: null or a string */
};

struct object {
    struct field fields[FIELDS_MOST];
    size_t count;
};

static void expect_char(const char **at, char c)
{
    cr_assert(**at == c, "expected '%c' before '%.40s'", c, *at);
    (*at)++;
}

static void read_string(const char **at, char *out, size_t size)
{
    size_t length = 0;
    expect_char(at, '"');
    while (**at != '"') {
        char c = *(*at)++;
        cr_assert((unsigned char)c >= ' ', "a bare control character in a string");
        if (c == '\\') {
            c = *(*at)++;
            unsigned code;
            if (c == 'u') {
                cr_assert(sscanf(*at, "%4x", &code) == 1 && code < ' ', "\\u%.4s", *at);
                c = (char)code;
                *at += 4;
            } else {
                cr_assert(c == '"' || c == '\\', "\\%c", c);
            }
        }
        cr_assert(length + 1 < size);
        out[length++] = c;
    }
    out[length] = '\0';
    (*at)++;
}

static void read_value(const char **at, struct field *field)
{
    field->number = NAN;
    if (**at == '"') {
        read_string(at, field->text, sizeof field->text);
        return;
    }
    if (strncmp(*at, "null", 4) == 0) {
        *at += 4;
        return;
    }
    char *end;
    cr_assert((**at >= '0' && **at <= '9') || **at == '-', "no JSON number: %.20s", *at);
    field->number = strtod(*at, &end);
    *at = end;
}

static struct object read_object(const char **at)
{
    static const struct object empty;
    struct object object = empty;
    expect_char(at, '{');
    do {
        if (object.count > 0) {
            expect_char(at, ',');
            expect_char(at, ' ');
        }
        cr_assert(object.count < FIELDS_MOST);
        struct field *field = &object.fields[object.count++];
        read_string(at, field->key, sizeof field->key);
        expect_char(at, ':');
        expect_char(at, ' ');
        read_value(at, field);
    } while (**at == ',');
    expect_char(at, '}');
    expect_char(at, '\n');
    return object;
}

static const struct field *find(const struct object *object, const char *key)
{
    for (size_t i = 0; i < object->count; i++)
        if (strcmp(object->fields[i].key, key) == 0)
            return &object->fields[i];
    return NULL;
}

static double number(const struct object *object, const char *key)
{
    const struct field *field = find(object, key);
    cr_assert(field != NULL, "there is no %s", key);
    return field->number;
}

/* The one object of a run that must succeed. */
static struct object run_json(const char *arguments)
{
    char line[PATH_MAX];
    (void)snprintf(line, sizeof line, "--json %s", arguments);
    struct run r = run(line);
    cr_assert(r.code == 0, "'%s' ends with %d: %s", line, r.code, r.error);
    cr_expect(r.error[0] == '\0', "'%s' complains: %s", line, r.error);
    const char *at = r.out;
    const struct object object = read_object(&at);
    cr_expect(*at == '\0', "more than one object: %s", r.out);
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

Test(cli_replay, figures_of_a_known_trace)
{
    const struct object plain = run_json("$T/tiny.trace");
    check_tiny(&plain);
    cr_expect(find(&plain, "smallest_capacity_bytes") == NULL, "nobody asked for it");
    const struct object packed = run_json("--smallest $T/tiny.trace.gz");
    check_tiny(&packed);
    cr_expect(number(&packed, "smallest_capacity_bytes") == 6291456);
    cr_expect(number(&packed, "smallest_to_live") == 1);
    const char *name = find(&packed, "trace")->text;
    cr_expect(strcmp(name + strlen(name) - strlen("/tiny.trace.gz"), "/tiny.trace.gz") == 0);
}

Test(cli_replay, sizes_round_up_to_units)
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

Test(cli_replay, the_hole_is_what_could_be_allocated_at_the_peak)
{
    config_write("t", "a 0 1024 0\n");
    const struct object o = run_json("--capacity 2MiB t");
    const size_t hole = (size_t)number(&o, "largest_hole_bytes");
    cr_expect(hole >= MIB && hole <= 2 * MIB - 1024, "of the one page: %zu", hole);
    char text[128];
    for (size_t more = 0; more <= 512; more += 512) {
        (void)snprintf(text, sizeof text, "a 0 1024 0\na 1 %zu 0\n", hole + more);
        config_write("t", text);
        struct run r = run("--capacity 2MiB t");
        cr_expect(r.code == (more == 0 ? 0 : 1), "%zu more than the hole: %s", more, r.error);
        done(&r);
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

Test(cli_replay, streams_and_ids_that_come_again)
{
    const struct object o = run_json("--smallest --capacity 64MiB $T/streams.trace");
    cr_expect(number(&o, "allocations") == 4);
    cr_expect(number(&o, "peak_live_bytes") == 2097152);
    cr_expect(number(&o, "smallest_capacity_bytes") == 2097152);
}

Test(cli_replay, a_file_as_people_write_it)
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

Test(cli_replay, the_same_call_gives_the_same_figures)
{
    write_mixed("t");
    const struct object first = run_json("--smallest t");
    const struct object second = run_json("--smallest --repeat 2 t");
    cr_expect(number(&first, "allocations") == 400);
    cr_assert(first.count == second.count);
    for (size_t i = 0; i < first.count; i++) {
        const struct field *a = &first.fields[i];
        const struct field *b = &second.fields[i];
        cr_expect(strcmp(a->key, b->key) == 0);
        cr_expect(strcmp(a->key, "ns_per_pair") == 0 || strcmp(a->text, b->text) == 0);
        cr_expect(strcmp(a->key, "ns_per_pair") == 0 || a->number == b->number ||
                      (isnan(a->number) && isnan(b->number)),
                  "%s: %g and %g", a->key, a->number, b->number);
    }
}

Test(cli_replay, a_recorded_trace)
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
    struct run r = run(line);
    cr_expect(r.code == 0, "'%s' must run: %s", line, r.error);
    done(&r);
    if (smallest == page_bytes)
        return; /* there is no smaller device */
    (void)snprintf(line, sizeof line, "--capacity %zu --page %zu %s", smallest - page_bytes,
                   page_bytes, trace);
    r = run(line);
    cr_expect(r.code == 1, "'%s' must not run", line);
    cr_expect(strstr(r.error, "the trace runs out of memory") != NULL, "%s", r.error);
    done(&r);
}

Test(cli_replay, smallest_is_the_smallest)
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
Test(cli_replay, in_the_smallest_a_trace_runs_twice)
{
    config_write("again", "a 0 152312 0\na 1 747315 0\na 2 155819 0\nf 1\na 3 194911 0\n"
                          "a 4 152547 0\na 5 128477 0\nf 5\nf 3\nf 0\nf 4\nf 2\n");
    const struct object o = run_json("--smallest --page 64KiB again");
    const size_t smallest = (size_t)number(&o, "smallest_capacity_bytes");
    char line[PATH_MAX];
    (void)snprintf(line, sizeof line, "--capacity %zu --page 64KiB again", smallest - 65536);
    struct run r = run(line);
    cr_expect(r.code == 0, "%s", r.error);
    cr_expect(strstr(r.error, "runs once, but not again") != NULL, "%s", r.error);
    done(&r);
}

Test(cli_replay, smallest_within_a_given_capacity_and_headroom)
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

/* The snapshot is of the first peak: 3 and 2 MiB of the blocks are live, and their events there. */
Test(cli_replay, snapshot_at_the_peak_as_tables)
{
    config_write("t", "a 1 1048576 0\na 2 3145728 0\nf 1\na 3 2097152 7\nf 2\na 4 1048576 0\n");
    struct run r = run("--snapshot s.csv t");
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
    r = run("--snapshot s.csv --events 2 t");
    cr_assert(r.code == 0);
    done(&r);
    events = config_read("s.events.csv");
    cr_expect(count_in(events, "\n") == 3, "%s", events);
    free(events);
}

/* Where the trace runs out of memory before its peak, the snapshot is of that moment. */
Test(cli_replay, snapshot_where_memory_runs_out)
{
    config_write("t", "a 1 2097152 0\na 2 4194304 0\na 3 1048576 0\n");
    struct run r = run("--capacity 4MiB --snapshot s.csv t");
    cr_expect(r.code == 1 && strstr(r.error, "t:2: the trace runs out of memory"), "%s", r.error);
    done(&r);
    char *events = config_read("s.events.csv");
    cr_expect(count_in(events, ",oom,,4194304,0,\"untagged\",2097152,") == 1, "%s", events);
    free(events);
    expect_error("--snapshot none/s.pickle $T/tiny.trace", 1,
                 "none/s.pickle cannot be written: No such file or directory\n");
}

Test(cli_replay, snapshot_as_a_pickle)
{
    struct run r = run("--snapshot s.pickle $T/tiny.trace");
    cr_assert(r.code == 0 && r.error[0] == '\0', "%s", r.error);
    done(&r);
    FILE *file = fopen("s.pickle", "rb");
    cr_assert(file != NULL);
    unsigned char bytes[65536];
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    (void)fclose(file);
    cr_assert(size < sizeof bytes);
    const struct pickle_value *segments = pickle_list(pickle_read(bytes, size), "segments");
    int64_t live = 0;
    for (size_t i = 0; i < segments->count; i++)
        live += pickle_number(segments->items[i], "allocated_size");
    cr_expect(live == 6291456);
    pickle_free();
}

/* ---- settings ---- */

Test(cli_replay, settings_of_the_pool_hold)
{
    static const struct {
        const char *arguments;
        bool runs;
    } cases[] = {
        {"--capacity 6MiB", true},
        {"--capacity 6291455", false},
        {"--capacity=6144KiB", true},
        {"--capacity 6.5MB", true},
        {"--capacity 6.2MB", false},
        {"--capacity '0.006 GiB'", true},
        {"--limit 6MiB", true},
        {"--limit 4MiB", false},
        {"--limit 75% --capacity 8MiB", true},
        {"--limit 74.9% --capacity 8MiB", false},
        {"--headroom 2MiB --capacity 8MiB", true},
        {"--headroom 3MiB --capacity 8MiB", false},
        {"--caching off --capacity 6MiB", true},
        {"--caching on --capacity 4MiB", false},
        {"--replay off --capacity 6MiB", true},
        {"--page 1MiB --capacity 6MiB", true},
        {"--capacity 8MiB", true},
        {"--fence on --capacity 6MiB", true},
        {"--fence on --capacity 4MiB", false},
        {"--keep-room 100% --rounding 4", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[PATH_MAX];
        (void)snprintf(line, sizeof line, "%s $T/tiny.trace", cases[i].arguments);
        struct run r = run(line);
        cr_expect(r.code == (cases[i].runs ? 0 : 1), "'%s' ends with %d: %s", line, r.code,
                  r.error);
        done(&r);
    }
}

/* What the first run needs is the same: a plan is made of runs that repeat. */
Test(cli_replay, replay_changes_no_figure_of_the_first_run)
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
Test(cli_replay, in_a_fiftieth_more_than_the_peak_a_warm_pass_maps_nothing)
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

Test(cli_replay, out_of_memory_says_where_and_why)
{
    struct run r = run("--json --capacity 4MiB $T/tiny.trace");
    cr_expect(r.code == 1);
    cr_expect(r.out[0] == '\0', "there is no object of a trace that did not run: %s", r.out);
    char line[PATH_MAX + 100];
    (void)snprintf(line, sizeof line,
                   "%s/tiny.trace:3: the trace runs out of memory, after 1 of 5 operations\n",
                   traces);
    cr_expect(strncmp(r.error, line, strlen(line)) == 0, "%s", r.error);
    cr_expect(strstr(r.error, "asked for 2.00 MiB") != NULL, "the pool's report follows: %s",
              r.error);
    done(&r);
}

/* ---- the table ---- */

Test(cli_replay, the_table)
{
    struct run r = run("--smallest $T/tiny.trace none.trace $T/tiny.trace.gz");
    cr_expect(r.code == 1, "one of them is not there");
    cr_expect(strcmp(r.error, "none.trace: No such file or directory\n") == 0, "%s", r.error);
    char *rest;
    const char *head = strtok_r(r.out, "\n", &rest);
    const char *first = strtok_r(NULL, "\n", &rest);
    const char *second = strtok_r(NULL, "\n", &rest);
    cr_assert(second != NULL && strtok_r(NULL, "\n", &rest) == NULL, "a head and two rows");
    cr_expect(strncmp(head, "trace ", 6) == 0);
    cr_expect(strlen(head) == strlen(first) && strlen(first) == strlen(second), "columns");
    static const char *const headings[] = {
        "requested",    "peak live", "reserved", "utilisation",  "PyTorch",      "ns/pair",
        "device calls", "first ms",  "warm ms",  "largest hole", "smallest/live"};
    for (size_t i = 0; i < sizeof headings / sizeof *headings; i++)
        cr_expect(strstr(head, headings[i]) != NULL, "%s", headings[i]);
    static const char *const cells[] = {"tiny.trace ", "6.000 MiB", "100.00 %",
                                        " 75.00 %",    " 0 B",      " 1.0000"};
    for (size_t i = 0; i < sizeof cells / sizeof *cells; i++)
        cr_expect(strstr(first, cells[i]) != NULL, "'%s' is not in %s", cells[i], first);
    done(&r);
}

Test(cli_replay, json_is_an_object_a_line)
{
    struct run r = run("--json $T/tiny.trace none.trace $T/tiny.trace.gz");
    cr_expect(r.code == 1);
    const char *at = r.out;
    for (int i = 0; i < 2; i++) {
        const struct object o = read_object(&at);
        check_tiny(&o);
    }
    cr_expect(*at == '\0');
    done(&r);
    config_write("a \"b\" \\c\td", "a 0 1 0\n");
    const struct object o = run_json("'a \"b\" \\c\td'");
    cr_expect(strcmp(find(&o, "trace")->text, "a \"b\" \\c\td") == 0);
}

Test(cli_replay, help)
{
    struct run asked = run("--help");
    struct run wrong = run("--help --nonsense");
    cr_expect(asked.code == 0);
    cr_expect(wrong.code == 2);
    struct run brief = run("-h");
    cr_expect(brief.code == 0 && strcmp(brief.out, asked.out) == 0);
    done(&brief);
    static const char *const words[] = {
        "--capacity", "--smallest", "--limit",  "--headroom", "--caching",
        "--replay",   "--page",     "--repeat", "--json",     "peak live / reserved"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        cr_expect(strstr(asked.out, words[i]) != NULL, "%s", words[i]);
    done(&asked);
    done(&wrong);
}

/* ---- mistakes ---- */

#define FORMS "'a ID BYTES STREAM', 'f ID', 'u ID STREAM' or '# comment'"

#define MOST "expected no more than 549755813888 in all, 262144 pages (--page)\n"

Test(cli_replay, mistakes_in_a_trace)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", ": no allocation in it: expected lines 'a ID BYTES STREAM'\n"},
        {"# nothing but this\n", ": no allocation in it: expected lines 'a ID BYTES STREAM'\n"},
        {"a 0 512\n", ":1: found 'a 0 512': expected 'a ID BYTES STREAM'\n"},
        {"a 0 512 0 0\n", ":1: found 'a 0 512 0 0': expected 'a ID BYTES STREAM'\n"},
        {"a 0 512 0\nf\n", ":2: found 'f': expected 'f ID'\n"},
        {"a 0 512 0\nf 0 1\n", ":2: found 'f 0 1': expected 'f ID'\n"},
        {"a 0 512 0\nu 0\n", ":2: found 'u 0': expected 'u ID STREAM'\n"},
        {"\n\nx 1\n", ":3: found 'x 1': expected " FORMS "\n"},
        {"alloc 1 512 0\n", ":1: found 'alloc 1 512 0': expected " FORMS "\n"},
        {"\x1b[2J\xff\n", ":1: found '?[2J?': expected " FORMS "\n"},
        {"a x 512 0\n", ":1: ID is 'x': expected a whole number\n"},
        {"a 0 5k 0\n", ":1: BYTES is '5k': expected a whole number\n"},
        {"a 0 -5 0\n", ":1: BYTES is '-5': expected a whole number\n"},
        {"a 0 5 1.0\n", ":1: STREAM is '1.0': expected a whole number\n"},
        {"a 0 18446744073709551616 0\n",
         ":1: BYTES is 18446744073709551616: expected at most 18446744073709551615\n"},
        {"a 99999999999999999999 1 0\n",
         ":1: ID is 99999999999999999999: expected at most 18446744073709551615\n"},
        {"a 0 18446744073709551615 0\n",
         ":1: BYTES is 18446744073709551615 on top of the 0 that are in use: " MOST},
        {"a 0 1125899906842624 0\n",
         ":1: BYTES is 1125899906842624 on top of the 0 that are in use: " MOST},
        {"a 0 549755813888 0\na 1 1 0\n",
         ":2: BYTES is 1 on top of the 549755813888 that are in use: " MOST},
        {"a 0 512 0\n# x\na 0 512 0\n",
         ":3: ID 0 is in use since line 1: expected one that is new or was freed\n"},
        {"f 7\n", ":1: ID 7 is unknown: expected one that is in use\n"},
        {"a 7 1 0\nf 7\n\nf 7\n", ":4: ID 7 was freed on line 2: expected one that is in use\n"},
        {"a 7 1 0\nu 8 1\n", ":2: ID 8 is unknown: expected one that is in use\n"},
        {"a 7 1 0\nf 7\nu 7 1\n", ":3: ID 7 was freed on line 2: expected one that is in use\n"},
    };
    /* One run for all: a bad trace does not keep the next one from being looked at. */
    char arguments[1024] = "";
    char errors[8192] = "";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[8];
        (void)snprintf(name, sizeof name, "t%zu ", i);
        (void)strcat(arguments, name);
        name[strlen(name) - 1] = '\0';
        config_write(name, cases[i].text);
        (void)snprintf(errors + strlen(errors), sizeof errors - strlen(errors), "%s%s", name,
                       cases[i].error);
    }
    expect_error(arguments, 1, errors);
}

Test(cli_replay, bytes_that_are_no_text)
{
    config_write_bytes("t", "a 0 5\0 0\n", 9);
    expect_error("t", 1, "t:1: BYTES is '5?': expected a whole number\n");
}

Test(cli_replay, lines_that_are_too_long)
{
    char text[3000];
    memset(text, '1', sizeof text);
    memcpy(text, "a 0 ", 4);
    text[sizeof text - 1] = '\0';
    config_write("t", text);
    expect_error("t", 1, "t:1: the line is longer than 1023 bytes: expected 'a ID BYTES STREAM'\n");
    text[0] = '#';
    memcpy(text + sizeof text - sizeof "\na 0 512 0\n", "\na 0 512 0\n", sizeof "\na 0 512 0\n");
    config_write("t", text);
    const struct object o = run_json("t");
    cr_expect(number(&o, "allocations") == 1, "a comment may be as long as it likes");
}

Test(cli_replay, a_line_without_an_end_is_given_up)
{
    expect_error("/dev/zero", 1,
                 "/dev/zero:1: the line is longer than 1 MiB: expected a trace of lines\n");
}

/* Of a device with other pages there is as much more, or as much less. */
Test(cli_replay, what_may_be_in_use_goes_by_the_page)
{
    config_write("t", "a 0 1099511627776 0\n");
    expect_error("t", 1, "t:1: BYTES is 1099511627776 on top of the 0 that are in use: " MOST);
    const struct object o = run_json("--page 4MiB t");
    cr_expect(number(&o, "peak_live_bytes") == 1099511627776.0);
    config_write("t", "a 0 17179869185 0\n");
    expect_error("--page 64KiB t", 1,
                 "t:1: BYTES is 17179869185 on top of the 0 that are in use: expected no more than "
                 "17179869184 in all, 262144 pages (--page)\n");
    config_write("t", "a 0 4611686018427387905 0\n");
    expect_error("--page 1TiB t", 1,
                 "t:1: BYTES is 4611686018427387905 on top of the 0 that are in use: expected no "
                 "more than 288230376151711744 in all, 262144 pages (--page)\n");
}

/* Memory is bounded by the length of the file, and gzip makes a thousand bytes of one. */
Test(cli_replay, gzip_data_that_unpack_to_much_more_are_given_up)
{
    static const char make[] = "set -e; printf 'a 0 1 0\\nf 0\\n' >t;"
                               "for i in 1 2 3 4 5 6 7; do cat t t t t t t t t >u; mv u t; done;"
                               "gzip <t >bomb.gz;";
    struct run r = cli_run(make, "replay --repeat 1", "bomb.gz");
    cr_expect(r.code == 1);
    unsigned long line, packed, text;
    cr_assert(sscanf(r.error, "bomb.gz:%lu: %lu bytes of gzip data are %lu of text:", &line,
                     &packed, &text) == 3,
              "%s", r.error);
    cr_expect(text > 16 * MIB && text < 18 * MIB && packed < text / 100, "%s", r.error);
    cr_expect(strstr(r.error, ": expected at most 100 times as many, or a trace that is unpacked"));
    done(&r);
    r = run("/dev/stdin < bomb.gz");
    cr_expect(r.code == 1, "%s", r.error);
    done(&r);
}

/* IDs that many a table would put into one place: minutes of looking for them. */
Test(cli_replay, ids_that_are_far_apart_are_found)
{
    const char *stride = getenv("REBATCH_TEST_STRIDE");
    const bool is_slow = stride && strcmp(stride, "1") != 0; /* valgrind, a sanitizer, a check */
    const uint64_t ids = is_slow ? 20000 : 300000;
    FILE *file = fopen("t", "w");
    cr_assert(file != NULL);
    for (uint64_t i = 0; i < ids; i++)
        (void)fprintf(file, "a %llu 1 0\n", (unsigned long long)(i << 44));
    cr_assert(fclose(file) == 0);
    struct run r = cli_run(is_slow ? "" : "ulimit -t 20;", "replay --repeat 1 --json", "t");
    cr_expect(r.code == 0, "%d: %s", r.code, r.error);
    done(&r);
}

Test(cli_replay, too_many_streams)
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

Test(cli_replay, files_that_cannot_be_read)
{
    expect_error("none", 1, "none: No such file or directory\n");
    expect_error("''", 1, ": No such file or directory\n");
    expect_error(".", 1, ".: Is a directory\n");
    char error[PATH_MAX + 64];
    (void)snprintf(error, sizeof error, "%s/truncated.trace.gz: the gzip data end too early\n",
                   traces);
    expect_error("$T/truncated.trace.gz", 1, error);
    (void)snprintf(error, sizeof error, "%s/damaged.trace.gz: the gzip data are damaged\n", traces);
    expect_error("$T/damaged.trace.gz", 1, error);
}

#define A_SIZE "expected a size of at least 1 byte such as 22GiB, 512 MB or 1048576"

Test(cli_replay, wrong_usage)
{
    static const struct {
        const char *arguments, *error;
    } cases[] = {
        {"", "usage: rebatch replay [OPTION...] TRACE...; see 'rebatch help replay'\n"},
        {"--json", "usage: rebatch replay [OPTION...] TRACE...; see 'rebatch help replay'\n"},
        {"--jason t", "rebatch replay: there is no option '--jason'; see 'rebatch help replay'\n"},
        {"--json=yes t", "rebatch replay: --json is 'yes': expected no value\n"},
        {"--capacity", "rebatch replay: --capacity has no value: " A_SIZE "\n"},
        {"--device tape t", "rebatch replay: --device is 'tape': expected dry or cuda\n"},
        {"--device cuda --smallest t", "rebatch replay: --device is 'cuda': expected no --smallest "
                                       "with it: a GPU's memory is fixed\n"},
        {"--device cuda --capacity 1GiB t",
         "rebatch replay: --device is 'cuda': expected no --capacity with it: a GPU's memory "
         "is fixed\n"},
        {"--capacity 0 t", "rebatch replay: --capacity is '0': " A_SIZE "\n"},
        {"--capacity -5 t", "rebatch replay: --capacity is '-5': " A_SIZE "\n"},
        {"--capacity 1.5 t", "rebatch replay: --capacity is '1.5': " A_SIZE "\n"},
        {"--capacity 12XiB t", "rebatch replay: --capacity is '12XiB': " A_SIZE "\n"},
        {"--capacity 90% t", "rebatch replay: --capacity is '90%': " A_SIZE "\n"},
        {"--capacity 99999999TiB t", "rebatch replay: --capacity is '99999999TiB': " A_SIZE "\n"},
        {"--capacity= t", "rebatch replay: --capacity is '': " A_SIZE "\n"},
        {"--headroom x t", "rebatch replay: --headroom is 'x': " A_SIZE "\n"},
        {"--limit 101% --capacity 8MiB t",
         "rebatch replay: --limit is '101%': " A_SIZE ", or a share from 0.1% to 100%\n"},
        {"--limit 0.05% --capacity 8MiB t",
         "rebatch replay: --limit is '0.05%': " A_SIZE ", or a share from 0.1% to 100%\n"},
        {"--limit 90% t",
         "rebatch replay: --limit is a share of the capacity: expected --capacity with it\n"},
        {"--caching maybe t", "rebatch replay: --caching is 'maybe': expected on or off\n"},
        {"--replay 0 t", "rebatch replay: --replay is '0': expected on or off\n"},
        {"--replay", "rebatch replay: --replay has no value: expected on or off\n"},
        {"--repeat 0 t", "rebatch replay: --repeat is '0': expected a number from 1 to 1000\n"},
        {"--repeat 1001 t",
         "rebatch replay: --repeat is '1001': expected a number from 1 to 1000\n"},
        {"--repeat 2x t", "rebatch replay: --repeat is '2x': expected a number from 1 to 1000\n"},
        {"--snapshot s.txt t",
         "rebatch replay: --snapshot is 's.txt': expected a file's name that ends in .pickle or "
         ".csv\n"},
        {"--snapshot .csv t",
         "rebatch replay: --snapshot is '.csv': expected a file's name that ends in .pickle or "
         ".csv\n"},
        {"--snapshot s.csv t u",
         "rebatch replay: --snapshot is 's.csv', and there are 2 traces: expected one\n"},
        {"--keep-room 0% t",
         "rebatch replay: --keep-room is '0%': expected a share from 0.1% to 100%\n"},
        {"--keep-room 8MiB t",
         "rebatch replay: --keep-room is '8MiB': expected a share from 0.1% to 100%\n"},
        {"--rounding 300 t",
         "rebatch replay: --rounding is '300': expected a power of two up to 256\n"},
        {"--fence yes t", "rebatch replay: --fence is 'yes': expected on or off\n"},
        {"--guard on t", "rebatch replay: there is no option '--guard'; it is --fence\n"},
        {"--events 0 t",
         "rebatch replay: --events is '0': expected a number from 1 to 100000000\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_error(cases[i].arguments, 2, cases[i].error);
    config_write("-t", "a 0 1 0\n");
    struct run r = run("-- -t");
    cr_expect(r.code == 0, "a path behind --: %s", r.error);
    done(&r);
}

Test(cli_replay, settings_that_no_device_takes)
{
    static const char *const cases[] = {"--page 3000 t",     "--page 512 t",
                                        "--capacity 1MiB t", "--page 1GiB --capacity 1MiB t",
                                        "--rounding 12 t",   "--fence on --caching off t"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct run r = run(cases[i]);
        cr_expect(r.code == 2, "'%s' ends with %d", cases[i], r.code);
        cr_expect(strncmp(r.error, "rebatch replay: ", 16) == 0 && strstr(r.error, "expected"),
                  "'%s' complains %s", cases[i], r.error);
        done(&r);
    }
}
