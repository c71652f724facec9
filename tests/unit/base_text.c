/* Owns the tests of the text helpers: cutting, counting, and bytes for people.
 * Must not know what the texts say. */
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/base.h"

/* ---- rbi_text_add() ---- */

Test(base_text, parts_are_appended)
{
    char text[32];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add(&t, "step %d", 7);
    rbi_text_add(&t, ": %s", "done");
    rbi_text_add(&t, "%s", "");
    cr_assert_str_eq(text, "step 7: done");
    cr_assert_eq(t.length, strlen("step 7: done"));
}

Test(base_text, any_size_gives_the_same_length_and_a_text_that_ends)
{
    const char *whole = "alpha beta gamma";
    for (size_t size = 0; size <= 20; size++) {
        char text[24];
        memset(text, 'x', sizeof text);
        struct rbi_text t = {size ? text : NULL, size, 0};
        rbi_text_add(&t, "%s ", "alpha");
        rbi_text_add(&t, "%s ", "beta");
        rbi_text_add(&t, "%s", "gamma");
        cr_assert_eq(t.length, strlen(whole));
        if (size) {
            const size_t kept = size - 1 < strlen(whole) ? size - 1 : strlen(whole);
            cr_assert_eq(strlen(text), kept);
            cr_assert_eq(strncmp(text, whole, kept), 0);
        }
        for (size_t i = size; i < sizeof text; i++)
            cr_assert_eq(text[i], 'x', "size %zu: byte %zu was written", size, i);
    }
}

/* ---- rbi_text_add_bytes() ---- */

static const char *bytes_text(uint64_t bytes)
{
    static char text[64];
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add_bytes(&t, bytes);
    cr_assert_eq(t.length, strlen(text));
    return text;
}

Test(base_text, bytes_at_the_boundaries_of_units)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        {0, "0 B"},
        {1, "1 B"},
        {1023, "1023 B"},
        {1024, "1.00 KiB"},
        {1536, "1.50 KiB"},
        {10 * 1024 - 1, "10.0 KiB"}, /* 9.999 rounds up to three digits, not to 10.00 */
        {10 * 1024, "10.0 KiB"},
        {100 * 1024 - 1, "100 KiB"}, /* and 99.999 to 100, not to 100.0 */
        {100 * 1024, "100 KiB"},
        {1000 * 1024, "1000 KiB"},
        {1023 * 1024, "1023 KiB"},
        {1024 * 1024 - 1, "1.00 MiB"}, /* never 1024 KiB */
        {1024 * 1024, "1.00 MiB"},
        {(uint64_t)3 << 29, "1.50 GiB"},
        {(uint64_t)22 << 30, "22.0 GiB"},
        {(uint64_t)1 << 40, "1.00 TiB"},
        {(uint64_t)1 << 50, "1.00 PiB"},
        {(uint64_t)1 << 60, "1.00 EiB"},
        {UINT64_MAX, "16.0 EiB"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_assert_str_eq(bytes_text(cases[i].bytes), cases[i].text, "%ju bytes are %s",
                         (uintmax_t)cases[i].bytes, bytes_text(cases[i].bytes));
}

/* Whatever the number: three digits (four from 1000 on), and at most half of the last one off. */
static void check_bytes(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    const char *text = bytes_text(bytes);
    char *rest;
    const double shown = strtod(text, &rest);
    cr_assert_eq(*rest, ' ', "%s", text);
    double unit = 1;
    size_t u = 0;
    while (u < 7 && strcmp(rest + 1, units[u]) != 0) {
        unit *= 1024;
        u++;
    }
    cr_assert_lt(u, 7, "%s", text);
    size_t digits = 0;
    for (const char *c = text; c < rest; c++)
        digits += isdigit((unsigned char)*c) != 0;
    cr_assert(bytes < 1024 || digits == 3 || (digits == 4 && shown >= 1000), "%s", text);
    const double last = shown >= 100 ? 1 : shown >= 10 ? 0.1 : 0.01;
    cr_assert_leq(fabs(shown - (double)bytes / unit), last * 0.5001, "%ju bytes are %s",
                  (uintmax_t)bytes, text);
    cr_assert_leq(shown, 1023);
}

