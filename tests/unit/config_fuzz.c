/* Owns the test that no file, however broken, crashes, hangs or leaves memory behind.
 * Must not know what is wrong with a file. Seeds: 20240229 and 20240301. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/settings.h"
#include "unit/config_files.h"

TestSuite(config_fuzz, .init = config_enter, .fini = config_leave);

enum { TEXT_MOST = 8192 };

struct random {
    uint64_t state;
};

/* xorshift64* */
static uint64_t next(struct random *r)
{
    r->state ^= r->state >> 12;
    r->state ^= r->state << 25;
    r->state ^= r->state >> 27;
    return r->state * UINT64_C(2685821657736338717);
}

static size_t below(struct random *r, size_t n)
{
    return n == 0 ? 0 : (size_t)(next(r) >> 33) % n;
}

/* A text that changes. */
struct text {
    char bytes[TEXT_MOST];
    size_t length;
};

/* Puts `count` bytes in the place of `removed` bytes at `at`. */
static void splice(struct text *text, size_t at, size_t removed, const char *bytes, size_t count)
{
    if (text->length - removed + count > TEXT_MOST)
        return;
    memmove(text->bytes + at + count, text->bytes + at + removed, text->length - at - removed);
    memcpy(text->bytes + at, bytes, count);
    text->length = text->length - removed + count;
}

static void mutate(struct text *text, struct random *r)
{
    static const char *const tokens[] = {
        "{",           "}",
        "(",           ")",
        "[",           "]",
        "=",           ":",
        ";",           ",",
        "\"",          "\\",
        "/*",          "*/",
        "//",          "#",
        "\n",          "@include \"t.cfg\"\n",
        "true",        "\"none\"",
        "\"5%\"",      "-1",
        "1.5",         "0x7fL",
        "\\x00",       "\\\"",
        "99999999999", "memory = { limit = ",
        "1e999",       "\xef\xbb\xbf",
        "\"22GiB\"",   "9223372036854775808L",
        "limit",       "log",
        "@include \"",
    };
    const size_t at = below(r, text->length + 1);
    const size_t left = text->length - at;
    const char byte = (char)next(r);
    char copy[64];
    const size_t count = rbi_min(below(r, sizeof copy), left);
    memcpy(copy, text->bytes + at, count);
    const char *token = tokens[below(r, sizeof tokens / sizeof *tokens)];
    switch (below(r, 5)) {
    case 0: /* another byte */
        splice(text, at, rbi_min(left, 1), &byte, 1);
        break;
    case 1: /* a piece less */
        splice(text, at, count, "", 0);
        break;
    case 2: /* a piece, somewhere else too */
        splice(text, below(r, text->length + 1), 0, copy, count);
        break;
    case 3: /* something that means something */
        splice(text, at, 0, token, strlen(token));
        break;
    default: /* the end missing, now and then */
        if (below(r, 8) == 0)
            text->length = at;
        break;
    }
}

/* Loads the text; whatever the answer is, it must be a whole one. Adds to *ok when it is a good
 * file. */
static void try_text(const struct text *text, unsigned run, unsigned *ok)
{
    (void)unlink("t.cfg"); /* a file that is written over may be sent to the disk, each time */
    config_write_bytes("t.cfg", text->bytes, text->length);
    rebatch_config *config = NULL;
    rebatch_clear_error();
    const rebatch_status status = rebatch_config_load(&config, "t.cfg");
    if (status == REBATCH_OK) {
        ++*ok;
        cr_assert(config != NULL, "run %u", run);
        for (size_t i = 0; i < RBI_SETTING_COUNT; i++)
            cr_assert(config_value(config, rbi_settings[i].key, NULL) != NULL);
    } else {
        cr_assert(config == NULL, "run %u", run);
        cr_assert(status == REBATCH_E_PARSE || status == REBATCH_E_IO, "run %u: %s", run,
                  rebatch_status_name(status));
        cr_assert(strstr(rebatch_last_error(), "t.cfg") != NULL, "run %u: %s", run,
                  rebatch_last_error());
        const size_t length = strlen(rebatch_last_error());
        cr_assert(length < 511, "run %u: the sentence was cut", run);
        for (size_t i = 0; i < length; i++)
            cr_assert((unsigned char)rebatch_last_error()[i] >= 0x20, "run %u", run);
    }
    rebatch_config_free(config);
    cr_assert(rbi_heap_live() == 0, "run %u leaves something", run);
}

/* Present in a build with a leak checker only: then libconfig's memory is looked at too. */
extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

static void expect_no_leak(void)
{
    if (__lsan_do_recoverable_leak_check)
        cr_expect(__lsan_do_recoverable_leak_check() == 0);
}

Test(config_fuzz, mutations_of_the_example)
{
    static struct text text;
    struct random r = {20240229};
    char example[TEXT_MOST];
    struct rbi_text t = {example, sizeof example, 0};
    rbi_config_add_example(&t);
    const size_t length = t.length;
    cr_assert(length < sizeof example);
    unsigned ok = 0;
    const unsigned runs = 20000;
    for (unsigned run = 0; run < runs; run++) {
        memcpy(text.bytes, example, length);
        text.length = length;
        for (size_t n = 1 + below(&r, 6); n > 0; n--)
            mutate(&text, &r);
        try_text(&text, run, &ok);
    }
    cr_expect(ok > runs / 100 && ok < runs, "%u of %u were good: too easy or too hard", ok, runs);
    expect_no_leak();
}

Test(config_fuzz, bytes_by_chance)
{
    static struct text text;
    struct random r = {20240301};
    unsigned ok = 0;
    for (unsigned run = 0; run < 2000; run++) {
        text.length = below(&r, 200);
        for (size_t i = 0; i < text.length; i++)
            text.bytes[i] = (char)next(&r);
        for (size_t n = below(&r, 40); n > 0; n--)
            mutate(&text, &r);
        try_text(&text, run, &ok);
    }
    expect_no_leak();
}
