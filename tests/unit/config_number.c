/* Owns the tests of numbers, sizes with units, and nearest words.
 * Must not know files. Nothing here is random. */
#include <criterion/criterion.h>
#include <inttypes.h>
#include <string.h>

#include "config/settings.h"

Test(config_number, integers)
{
    static const struct {
        const char *text;
        enum rbi_integer what;
        int64_t value;
    } cases[] = {
        {"0", RBI_INTEGER_FITS, 0},
        {"64", RBI_INTEGER_FITS, 64},
        {"+64", RBI_INTEGER_FITS, 64},
        {"-64", RBI_INTEGER_FITS, -64},
        {"0755", RBI_INTEGER_FITS, 755},
        {"64L", RBI_INTEGER_FITS, 64},
        {"64LL", RBI_INTEGER_FITS, 64},
        {"0x40", RBI_INTEGER_FITS, 64},
        {"0XfF", RBI_INTEGER_FITS, 255},
        {"0xFFFFFFFF", RBI_INTEGER_FITS, 4294967295},
        {"9223372036854775807", RBI_INTEGER_FITS, INT64_MAX},
        {"-9223372036854775808", RBI_INTEGER_FITS, INT64_MIN},
        {"9223372036854775808", RBI_INTEGER_TOO_LARGE, 0},
        {"-9223372036854775809", RBI_INTEGER_TOO_LARGE, 0},
        {"0x8000000000000000", RBI_INTEGER_TOO_LARGE, 0},
        {"99999999999999999999999999", RBI_INTEGER_TOO_LARGE, 0},
        {"", RBI_INTEGER_NONE, 0},
        {"L", RBI_INTEGER_NONE, 0},
        {"-", RBI_INTEGER_NONE, 0},
        {"0x", RBI_INTEGER_NONE, 0},
        {"-0x40", RBI_INTEGER_NONE, 0},
        {"64LLL", RBI_INTEGER_NONE, 0},
        {"6 4", RBI_INTEGER_NONE, 0},
        {"1e5", RBI_INTEGER_NONE, 0},
        {"99999999999999999999999999x", RBI_INTEGER_NONE, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t value = 0;
        const enum rbi_integer what =
            rbi_integer_parse(cases[i].text, strlen(cases[i].text), &value);
        cr_expect(what == cases[i].what, "'%s' is read as kind %d", cases[i].text, (int)what);
        cr_expect(value == cases[i].value, "'%s' is read as %" PRId64, cases[i].text, value);
    }
}

Test(config_number, sizes)
{
    static const struct {
        const char *text;
        uint64_t bytes;
        uint32_t permille;
    } cases[] = {
        {"1B", 1, 0},
        {"0B", 0, 0},
        {"1KB", 1000, 0},
        {"1MB", 1000000, 0},
        {"1GB", 1000000000, 0},
        {"1TB", 1000000000000, 0},
        {"1KiB", 1024, 0},
        {"1MiB", 1048576, 0},
        {"1GiB", 1073741824, 0},
        {"1TiB", 1099511627776, 0},
        {"1.5GiB", 1610612736, 0},
        {"1.5 GiB", 1610612736, 0},
        {"0.1GiB", 107374182, 0}, /* 107374182.4: rounded down */
        {"0.000001MB", 1, 0},
        {"0.999999TiB", 1099510528264, 0}, /* 1099511627776 - 1099511.6, rounded down */
        {"007MiB", 7340032, 0},
        {"8388607.999999TiB", 9223372036853676296, 0},
        {"9223372036854775807B", INT64_MAX, 0},
        {"90%", 0, 900},
        {"12.5%", 0, 125},
        {"0.1 %", 0, 1},
        {"100%", 0, 1000},
        {"100.0%", 0, 1000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct rbi_size size = rbi_size_parse(cases[i].text, true);
        cr_expect(size.wrong[0] == '\0', "%s%s", cases[i].text, size.wrong);
        cr_expect(size.bytes == cases[i].bytes, "%s: %" PRIu64 " bytes", cases[i].text, size.bytes);
        cr_expect(size.permille == cases[i].permille, "%s: %u permille", cases[i].text,
                  size.permille);
    }
}

Test(config_number, sizes_that_are_none)
{
    static const struct {
        const char *text;
        const char *wrong;
    } cases[] = {
        {"", ", empty"},
        {" ", ", not a size"},
        {"GiB", ", not a size"},
        {" 1GiB", ", not a size"},
        {"1GiB ", ", not a size"},
        {"1GiB1", ", not a size"},
        {"1.GiB", ", not a size"},
        {".5GiB", ", not a size"},
        {"1,5GiB", ", not a size"},
        {"1e9B", ", not a size"},
        {"+1GiB", ", not a size"},
        {"nan", ", not a size"},
        {"NaN GiB", ", not a size"},
        {"inf", ", not a size"},
        {"-", ", not a size"},
        {"-1GiB", ", a negative size"},
        {"-5%", ", a negative size"},
        {"5", ", a number without a unit"},
        {"1.5", ", a number without a unit"},
        {"1.0000001GiB", ", finer than 6 digits after the point"},
        {"8388608TiB", ", more than 9223372036854775807 bytes"},
        {"9223372036854775808B", ", more than 9223372036854775807 bytes"},
        {"18446744073709551616B", ", more than 9223372036854775807 bytes"},
        {"99999999999999999999999B", ", more than 9223372036854775807 bytes"},
        {"22K", ", which may mean 22KiB or 22KB"},
        {"22M", ", which may mean 22MiB or 22MB"},
        {"1.5G", ", which may mean 1.5GiB or 1.5GB"},
        {"22T", ", which may mean 22TiB or 22TB"},
        {"22 g", ", which may mean 22GiB or 22GB"},
        {"22Gi", ", which may mean 22GiB or 22GB"},
        {"22gib", ", which may mean 22GiB or 22GB"},
        {"22kB", ", which may mean 22KiB or 22KB"},
        {"22PiB", ", not a size"},
        {"0%", ", a size of zero"},
        {"100.1%", ", more than 100%"},
        {"101%", ", more than 100%"},
        {"18446744073709551615%", ", more than 100%"},
        {"12.34%", ", finer than a tenth of a percent"},
        {"5%%", ", not a size"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct rbi_size size = rbi_size_parse(cases[i].text, true);
        cr_expect(strcmp(size.wrong, cases[i].wrong) == 0, "'%s': '%s' instead of '%s'",
                  cases[i].text, size.wrong, cases[i].wrong);
    }
    cr_expect(strcmp(rbi_size_parse("90%", false).wrong, ", a share") == 0);
}

/* The public reader takes what a value of a file may be, a plain number of bytes included. */
Test(config_number, sizes_for_programs)
{
    static const struct {
        const char *text;
        size_t bytes;
        uint32_t permille;
    } cases[] = {
        {"1048576", 1048576, 0}, {"0", 0, 0},    {"0x40", 64, 0},   {"22GiB", 23622320128, 0},
        {"1.5 MB", 1500000, 0},  {"1.5B", 1, 0}, {"12.5%", 0, 125}, {"100%", 0, 1000}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t bytes = 7;
        uint32_t permille = 7;
        cr_expect(rebatch_config_parse_size(&bytes, &permille, cases[i].text) == REBATCH_OK, "%s",
                  rebatch_last_error());
        cr_expect(bytes == cases[i].bytes && permille == cases[i].permille, "%s", cases[i].text);
        cr_expect(rebatch_config_parse_size(&bytes, NULL, cases[i].text) ==
                  (permille ? REBATCH_E_PARSE : REBATCH_OK));
        cr_expect(bytes == cases[i].bytes);
    }
}

Test(config_number, sizes_that_are_none_for_programs)
{
#define EXPECTED ": expected bytes such as 1048576 or \"22GiB\""
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"22G", "the size is \"22G\", which may mean 22GiB or 22GB" EXPECTED},
        {"-1", "the size is \"-1\", a negative size" EXPECTED},
        {"-99999999999999999999",
         "the size is \"-99999999999999999999\", a negative size" EXPECTED},
        {"9223372036854775808", "the size is \"9223372036854775808\", too large a number" EXPECTED},
        {"90%", "the size is \"90%\", a share" EXPECTED},
        {"", "the size is \"\", empty" EXPECTED},
        {"1.5", "the size is \"1.5\", a number without a unit" EXPECTED},
    };
#undef EXPECTED
    size_t bytes = 7;
    uint32_t permille = 7;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bytes = 7;
        cr_expect(rebatch_config_parse_size(&bytes, NULL, cases[i].text) == REBATCH_E_PARSE);
        cr_expect(strcmp(rebatch_last_error(), cases[i].error) == 0, "%s", rebatch_last_error());
        cr_expect(bytes == 0);
    }
    cr_expect(rebatch_config_parse_size(&bytes, &permille, "101%") == REBATCH_E_PARSE);
    cr_expect(permille == 0 && strstr(rebatch_last_error(), "or a share such as \"90%\"") != NULL);
    cr_expect(rebatch_config_parse_size(NULL, &permille, "1") == REBATCH_E_INVALID);
    cr_expect(rebatch_config_parse_size(&bytes, &permille, NULL) == REBATCH_E_INVALID);
}

