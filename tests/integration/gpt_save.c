/* Owns the tests of a training that is saved and goes on: the bits are those of one that was never
 * interrupted, and no file that is damaged, foreign or of another run changes anything. Must not
 * know more of the library than its public headers say. Seeds: 1 to 12 for when a process is
 * killed. */
#include "gpt/save.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpt/error.h"
#include "integration/gpt_common.h"
#include "integration/step_common.h"

/* Texts are read from the repository, so the folder of a test is another one. */
static char folder[] = "/tmp/rebatch-save-XXXXXX";
static char file[64], file_new[64], other[64];

static void enter(void)
{
    cr_assert_not_null(mkdtemp(folder));
    (void)snprintf(file, sizeof file, "%s/state", folder);
    (void)snprintf(file_new, sizeof file_new, "%s/state.new", folder);
    (void)snprintf(other, sizeof other, "%s/other", folder);
}

static void leave(void)
{
    (void)unlink(file);
    (void)unlink(file_new);
    (void)unlink(other);
    (void)rmdir(folder);
}

TestSuite(gpt_save, .init = enter, .fini = leave);

/* ---- the same bits ---- */

static void save_after(const struct run_options *options, size_t steps)
{
    OPEN(run, run, options);
    run_steps(&run, steps);
    ASSERT_OK(gpt_trainer_save(run.trainer, file));
}

static void resume(char hash[GPT_HASH_TEXT_BYTES], const struct run_options *options, size_t steps)
{
    rebatch_step_report report;
    OPEN(run, run, options);
    ASSERT_OK(gpt_trainer_load(run.trainer, file));
    for (size_t i = 0; i < steps; i++) {
        const uint64_t number = run.trainer->loss_count;
        ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
        cr_assert_eq(report.step, number, "the session goes on counting");
    }
    run_hash(&run, hash);
}

Test(gpt_save, a_resumed_run_has_the_bits_of_one_that_never_stopped)
{
    enum { STEPS = 4 };
    static const size_t micros[] = {0, 7, 1};
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    struct run_options options = tiny_run();
    run_whole(reference, &options, STEPS);
    for (size_t before = 0; before <= STEPS; before += stride_of_cases(STEPS)) {
        options.micro = micros[before % 3];
        save_after(&options, before);
        for (size_t i = 0; i < 3; i++) {
            options.micro = micros[i];
            options.own_stream = i == 1;
            resume(hash, &options, STEPS - before);
            cr_assert_str_eq(hash, reference, "saved after %zu, micro-batch %zu", before,
                             micros[i]);
        }
        options.own_stream = false;
    }
}

Test(gpt_save, a_resumed_run_has_the_same_bits_through_ooms)
{
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    struct run_options options = tiny_run();
    struct run run;
    rebatch_pool_stats stats;
    run_open(&run, &options);
    run_steps(&run, 2);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    ASSERT_OK(gpt_trainer_save(run.trainer, file));
    run_steps(&run, 2);
    run_hash(&run, reference);
    run_close(&run);
    options.capacity_bytes = (size_t)stats.reserved_peak_bytes / 10 * 7;
    rebatch_step_report report;
    run_open(&run, &options);
    ASSERT_OK(gpt_trainer_load(run.trainer, file));
    ASSERT_OK(gpt_trainer_step(run.trainer, &report, NULL));
    cr_assert_gt(report.ooms, 0);
    run_steps(&run, 1);
    run_hash(&run, hash);
    run_close(&run);
    cr_assert_str_eq(hash, reference);
}

static rebatch_status nothing_is_finite(const struct gpt_queue *queue, uint32_t *is_not_finite,
                                        const float *values, size_t count)
{
    (void)queue;
    (void)values;
    (void)count;
    *is_not_finite = 1; /* on the host's default stream everything has run */
    return REBATCH_OK;
}

/* A skipped update, so that steps and updates are counted apart, and a scale that is about to
 * double. */
Test(gpt_save, the_loss_scaler_goes_on_where_it_was)
{
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    struct run_options options = tiny_run();
    options.train.loss_scale = 1024.0f;
    struct gpt_ops overflowing = gpt_host_ops;
    overflowing.check_finite = nothing_is_finite;
    OPEN(run, run, &options);
    run_steps(&run, 1);
    const struct gpt_ops *ops = run.trainer->model->ops;
    run.trainer->model->ops = &overflowing;
    run_steps(&run, 1);
    run.trainer->model->ops = ops;
    cr_assert_eq(run.trainer->skipped, 1);
    run.trainer->scaler.good = GPT_SCALER_INTERVAL - 2;
    run_steps(&run, 1);
    ASSERT_OK(gpt_trainer_save(run.trainer, file));
    run_steps(&run, 3);
    run_hash(&run, reference);
    cr_assert_eq(run.trainer->scaler.scale, 1024.0f, "halved once, doubled once");
    cr_assert_eq(run.trainer->updates, 5);
    options.micro = 5;
    resume(hash, &options, 3);
    cr_assert_str_eq(hash, reference);
}

