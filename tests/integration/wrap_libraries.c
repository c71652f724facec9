/* Owns the tests of what rebatch/wrap.h knows of other libraries of CUDA: their codes, and the
 * place of a generator. Must not know the library's inside. */
#include "wrap_generator.h"

#include "rebatch/current.h"
#include "rig.h"

#define BATCH 8

static float drawn[BATCH]; /* by each sample */
static int ooms;

static void nothing(void *user)
{
    (void)user;
}

static void train(size_t first, size_t count, void *user)
{
    (void)user;
    wrap_libraries_draw(drawn + first, count);
    if (ooms-- > 0)
        wrap_libraries_escape();
    rebatch_mutating(rebatch_get_current());
}

static rebatch_device *open_session(void)
{
    rebatch_device *device;
    rebatch *rb;
    open_on_host(&device, &rb, (size_t)1 << 20, &(rebatch_options)REBATCH_OPTIONS_INIT);
    OK(rebatch_set_current(rb));
    return device;
}

static void run_step(int fails)
{
    rebatch_step_report report;
    ooms = fails;
    OK(rebatch_step_plain(rebatch_get_current(), BATCH, nothing, train, nothing, NULL,
                          REBATCH_DECLARES_MUTATION, &report));
    cr_assert_eq(report.ooms, fails);
}

/* What three steps draw, the second of which runs out of memory `fails` times. */
static void draw_steps(float *out, int fails)
{
    for (int step = 0; step < 3; step++) {
        run_step(step == 1 ? fails : 0);
        memcpy(out + step * BATCH, drawn, sizeof drawn);
    }
}

Test(wrap_libraries, samples_that_run_again_after_a_code_of_a_library_draw_the_same_numbers)
{
    float clean[3 * BATCH], failed[3 * BATCH], begun[3 * BATCH];
    rebatch_device *device = open_session();
    wrap_libraries_draw(begun, 3 * BATCH); /* from the beginning */
    cr_assert_eq(wrap_libraries_guard(false), cudaSuccess);
    wrap_libraries_go(0);
    draw_steps(clean, 0);
    wrap_libraries_go(0);
    draw_steps(failed, 2);
    cr_expect_arr_eq(clean, begun, sizeof clean);
    cr_expect_arr_eq(failed, clean, sizeof clean);
    rebatch_close(rebatch_get_current());
    rebatch_device_close(device);
}

Test(wrap_libraries, a_generator_without_a_place_is_refused)
{
    rebatch_device *device = open_session();
    cr_expect_eq(wrap_libraries_guard(true), cudaErrorNotSupported);
    rebatch_close(rebatch_get_current());
    rebatch_device_close(device);
}