/* Seed 1. */
Test(base_text, bytes_are_shown_in_three_digits_and_rounded_right)
{
    uint64_t random = 1;
    for (int i = 0; i < 20000; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        check_bytes(random >> (i % 64));
    }
    for (unsigned shift = 1; shift < 64; shift++)
        for (uint64_t d = 0; d < 3; d++)
            check_bytes(((uint64_t)1 << shift) - 1 + d);
}

/* ---- rbi_text_add_shown() ---- */

static void shown_is(const char *bytes, size_t most, const char *expected)
{
    char text[256] = "";
    struct rbi_text t = {text, sizeof text, 0};
    rbi_text_add_shown(&t, bytes, strlen(bytes), most);
    cr_assert_str_eq(text, expected);
    cr_assert_eq(t.length, strlen(expected));
}

Test(base_text, what_is_shown_is_utf_8_and_has_no_control_characters)
{
    shown_is("", 10, "");
    shown_is("a b~", 10, "a b~");
    shown_is("\x1b[1m\n\x7f", 40, "\\x1b[1m\\x0a\\x7f");
    shown_is("\xff\xfe", 40, "\\xff\\xfe");
    shown_is("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", 40, "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80");
    shown_is("\xc3", 40, "\\xc3");                            /* cut short */
    shown_is("\xe2\x82z", 40, "\\xe2\\x82z");                 /* the same */
    shown_is("\xc0\xaf", 40, "\\xc0\\xaf");                   /* longer than it must be */
    shown_is("\xe0\x80\xaf", 40, "\\xe0\\x80\\xaf");          /* the same */
    shown_is("\xed\xa0\x80", 40, "\\xed\\xa0\\x80");          /* a surrogate */
    shown_is("\xf5\x80\x80\x80", 40, "\\xf5\\x80\\x80\\x80"); /* beyond U+10FFFF */
    shown_is("\xc2\x9b"
             "1m",
             40,
             "\\xc2\\x9b"
             "1m"); /* a control character too */
    shown_is("abcdef", 6, "abcdef");
    shown_is("abcdefg", 6, "abcdef...");
    shown_is("abcde\xc3\xa4", 6, "abcde...");
    shown_is("abc\xff", 6, "abc...");
}

/* ---- for programs ---- */

static const char *as_json(const char *text)
{
    static char json[256];
    struct rbi_text t = {json, sizeof json, 0};
    rbi_text_add_json(&t, text);
    return json;
}

Test(base_text, a_string_of_json_has_escapes_for_what_must_not_stand_in_it)
{
    cr_assert_str_eq(as_json(""), "\"\"");
    cr_assert_str_eq(as_json("a \"b\" \\ c"), "\"a \\\"b\\\" \\\\ c\"");
    cr_assert_str_eq(as_json("1\n2\t\x7f"), "\"1\\u000a2\\u0009\\u007f\"");
    cr_assert_str_eq(as_json("\xc3\xa4 \xff"), "\"\xc3\xa4 \\ufffd\"");
}

static const char *as_time(int64_t clock_ms)
{
    static char time[64];
    struct rbi_text t = {time, sizeof time, 0};
    rbi_text_add_time(&t, clock_ms);
    return time;
}

Test(base_text, a_time_is_in_utc_whatever_the_year)
{
    cr_assert_str_eq(as_time(0), "1970-01-01T00:00:00.000Z");
    cr_assert_str_eq(as_time(951782399999), "2000-02-28T23:59:59.999Z");
    cr_assert_str_eq(as_time(951782400000), "2000-02-29T00:00:00.000Z");
    cr_assert_str_eq(as_time(951868800000), "2000-03-01T00:00:00.000Z");
    cr_assert_str_eq(as_time(1767225599001), "2025-12-31T23:59:59.001Z");
    cr_assert_str_eq(as_time(4107542400000), "2100-03-01T00:00:00.000Z");
    cr_assert_str_eq(as_time(-1), "1969-12-31T23:59:59.999Z");
}
