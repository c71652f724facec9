/* Owns the test by which scripts/run-sanitizer knows that errors of tests are seen. Run with -j1.
 */
#include <stdlib.h>

#include <criterion/criterion.h>

#include "kernels_support.h"

TestSuite(kernels_sanitizer, .fini = support_free_all);

/* Asked to, it writes past the end of an array, which a sanitizer has to report. */
Test(kernels_sanitizer, an_overrun_is_seen)
{
    const size_t count = 64, beyond = getenv("REBATCH_TEST_OVERRUN") ? 1024 : 0;
    support_array array = support_array_poisoned(RBK_F32, count);
    double want[64];
    for (size_t i = 0; i < count; i++)
        want[i] = 1.5;
    support_must(rbk_fill(array.device, 1.5f, count + beyond, RBK_F32, NULL), "fill");
    support_expect_close(&array, want, 0.0, "fill");
}
