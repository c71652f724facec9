/* Owns the tests of the file of probe results: what is found again, what is never believed, and
 * what becomes of the file. Must not know sessions. Seeds: none. */
#include "probe/store.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/config_files.h"

TestSuite(probe_store, .init = config_enter, .fini = config_leave);

#define NAME "results"

static const struct rbi_store_key gpt = {.model = "gpt 124M",
                                         .device = "cuda NVIDIA H200",
                                         .total_bytes = 150754820096,
                                         .driver = "CUDA 13.0, driver 580.159.04",
                                         .library = "0.1.0",
                                         .settings = "batch=64 smallest=1"};

static struct rbi_store_key other(const char *model)
{
    struct rbi_store_key key = gpt;
    key.model = model;
    return key;
}

static size_t find(const struct rbi_store_key *key)
{
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_find(&result, NAME, key), REBATCH_OK, "%s", rebatch_last_error());
    return result.size;
}

static void put(const struct rbi_store_key *key, size_t size)
{
    const struct rbi_store_result result = {.size = size, .peak_bytes = 1000 * size};
    cr_assert_eq(rbi_store_put(NAME, key, &result), REBATCH_OK, "%s", rebatch_last_error());
}

/* As bytes, for a text with damage in it may have zeros. */
static size_t read_bytes(char *bytes, size_t room, const char *name)
{
    FILE *file = fopen(name, "rb");
    cr_assert_not_null(file, "%s", name);
    const size_t length = fread(bytes, 1, room, file);
    fclose(file);
    return length;
}

Test(probe_store, what_was_put_is_found_and_nothing_else)
{
    cr_assert_eq(find(&gpt), 0);
    cr_assert(access(NAME, F_OK) != 0, "looking makes no file");
    put(&gpt, 38);
    cr_assert_eq(find(&gpt), 38);
    struct rbi_store_key keys[6];
    for (size_t i = 0; i < 6; i++)
        keys[i] = gpt;
    keys[0].model = "gpt 124";
    keys[1].device = "cuda NVIDIA H100";
    keys[2].total_bytes--;
    keys[3].driver = "CUDA 13.0, driver 580.159.05";
    keys[4].library = "0.1.1";
    keys[5].settings = "batch=64 smallest=2";
    for (size_t i = 0; i < 6; i++)
        cr_assert_eq(find(&keys[i]), 0, "%zu", i);
    for (size_t i = 0; i < 6; i++)
        put(&keys[i], i + 1);
    for (size_t i = 0; i < 6; i++)
        cr_assert_eq(find(&keys[i]), i + 1, "%zu", i);
    cr_assert_eq(find(&gpt), 38);
}

Test(probe_store, a_later_result_replaces_the_one_of_its_key)
{
    const struct rbi_store_key second = other("second");
    put(&gpt, 38);
    put(&second, 5);
    put(&gpt, 40);
    cr_assert_eq(find(&gpt), 40);
    cr_assert_eq(find(&second), 5);
    char *text = config_read(NAME);
    size_t lines = 0;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    cr_assert_eq(lines, 3, "the header and two entries:\n%s", text);
    free(text);
}

Test(probe_store, any_text_can_name_a_model)
{
    static const char *const names[] = {"a \"quoted\" name", "two\nlines", "back\\slash",
                                        "back\\x5cslash",    "\x7f\x01",   "größer",
                                        "a=\"1\" size=9 "};
    for (size_t i = 0; i < 7; i++) {
        const struct rbi_store_key key = other(names[i]);
        put(&key, 10 + i);
    }
    for (size_t i = 0; i < 7; i++) {
        const struct rbi_store_key key = other(names[i]);
        cr_assert_eq(find(&key), 10 + i, "%s", names[i]);
    }
}

/* ---- damage ---- */

/* Every byte; under sanitizers and valgrind, where all of this takes many times as long, every 8th
 * of them, but another one for each bit or value. */
static size_t stride(void)
{
    const char *text = getenv("REBATCH_TEST_STRIDE");
    return text && strcmp(text, "1") != 0 ? 8 : 1;
}

