/* Owns the tests of language models that are trained as many are, before and after rebatch wraps
 * them (tests/wrap), on a stand-in for a GPU. Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "preload_common.h"
#include "unit/config_files.h"

TestSuite(wrap_llm, .init = preload_enter, .fini = config_leave);

static const char *const models[] = {"llm_fp32", "llm_bf16"};

static struct run run_with(const char *variables, const char *options, const char *program,
                           const char *arguments)
{
    static char all[512], path[512];
    (void)snprintf(all, sizeof all, "DRIVER_MEMORY=1 %s", variables);
    (void)snprintf(path, sizeof path, "\"$TESTS\"/../wrap/%s", program);
    return preload_run_with(all, options, path, arguments);
}

/* As it was, in so much memory that it ends. */
static struct run run_before(const char *model, const char *arguments)
{
    char program[64];
    (void)snprintf(program, sizeof program, "%s-before", model);
    return run_with("DRIVER_BYTES=67108864", "", program, arguments);
}

static const char *weights(const struct run *r)
{
    const char *found = strstr(r->out, "weights ");
    cr_assert_not_null(found, "code %d: %s%s", r->code, r->out, r->error);
    return found;
}

static const char *const arguments_of[] = {"256 3", "256 256 3"};

/* Validation comes first, so the first allocation of a size is a map's. */
Test(wrap_llm, little_memory_changes_no_bit_of_the_wrapped_program)
{
    for (size_t i = 0; i < 2; i++) {
        char program[64];
        AUTO_DONE(before) = run_before(models[i], arguments_of[i]);
        (void)snprintf(program, sizeof program, "%s-before", models[i]);
        AUTO_DONE(little) = run_with("DRIVER_BYTES=4194304", "", program, arguments_of[i]);
        cr_expect_neq(little.code, 0);
        cr_expect(strstr(little.error, ": out of memory"), "%s", little.error);
        AUTO_DONE(wrapped) = run_with("DRIVER_BYTES=4194304", "", models[i], arguments_of[i]);
        cr_expect_eq(wrapped.code, 0, "%s: %s", models[i], wrapped.error);
        cr_expect_str_eq(weights(&wrapped), weights(&before), "%s", models[i]);
        cr_expect(strstr(wrapped.error, "micro-batch 256 -> 128"), "%s", wrapped.error);
        cr_expect(strstr(wrapped.error, "out of memory in map") ||
                      strstr(wrapped.error, "out of memory in resize"),
                  "%s", wrapped.error);
    }
}

Test(wrap_llm, with_enough_memory_it_prints_what_it_did)
{
    for (size_t i = 0; i < 2; i++) {
        AUTO_DONE(before) = run_before(models[i], arguments_of[i]);
        AUTO_DONE(wrapped) = run_with("DRIVER_BYTES=67108864", "", models[i], arguments_of[i]);
        cr_expect_str_eq(wrapped.out, before.out);
    }
}

/* Each request of the steps and maps, until there is none of that number. llm_bf16 has all its
 * buffers before them. */
Test(wrap_llm, a_request_that_fails_changes_no_bit)
{
    static const char *const arguments[] = {"16 2", "16 16 2"};
    for (size_t i = 0; i < 2; i++) {
        AUTO_DONE(before) = run_before(models[i], arguments[i]);
        for (int nth = 1; nth <= 12; nth++) {
            char options[32];
            (void)snprintf(options, sizeof options, "--oom %d", nth);
            AUTO_DONE(r) = run_with("DRIVER_BYTES=67108864", options, models[i], arguments[i]);
            cr_expect_str_eq(weights(&r), weights(&before), "%s %s: %s", models[i], options,
                             r.error);
            const bool is_beyond = strstr(r.error, "ended before a request failed") != NULL;
            cr_expect_eq(r.code, is_beyond, "%s %s: %s", models[i], options, r.error);
            cr_expect(nth > 1 || i || !is_beyond, "%s: no request", models[i]);
        }
    }
}

/* A session that opens itself has the settings of the environment, and says what is wrong. */
Test(wrap_llm, the_first_allocation_opens_the_session)
{
    struct run r =
        run_with("DRIVER_BYTES=4194304 REBATCH_BATCH_LARGEST=32", "", "llm_fp32", "256 1");
    cr_expect_eq(r.code, 0, "%s", r.error);
    cr_expect_null(strstr(r.error, "out of memory"), "%s", r.error);
    done(&r);
    r = run_with("DRIVER_BYTES=67108864 REBATCH_BATCH_LARGEST=many", "", "llm_fp32", "16 1");
    cr_expect_neq(r.code, 0);
    cr_expect(strstr(r.error, "REBATCH_BATCH_LARGEST: batch.largest is \"many\""), "%s", r.error);
    done(&r);
}

Test(wrap_llm, a_check_finds_no_mistakes)
{
    static const char *const arguments[] = {"16 2", "16 16 2"};
    for (size_t i = 0; i < 2; i++) {
        AUTO_DONE(r) = run_with("DRIVER_BYTES=67108864", "--check", models[i], arguments[i]);
        cr_expect_eq(r.code, 0, "%s: %s%s", models[i], r.out, r.error);
        cr_expect(strstr(r.out, "no mistakes"), "%s: %s%s", models[i], r.out, r.error);
    }
}