/* Moments in pinned host memory are saved and loaded there; where they are changes no bit. */
Test(gpt_save, moments_that_are_pinned_are_saved_and_loaded_there)
{
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    const struct run_options options = tiny_run();
    run_whole(reference, &options, 4);
    for (size_t before = 0; before <= 2; before += 2)
        for (int pinned = 0; pinned < 4; pinned++) { /* when saved, when resumed */
            struct run run;
            run_open(&run, &options);
            if (pinned & 1)
                ASSERT_OK(gpt_trainer_ops()->lighten(GPT_LIGHTEN_MOST, run.trainer));
            run_steps(&run, before);
            ASSERT_OK(gpt_trainer_save(run.trainer, file));
            run_close(&run);
            run_open(&run, &options);
            if (pinned & 2) {
                ASSERT_OK(gpt_trainer_ops()->lighten(GPT_LIGHTEN_MOST, run.trainer));
                run_steps(&run, 1); /* what it leaves in the moments is not to stay */
            }
            ASSERT_OK(gpt_trainer_load(run.trainer, file));
            run_steps(&run, 4 - before);
            run_hash(&run, hash);
            cr_assert_str_eq(hash, reference, "%zu before, %d", before, pinned);
            run_close(&run);
        }
}

/* A run can also be put back: weights, moments and losses of later steps are gone. */
Test(gpt_save, loading_into_a_run_that_went_on_puts_it_back)
{
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    struct run_options options = tiny_run();
    for (size_t before = 0; before < 2; before++) {
        OPEN(run, run, &options);
        run_steps(&run, before);
        ASSERT_OK(gpt_trainer_save(run.trainer, file));
        run_steps(&run, 2);
        run_hash(&run, reference);
        run_steps(&run, 1);
        ASSERT_OK(gpt_trainer_load(run.trainer, file));
        cr_assert_eq(run.trainer->loss_count, before);
        run_steps(&run, 2);
        run_hash(&run, hash);
        cr_assert_str_eq(hash, reference);
        cr_assert_eq(run.trainer->samples_seen, (before + 2) * options.train.batch);
    }
}

/* Floats that decimal digits do not show exactly come back as they were. */
Test(gpt_save, the_settings_come_back_to_the_bit)
{
    struct run_options options = tiny_run();
    options.train.learning_rate = 0.1f / 3.0f;
    options.train.least_learning_rate = 1e-39f; /* not normal */
    options.train.epsilon = 1.17549449e-38f;
    options.train.seed = UINT64_MAX;
    save_after(&options, 1);
    struct gpt_train_options saved;
    ASSERT_OK(gpt_saved_options(&saved, NULL, file));
    cr_assert_eq(memcmp(&saved.learning_rate, &options.train.learning_rate, sizeof(float)), 0);
    cr_assert_eq(
        memcmp(&saved.least_learning_rate, &options.train.least_learning_rate, sizeof(float)), 0);
    cr_assert_eq(memcmp(&saved.epsilon, &options.train.epsilon, sizeof(float)), 0);
    cr_assert_eq(saved.seed, UINT64_MAX);
    cr_assert_eq(saved.config.channels, options.train.config.channels);
    cr_assert_eq(saved.batch, options.train.batch);
    char hash[GPT_HASH_TEXT_BYTES];
    options.train = saved;
    resume(hash, &options, 0);
}

/* ---- what is refused ---- */

/* The load must fail, say `words`, and change nothing. */
static void expect_refused(struct run *run, const char *path, rebatch_status status,
                           const char *words)
{
    char before[GPT_HASH_TEXT_BYTES], after[GPT_HASH_TEXT_BYTES];
    run_hash(run, before);
    const size_t losses = run->trainer->loss_count, moments = run->trainer->moments[0].count;
    ASSERT_ERROR(gpt_trainer_load(run->trainer, path), status, words);
    run_hash(run, after);
    cr_assert_str_eq(before, after);
    cr_assert_eq(run->trainer->loss_count, losses);
    cr_assert_eq(run->trainer->moments[0].count, moments);
}