/* Two entries; the sizes have three digits so that a changed one is seen. */
static size_t make_two(char *bytes, size_t room)
{
    const struct rbi_store_key second = other("second");
    put(&gpt, 138);
    put(&second, 257);
    return read_bytes(bytes, room, NAME);
}

/* Whatever stands in the file now: the right size or none, and not without a word. */
static void expect_right_or_none(const char *what, size_t at)
{
    const struct rbi_store_key second = other("second");
    const struct rbi_store_key *keys[] = {&gpt, &second};
    const size_t sizes[] = {138, 257};
    for (size_t k = 0; k < 2; k++) {
        struct rbi_store_result result;
        const rebatch_status status = rbi_store_find(&result, NAME, keys[k]);
        cr_assert(result.size == 0 ||
                      (result.size == sizes[k] && result.peak_bytes == 1000 * sizes[k]),
                  "%s %zu: %zu is found", what, at, result.size);
        cr_assert_eq(status, REBATCH_E_PARSE, "%s %zu: %s", what, at, rebatch_status_name(status));
    }
}

static void write_byte(int file, size_t at, char byte)
{
    cr_assert_eq(pwrite(file, &byte, 1, (off_t)at), 1);
}

Test(probe_store, with_any_bit_flipped_no_wrong_size_is_found)
{
    char good[4096];
    const size_t length = make_two(good, sizeof good);
    const int file = open(NAME, O_WRONLY);
    cr_assert(length > 400 && length < sizeof good);
    for (size_t at = 0; at < length; at++) {
        for (int bit = (int)(at % stride()); bit < 8; bit += (int)stride()) {
            write_byte(file, at, (char)(good[at] ^ 1 << bit));
            expect_right_or_none("byte", at);
        }
        write_byte(file, at, good[at]);
    }
    close(file);
    cr_assert_eq(find(&gpt), 138);
}

Test(probe_store, with_any_byte_replaced_no_wrong_size_is_found)
{
    static const char others[] = {0, '\n', ' ', '"', '0', '9', 'f', '\xff'};
    char good[4096];
    const size_t length = make_two(good, sizeof good);
    const int file = open(NAME, O_WRONLY);
    for (size_t at = 0; at < length; at++) {
        for (size_t i = at % stride(); i < sizeof others; i += stride()) {
            if (others[i] == good[at])
                continue;
            write_byte(file, at, others[i]);
            expect_right_or_none("byte", at);
        }
        write_byte(file, at, good[at]);
    }
    close(file);
    cr_assert_eq(find(&gpt), 138);
}

Test(probe_store, truncated_at_any_length_no_wrong_size_is_found)
{
    char good[4096];
    const size_t length = make_two(good, sizeof good);
    for (size_t at = length; at-- > 0;) {
        cr_assert_eq(truncate(NAME, (off_t)at), 0);
        if (at > 0 && good[at - 1] != '\n') {
            expect_right_or_none("length", at);
            continue;
        }
        struct rbi_store_result result; /* where a line ends nothing is to be seen of it */
        cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK);
        cr_assert(result.size == 0 || result.size == 138);
    }
}

Test(probe_store, a_bad_line_costs_no_other_entry_and_is_kept_beside)
{
    char good[4096], bad[4096], kept[4096];
    const struct rbi_store_key second = other("second"), third = other("third");
    const size_t length = make_two(good, sizeof good);
    memcpy(bad, good, length);
    memcpy(strstr(bad, "138"), "139", 3);
    config_write_bytes(NAME, bad, length);
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_find(&result, NAME, &second), REBATCH_E_PARSE);
    cr_assert_eq(result.size, 257, "a good line is believed");
    cr_assert(strstr(rebatch_last_error(), NAME ":2: 1 damaged line"), "%s", rebatch_last_error());
    put(&third, 3);
    cr_assert_eq(find(&gpt), 0);
    cr_assert_eq(find(&second), 257);
    cr_assert_eq(find(&third), 3);
    cr_assert_eq(read_bytes(kept, sizeof kept, NAME ".damaged"), length);
    cr_assert_eq(memcmp(kept, bad, length), 0);
}

