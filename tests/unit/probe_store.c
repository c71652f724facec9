/* Owns the tests of the file of probe results: what is found again, what is never believed, and
 * what becomes of the file. Must not know sessions. Seeds: none. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "probe/saved.h"
#include "unit/config_files.h"

TestSuite(probe_store, .init = config_enter, .fini = config_leave);

#define NAME "results"
#define GPT "gpt 124M | cuda NVIDIA H200 | batch=64"

static size_t find(const char *key)
{
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_find(&result, NAME, key), REBATCH_OK, "%s", rebatch_last_error());
    return result.size;
}

static void put(const char *key, size_t size)
{
    const struct rbi_store_result result = {.size = size, .room_bytes = 1000 * size};
    cr_assert_eq(rbi_store_put(NAME, key, &result), REBATCH_OK, "%s", rebatch_last_error());
}

Test(probe_store, what_was_put_is_found_and_nothing_else)
{
    cr_assert_eq(find(GPT), 0);
    cr_assert(access(NAME, F_OK) != 0, "looking makes no file");
    put(GPT, 38);
    put("second", 5);
    cr_assert_eq(find(GPT), 38);
    cr_assert_eq(find("second"), 5);
    cr_assert_eq(find(GPT "0"), 0);
    put(GPT, 40);
    cr_assert_eq(find(GPT), 40);
    cr_assert_eq(find("second"), 5);
}

Test(probe_store, every_member_is_kept)
{
    const struct rbi_store_result bounded = {17, UINT64_MAX, (uint64_t)1 << 40};
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_put(NAME, GPT, &bounded), REBATCH_OK);
    cr_assert_eq(rbi_store_find(&result, NAME, GPT), REBATCH_OK);
    cr_assert_eq(memcmp(&result, &bounded, sizeof result), 0);
}

Test(probe_store, any_text_can_name_a_model)
{
    static const char *const names[] = {"a \"quoted\" name", "two\nlines",      "back\\slash",
                                        "back\\x5cslash",    "\x7f\x01",        "größer",
                                        "size = 9L; } # ",   "\n@include \"/\""};
    for (size_t i = 0; i < 8; i++)
        put(names[i], 10 + i);
    for (size_t i = 0; i < 8; i++)
        cr_assert_eq(find(names[i]), 10 + i, "%s", names[i]);
}

/* ---- damage ---- */

/* Every byte; under sanitizers and valgrind, where all of this takes many times as long, every 8th
 * of them, but another one for each bit or value. */
static size_t stride(void)
{
    const char *text = getenv("REBATCH_TEST_STRIDE");
    return text && strcmp(text, "1") != 0 ? 8 : 1;
}

/* Two entries; the caller frees the text. */
static char *make_two(size_t *length)
{
    put(GPT, 138);
    put("second", 257);
    char *text = config_read(NAME);
    *length = strlen(text);
    return text;
}

/* Whatever stands in the file now: the right result or none. */
static void expect_right_or_none(const char *what, size_t at)
{
    static const char *const keys[] = {GPT, "second"};
    static const size_t sizes[] = {138, 257};
    for (size_t k = 0; k < 2; k++) {
        struct rbi_store_result result;
        (void)rbi_store_find(&result, NAME, keys[k]);
        cr_assert(result.size == 0 ||
                      (result.size == sizes[k] && result.room_bytes == 1000 * sizes[k] &&
                       result.too_large == 0),
                  "%s %zu: %zu is found", what, at, (size_t)result.size);
    }
}

static void write_byte(int file, size_t at, char byte)
{
    cr_assert_eq(pwrite(file, &byte, 1, (off_t)at), 1);
}

Test(probe_store, with_any_bit_flipped_or_byte_replaced_no_wrong_size_is_found)
{
    static const char others[] = {0, '\n', ' ', '\\', '0', '9', 'x', '-', '+', '\xff'};
    size_t length;
    char *good = make_two(&length);
    const int file = open(NAME, O_WRONLY);
    for (size_t at = 0; at < length; at++) {
        for (size_t i = at % stride(); i < 8 + sizeof others; i += stride()) {
            write_byte(file, at, i < 8 ? (char)(good[at] ^ 1 << i) : others[i - 8]);
            expect_right_or_none("byte", at);
        }
        write_byte(file, at, good[at]);
    }
    close(file);
    free(good);
    cr_assert_eq(find(GPT), 138);
}

Test(probe_store, truncated_at_any_length_no_wrong_size_is_found)
{
    size_t length;
    free(make_two(&length));
    while (length-- > 0) {
        cr_assert_eq(truncate(NAME, (off_t)length), 0);
        expect_right_or_none("length", length);
    }
}