static void expect_other_settings_refused(const struct run_options *options, const char *words)
{
    OPEN(run, run, options);
    run_steps(&run, 1);
    expect_refused(&run, file, REBATCH_E_INVALID, words);
}

Test(gpt_save, another_shape_or_setting_is_refused_by_name)
{
    struct run_options options = tiny_run();
    save_after(&options, 1);
    options.train.config.layers = 3;
    expect_other_settings_refused(&options, "was saved with layers=2: this run has layers=3");
    options = tiny_run();
    options.train.config.channels = 128;
    expect_other_settings_refused(&options, "channels=64: this run has channels=128");
    options = tiny_run();
    options.train.batch = 8;
    expect_other_settings_refused(&options, "batch=16: this run has batch=8");
    options = tiny_run();
    options.train.config.dropout = 0.2f;
    expect_other_settings_refused(&options, "dropout=0.100000001: this run has dropout=0.2");
    options = tiny_run();
    options.train.total_steps = 41;
    expect_other_settings_refused(&options, "total_steps=40: this run has total_steps=41");
}

Test(gpt_save, another_text_is_refused)
{
    struct run_options options = tiny_run();
    save_after(&options, 1);
    FILE *text = fopen(other, "w");
    for (int i = 0; i < 1000; i++)
        (void)fprintf(text, "another text, line %d\n", i);
    cr_assert_eq(fclose(text), 0);
    OPEN(run, run, &options);
    struct gpt_data *ours = run.data, *theirs;
    ASSERT_OK(gpt_data_open(&theirs, other, options.train.config.length));
    run.trainer->data = theirs;
    expect_refused(&run, file, REBATCH_E_INVALID, "another text");
    run.trainer->data = ours;
    gpt_data_close(theirs);
}

Test(gpt_save, without_room_for_the_moments_nothing_changes)
{
    struct run_options options = tiny_run();
    struct run run;
    rebatch_pool_stats stats;
    save_after(&options, 1);
    run_open(&run, &options);
    ASSERT_OK(rebatch_pool_get_stats(&stats, rebatch_get_pool(run.rb)));
    run_close(&run);
    options.capacity_bytes = (size_t)stats.reserved_bytes + 65536;
    run_open(&run, &options);
    expect_refused(&run, file, REBATCH_OOM, "");
    run_close(&run);
}

Test(gpt_save, what_is_no_saved_training_is_refused)
{
    struct run_options options = tiny_run();
    struct gpt_train_options saved;
    OPEN(run, run, &options);
    run_steps(&run, 1);
    expect_refused(&run, file, REBATCH_E_IO, "cannot be opened: No such file or directory");
    expect_refused(&run, "README.md", REBATCH_E_PARSE, "is no saved training");
    expect_refused(&run, "/dev/zero", REBATCH_E_IO, "is no regular file");
    expect_refused(&run, "/dev/null", REBATCH_E_IO, "is no regular file");
    expect_refused(&run, folder, REBATCH_E_IO, "is no regular file");
    ASSERT_ERROR(gpt_saved_options(&saved, NULL, "README.md"), REBATCH_E_PARSE,
                 "is no saved training");
    ASSERT_ERROR(gpt_trainer_save(run.trainer, "/nowhere/state"), REBATCH_E_IO,
                 "/nowhere/state.new cannot be made");
}

Test(gpt_save, only_a_regular_file_is_replaced)
{
    struct run_options options = tiny_run();
    struct stat about;
    OPEN(run, run, &options);
    run_steps(&run, 1);
    cr_assert_eq(mkfifo(file, 0600), 0);
    ASSERT_ERROR(gpt_save_check_path(file), REBATCH_E_IO, "is no regular file");
    ASSERT_ERROR(gpt_trainer_save(run.trainer, file), REBATCH_E_IO, "is no regular file");
    cr_assert_eq(stat(file, &about), 0);
    cr_assert(S_ISFIFO(about.st_mode));
    ASSERT_ERROR(gpt_trainer_save(run.trainer, folder), REBATCH_E_IO, "is no regular file");
}

/* ---- damage ---- */

static uint8_t *read_whole(size_t *count, const char *path)
{
    struct stat about;
    cr_assert_eq(stat(path, &about), 0);
    uint8_t *bytes = malloc((size_t)about.st_size);
    FILE *stream = fopen(path, "rb");
    cr_assert_not_null(stream);
    *count = fread(bytes, 1, (size_t)about.st_size, stream);
    cr_assert_eq(*count, (size_t)about.st_size);
    fclose(stream);
    return bytes;
}

