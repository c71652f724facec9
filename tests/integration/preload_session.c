/* Owns the tests of librebatch_wrap.so in programs with a session, over a stand-in for CUDA's
 * driver: memory from the pool for code that knows nothing of it, and no limit or failure twice.
 * Must not know the library's inside: the programs of tests/preload are the user's. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "preload_common.h"
#include "unit/config_files.h"

TestSuite(preload_session, .init = preload_enter, .fini = config_leave);

/* ---- memory from the pool ---- */

/* A pool takes 8 MiB at first, and the driver has no other call. */
Test(preload_session, code_without_the_header_uses_the_pool)
{
    static const char *const ways[] = {"asked", "asked-old", "asked-thread", "symbol", "global"};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char arguments[128] = "";
        (void)strcat(strcpy(arguments, ways[i]), " a1024 s2048 a4096 f1 g2 f3 a1024 f4");
        AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "session", arguments);
        char *calls = config_read("log");
        cr_assert_eq(r.code, 0, "%s", r.error);
        cr_expect_str_eq(r.error, "");
        cr_expect(!strstr(r.out, "= 1") && !strstr(r.out, "= 2"), "%s", r.out);
        cr_expect_str_eq(calls, "cuMemAlloc_v2 8388608 = 0\n", "%s", ways[i]);
        free(calls);
    }
}

Test(preload_session, code_without_the_header_frees_memory_of_the_pool)
{
    struct run r =
        preload_run_plain("LD_PRELOAD=$WRAP", "session", "asked A4096 A512 f1 g2 F1 a512");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    static const char answers[] = "A4096 = 0\nA512 = 0\nf1 = 0\ng2 = 0\nF1 = 2\na512 = 0 0x4000";
    cr_expect(strncmp(r.out, answers, sizeof answers - 1) == 0, "%s", r.out);
    cr_expect_str_eq(calls, "cuMemAlloc_v2 8388608 = 0\n");
    free(calls);
    done(&r);
}

/* cudaFree waits for the device, of the pool's memory too. */
Test(preload_session, a_free_waits_once)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP DRIVER_LOG_WAITS=1", "session",
                                     "asked a4096 c512 s512 f1 g3 r2 f2");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(calls, "cuMemAlloc_v2 8388608 = 0\ncuMemCreate 512 = 0\n"
                            "cuCtxSynchronize 0 = 0\ncuMemRelease 1082130432 = 0\n"
                            "cuMemFree_v2 1082130432 = 1\n");
    free(calls);
}

/* Without the library the driver does not know the pool's memory. */
Test(preload_session, which_fails_without_the_library)
{
    AUTO_DONE(r) = preload_run_plain("", "session", "asked A4096 A512 f2 F2");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "A4096 = 0\nA512 = 0\nf2 = 1\nF2 = 0\n");
}

/* Physical memory, other pools and captured graphs are the driver's, and so is what is wrong. */
Test(preload_session, what_is_not_the_pools_goes_to_the_driver)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "session",
                                     "asked p1024 c1024 t1024 m1024 f1 r2 g3 g4 f1 a0");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(calls, "cuMemAllocPitch_v2 1024 = 0\ncuMemCreate 1024 = 0\n"
                            "cuMemAllocFromPoolAsync 1024 = 0\ncuMemAllocAsync 1024 = 0\n"
                            "cuMemFree_v2 1073741824 = 0\ncuMemRelease 1073742848 = 0\n"
                            "cuMemFreeAsync 1073743872 = 0\ncuMemFreeAsync 1073744896 = 0\n"
                            "cuMemFree_v2 1073741824 = 1\ncuMemAlloc_v2 0 = 1\n");
    free(calls);
}

Test(preload_session, an_oom_of_the_pool_is_cudas)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "session",
                                     "asked a100000000 s100000000 i0 o8000000 o40000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out,
                     "a100000000 = 2 untouched\ns100000000 = 2 untouched\n"
                     "info = 0, 67108864 of 67108864\n"
                     "o8000000 = 0, micro-batch 4, 0 out of memory\n"
                     "o40000000 = 5, micro-batch 1, 3 out of memory\n",
                     "%s", r.out);
}

/* What an attempt took by the driver's functions goes with it. */
Test(preload_session, a_rollback_takes_back_what_code_without_the_header_took)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP REBATCH_MEMORY_LIMIT=24MiB", "session",
                                     "asked a4000000 o6000000 i0");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "o6000000 = 5, micro-batch 1, "), "%s", r.out);
    done(&r);
    r = preload_run_plain("REBATCH_RUN_OOM=4 LD_PRELOAD=$WRAP", "session", "asked o6000000");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "o6000000 = 0, micro-batch 2, 1 out of memory\n");
}

