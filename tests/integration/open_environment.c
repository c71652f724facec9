/* Owns the tests of sessions that take their settings from the environment.
 * Must not know the library's inside. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "rig.h"

#define BATCH 64

static char folder[] = "/tmp/rebatch-environment-XXXXXX";
static rebatch_device *device;

static void enter(void)
{
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(chdir(folder), 0);
    OK(rebatch_device_open_host(&device, MIB(64), NULL));
}

static void leave(void)
{
    rebatch_device_close(device);
    (void)unlink("train.cfg");
    cr_assert_eq(chdir("/"), 0);
    (void)rmdir(folder);
}

TestSuite(open_environment, .init = enter, .fini = leave);

static void write_settings(const char *text)
{
    FILE *file = fopen("train.cfg", "w");
    cr_assert_not_null(file);
    cr_assert_geq(fputs(text, file), 0);
    cr_assert_eq(fclose(file), 0);
    setenv("REBATCH_CONFIG", "train.cfg", 1);
}

static void expect_micro(const rebatch_options *options, size_t micro)
{
    rebatch *rb;
    OK(rebatch_open(&rb, device, options));
    cr_expect_eq(rebatch_get_micro(rb, BATCH), micro, "%zu samples, not %zu",
                 rebatch_get_micro(rb, BATCH), micro);
    rebatch_close(rb);
}

static void expect_failure(rebatch_status status, const char *text)
{
    rebatch *rb = (rebatch *)&device;
    cr_expect_eq(rebatch_open(&rb, device, NULL), status);
    cr_expect_null(rb);
    cr_expect_str_eq(rebatch_last_error(), text);
}

/* ---- without options ---- */

/* The list of the variable takes the place of the file's as a whole. */
Test(open_environment, a_list_of_the_variable_replaces_the_files)
{
    write_settings("batch: { allowed = [4, 8, 16, 32]; };");
    expect_micro(NULL, 32);
    setenv("REBATCH_BATCH_ALLOWED", "8,16", 1);
    expect_micro(NULL, 16);
    setenv("REBATCH_BATCH_ALLOWED", "4", 1);
    expect_micro(NULL, 4);
    setenv("REBATCH_BATCH_ALLOWED", "any", 1);
    expect_micro(NULL, BATCH);
    write_settings("batch: { allowed = \"any\"; };");
    setenv("REBATCH_BATCH_ALLOWED", "[16, 8]", 1);
    expect_micro(NULL, 16);
}

Test(open_environment, without_options_file_and_variables_are_read)
{
    expect_micro(NULL, BATCH);
    write_settings("batch: { start = 16; };");
    expect_micro(NULL, 16);
    setenv("REBATCH_BATCH_START", "8", 1);
    expect_micro(NULL, 8);
    unsetenv("REBATCH_CONFIG");
    expect_micro(NULL, 8);
}

Test(open_environment, a_mistake_opens_nothing_and_is_named_with_file_and_line)
{
    write_settings("batch: {\n    start = 16;\n    smalest = 4;\n};\n");
    expect_failure(REBATCH_E_PARSE,
                   "train.cfg:3: batch.smalest is not a setting; did you mean batch.smallest?");
    write_settings("growth: {\n    after = 0;\n};\n");
    expect_failure(REBATCH_E_PARSE, "train.cfg:2: growth.after is 0, too small: expected a whole "
                                    "number from 1 to 4294967295");
    unlink("train.cfg");
    expect_failure(REBATCH_E_IO, "train.cfg cannot be read: No such file or directory");
    setenv("REBATCH_CONFIG", "", 1);
    expect_failure(REBATCH_E_PARSE,
                   "REBATCH_CONFIG is empty: expected the path of a settings file");
    unsetenv("REBATCH_CONFIG");
    setenv("REBATCH_BATCH_START", "many", 1);
    expect_failure(REBATCH_E_PARSE, "REBATCH_BATCH_START: batch.start is \"many\": expected a "
                                    "whole number, 0 or more");
}

Test(open_environment, a_slip_in_the_name_of_the_variable_is_a_mistake)
{
    setenv("REBATCH_CONFG", "train.cfg", 1);
    expect_failure(REBATCH_E_PARSE,
                   "REBATCH_CONFG is not a setting's variable; did you mean REBATCH_CONFIG?");
}

/* ---- with options ---- */

Test(open_environment, with_options_it_is_not_read_unless_they_say_so)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    write_settings("batch: { start = 16; };");
    expect_micro(&options, BATCH);
    options.environment = REBATCH_OFF;
    expect_micro(&options, BATCH);
    options.environment = REBATCH_ON;
    expect_micro(&options, 16);
}

Test(open_environment, what_it_does_not_set_stays_the_options)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.environment = REBATCH_ON;
    options.micro_start = 32;
    options.micro_largest = 48;
    expect_micro(&options, 32);
    write_settings("batch: { start = 16; };");
    expect_micro(&options, 16);
    write_settings("batch: { start = 0; };"); /* the default, and yet said */
    expect_micro(&options, 48);
}

Test(open_environment, an_older_struct_has_no_say_in_it)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    options.environment = REBATCH_ON;
    options.struct_size = offsetof(rebatch_options, environment);
    write_settings("batch: { start = 16; };");
    expect_micro(&options, BATCH);
}

Test(open_environment, a_program_that_loads_settings_has_the_same_file)
{
    rebatch_config *config;
    rebatch_options options = REBATCH_OPTIONS_INIT;
    write_settings("batch: { start = 16; };");
    OK(rebatch_config_load(&config, NULL));
    OK(rebatch_config_options(&options, config));
    cr_expect_eq(options.micro_start, 16);
    rebatch_config_free(config);
}