static void write_whole(const char *path, const uint8_t *bytes, size_t count)
{
    FILE *stream = fopen(path, "wb");
    cr_assert_not_null(stream);
    cr_assert_eq(fwrite(bytes, 1, count, stream), count);
    cr_assert_eq(fclose(stream), 0);
}

/* Each byte of the header and of the checksum, and some between them. */
static size_t next_place(size_t at, size_t count, size_t stride)
{
    const size_t header = 800, tail = 80;
    if (at < header)
        return at + stride;
    return at + 80021 < count - tail ? at + 80021 : at < count - tail ? count - tail : at + stride;
}

static void expect_not_loaded(const struct run *run, const char *what, size_t at)
{
    const rebatch_status status = gpt_trainer_load(run->trainer, file);
    cr_assert_eq(status, REBATCH_E_PARSE, "%s %zu: %s", what, at, rebatch_status_name(status));
    cr_assert_eq(run->trainer->loss_count, 0);
}

Test(gpt_save, with_any_byte_changed_nothing_is_loaded)
{
    struct run_options options = tiny_run();
    size_t count;
    save_after(&options, 1);
    uint8_t *bytes = read_whole(&count, file);
    const int damaged = open(file, O_WRONLY);
    OPEN(run, run, &options);
    const size_t stride = stride_of_cases(40);
    for (size_t at = 0; at < count; at = next_place(at, count, stride)) {
        const uint8_t byte = (uint8_t)(bytes[at] ^ 1 << at % 8);
        cr_assert_eq(pwrite(damaged, &byte, 1, (off_t)at), 1);
        expect_not_loaded(&run, "byte", at);
        cr_assert_eq(pwrite(damaged, &bytes[at], 1, (off_t)at), 1);
    }
    ASSERT_OK(gpt_trainer_load(run.trainer, file));
    close(damaged);
    free(bytes);
}

Test(gpt_save, cut_at_any_length_nothing_is_loaded)
{
    struct run_options options = tiny_run();
    size_t count;
    save_after(&options, 1);
    uint8_t *bytes = read_whole(&count, file);
    OPEN(run, run, &options);
    const size_t stride = stride_of_cases(40);
    for (size_t at = 0; at < count; at = next_place(at, count, stride)) {
        write_whole(file, bytes, at);
        expect_not_loaded(&run, "length", at);
    }
    free(bytes);
}

/* A good checksum for what was changed. */
static void write_summed(const char *path, uint8_t *bytes, size_t count)
{
    struct gpt_hash hash;
    char sum[GPT_HASH_TEXT_BYTES];
    const size_t digits = sizeof sum - 1;
    gpt_hash_begin(&hash);
    gpt_hash_add(&hash, bytes, count - digits);
    gpt_hash_end(&hash, sum);
    memcpy(bytes + count - digits, sum, digits);
    write_whole(path, bytes, count);
}

static void set_version(uint8_t *bytes, size_t count, char version)
{
    uint8_t *end = memchr(bytes, '\n', count);
    cr_assert(end && end[-1] == '2');
    end[-1] = (uint8_t)version;
}

/* The line of the header that begins so; it ends at *end. */
static uint8_t *find_line(uint8_t **end, uint8_t *bytes, size_t count, const char *begin)
{
    uint8_t *line = memmem(bytes, count, begin, strlen(begin));
    cr_assert_not_null(line);
    *end = memchr(line + 1, '\n', count - (size_t)(line + 1 - bytes));
    cr_assert_not_null(*end);
    return line;
}

Test(gpt_save, a_newer_version_is_refused)
{
    struct run_options options = tiny_run();
    size_t count;
    save_after(&options, 1);
    uint8_t *bytes = read_whole(&count, file);
    set_version(bytes, count, '3');
    write_summed(other, bytes, count);
    OPEN(run, run, &options);
    expect_refused(&run, other, REBATCH_E_PARSE, "is of another version: expected version 1 or 2");
    free(bytes);
}