/* A changed number is said with its line, costs no other entry, and goes with the next result. */
Test(probe_store, a_damaged_entry_is_said_and_dropped)
{
    size_t length;
    struct rbi_store_result result;
    char *text = make_two(&length);
    memcpy(strstr(text, "138"), "139", 3);
    config_write(NAME, text);
    free(text);
    cr_assert_eq(rbi_store_find(&result, NAME, "second"), REBATCH_E_PARSE);
    cr_assert_eq(result.size, 257);
    cr_assert(strstr(rebatch_last_error(), NAME ":"), "%s", rebatch_last_error());
    cr_assert(strstr(rebatch_last_error(), "a damaged entry"), "%s", rebatch_last_error());
    put("third", 3);
    cr_assert_eq(find(GPT), 0);
    cr_assert_eq(find("second"), 257);
}

/* ---- what is not ours ---- */

static void expect_refused(const char *path, rebatch_status expected, const char *words)
{
    struct rbi_store_result result;
    const struct rbi_store_result mine = {.size = 7};
    if (words) {
        cr_assert_eq(rbi_store_find(&result, path, GPT), expected, "%s", path);
        cr_assert(strstr(rebatch_last_error(), words), "%s", rebatch_last_error());
        cr_assert_eq(result.size, 0);
    }
    cr_assert_eq(rbi_store_put(path, GPT, &mine), expected, "%s", path);
}

Test(probe_store, a_foreign_or_broken_file_is_left_alone)
{
    static const char *const texts[] = {"memory = { limit = \"22GiB\"; };\n", "not mine\n",
                                        "# rebatch: what probes have"};
    for (size_t i = 0; i < 3; i++) {
        config_write(NAME, texts[i]);
        expect_refused(NAME, REBATCH_E_PARSE, "left alone");
        char *now = config_read(NAME);
        cr_assert_str_eq(now, texts[i]);
        free(now);
    }
    config_write(NAME, ""); /* an empty one is taken */
    put(GPT, 4);
    cr_assert_eq(find(GPT), 4);
}

Test(probe_store, what_cannot_be_read_or_written_is_refused)
{
    cr_assert_eq(mkdir("folder", 0700), 0);
    cr_assert_eq(mkfifo("pipe", 0600), 0);
    expect_refused("folder", REBATCH_E_IO, "is no regular file");
    expect_refused("pipe", REBATCH_E_IO, "is no regular file");
    expect_refused("/dev/zero", REBATCH_E_IO, "is no regular file");
    expect_refused("none/there", REBATCH_E_IO, NULL);
    cr_assert_eq(rmdir("folder"), 0);
    config_write(NAME, "");
    cr_assert_eq(truncate(NAME, (off_t)2 << 20), 0);
    expect_refused(NAME, REBATCH_E_IO, "is larger than 1048576 bytes");
}

Test(probe_store, of_too_many_entries_the_oldest_go)
{
    char name[16];
    for (size_t i = 0; i < RBI_STORE_ENTRIES + 3; i++) {
        (void)snprintf(name, sizeof name, "model %zu", i);
        put(name, i + 1);
    }
    cr_assert_eq(find("model 2"), 0);
    cr_assert_eq(find("model 3"), 4);
    put("model 3", 5);
    cr_assert_eq(find("model 4"), 5);
}

/* ---- several at once ---- */

/* In the folder of the test. */
static size_t count_files(void)
{
    size_t count = 0;
    DIR *folder = opendir(".");
    cr_assert_not_null(folder);
    for (struct dirent *e; (e = readdir(folder)) != NULL;)
        count += e->d_name[0] != '.';
    closedir(folder);
    return count;
}

enum { WRITERS = 4, ENTRIES_EACH = 20 };

static void write_entries(int writer)
{
    char name[32];
    for (int i = 0; i < ENTRIES_EACH; i++) {
        (void)snprintf(name, sizeof name, "writer %d entry %d", writer, i);
        const struct rbi_store_result result = {.size = (size_t)i + 1};
        if (rbi_store_put(NAME, name, &result))
            _exit(1);
    }
    _exit(0);
}

/* Who reads meanwhile never sees half a file, and none is left beside it. */
Test(probe_store, processes_that_write_at_once_leave_a_whole_file)
{
    for (int w = 0; w < WRITERS; w++)
        if (fork() == 0)
            write_entries(w);
    int status;
    for (int done = 0; done < WRITERS;) {
        (void)find(GPT);
        if (waitpid(-1, &status, WNOHANG) <= 0)
            continue;
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        done++;
    }
    put(GPT, 38);
    cr_assert_eq(find(GPT), 38);
    cr_assert_eq(count_files(), 1);
}

/* ---- a disk that is full ---- */

Test(probe_store, a_write_that_fails_leaves_the_old_file)
{
    const struct rbi_store_result more = {.size = 40};
    const struct rlimit full = {16, RLIM_INFINITY}, before = {RLIM_INFINITY, RLIM_INFINITY};
    put(GPT, 38);
    cr_assert(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &full), 0);
    const rebatch_status status = rbi_store_put(NAME, GPT, &more);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
    cr_assert_eq(status, REBATCH_E_IO);
    cr_assert(strstr(rebatch_last_error(), "cannot be written"), "%s", rebatch_last_error());
    cr_assert_eq(find(GPT), 38);
    cr_assert_eq(count_files(), 1);
}
