/* Owns the tests of the reference model's text and samples.
 * Must not know private headers of the library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <criterion/criterion.h>

#include "gpt/error.h"
#include "gpt_common.h"

TestSuite(gpt_data);

/* A file that is gone when the test is. */
static char path[64];

static void write_file(const char *text, size_t count)
{
    strcpy(path, "/tmp/gpt-data-XXXXXX");
    const int descriptor = mkstemp(path);
    cr_assert_geq(descriptor, 0);
    cr_assert_eq(write(descriptor, text, count), (ssize_t)count);
    close(descriptor);
}

static void remove_file(void)
{
    unlink(path);
}

static void check_refused(const char *file, size_t length, rebatch_status status, const char *words)
{
    struct gpt_data *data;
    ASSERT_ERROR(gpt_data_open(&data, file, length), status, words);
    cr_assert_null(data);
}

Test(gpt_data, refuses_files_that_will_not_do, .fini = remove_file)
{
    check_refused("/nonexistent/text", 4, REBATCH_E_IO,
                  "/nonexistent/text cannot be opened: No such file");
    check_refused("/tmp", 4, REBATCH_E_IO, "/tmp cannot be read: Is a directory");
    check_refused("/dev/null", 4, REBATCH_E_INVALID, "/dev/null is empty");
    write_file("four", 4);
    check_refused(path, 4, REBATCH_E_INVALID, "has 4 bytes: expected at least the 5 of one sample");
}

Test(gpt_data, a_text_of_one_sample_is_that_sample, .fini = remove_file)
{
    struct gpt_data *data;
    int32_t tokens[5];
    write_file("five\xff", 5);
    ASSERT_OK(gpt_data_open(&data, path, 4));
    for (size_t i = 0; i < 20; i++) {
        gpt_data_sample(tokens, data, i % 2 ? GPT_TRAINING : GPT_HELD_OUT, 1, i, i, 4);
        cr_assert(tokens[0] == 'f' && tokens[3] == 'e' && tokens[4] == 255);
    }
    gpt_data_close(data);
}

Test(gpt_data, splits_do_not_overlap, .fini = remove_file)
{
    char text[1000];
    struct gpt_data *data;
    int32_t tokens[9];
    size_t seen[2] = {0};
    memset(text, 'a', 900);
    memset(text + 900, 'b', 100);
    write_file(text, sizeof text);
    ASSERT_OK(gpt_data_open(&data, path, 8));
    cr_assert_eq(gpt_data_bytes(data), sizeof text);
    for (size_t i = 0; i < 2000; i++) {
        gpt_data_sample(tokens, data, GPT_TRAINING, 5, 0, i, 8);
        for (size_t t = 0; t < 9; t++)
            seen[0] += tokens[t] == 'a';
        gpt_data_sample(tokens, data, GPT_HELD_OUT, 5, 0, i, 8);
        for (size_t t = 0; t < 9; t++)
            seen[1] += tokens[t] == 'b';
    }
    cr_assert_eq(seen[0], 2000 * 9);
    cr_assert_eq(seen[1], 2000 * 9);
    gpt_data_close(data);
}

Test(gpt_data, a_sample_is_a_function_of_seed_step_and_index)
{
    enum { LENGTH = 63, BYTES = (LENGTH + 1) * sizeof(int32_t) };
    struct gpt_data *one = open_text(LENGTH), *two = open_text(LENGTH);
    int32_t a[LENGTH + 1], b[LENGTH + 1];
    size_t different = 0;
    for (uint64_t i = 0; i < 50; i++) {
        const uint64_t seed = i % 3, step = i / 7 + (i << 32);
        gpt_data_sample(a, one, GPT_TRAINING, seed, step, i, LENGTH);
        gpt_data_sample(b, two, GPT_TRAINING, seed, step, i, LENGTH);
        cr_assert_arr_eq(a, b, BYTES);
        gpt_data_sample(b, two, GPT_TRAINING, seed + 1, step, i, LENGTH);
        different += memcmp(a, b, BYTES) != 0;
        gpt_data_sample(b, two, GPT_TRAINING, seed, step + 1, i, LENGTH);
        different += memcmp(a, b, BYTES) != 0;
        gpt_data_sample(b, two, GPT_TRAINING, seed, step, i + 1, LENGTH);
        different += memcmp(a, b, BYTES) != 0;
        for (size_t t = 0; t <= LENGTH; t++)
            cr_assert(a[t] >= 0 && a[t] < 256);
    }
    cr_assert_gt(different, 140, "only %zu of 150 samples differ", different);
    gpt_data_close(one);
    gpt_data_close(two);
}

Test(gpt_data, a_folder_without_text_leaves_the_machine_s)
{
    struct gpt_data *here, *elsewhere;
    struct stat about;
    ASSERT_OK(gpt_data_open_default(&here, ".", 16));
    cr_assert_gt(gpt_data_bytes(here), 10000);
    if (stat("/usr/share/common-licenses", &about) == 0) {
        ASSERT_OK(gpt_data_open_default(&elsewhere, "/nonexistent", 16));
        cr_assert_lt(gpt_data_bytes(elsewhere), gpt_data_bytes(here));
        gpt_data_close(elsewhere);
    }
    gpt_data_close(here);
}