/* It has no line of where its text is from. */
Test(gpt_save, version_1_is_loaded)
{
    struct run_options options = tiny_run();
    struct gpt_train_options saved;
    struct gpt_source source;
    char reference[GPT_HASH_TEXT_BYTES], hash[GPT_HASH_TEXT_BYTES];
    size_t count;
    run_whole(reference, &options, 3);
    save_after(&options, 1);
    uint8_t *end, *bytes = read_whole(&count, file);
    uint8_t *line = find_line(&end, bytes, count, "\ndata=");
    set_version(bytes, count, '1');
    memmove(line, end, count - (size_t)(end - bytes));
    count -= (size_t)(end - line);
    write_summed(file, bytes, count);
    ASSERT_OK(gpt_saved_options(&saved, &source, file));
    cr_assert_str_empty(source.path);
    resume(hash, &options, 2);
    cr_assert_str_eq(hash, reference);
    free(bytes);
}

/* ---- where its text is from ---- */

static void expect_source(struct run *run, struct gpt_data *theirs, const char *path,
                          bool is_default)
{
    struct gpt_train_options saved;
    struct gpt_source source;
    const struct gpt_data *ours = run->data;
    run->trainer->data = theirs;
    ASSERT_OK(gpt_trainer_save(run->trainer, file));
    run->trainer->data = ours;
    gpt_data_close(theirs);
    ASSERT_OK(gpt_saved_options(&saved, &source, file));
    cr_assert_str_eq(source.path, path);
    cr_assert_eq(source.is_default, is_default);
}

/* Absolute, with any character that a name may have. */
Test(gpt_save, where_the_text_is_from_comes_back)
{
    static const char *const names[] = {"plain", "two\nlines, 100%", "%0A", "=\xff\x01 "};
    struct run_options options = tiny_run();
    const size_t length = options.train.config.length;
    struct gpt_data *theirs;
    char path[PATH_MAX], here[PATH_MAX];
    cr_assert_not_null(realpath(".", here));
    OPEN(run, run, &options);
    ASSERT_OK(gpt_data_open_default(&theirs, ".", length));
    expect_source(&run, theirs, here, true);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        write_whole(path, (const uint8_t *)here, sizeof here);
        ASSERT_OK(gpt_data_open(&theirs, path, length));
        expect_source(&run, theirs, path, false);
        cr_assert_eq(unlink(path), 0);
    }
}

Test(gpt_save, a_wrong_line_of_where_the_text_is_from_is_refused)
{
    static const char *const lines[] = {"\ndta=", "\ndata%", "\ndatax"};
    static const char *const ends[] = {"%", "%2", "%0a", "%00"};
    struct run_options options = tiny_run();
    size_t count;
    save_after(&options, 0);
    OPEN(run, run, &options);
    for (size_t i = 0; i < 3 + 4; i++) {
        uint8_t *end, *bytes = read_whole(&count, file);
        uint8_t *line = find_line(&end, bytes, count, "\ndata=");
        if (i < 3)
            memcpy(line, lines[i], strlen(lines[i]));
        else
            memcpy(end - strlen(ends[i - 3]), ends[i - 3], strlen(ends[i - 3]));
        write_summed(other, bytes, count);
        expect_refused(&run, other, REBATCH_E_PARSE, "has no line of where its text is from");
        free(bytes);
    }
}

/* ---- interrupted while saving ---- */

