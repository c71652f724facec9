/* Owns the tests of librebatch_wrap.so in programs without a session, over a stand-in for CUDA's
 * driver: nothing changes, functions by name, the cap, failures on purpose, traces.
 * Must not know the library's inside: the programs of tests/preload are the user's. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "preload_common.h"
#include "unit/config_files.h"

TestSuite(preload, .init = preload_enter, .fini = config_leave);

static const char *const ways[] = {"asked", "asked-old", "asked-thread", "symbol", "global"};
#define WAYS (sizeof ways / sizeof *ways)

/* Of each kind, with mistakes of the program's and an OOM of the driver's. */
#define EVERYTHING                                                                                 \
    " a1024 s2048 c4096 p5120 t600 m512 i0 f1 g2 r3 f4 h5 f6 f1 a0 a100000000 i0 w0 i0"

/* After its first line, which has the version. */
static void expect_trace(const char *file, const char *lines)
{
    char *trace = config_read(file);
    const char *end = strchr(trace, '\n');
    cr_assert_not_null(end, "%s", trace);
    cr_expect(strncmp(trace, "# rebatch ", 10) == 0 && strstr(trace, ", program, device 0\n"), "%s",
              trace);
    cr_expect_str_eq(end + 1, lines);
    free(trace);
}

/* ---- nothing is asked for ---- */

/* The outputs and the driver's calls are those without the library. */
static void expect_unchanged(const char *program, const char *arguments)
{
    const char *const variables[] = {"", "LD_PRELOAD=$WRAP"};
    struct run r[2];
    char *calls[2];
    for (int i = 0; i < 2; i++) {
        r[i] = preload_run_plain(variables[i], program, arguments);
        calls[i] = config_read("log");
        cr_assert_eq(r[i].code, 0, "%s", r[i].error);
    }
    cr_expect_str_eq(r[1].out, r[0].out, "%s %s", program, arguments);
    cr_expect_str_eq(r[1].error, r[0].error);
    cr_expect_str_eq(calls[1], calls[0]);
    cr_expect(strstr(calls[0], "cuMemAlloc_v2 1024 = 0\n"), "%s", calls[0]);
    for (int i = 0; i < 2; i++) {
        done(&r[i]);
        free(calls[i]);
    }
}

/* Threads make their calls in any order. */
#define IN_ORDER " a1024 s2048 c4096 p5120 t600 m512 i0 f1 g2 r3 f4 h5 f6 f1 a0 a100000000 i0"

Test(preload, nothing_changes_where_nothing_is_asked_for)
{
    for (size_t i = 0; i < WAYS; i++) {
        char arguments[256];
        (void)snprintf(arguments, sizeof arguments, "%s" IN_ORDER, ways[i]);
        expect_unchanged("program", arguments);
    }
    expect_unchanged("linked", "linked" IN_ORDER);
    expect_unchanged("program", "deep" IN_ORDER);
}

Test(preload, a_program_that_is_linked_with_the_library)
{
    AUTO_DONE(r) = preload_run_plain("REBATCH_RUN_OOM=2", "wrapped", "asked a1024 a1024");
    cr_assert_eq(r.code, 0);
    cr_expect_str_eq(r.out, "a1024 = 0 0x40000000\na1024 = 2 untouched\n");
}

/* ---- functions by name ---- */

static void expect_line(const struct run *r, const char *line)
{
    char whole[128];
    (void)snprintf(whole, sizeof whole, "%s\n", line);
    cr_expect(strstr(r->out, whole), "no line '%s' in\n%s", line, r->out);
}

Test(preload, functions_are_found_as_without_the_library)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "names", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_line(&r, "driver cuMemAlloc_v2: librebatch_wrap.so");
    expect_line(&r, "driver cuMemAllocManaged has an error: nowhere");
    expect_line(&r, "driver cuNone has an error: nowhere");
    /* Other libraries' functions stay theirs, and RTLD_NEXT is that of the caller. */
    expect_line(&r, "inner cuMemAlloc_v2: libinner.so");
    expect_line(&r, "inner cudnnCreate: libinner.so");
    expect_line(&r, "default cudnnCreate: libouter.so");
    expect_line(&r, "next cudnnCreate: libouter.so");
    expect_line(&r, "next of outer cuMemAlloc_v2: libinner.so");
    expect_line(&r, "next of outer cudnnCreate: libinner.so");
    expect_line(&r, "driver itself cuMemAlloc_v2: libcuda.so.1");
    expect_line(&r, "cudnnCreate calls inner");
    expect_line(&r, "cuda_outer calls inner");
}