static void expect_left_alone(const char *text, const char *words)
{
    struct rbi_store_result result;
    const struct rbi_store_result mine = {.size = 7, .peak_bytes = 7};
    config_write(NAME, text);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_E_PARSE);
    cr_assert_eq(result.size, 0);
    cr_assert(strstr(rebatch_last_error(), words), "%s", rebatch_last_error());
    cr_assert_eq(rbi_store_put(NAME, &gpt, &mine), REBATCH_E_PARSE);
    cr_assert(strstr(rebatch_last_error(), "left alone"), "%s", rebatch_last_error());
    char *now = config_read(NAME);
    cr_assert_str_eq(now, text);
    free(now);
}

Test(probe_store, a_foreign_file_is_left_alone)
{
    expect_left_alone("memory = { limit = \"22GiB\"; };\n", "has no results of probes in it");
    expect_left_alone("rebatch probe results, version", "has no results of probes in it");
    expect_left_alone("rebatch probe results, version 1", "has no results of probes in it");
    expect_left_alone("\n", "has no results of probes in it");
}

Test(probe_store, a_newer_version_is_left_alone)
{
    expect_left_alone("rebatch probe results, version 2\nkey=\"a\" anything\n", "has version 2");
    expect_left_alone("rebatch probe results, version 13\n", "has version 13");
}

Test(probe_store, an_empty_file_is_one_without_entries)
{
    config_write(NAME, "");
    cr_assert_eq(find(&gpt), 0);
    put(&gpt, 4);
    cr_assert_eq(find(&gpt), 4);
}

/* ---- what cannot be read or written ---- */

static void expect_io(const char *path, const char *words)
{
    struct rbi_store_result result;
    const struct rbi_store_result mine = {.size = 7, .peak_bytes = 7};
    const rebatch_status found = rbi_store_find(&result, path, &gpt);
    cr_assert_eq(result.size, 0);
    if (words) {
        cr_assert_eq(found, REBATCH_E_IO);
        cr_assert(strstr(rebatch_last_error(), words), "%s", rebatch_last_error());
    }
    cr_assert_eq(rbi_store_put(path, &gpt, &mine), REBATCH_E_IO, "%s", path);
}

Test(probe_store, what_is_no_file_is_refused)
{
    cr_assert_eq(mkdir("folder", 0700), 0);
    cr_assert_eq(mkfifo("pipe", 0600), 0);
    expect_io("folder", NULL);
    expect_io("pipe", "is no regular file");
    expect_io("none/there", NULL);
    expect_io("/dev/zero", "is no regular file");
    cr_assert_eq(rmdir("folder"), 0);
}

Test(probe_store, a_file_that_is_too_large_is_refused)
{
    struct rbi_store_result result;
    config_write(NAME, RBI_STORE_HEADER);
    cr_assert_eq(truncate(NAME, (off_t)RBI_STORE_BYTES_MOST + 1), 0);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_E_IO);
    cr_assert(strstr(rebatch_last_error(), "is larger than"), "%s", rebatch_last_error());
}

Test(probe_store, the_files_mode_stays)
{
    struct stat about;
    put(&gpt, 3);
    cr_assert_eq(chmod(NAME, 0640), 0);
    put(&gpt, 4);
    cr_assert_eq(stat(NAME, &about), 0);
    cr_assert_eq(about.st_mode & 0777, 0640);
}

/* Which is much text to look through again and again. */
Test(probe_store, of_too_many_entries_the_oldest_go)
{
    char name[16];
    for (int i = 0; i < RBI_STORE_ENTRIES + 3; i++) {
        (void)snprintf(name, sizeof name, "model %d", i);
        const struct rbi_store_key key = other(name);
        put(&key, (size_t)i + 1);
    }
    const struct rbi_store_key gone = other("model 2"), stays = other("model 3");
    cr_assert_eq(find(&gone), 0);
    cr_assert_eq(find(&stays), 4);
    put(&stays, 5); /* the one that is replaced costs no other its place */
    const struct rbi_store_key next = other("model 4");
    cr_assert_eq(find(&next), 5);
}

/* ---- two at once ---- */

