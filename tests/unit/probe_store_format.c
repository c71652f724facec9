/* Owns the tests of the lines in the file of probe results, as docs/probe.md describes them: what
 * is written, and which lines of another writer are believed. The checksum is computed here once
 * more, bit by bit. Must not know sessions. Seeds: none. */
#include "probe/store.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "unit/config_files.h"

TestSuite(probe_store_format, .init = config_enter, .fini = config_leave);

#define NAME "results"
#define KEY                                                                                        \
    "key=\"gpt\" device=\"host\" total_bytes=4096 driver=\"D\" library=\"L\" settings=\"S=1\" "

static const struct rbi_store_key gpt = {"gpt", "host", 4096, "D", "L", "S=1"};

/* CRC-64/XZ: reflected, polynomial 42f0e1eba9ea3693, begins and ends inverted. */
static uint64_t crc64(const char *bytes, size_t length)
{
    uint64_t sum = UINT64_MAX;
    for (size_t i = 0; i < length; i++)
        for (int bit = 0; bit < 8; bit++) {
            const uint64_t in = (sum ^ (uint64_t)((unsigned char)bytes[i] >> bit)) & 1;
            sum = sum >> 1 ^ (in ? UINT64_C(0xc96c5795d7870f42) : 0);
        }
    return ~sum;
}

/* A line of another writer, with its checksum. */
static void add_line(char *text, size_t room, const char *fields)
{
    const size_t length = strlen(text);
    (void)snprintf(text + length, room - length, "%s sum=%016" PRIx64 "\n", fields,
                   crc64(fields, strlen(fields)));
}

static struct rbi_store_result read_line(const char *fields)
{
    char text[1024] = RBI_STORE_HEADER;
    struct rbi_store_result result;
    add_line(text, sizeof text, fields);
    config_write(NAME, text);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK, "%s", rebatch_last_error());
    return result;
}

static void assert_read(const char *fields, struct rbi_store_result expected)
{
    const struct rbi_store_result result = read_line(fields);
    cr_assert(result.size == expected.size && result.peak_bytes == expected.peak_bytes &&
                  result.too_large == expected.too_large &&
                  result.room_bytes == expected.room_bytes,
              "%s: %zu %" PRIu64 " %zu %" PRIu64, fields, result.size, result.peak_bytes,
              result.too_large, result.room_bytes);
}

Test(probe_store_format, the_checksum_is_the_one_that_is_named)
{
    cr_assert_eq(crc64("123456789", 9), UINT64_C(0x995dc9bbdf1939fa), "CRC-64/XZ's check value");
}

/* ---- what is written ---- */

Test(probe_store_format, a_line_has_the_members_that_are_described)
{
    const struct rbi_store_result results[] = {{17, 1000, 0, 0}, {18, 2000, 19, 5000}};
    const char *const fields[] = {KEY "size=17 peak_bytes=1000 found=", KEY
                                  "size=18 peak_bytes=2000 too_large=19 room_bytes=5000 found="};
    for (size_t i = 0; i < 2; i++) {
        unsigned long long sum;
        int year, month, day, hour, minute, second, end = 0;
        cr_assert_eq(rbi_store_put(NAME, &gpt, &results[i]), REBATCH_OK);
        char *text = config_read(NAME);
        cr_assert_eq(strncmp(text, RBI_STORE_HEADER, strlen(RBI_STORE_HEADER)), 0);
        const char *line = text + strlen(RBI_STORE_HEADER);
        cr_assert_eq(strncmp(line, fields[i], strlen(fields[i])), 0, "%s", line);
        const char *found = line + strlen(fields[i]);
        cr_assert_eq(sscanf(found, "%4d-%2d-%2dT%2d:%2d:%2dZ sum=%16llx\n%n", &year, &month, &day,
                            &hour, &minute, &second, &sum, &end),
                     7, "%s", found);
        cr_assert_str_empty(found + end, "the other line of this key is gone");
        cr_assert_eq(sum, crc64(line, (size_t)(strstr(line, " sum=") - line)));
        struct tm utc = {.tm_year = year - 1900,
                         .tm_mon = month - 1,
                         .tm_mday = day,
                         .tm_hour = hour,
                         .tm_min = minute,
                         .tm_sec = second};
        cr_assert_lt(llabs((long long)(time(NULL) - timegm(&utc))), 60);
        free(text);
    }
}

Test(probe_store_format, what_cannot_stand_in_a_line_is_written_as_its_number)
{
    const struct rbi_store_key key = {"a\"b\\c\nd\x1f\x7f~ é", "", 0, "", "", ""};
    cr_assert_eq(rbi_store_put(NAME, &key, &(struct rbi_store_result){.size = 1}), REBATCH_OK);
    char *text = config_read(NAME);
    cr_assert(strstr(text, "\nkey=\"a\\x22b\\x5cc\\x0ad\\x1f\\x7f~ é\" device=\"\" total"), "%s",
              text);
    free(text);
}