Test(preload, the_driver_says_which_form_of_a_function_it_has)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "names", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_line(&r, "cuMemAlloc 13000 0 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuMemAlloc 3020 1 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuMemAlloc 2000 0 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuMemAllocAsync 13000 2 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuMemAllocAsync 11010 0 = 500, 2: nowhere");
    expect_line(&r, "cuGetProcAddress 12000 0 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuDriverGetVersion 13000 0 = 0, 0: libcuda.so.1");
    expect_line(&r, "cuNone 13000 0 = 500, 1: nowhere");
    /* A form that is newer than this library is not taken. */
    expect_line(&r, "cuMemGetInfo 13999 0 = 0, 0: librebatch_wrap.so");
    expect_line(&r, "cuMemGetInfo 14000 0 = 0, 0: libcuda.so.1");
}

/* Each form of an entry point calls the driver's function of that form. */
Test(preload, streams_of_threads_stay_streams_of_threads)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB", "program", "asked-thread s2048 g1");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(calls, "cuMemAllocAsync_ptsz 2048 = 0\ncuMemFreeAsync_ptsz 1073741824 = 0\n");
    free(calls);
}

Test(preload, streams_of_threads_and_of_the_process_at_once)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "names", "");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(calls, "\ncuMemAllocAsync 512 = 0\ncuMemAllocAsync 1024 = 0\n"
                            "cuMemAllocAsync_ptsz 2048 = 0\n"),
              "%s", calls);
    free(calls);
}

/* Its own table of functions has those of this library. */
Test(preload, a_driver_that_finds_its_functions_by_their_symbols)
{
    AUTO_DONE(r) = preload_run_plain(
        "LD_LIBRARY_PATH=$TESTS/../drivers/leaky:$TESTS LD_PRELOAD=$WRAP REBATCH_RUN_OOM=2",
        "program", "asked a1024 s1024 f1");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1024 = 0 0x40000000\ns1024 = 2 untouched\nf1 = 0\n");
    cr_expect_str_eq(calls, "cuMemAlloc_v2 1024 = 0\ncuMemFree_v2 1073741824 = 0\n");
    free(calls);
}

/* The one that comes first answers, and neither waits for the other. */
Test(preload, another_library_that_takes_dlsym)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP:$TESTS/libhook.so REBATCH_MEMORY_LIMIT=1MiB",
                                     "program", "asked a1024 a2000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1024 = 0 0x40000000\na2000000 = 2 untouched\n");
    done(&r);
    r = preload_run_plain("LD_PRELOAD=$TESTS/libhook.so:$WRAP REBATCH_MEMORY_LIMIT=1MiB", "program",
                          "asked a1024 a2000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1024 = 0 0x40000000\na2000000 = 0 0x40000400\n");
    cr_expect(strstr(r.error, "hook: called\n"), "%s", r.error);
}

/* ---- the cap ---- */

Test(preload, a_cap_holds_however_the_program_finds_the_driver)
{
    static const char expected[] = "a20000000 = 0 0x40000000\n"
                                   "a20000000 = 2 untouched\n"
                                   "s20000000 = 2 untouched\n"
                                   "t20000000 = 2 untouched\n"
                                   "c20000000 = 2 untouched\n"
                                   "p20000000 = 2 untouched\n"
                                   "info = 0, 13554432 of 33554432\n"
                                   "f1 = 0\n"
                                   "c20000000 = 0 0x40000000\n"
                                   "info = 0, 13554432 of 33554432\n"
                                   "r7 = 0\n"
                                   "info = 0, 33554432 of 33554432\n";
    static const char actions[] = "a20000000 a20000000 s20000000 t20000000 c20000000 p20000000 i0 "
                                  "f1 c20000000 i0 r7 i0";
    for (size_t i = 0; i <= WAYS; i++) {
        char arguments[256];
        (void)snprintf(arguments, sizeof arguments, "%s %s", i < WAYS ? ways[i] : "linked",
                       actions);
        AUTO_DONE(r) = preload_run("--limit 32MiB", i < WAYS ? "program" : "linked", arguments);
        cr_assert_eq(r.code, 0, "%s", r.error);
        cr_expect_str_eq(r.out, expected, "%s\n%s", arguments, r.out);
        cr_expect_str_eq(r.error, "rebatch run: 7 allocations, 5 beyond the cap, peak 19.1 MiB of "
                                  "32.0 MiB\n");
    }
}