enum { WRITERS = 4, ENTRIES_EACH = 20 };

static void write_entries(int writer)
{
    char name[32];
    for (int i = 0; i < ENTRIES_EACH; i++) {
        (void)snprintf(name, sizeof name, "writer %d entry %d", writer, i);
        const struct rbi_store_key key = other(name);
        const struct rbi_store_result result = {.size = (size_t)(100 * writer + i + 1),
                                                .peak_bytes = 1};
        if (rbi_store_put(NAME, &key, &result))
            _exit(1);
    }
    _exit(0);
}

Test(probe_store, processes_that_write_at_once_lose_nothing)
{
    for (int w = 0; w < WRITERS; w++)
        if (fork() == 0)
            write_entries(w);
    struct rbi_store_result result;
    int status;
    for (int done = 0; done < WRITERS;) {
        /* Who reads meanwhile never sees half a file. */
        cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK, "%s", rebatch_last_error());
        const pid_t child = waitpid(-1, &status, WNOHANG);
        if (child > 0) {
            cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            done++;
        }
    }
    char name[32];
    for (int w = 0; w < WRITERS; w++)
        for (int i = 0; i < ENTRIES_EACH; i++) {
            (void)snprintf(name, sizeof name, "writer %d entry %d", w, i);
            const struct rbi_store_key key = other(name);
            cr_assert_eq(find(&key), (size_t)(100 * w + i + 1), "%s", name);
        }
    cr_assert(access(NAME ".new", F_OK) != 0);
}

Test(probe_store, who_cannot_have_the_lock_gives_up_and_leaves_the_file)
{
    int lock;
    put(&gpt, 3);
    cr_assert_eq(rbi_file_lock(&lock, NAME, 0), REBATCH_OK);
    int second;
    cr_assert_eq(rbi_file_lock(&second, NAME, 5000000), REBATCH_E_IO);
    cr_assert(strstr(rebatch_last_error(), "is locked by another process"));
    cr_assert_eq(second, -1);
    cr_assert_eq(find(&gpt), 3, "reading needs no lock");
    rbi_file_unlock(lock);
    put(&gpt, 4);
    cr_assert_eq(find(&gpt), 4);
}

Test(probe_store, what_was_too_large_is_kept_with_its_size)
{
    const struct rbi_store_result bounded = {17, 1000, 19, 5000}, without = {18, 1000, 0, 0};
    const struct rbi_store_key second = other("second");
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_put(NAME, &gpt, &bounded), REBATCH_OK);
    put(&second, 3);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK);
    cr_assert(result.size == 17 && result.peak_bytes == 1000);
    cr_assert(result.too_large == 19 && result.room_bytes == 5000);
    cr_assert_eq(rbi_store_find(&result, NAME, &second), REBATCH_OK);
    cr_assert(result.size == 3 && result.too_large == 0 && result.room_bytes == 0);
    cr_assert_eq(rbi_store_put(NAME, &gpt, &without), REBATCH_OK);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK);
    cr_assert(result.size == 18 && result.too_large == 0 && result.room_bytes == 0);
}

/* The file of a version that is out must be readable for ever: this one was written by 0.1.0. The
 * checksum is CRC-64/XZ, whose check value, of "123456789", is 995dc9bbdf1939fa. */
Test(probe_store, the_format_stays)
{
    const struct rbi_store_key key = {"123", "host", 8388608, "", "0.1.0", "batch=64"};
    config_write(NAME, RBI_STORE_HEADER
                 "key=\"123\" device=\"host\" total_bytes=8388608 driver=\"\" library=\"0.1.0\" "
                 "settings=\"batch=64\" size=17 peak_bytes=8146944 found=2026-11-21T03:21:33Z "
                 "sum=b2f17d2a80f84b80\n");
    struct rbi_store_result result;
    cr_assert_eq(rbi_store_find(&result, NAME, &key), REBATCH_OK, "%s", rebatch_last_error());
    cr_assert_eq(result.size, 17);
    cr_assert_eq(result.peak_bytes, 8146944);
    cr_assert_eq(result.too_large, 0, "that came later");
}