/* ---- what is believed ---- */

Test(probe_store_format, later_members_are_skipped_and_missing_ones_unknown)
{
    assert_read(KEY "size=17 peak_bytes=9 ", (struct rbi_store_result){17, 9, 0, 0});
    assert_read(KEY "size=17 peak_bytes=9 found=2026-11-21T03:21:33Z later=\"size=3 \" more=1",
                (struct rbi_store_result){17, 9, 0, 0});
    assert_read(KEY "size=17 peak_bytes=9 too_large=20 room_bytes=64 more=1",
                (struct rbi_store_result){17, 9, 20, 64});
    assert_read(KEY "size=17 peak_bytes=9 too_large=20 found=x",
                (struct rbi_store_result){17, 9, 0, 0});
    assert_read(KEY "size=17 peak_bytes=9 room_bytes=64 ", (struct rbi_store_result){17, 9, 0, 0});
    assert_read(KEY "size=1 peak_bytes=0 ", (struct rbi_store_result){1, 0, 0, 0});
}

Test(probe_store_format, what_is_no_size_is_no_result)
{
    static const char *const none[] = {"",
                                       "size=",
                                       "size= peak_bytes=9 ",
                                       "size=0 peak_bytes=9 ",
                                       "size=17",
                                       "size=-1 peak_bytes=9 ",
                                       "size=+1 peak_bytes=9 ",
                                       "size=1x peak_bytes=9 ",
                                       "size=17 ",
                                       "size=17 peak_bytes=",
                                       "size=17 peak_bytes=9",
                                       "peak_bytes=9 size=17 ",
                                       "siz=17 peak_bytes=9 ",
                                       "size=:1 peak_bytes=9 ",
                                       "size=/1 peak_bytes=9 ",
                                       "size=18446744073709551616 peak_bytes=9 ", /* 2^64 */
                                       "size=18446744073709551620 peak_bytes=9 ",
                                       "size=184467440737095516150 peak_bytes=9 "};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        char fields[256];
        (void)snprintf(fields, sizeof fields, KEY "%s", none[i]);
        assert_read(fields, (struct rbi_store_result){0, 0, 0, 0});
    }
    assert_read(KEY "size=18446744073709551615 peak_bytes=18446744073709551615 ",
                (struct rbi_store_result){SIZE_MAX, UINT64_MAX, 0, 0});
    assert_read(KEY "size=0000019 peak_bytes=08 ", (struct rbi_store_result){19, 8, 0, 0});
}

Test(probe_store_format, what_was_too_large_is_larger_than_what_was_found)
{
    static const size_t others[] = {0, 1, 16, 17};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char fields[256];
        (void)snprintf(fields, sizeof fields,
                       KEY "size=17 peak_bytes=9 too_large=%zu room_bytes=6 ", others[i]);
        assert_read(fields, (struct rbi_store_result){17, 9, 0, 0});
    }
    assert_read(KEY "size=17 peak_bytes=9 too_large=18 room_bytes=6 ",
                (struct rbi_store_result){17, 9, 18, 6});
    assert_read(KEY "size=17 peak_bytes=9 too_large=18 room_bytes=0 ",
                (struct rbi_store_result){17, 9, 18, 0});
}

Test(probe_store_format, of_two_lines_of_a_key_the_later_one_counts)
{
    char text[1024] = RBI_STORE_HEADER;
    struct rbi_store_result result;
    add_line(text, sizeof text, KEY "size=5 peak_bytes=1 ");
    add_line(text, sizeof text, KEY "size=6 peak_bytes=1 ");
    config_write(NAME, text);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_OK);
    cr_assert_eq(result.size, 6);
}

/* ---- damage ---- */

Test(probe_store_format, damaged_lines_are_counted_and_the_first_is_named)
{
    static const char good[] = KEY "size=5 peak_bytes=1 ";
    static const char *const words[] = {NAME ":3: 1 damaged line,", NAME ":3: 2 damaged lines,",
                                        NAME ":3: 3 damaged lines,"};
    char text[4096] = RBI_STORE_HEADER;
    struct rbi_store_result result;
    add_line(text, sizeof text, good);
    for (size_t i = 0; i < 3; i++) {
        strcat(text, i == 1 ? "\n" : "key=\"gpt\" size=7 sum=0000000000000000\n");
        config_write(NAME, text);
        cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_E_PARSE);
        cr_assert(strstr(rebatch_last_error(), words[i]), "%s", rebatch_last_error());
        cr_assert(strstr(rebatch_last_error(), "cannot be believed"));
        cr_assert_eq(result.size, 5);
    }
}