Test(preload, a_cap_can_be_a_share_and_the_device_can_be_smaller)
{
    AUTO_DONE(r) = preload_run("--limit 50%", "program", "asked a40000000 a30000000 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a40000000 = 2 untouched\na30000000 = 0 0x40000000\n"
                            "info = 0, 3554000 of 33554000\n");
    done(&r);
    r = preload_run("--limit 1GiB", "program", "asked a40000000 a40000000 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a40000000 = 0 0x40000000\na40000000 = 2 untouched\n"
                            "info = 0, 27108864 of 67108864\n");
    cr_expect_str_eq(r.error, "rebatch run: 2 allocations, 0 beyond the cap, 1 beyond what the "
                              "device has, peak 38.1 MiB of 1.00 GiB\n");
    done(&r);
    /* What the device refuses is not in use. */
    r = preload_run("--limit 100MiB", "program", "asked a70000000 a60000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a70000000 = 2 untouched\na60000000 = 0 0x40000000\n");
}

Test(preload, each_device_has_a_cap_and_a_trace_has_one_device)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB --record x.trace", "program",
                               "asked a900000 d1 a800000 c200000 c900000 i0 d0 i0 a900000 f2 f1");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a900000 = 0 0x40000000\na800000 = 0 0x400dbc00\n"
                            "c200000 = 0 0x4019f200\nc900000 = 2 untouched\n"
                            "info = 0, 48576 of 1048576\ninfo = 0, 148576 of 1048576\n"
                            "a900000 = 2 untouched\nf2 = 0\nf1 = 0\n");
    cr_expect(strstr(r.error, "5 allocations, 2 beyond the cap, peak 977 KiB of 1.00 MiB; "), "%s",
              r.error);
    expect_trace("x.trace", "a 1 900000 0\n# device 1 is not recorded\n"
                            "# out of memory: 900000 bytes\nf 1\n");
}

Test(preload, the_first_form_of_the_functions)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB", "names", "");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_line(&r, "first form: 0, 0x40000000 7");
    expect_line(&r, "first form: 2, 7 7");
    expect_line(&r, "first form: 0, 1047576 of 1048576 7");
    expect_line(&r, "first form: 0, 1048576 of 1048576");
}

/* CUDA does not work in a child process of fork(): it is neither counted nor reported. */
Test(preload, a_child_process_is_left_alone)
{
    struct run r =
        preload_run("--limit 1MiB --record x.trace", "program", "asked a900000 y900000 a100000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a900000 = 0 0x40000000\na900000 = 0 0x400dbc00\n"
                            "a100000 = 0 0x400dbc00\n");
    cr_expect(strncmp(r.error, "rebatch run: 2 allocations, 0 beyond", 36) == 0, "%s", r.error);
    cr_expect_eq(strchr(r.error, '\n')[1], '\0', "%s", r.error);
    expect_trace("x.trace", "a 1 900000 0\na 2 100000 0\n");
    done(&r);
}

/* What the driver refuses to free is still there. */
Test(preload, a_free_that_fails_frees_nothing)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB", "program", "asked a1000000 f1 f1 a1000000 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1000000 = 0 0x40000000\nf1 = 0\nf1 = 1\na1000000 = 0 0x40000000\n"
                            "info = 0, 48576 of 1048576\n");
    done(&r);
    r = preload_run("--limit 1MiB", "program", "asked a1000000 n1 a1000000 f1 a1000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1000000 = 0 0x40000000\nn1 = 900\na1000000 = 2 untouched\nf1 = 0\n"
                            "a1000000 = 0 0x40000000\n");
}

