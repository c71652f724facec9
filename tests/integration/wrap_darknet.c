/* Owns the tests of an image classifier that is trained as darknet trains, before and after rebatch
 * wraps it (tests/wrap/darknet.cc), on a stand-in for a GPU. Must not know the library's inside. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "preload_common.h"
#include "unit/config_files.h"

TestSuite(wrap_darknet, .init = preload_enter, .fini = config_leave);

#define MUCH "DRIVER_MEMORY=1 DRIVER_BYTES=67108864"
/* The library of convolutions has 1 MiB at least, beside the pool. */
#define LITTLE "DRIVER_MEMORY=1 DRIVER_BYTES=8388608 REBATCH_MEMORY_HEADROOM=1MiB"

static struct run run_it(const char *variables, const char *options, const char *name,
                         const char *arguments)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "\"$TESTS\"/../wrap/%s", name);
    return preload_run_with(variables, options, path, arguments);
}

/* At 64 a micro-batch, which is what the wrapped program comes to. */
Test(wrap_darknet, little_memory_gives_the_bits_of_the_plain_program_at_that_size)
{
    AUTO_DONE(little) = run_it(LITTLE, "", "darknet-before", "256 1 6");
    cr_expect_neq(little.code, 0);
    cr_expect(strstr(little.error, ": out of memory"), "%s", little.error);
    AUTO_DONE(plain) = run_it(MUCH, "", "darknet-before", "256 4 6");
    AUTO_DONE(wrapped) = run_it(LITTLE, "", "darknet", "256 1 6");
    cr_assert_eq(wrapped.code, 0, "%s", wrapped.error);
    cr_expect(strstr(wrapped.error, "micro-batch 128 -> 64"), "%s", wrapped.error);
    cr_expect(strstr(wrapped.error, "out of memory in resize"), "%s", wrapped.error);
    cr_expect_str_eq(wrapped.out, plain.out);
}

/* Four times as many at once would not fit. */
Test(wrap_darknet, subdivisions_are_the_largest_micro_batch)
{
    AUTO_DONE(plain) = run_it(MUCH, "", "darknet-before", "256 8 2");
    AUTO_DONE(wrapped) = run_it(LITTLE, "", "darknet", "256 8 2");
    cr_assert_eq(wrapped.code, 0, "%s", wrapped.error);
    cr_expect_null(strstr(wrapped.error, "out of memory"), "%s", wrapped.error);
    cr_expect_str_eq(wrapped.out, plain.out);
}

/* The pool has memory enough, and the library has none beside it for 256 and for 128. */
Test(wrap_darknet, an_oom_of_the_library_is_survived)
{
    AUTO_DONE(plain) = run_it(MUCH, "", "darknet-before", "256 1 2");
    AUTO_DONE(wrapped) = run_it("DRIVER_MEMORY=1 DRIVER_BYTES=25165824", "", "darknet", "256 1 2");
    cr_assert_eq(wrapped.code, 0, "%s", wrapped.error);
    cr_expect(strstr(wrapped.error, "out of memory in forward_backward"), "%s", wrapped.error);
    cr_expect_str_eq(wrapped.out, plain.out);
}

/* Also in steps whose images have another size than those of the step before. */
Test(wrap_darknet, a_request_that_fails_changes_no_bit)
{
    AUTO_DONE(plain) = run_it(MUCH, "", "darknet-before", "16 1 4");
    for (int nth = 1; nth <= 101; nth += 4) {
        char options[32];
        (void)snprintf(options, sizeof options, "--oom %d", nth);
        AUTO_DONE(wrapped) = run_it(MUCH, options, "darknet", "16 1 4");
        cr_expect_eq(wrapped.code, 0, "%s: %s", options, wrapped.error);
        cr_expect_str_eq(wrapped.out, plain.out, "%s", options);
        cr_expect_null(strstr(wrapped.error, "freed the address"), "%s: %s", options,
                       wrapped.error);
    }
}

/* Images of the largest size come again and again: what their buffers take is what they took. */
Test(wrap_darknet, buffers_of_another_image_size_leave_nothing_behind)
{
    AUTO_DONE(wrapped) = run_it(MUCH " REBATCH_MEMORY_LIMIT=2MiB REBATCH_BATCH_LARGEST=16", "",
                                "darknet", "16 1 40");
    cr_expect_eq(wrapped.code, 0, "%s", wrapped.error);
    cr_expect_null(strstr(wrapped.error, "memory grows"), "%s", wrapped.error);
    cr_expect_null(strstr(wrapped.error, "out of memory"), "%s", wrapped.error);
}

Test(wrap_darknet, a_check_finds_no_mistakes)
{
    AUTO_DONE(r) = run_it(MUCH, "--check", "darknet", "8 1 2");
    cr_expect_eq(r.code, 0, "%s%s", r.out, r.error);
    cr_expect(strstr(r.out, "no mistakes"), "%s%s", r.out, r.error);
}