/* Its step changes nothing that rebatch sees. */
Test(preload_session, a_check_of_a_program_that_watches_nothing_says_so)
{
    AUTO_DONE(r) = preload_run_plain("REBATCH_CHECK=1", "session", "asked o1024");
    cr_assert_eq(r.code, 4, "%s", r.error);
    cr_assert(strncmp(r.out, "uncompared      ", 16) == 0, "%s", r.out);
    cr_assert(strstr(r.out, "1 mistake: ") && strstr(r.out, ", compared nothing, "), "%s", r.out);
}

/* ---- a program that has the library inside ---- */

Test(preload_session, a_static_session_is_not_shared)
{
    AUTO_DONE(r) = preload_run_plain("LD_PRELOAD=$WRAP", "session-static", "asked a1024 A512 f1");
    char *calls = config_read("log");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect_str_eq(r.out, "a1024 = 0 0x40000000\nA512 = 0\nf1 = 0\n");
    cr_expect_str_eq(calls, "cuMemAlloc_v2 1024 = 0\ncuMemAlloc_v2 8388608 = 0\n"
                            "cuMemFree_v2 1073741824 = 0\n");
    free(calls);
}

/* ---- rebatch run ---- */

/* The pool's memory would not fit into the cap twice. */
Test(preload_session, a_session_applies_the_limit_itself)
{
    static const char *const programs[] = {"session", "session-static"};
    for (int i = 0; i < 2; i++) {
        AUTO_DONE(r) = preload_run("--limit 8MiB", programs[i],
                                   "asked A5000000 A2000000 A4000000 a1000000 F1 F2 c20000000");
        cr_assert_eq(r.code, 0, "%s", r.error);
        cr_expect(strncmp(r.out, "A5000000 = 0\nA2000000 = 0\nA4000000 = 1\na1000000 = 0 0x", 54) ==
                      0,
                  "%s", r.out);
        cr_expect(strstr(r.out, "c20000000 = 0 0x"), "%s", r.out);
        cr_expect(!strstr(r.error, "beyond the cap"), "%s", r.error);
    }
}

/* The first request of the step fails, and no allocation outside of it. */
Test(preload_session, a_failure_strikes_once)
{
    AUTO_DONE(r) = preload_run("--oom 1", "session", "asked c512 a512 A512 o1000000 o1000000 a512");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.out, "c512 = 0 0x40000000\na512 = 0 0x40000200\nA512 = 0\n"
                            "o1000000 = 0, micro-batch 2, 1 out of memory\n"
                            "o1000000 = 0, micro-batch 2, 0 out of memory\na512 = 0 "),
              "%s", r.out);
    cr_expect(strstr(r.error, "rebatch run: 1 failure injected, 1 survived; 1 OOM in all, "), "%s",
              r.error);
    cr_expect(!strstr(r.error, "on purpose"), "%s", r.error);
}

Test(preload_session, the_pools_allocations_are_recorded)
{
    AUTO_DONE(r) = preload_run("--record x.trace", "session", "asked a1024 s2048 f1 h2 a512 p600");
    cr_assert_eq(r.code, 0, "%s", r.error);
    cr_expect(strstr(r.error, "rebatch run: 4 allocations, peak 512 B; recorded in /"), "%s",
              r.error);
    char *trace = config_read("x.trace");
    const char *lines = strchr(trace, '\n');
    cr_assert_not_null(lines);
    cr_expect_str_eq(lines, "\na 1 1024 0\na 2 2048 1\nf 1\nu 2 2\nf 2\na 3 512 0\na 4 512 0\n");
    free(trace);
    done(&r);
    r = cli_run_program(cli_replay, "--json x.trace");
    cr_expect_eq(r.code, 0, "%s", r.error);
    done(&r);
    /* A free that did not come this way is seen when the address is given out again. */
    r = preload_run("--record x.trace", "session", "asked a1024 F1 a1024 f2");
    cr_assert_eq(r.code, 0, "%s", r.error);
    trace = config_read("x.trace");
    cr_expect(strstr(trace, "\na 1 1024 0\nf 1\na 2 1024 0\nf 2\n"), "%s", trace);
    free(trace);
}