/* A library with a scope of its own finds the driver itself. */
Test(preload, a_library_that_binds_deeply_is_not_seen)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB", "program", "deep a1000000 a1000000 f1");
    cr_expect_eq(r.code, 1);
    cr_expect_str_eq(r.out, "a1000000 = 0 0x40000000\na1000000 = 0 0x400f4400\nf1 = 0\n");
    cr_expect(strstr(r.error, " ended with status 0 and never called rebatch_step(), nor did it "
                              "allocate CUDA memory\n"),
              "%s", r.error);
}

Test(preload, threads_at_once)
{
    AUTO_DONE(r) = preload_run("--limit 64KiB --record x.trace", "program", "asked w0 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "threads: 0 wrong\ninfo = 0, 65536 of 65536\n");
    done(&r);
    r = cli_run_program(cli_replay, "--json x.trace"); /* every free is of what is in use */
    cr_expect_eq(r.code, 0, "%s", r.error);
}

/* ---- failures on purpose ---- */

Test(preload, the_nth_allocation_fails)
{
    AUTO_DONE(r) = preload_run("--oom 2", "program", "asked a512 s512 c512 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a512 = 0 0x40000000\ns512 = 2 untouched\nc512 = 0 0x40000200\n"
                            "info = 0, 67107840 of 67108864\n");
    cr_expect_str_eq(r.error, "rebatch run: 1 of 3 allocations failed on purpose, peak 1.00 KiB\n");
}

Test(preload, a_seed_fails_the_same_allocations)
{
    static const char twenty[] =
        "asked a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1 a1";
    AUTO_DONE(first) = preload_run("--oom-chance 30%", "program", twenty);
    AUTO_DONE(again) = preload_run("--oom-chance 0.3 --seed 1", "program", twenty);
    AUTO_DONE(other) = preload_run("--oom-chance 0.3 --seed 2", "program", twenty);
    cr_assert_eq(first.code, 0, "%s", first.error);
    cr_expect(strstr(first.out, "untouched") && strstr(first.out, "= 0"), "%s", first.out);
    cr_expect_str_eq(again.out, first.out);
    cr_expect_str_eq(again.error, first.error);
    cr_expect(strcmp(other.out, first.out) != 0, "another seed, other allocations");
}

Test(preload, variables_alone)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP REBATCH_MEMORY_LIMIT=1MiB", "program",
                                     "asked a1000000 f1");
    cr_assert_eq(r.code, 0);
    cr_expect_str_eq(r.out, "a1000000 = 0 0x40000000\nf1 = 0\n");
    cr_expect_str_eq(r.error,
                     "rebatch run: 1 allocation, 0 beyond the cap, peak 977 KiB of 1.00 MiB\n");
    done(&r);
    r = preload_run_plain("LD_PRELOAD=$WRAP REBATCH_RUN_OOM=1", "program", "asked a512");
    cr_assert_eq(r.code, 0);
    cr_expect_str_eq(r.out, "a512 = 2 untouched\n");
    cr_expect_str_eq(r.error, "rebatch run: 1 of 1 allocation failed on purpose\n");
    done(&r);
    r = preload_run_plain("LD_PRELOAD=$WRAP REBATCH_RUN_OOM=no", "program", "asked a512");
    cr_assert_eq(r.code, 0);
    cr_expect_str_eq(r.out, "a512 = 0 0x40000000\n");
    cr_expect_str_eq(r.error,
                     "rebatch: REBATCH_RUN_OOM is \"no\": expected a whole number, 1 or more\n");
}

/* ---- traces ---- */

Test(preload, what_is_recorded_can_be_replayed)
{
    AUTO_DONE(r) = preload_run("--oom 4 --record x.trace", "program",
                               "asked a1000 s2000 c3000 a4000 s5000 f1 h2 g5 r3 f3 a100000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.error, "/x.trace\n"), "%s", r.error);
    expect_trace("x.trace", "a 1 1000 0\na 2 2000 1\na 3 3000 0\n# out of memory: 4000 bytes\n"
                            "a 4 5000 1\nf 1\nu 2 2\nf 2\nf 4\nf 3\n"
                            "# out of memory: 100000000 bytes\n");
    done(&r);
    r = cli_run_program(cli_replay, "--json x.trace");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "\"peak_requested_bytes\": 11000,"), "%s", r.out);
}

