/* Owns the tests of sessions that are opened with their device, by settings given as text.
 * Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "rig.h"

#define BATCH 64

static char folder[] = "/tmp/rebatch-default-XXXXXX";

static void enter(void)
{
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(chdir(folder), 0);
}

static void leave(void)
{
    (void)unlink("train.cfg");
    cr_assert_eq(chdir("/"), 0);
    (void)rmdir(folder);
}

TestSuite(open_default, .init = enter, .fini = leave);

static rebatch *open_with(const char *settings)
{
    rebatch *rb;
    OK(rebatch_open_default(&rb, settings));
    return rb;
}

static size_t capacity_of(const rebatch *rb)
{
    rebatch_memory_info info;
    OK(rebatch_device_memory(rebatch_pool_device(rebatch_get_pool(rb)), &info));
    return info.total_bytes;
}

static const char *device_of(const rebatch *rb)
{
    return rebatch_device_name(rebatch_pool_device(rebatch_get_pool(rb)));
}

Test(open_default, the_program_says_which_device_and_which_limits)
{
    rebatch *rb = open_with(" device.kind = host;\n device.capacity = \"3MiB\" ;"
                            "batch.allowed = 8, 16; batch.start=16;;");
    cr_expect_eq(capacity_of(rb), MIB(3));
    cr_expect_str_eq(device_of(rb), "host");
    cr_expect_eq(rebatch_get_micro(rb, BATCH), 16);
    cr_expect_eq(rebatch_get_micro(rb, 12), 8);
    rebatch_close(rb);
}

Test(open_default, file_and_environment_override_the_program)
{
    const char *const settings = "device.capacity = 3MiB; batch.start = 16";
    FILE *file = fopen("train.cfg", "w");
    cr_assert_geq(fputs("batch = { start = 8; };", file), 0);
    cr_assert_eq(fclose(file), 0);
    setenv("REBATCH_CONFIG", "train.cfg", 1);
    rebatch *rb = open_with(settings);
    cr_expect_eq(rebatch_get_micro(rb, BATCH), 8);
    cr_expect_eq(capacity_of(rb), MIB(3));
    rebatch_close(rb);
    setenv("REBATCH_BATCH_START", "4", 1);
    setenv("REBATCH_DEVICE_CAPACITY", "5MiB", 1);
    rb = open_with(settings);
    cr_expect_eq(rebatch_get_micro(rb, BATCH), 4);
    cr_expect_eq(capacity_of(rb), MIB(5));
    rebatch_close(rb);
}

Test(open_default, without_a_gpu_the_device_is_the_host)
{
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    rebatch *rb = open_with(NULL);
    cr_expect_str_eq(device_of(rb), "host");
    rebatch_close(rb);
    rb = open_with("device.kind = auto");
    cr_expect_str_eq(device_of(rb), "host");
    rebatch_close(rb);
    cr_expect_eq(rebatch_open_default(&rb, "device.kind = cuda"), REBATCH_E_NO_DEVICE);
    cr_expect_eq(rebatch_open_default(&rb, "device.ordinal = 7"), REBATCH_E_NO_DEVICE,
                 "a GPU that is asked for by its number was replaced");
    cr_expect_null(rb);
}

Test(open_default, settings_files_have_the_choice_too)
{
    rebatch_config *config;
    rebatch_device *device;
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    setenv("REBATCH_DEVICE_KIND", "auto", 1);
    OK(rebatch_config_load(&config, NULL));
    OK(rebatch_config_open_device(&device, config));
    cr_expect_str_eq(rebatch_device_name(device), "host");
    rebatch_device_close(device);
    rebatch_config_free(config);
}

static void fails_to_open_the_device(rebatch_status expected, const char *sentence)
{
    rebatch_config *config;
    rebatch_device *device;
    OK(rebatch_config_load(&config, NULL));
    FAILS(rebatch_config_open_device(&device, config), expected, sentence);
    cr_expect_null(device);
    rebatch_config_free(config);
}

Test(open_default, a_device_that_the_settings_do_not_fit_is_not_opened)
{
    setenv("REBATCH_DEVICE_ORDINAL", "3", 1);
    fails_to_open_the_device(REBATCH_E_PARSE,
                             "device.ordinal is 3 (REBATCH_DEVICE_ORDINAL) and device.kind is "
                             "\"host\" (default): expected device.kind to be cuda or auto with it");
    unsetenv("REBATCH_DEVICE_ORDINAL");
    setenv("REBATCH_DEVICE_KIND", "cuda", 1);
    setenv("REBATCH_DEVICE_CAPACITY", "5MiB", 1);
    fails_to_open_the_device(REBATCH_E_PARSE,
                             "device.capacity is \"5MiB\" (REBATCH_DEVICE_CAPACITY) and "
                             "device.kind is \"cuda\" (REBATCH_DEVICE_KIND): expected "
                             "device.kind to be host with it");
    unsetenv("REBATCH_DEVICE_KIND");
    unsetenv("REBATCH_DEVICE_CAPACITY");
    setenv("REBATCH_MEMORY_LIMIT", "1KiB", 1);
    fails_to_open_the_device(REBATCH_E_INVALID,
                             "memory.limit is \"1KiB\" (REBATCH_MEMORY_LIMIT): expected at least a "
                             "page of the device, 65536 bytes");
}

Test(open_default, a_mistake_opens_nothing_and_is_said)
{
    static const char *const wrong[][2] = {
        {"batch.larget = 8",
         "settings: batch.larget is not a setting; did you mean batch.largest?"},
        {"batch.largest 8",
         "settings: \"batch.largest 8\" has no \"=\": expected KEY = VALUE, such "
         "as batch.largest = 64"},
        {"batch.largest = many", "settings: batch.largest is \"many\": expected a whole number, 0 "
                                 "or more"},
        {"batch.largest = 8; batch.largest = 4",
         "settings: batch.largest is set twice: expected every name once"},
        {"= 8", "settings:  is not a setting"},
        {"batch.smallest = 8; batch.largest = 4", NULL},
        {"log.file = /nowhere/at/all", NULL},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rebatch *rb = (rebatch *)(uintptr_t)16; // anything but NULL
        cr_expect_neq(rebatch_open_default(&rb, wrong[i][0]), REBATCH_OK, "%s", wrong[i][0]);
        cr_expect_null(rb);
        if (wrong[i][1])
            cr_expect_str_eq(rebatch_last_error(), wrong[i][1]);
        cr_expect_str_neq(rebatch_last_error(), "");
    }
    cr_expect_eq(rebatch_open_default(NULL, NULL), REBATCH_E_INVALID);
}

Test(open_default, the_process_has_one_that_is_opened_once)
{
    rebatch *rb, *again;
    OK(rebatch_open_current(&rb, NULL, "device.capacity = 2MiB"));
    cr_expect_eq(rebatch_get_current(), rb);
    cr_expect_eq(rebatch_open_current(&again, NULL, NULL), REBATCH_OK);
    cr_expect_eq(again, rb);
    cr_expect_eq(rebatch_open_current(&again, NULL, ""), REBATCH_E_STATE);
    cr_expect_null(again);
    rebatch_close(rb);
    cr_expect_eq(rebatch_open_current(&again, NULL, NULL), REBATCH_OK);
    cr_expect_null(again, "it was closed, and is there again without being asked for");
    cr_expect_eq(rebatch_open_current(&again, NULL, "device.capacity = 2MiB"), REBATCH_OK);
    cr_expect_eq(rebatch_get_current(), again);
    rebatch_close(again);
    cr_expect_eq(rebatch_open_current(NULL, NULL, NULL), REBATCH_E_INVALID);
}

/* ---- plain functions ---- */