/* A sum alone, of nothing, is the sum of no entry. */
Test(probe_store_format, a_line_without_an_entry_is_damage)
{
    char text[256] = RBI_STORE_HEADER;
    struct rbi_store_result result;
    add_line(text, sizeof text, "");
    config_write(NAME, text);
    cr_assert_eq(rbi_store_find(&result, NAME, &gpt), REBATCH_E_PARSE);
    cr_assert(strstr(rebatch_last_error(), NAME ":2: 1 damaged line"), "%s", rebatch_last_error());
}

/* ---- the most that is kept ---- */

static size_t lines_of(const char *text)
{
    size_t lines = 0;
    for (const char *c = text; *c; c++)
        lines += *c == '\n';
    return lines;
}

/* Entries of other keys: those that stay are in the order in which they stood. */
Test(probe_store_format, the_oldest_entries_go_first_and_the_order_stays)
{
    enum { ROOM = 1 << 17 };
    char *text = calloc(1, ROOM), *kept = calloc(1, ROOM);
    for (size_t others = RBI_STORE_ENTRIES - 2; others <= RBI_STORE_ENTRIES + 3; others++) {
        const size_t stay = others < RBI_STORE_ENTRIES - 1 ? others : (size_t)RBI_STORE_ENTRIES - 1;
        strcpy(text, RBI_STORE_HEADER);
        strcpy(kept, RBI_STORE_HEADER);
        for (size_t i = 0; i < others; i++) {
            char fields[128];
            (void)snprintf(fields, sizeof fields, "key=\"%zu\" size=1 peak_bytes=1 ", i);
            add_line(text, ROOM, fields);
            if (i >= others - stay)
                add_line(kept, ROOM, fields);
        }
        config_write(NAME, text);
        cr_assert_eq(rbi_store_put(NAME, &gpt, &(struct rbi_store_result){.size = 3}), REBATCH_OK);
        char *now = config_read(NAME);
        cr_assert_eq(strncmp(now, kept, strlen(kept)), 0, "%zu entries", others);
        cr_assert_eq(lines_of(now), 1 + stay + 1, "%zu entries: %zu lines", others, lines_of(now));
        cr_assert_eq(strncmp(now + strlen(kept), KEY, strlen(KEY)), 0);
        cr_assert(access(NAME RBI_STORE_DAMAGED, F_OK) != 0, "nothing was damaged");
        free(now);
    }
    free(text);
    free(kept);
}

/* The file's own entries may be larger than what it will be written as, or as large. */
Test(probe_store_format, a_file_that_would_be_too_large_is_refused_and_left)
{
    char *const text = calloc(1, RBI_STORE_BYTES_MOST);
    char *const fields = calloc(1, RBI_STORE_BYTES_MOST);
    const size_t limit = RBI_STORE_BYTES_MOST / 2;
    const struct rbi_store_result mine = {.size = 3};
    cr_assert_eq(rbi_store_put(NAME, &gpt, &mine), REBATCH_OK);
    char *own = config_read(NAME);
    const size_t rest = limit - strlen(own) - strlen("key=\"\" sum=0123456789abcdef\n");
    for (size_t more = 0; more < 2; more++) {
        strcpy(text, RBI_STORE_HEADER);
        strcpy(fields, "key=\"");
        memset(fields + strlen(fields), 'a', rest + more);
        strcat(fields, "\"");
        add_line(text, RBI_STORE_BYTES_MOST, fields);
        config_write(NAME, text);
        const rebatch_status status = rbi_store_put(NAME, &gpt, &mine);
        char *now = config_read(NAME);
        if (more) {
            cr_assert_eq(status, REBATCH_E_IO);
            cr_assert(strstr(rebatch_last_error(), "would be larger than 524288 bytes"), "%s",
                      rebatch_last_error());
            cr_assert_str_eq(now, text);
        } else {
            cr_assert_eq(status, REBATCH_OK, "%s", rebatch_last_error());
            cr_assert_eq(strlen(now), limit);
        }
        free(now);
    }
    free(own);
    free(text);
    free(fields);
}

Test(probe_store_format, a_name_that_is_too_long_is_refused)
{
    char path[PATH_MAX + 8] = ".";
    for (size_t length = 1; length < PATH_MAX - sizeof NAME - 4; length += 2)
        strcat(path, "/.");
    strcat(path, "/" NAME);
    cr_assert_lt(strlen(path), PATH_MAX, "it can be opened");
    cr_assert_gt(strlen(path) + strlen(RBI_STORE_DAMAGED), PATH_MAX);
    cr_assert_eq(rbi_store_put(path, &gpt, &(struct rbi_store_result){.size = 3}), REBATCH_E_IO);
    cr_assert(strstr(rebatch_last_error(), "the name is too long"), "%s", rebatch_last_error());
}