static void limit_file_size(size_t bytes)
{
    const struct rlimit limit = {bytes, RLIM_INFINITY};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

Test(gpt_save, a_disk_that_is_full_leaves_the_old_file)
{
    struct run_options options = tiny_run();
    size_t count, after;
    OPEN(run, run, &options);
    run_steps(&run, 1);
    ASSERT_OK(gpt_trainer_save(run.trainer, file));
    uint8_t *good = read_whole(&count, file);
    run_steps(&run, 1);
    (void)signal(SIGXFSZ, SIG_IGN);
    for (size_t at = 0; at < count; at = next_place(at, count, 97)) {
        limit_file_size(at);
        ASSERT_ERROR(gpt_trainer_save(run.trainer, file), REBATCH_E_IO, "File too large");
        limit_file_size(RLIM_INFINITY);
        cr_assert(access(file_new, F_OK) != 0);
        uint8_t *now = read_whole(&after, file);
        cr_assert(after == count && memcmp(now, good, count) == 0, "%zu", at);
        free(now);
    }
    ASSERT_OK(gpt_trainer_save(run.trainer, file));
    free(good);
}

/* In a process of its own, before this one has threads: trains, saves after every step, and at the
 * `last` one no file may be longer than `bytes`, which ends the process. */
static void save_until_killed(const struct run_options *options, size_t last, size_t bytes)
{
    struct run run;
    run_open(&run, options);
    for (size_t i = 1; i <= last; i++) {
        run_steps(&run, 1);
        if (i == last) {
            (void)signal(SIGXFSZ, SIG_DFL); /* which the shell of the tests may ignore */
            limit_file_size(bytes);
        }
        if (gpt_trainer_save(run.trainer, file))
            _exit(1);
    }
    _exit(0);
}

/* Saves after each of so many steps, and waits to be killed. */
static void save_for_ever(const struct run_options *options, size_t last)
{
    struct run run;
    run_open(&run, options);
    for (size_t i = 0; i < last; i++) {
        run_steps(&run, 1);
        if (gpt_trainer_save(run.trainer, file))
            _exit(1);
    }
    for (;;)
        (void)pause();
}

/* The signal that ended a child; 0: none did. */
static int wait_for(pid_t child)
{
    int status;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void expect_hash_of_file(const struct run_options *options, const char *path,
                                const char hashes[][GPT_HASH_TEXT_BYTES], size_t most)
{
    char hash[GPT_HASH_TEXT_BYTES];
    OPEN(run, run, options);
    ASSERT_OK(gpt_trainer_load(run.trainer, path));
    cr_assert_leq(run.trainer->loss_count, most);
    run_hash(&run, hash);
    cr_assert_str_eq(hash, hashes[run.trainer->loss_count]);
}

static void hash_every_step(char hashes[][GPT_HASH_TEXT_BYTES], const struct run_options *options,
                            size_t steps)
{
    OPEN(run, run, options);
    for (size_t i = 0; i <= steps; i++) {
        run_hash(&run, hashes[i]);
        if (i < steps)
            run_steps(&run, 1);
    }
}

Test(gpt_save, a_process_that_dies_while_it_writes_leaves_the_old_file)
{
    enum { CASES = 6 };
    const struct run_options options = tiny_run();
    char kept[CASES][96], hashes[3][GPT_HASH_TEXT_BYTES];
    for (size_t i = 0; i < CASES; i++) {
        const size_t bytes[CASES] = {0, 30, 650, 100001, 900001, 1390000};
        const pid_t child = fork();
        if (child == 0)
            save_until_killed(&options, 2, bytes[i]);
        cr_assert_eq(wait_for(child), SIGXFSZ, "%zu", bytes[i]);
        (void)snprintf(kept[i], sizeof kept[i], "%s.%zu", file, i);
        cr_assert_eq(rename(file, kept[i]), 0);
    }
    hash_every_step(hashes, &options, 2);
    for (size_t i = 0; i < CASES; i++) {
        OPEN(run, run, &options);
        ASSERT_OK(gpt_trainer_load(run.trainer, kept[i]));
        cr_assert_eq(run.trainer->loss_count, 1, "the one that was being written is not there");
        expect_hash_of_file(&options, kept[i], (const char(*)[GPT_HASH_TEXT_BYTES])hashes, 2);
        cr_assert_eq(unlink(kept[i]), 0);
    }
}

Test(gpt_save, kill_9_at_any_time_leaves_a_good_file)
{
    enum { ROUNDS = 12, MOST = 400 };
    static char hashes[MOST + 1][GPT_HASH_TEXT_BYTES];
    const struct run_options options = tiny_run();
    char kept[ROUNDS][96];
    size_t rounds = ROUNDS / (stride_of_cases(4) > 1 ? 3 : 1), last = 0;
    for (size_t i = 0; i < rounds; i++) {
        uint64_t seed = i + 1;
        const pid_t child = fork();
        if (child == 0)
            save_for_ever(&options, MOST);
        for (int waited = 0; access(file, F_OK) != 0; waited++) { /* once there, always there */
            cr_assert_lt(waited, 120000);
            (void)usleep(1000);
        }
        (void)usleep((useconds_t)(script_random(&seed) % 50000));
        cr_assert_eq(kill(child, SIGKILL), 0);
        cr_assert_eq(wait_for(child), SIGKILL);
        (void)snprintf(kept[i], sizeof kept[i], "%s.%zu", file, i);
        cr_assert_eq(rename(file, kept[i]), 0);
    }
    OPEN(run, run, &options); /* how far the furthest came */
    for (size_t i = 0; i < rounds; i++) {
        ASSERT_OK(gpt_trainer_load(run.trainer, kept[i]));
        last = run.trainer->loss_count > last ? run.trainer->loss_count : last;
    }
    hash_every_step(hashes, &options, last);
    for (size_t i = 0; i < rounds; i++) {
        expect_hash_of_file(&options, kept[i], (const char(*)[GPT_HASH_TEXT_BYTES])hashes, last);
        cr_assert_eq(unlink(kept[i]), 0);
    }
}