struct trainer {
    rebatch *rb;
    unsigned zeros, trains, updates;
    size_t sum, parameter;
    bool late; /* allocates after it has changed something */
};

static void zero(void *user)
{
    struct trainer *t = user;
    t->zeros++;
    t->sum = 0;
}

static void train(size_t first, size_t count, void *user)
{
    struct trainer *t = user;
    t->trains++;
    void *early = t->late ? NULL : rebatch_alloc_or_escape(t->rb, count * MIB(1));
    cr_expect(t->late || early);
    rebatch_mutating(t->rb);
    for (size_t i = first; i < first + count; i++)
        t->sum += i;
    void *memory = rebatch_alloc_or_escape(t->rb, t->late ? count * MIB(1) : 0);
    cr_expect_eq(rebatch_free(t->rb, t->late ? memory : early), REBATCH_OK);
}

static void update(void *user)
{
    struct trainer *t = user;
    rebatch_mutating(t->rb);
    t->updates++;
    t->parameter += t->sum;
}

Test(open_default, a_step_of_plain_functions_recovers_and_counts_every_sample_once)
{
    rebatch_step_report report;
    struct trainer t = {.rb = open_with("device.capacity = 24MiB; batch.start = 64")};
    OK(rebatch_step_plain(t.rb, BATCH, zero, train, update, &t, REBATCH_DECLARES_MUTATION,
                          &report));
    cr_expect_eq(t.parameter, BATCH * (BATCH - 1) / 2);
    cr_expect_eq(t.zeros, 1);
    cr_expect_eq(t.updates, 1);
    cr_expect_eq(t.trains, 6);
    cr_expect_eq(report.micro, 16);
    rebatch_close(t.rb);
}