Test(preload, the_default_stream_of_a_thread_is_another_than_the_processs)
{
    AUTO_DONE(r) = preload_run("--record x.trace", "program", "asked z512 s512 g1");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_trace("x.trace", "a 1 512 0\na 2 512 1\nu 1 1\nf 1\n");
    done(&r);
    r = preload_run("--record x.trace", "program", "asked-thread z512 s512 f1");
    cr_assert_eq(r.code, 0, "%s", r.error);
    expect_trace("x.trace", "a 1 512 1\na 2 512 2\nf 1\n");
}

Test(preload, the_trace_of_a_program_that_is_killed_is_whole)
{
    static const struct {
        const char *line;
        int code;
    } ends[] = {{"$TESTS/program asked a1000 a2000 a3000 f1 x0", 0},
                {"$TESTS/program asked a1000 a2000 a3000 f1 k0; exit $?", 128 + 9}};
    for (int i = 0; i < 2; i++) {
        AUTO_DONE(r) = preload_run_shell("--record x.trace", ends[i].line);
        cr_expect_eq(r.code, ends[i].code, "%s", r.error);
        cr_expect(strstr(r.error, "rebatch run: at least 2 allocations, "), "%s", r.error);
        expect_trace("x.trace", "a 1 1000 0\na 2 2000 0\na 3 3000 0\nf 1\n");
    }
}

/* Processes of one program do not write into one file. */
Test(preload, each_process_has_a_trace_and_a_report)
{
    AUTO_DONE(r) = preload_run_shell("--record x.trace",
                                     "$TESTS/program asked a1000; $TESTS/program asked a2000 a1");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.error, "rebatch run: 1 allocation, peak 1000 B; recorded in "), "%s",
              r.error);
    cr_expect(strstr(r.error, "rebatch run: 2 allocations, peak 1.95 KiB; recorded in "), "%s",
              r.error);
    expect_trace("x.trace", "a 1 1000 0\n");
    done(&r);
    r = cli_run_program("sh", "-c 'cat x.trace.*'");
    cr_expect(strstr(r.out, "\na 1 2000 0\na 2 1 0\n"), "%s", r.out);
}

Test(preload, a_trace_that_cannot_be_written_stops_nothing)
{
    AUTO_DONE(r) = preload_run("--record /proc/x.trace", "program", "asked a1000 a2000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1000 = 0 0x40000000\na2000 = 0 0x40000400\n");
    cr_expect(strstr(r.error, "/proc/x.trace cannot be made: No such file or directory\n"), "%s",
              r.error);
}

/* ---- the command ---- */

Test(preload, what_is_preloaded_already_stays)
{
    AUTO_DONE(r) = preload_run_shell("--limit 1MiB", "echo \"$LD_PRELOAD\"");
    const char *const wrap = strstr(r.out, "librebatch_wrap.so\n");
    cr_expect(wrap && r.out[0] == '/', "%s", r.out);
    done(&r);
    r = preload_run_with("LD_PRELOAD=$TESTS/libinner.so", "--limit 1MiB", "sh",
                         "-c 'echo \"$LD_PRELOAD\"'");
    cr_expect(strstr(r.out, "/libinner.so:/") && strstr(r.out, "/librebatch_wrap.so\n"), "%s",
              r.out);
    done(&r);
    r = preload_run_with("LD_PRELOAD=$WRAP", "--limit 1MiB", "sh", "-c 'echo \"$LD_PRELOAD\"'");
    cr_expect(!strchr(r.out, ':'), "%s", r.out);
}

Test(preload, a_shrink_needs_steps)
{
    AUTO_DONE(r) = preload_run("--limit 1MiB --shrink 50%@step:1", "program", "asked a1000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.error,
                     "rebatch run: 1 allocation, 0 beyond the cap, peak 1000 B of 1.00 MiB; "
                     "without rebatch_step() there is nothing to shrink\n");
}

Test(preload, wrong_paths_of_a_trace)
{
    cli_expect_refused(
        "", "run", "--record '' -- true", 2,
        "rebatch: --record is '': expected the path of a file in a folder that exists\n");
    cli_expect_refused(
        "", "run", "--record . -- true", 2,
        "rebatch: --record is '.': expected the path of a file in a folder that exists\n");
}