static const char *nearest(const char *group, const char *word)
{
    const struct rbi_setting *setting = rbi_nearest_setting(group, word, strlen(word));
    return setting ? setting->key : "none";
}

Test(config_number, nearest_words)
{
    static const struct {
        const char *group, *word, *key;
    } cases[] = {
        {"memory", "limt", "memory.limit"},   /* one missing */
        {"memory", "limitt", "memory.limit"}, /* one too many */
        {"memory", "lomit", "memory.limit"},  /* one other */
        {"memory", "ilmit", "memory.limit"},  /* two swapped */
        {"memory", "LIMIT", "memory.limit"},  /* case */
        {"memory", "head_room", "memory.headroom"},
        {"recovery", "max_atempts", "recovery.max_attempts"},
        {"memory", "start", "batch.start"}, /* the right name in the wrong group */
        {NULL, "recovery.on_omm", "recovery.on_oom"},
        {NULL, "limit", "memory.limit"},
        {"memory", "bytes", "none"},
        {"memory", "", "none"},
        {"memory", "l", "none"},
        {"memory", "limitlimitlimit", "none"},
        {"memory", "limitlimitlimitlimitlimitlimitlimitlimitlimitlimit", "none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect(strcmp(nearest(cases[i].group, cases[i].word), cases[i].key) == 0,
                  "%s: %s instead of %s", cases[i].word, nearest(cases[i].group, cases[i].word),
                  cases[i].key);
}

/* The distance without a table: what is left when the best of the four edits was made. */
static size_t slow_distance(const char *a, size_t n, const char *b, size_t m)
{
    if (n == 0 || m == 0)
        return n + m;
    size_t best = slow_distance(a, n - 1, b, m) + 1;
    best = rbi_min(best, slow_distance(a, n, b, m - 1) + 1);
    best = rbi_min(best, slow_distance(a, n - 1, b, m - 1) + (a[n - 1] != b[m - 1]));
    if (n > 1 && m > 1 && a[n - 1] == b[m - 2] && a[n - 2] == b[m - 1])
        best = rbi_min(best, slow_distance(a, n - 2, b, m - 2) + 1);
    return best;
}

Test(config_number, distances_of_all_short_words)
{
    enum { LENGTH = 5, WORDS = 1 << LENGTH };
    for (unsigned a = 0; a < WORDS; a++) {
        for (unsigned b = 0; b < WORDS; b++) {
            char x[LENGTH + 1] = "";
            char y[LENGTH + 1] = "";
            for (unsigned i = 0; i < LENGTH; i++) {
                x[i] = (a >> i) & 1 ? 'a' : 'b';
                y[i] = (b >> i) & 1 ? 'a' : 'b';
            }
            const size_t distance = slow_distance(x, LENGTH, y, LENGTH);
            struct rbi_nearest n = rbi_nearest_to(x, LENGTH);
            rbi_nearest_offer(&n, y, "found");
            if (distance <= LENGTH / 3)
                cr_assert(n.found && n.distance == distance, "%s, %s", x, y);
            else
                cr_assert(!n.found, "%s, %s are %zu apart", x, y, distance);
        }
    }
}