/* In the second step, too: what a function did in one before says nothing. */
Test(open_default, plain_functions_that_do_not_declare_are_taken_to_change_things_at_once)
{
    struct trainer t = {.rb = open_with("device.capacity = 24MiB; growth.after = 1")};
    for (unsigned step = 1; step <= 3; step++) {
        rebatch_step_report report;
        const unsigned zeros = t.zeros;
        OK(rebatch_step_plain(t.rb, BATCH, zero, train, update, &t, 0, &report));
        cr_expect_eq(t.zeros, zeros + 1 + report.ooms - report.ooms_in[REBATCH_PHASE_ADMISSION]);
        cr_expect_eq(report.ooms_in[REBATCH_PHASE_FORWARD], 0);
        cr_expect_eq(t.parameter, step * BATCH * (BATCH - 1) / 2);
    }
    rebatch_close(t.rb);
}

Test(open_default, plain_functions_may_run_out_of_memory_late)
{
    struct trainer t = {.rb = open_with("device.capacity = 24MiB"), .late = true};
    OK(rebatch_step_plain(t.rb, BATCH, zero, train, update, &t, REBATCH_DECLARES_MUTATION, NULL));
    cr_expect_eq(t.parameter, BATCH * (BATCH - 1) / 2);
    cr_expect_eq(t.zeros, 3);
    rebatch_close(t.rb);
}

Test(open_default, a_plain_step_refuses_what_a_step_refuses)
{
    struct trainer t = {.rb = open_with("device.capacity = 24MiB")};
    cr_expect_eq(rebatch_step_plain(NULL, BATCH, zero, train, update, &t, 0, NULL),
                 REBATCH_E_INVALID);
    cr_expect_eq(rebatch_step_plain(t.rb, 0, zero, train, update, &t, 0, NULL), REBATCH_E_INVALID);
    cr_expect_eq(rebatch_step_plain(t.rb, BATCH, zero, NULL, update, &t, 0, NULL),
                 REBATCH_E_INVALID);
    cr_expect_eq(rebatch_step_plain(t.rb, BATCH, zero, train, update, &t, 1 << 30, NULL),
                 REBATCH_E_INVALID);
    cr_expect_eq(t.zeros + t.trains + t.updates, 0);
    rebatch_close(t.rb);
}

/* A failure outside of a step comes back; one of another kind within it ends the step. */
static void allocate_nothing_real(size_t first, size_t count, void *user)
{
    (void)first;
    (void)count;
    cr_expect_null(rebatch_alloc_or_escape(((struct trainer *)user)->rb, SIZE_MAX), "it came back");
    cr_assert_fail("it came back");
}

Test(open_default, an_allocation_that_escapes_comes_back_outside_of_a_step)
{
    struct trainer t = {.rb = open_with("device.capacity = 24MiB")};
    rebatch_step_report report;
    cr_expect_null(rebatch_alloc_or_escape(t.rb, MIB(32)));
    cr_expect_eq(rebatch_last_status(), REBATCH_OOM);
    cr_expect_null(rebatch_alloc_or_escape(NULL, 1));
    cr_expect_eq(rebatch_last_status(), REBATCH_E_INVALID);
    cr_expect_neq(rebatch_step_plain(t.rb, 2, zero, allocate_nothing_real, update, &t, 0, &report),
                  REBATCH_OK);
    cr_expect_eq(t.updates, 0);
    rebatch_close(t.rb);
}
