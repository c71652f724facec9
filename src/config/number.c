/* Owns the reading of numbers, and of sizes with their units.
 * Must not know settings. */
#include <string.h>

#include "config/settings.h"

static int digit_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : 16;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

enum rbi_integer rbi_integer_parse(const char *text, size_t length, int64_t *out)
{
    const char *at = text;
    const char *end = text + length;
    for (int i = 0; i < 2 && end > at && end[-1] == 'L'; i++)
        end--;
    const bool negative = at < end && *at == '-';
    const bool is_signed = negative || (at < end && *at == '+');
    at += is_signed;
    const bool hex = !is_signed && end - at > 2 && at[0] == '0' && (at[1] == 'x' || at[1] == 'X');
    at += hex ? 2 : 0;
    if (at == end)
        return RBI_INTEGER_NONE;
    const int base = hex ? 16 : 10;
    int64_t number = 0;
    bool fits = true;
    for (; at < end; at++) {
        const int digit = digit_of(*at);
        if (digit >= base)
            return RBI_INTEGER_NONE;
        fits = fits && !__builtin_mul_overflow(number, base, &number) &&
               !__builtin_sub_overflow(number, digit, &number); /* downwards: INT64_MIN fits */
    }
    if (!fits || (!negative && number == INT64_MIN))
        return RBI_INTEGER_TOO_LARGE;
    *out = negative ? number : -number;
    return RBI_INTEGER_FITS;
}

/* ---- sizes ---- */

struct rbi_size rbi_size_wrong(const char *wrong)
{
    struct rbi_size size = {0, 0, ""};
    struct rbi_text t = {size.wrong, sizeof size.wrong, 0};
    rbi_text_add(&t, "%s", wrong);
    return size;
}

#define FRACTION_ONE 1000000u
static const char not_a_size[] = ", not a size";
static const char too_large[] = ", more than 9223372036854775807 bytes";

/* The number before the unit: whole + fraction / FRACTION_ONE. */
struct decimal {
    uint64_t whole;
    uint64_t fraction;
    const char *begin; /* of its text */
    const char *end;   /* NULL: something is wrong */
    const char *wrong; /* what */
};

static struct decimal wrong_decimal(const char *wrong)
{
    return (struct decimal){0, 0, NULL, NULL, wrong};
}

static struct decimal parse_decimal(const char *at)
{
    if (*at == '-')
        return wrong_decimal(is_digit(at[1]) ? ", a negative size" : not_a_size);
    if (!is_digit(*at))
        return wrong_decimal(not_a_size);
    struct decimal decimal = {0, 0, at, NULL, ""};
    for (; is_digit(*at); at++)
        if (__builtin_mul_overflow(decimal.whole, 10u, &decimal.whole) ||
            __builtin_add_overflow(decimal.whole, (uint64_t)(*at - '0'), &decimal.whole))
            return wrong_decimal(too_large);
    if (*at == '.') {
        if (!is_digit(*++at))
            return wrong_decimal(not_a_size);
        uint64_t one = FRACTION_ONE;
        for (; is_digit(*at); at++) {
            if (one == 1)
                return wrong_decimal(", finer than 6 digits after the point");
            one /= 10;
            decimal.fraction += one * (uint64_t)(*at - '0');
        }
    }
    rbi_assert(decimal.fraction < FRACTION_ONE);
    decimal.end = at;
    return decimal;
}

static struct rbi_size parse_share(const struct decimal *decimal)
{
    const uint64_t step = FRACTION_ONE / 10;
    if (decimal->whole > 100 || (decimal->whole == 100 && decimal->fraction > 0))
        return rbi_size_wrong(", more than 100%");
    if (decimal->fraction % step != 0)
        return rbi_size_wrong(", finer than a tenth of a percent");
    struct rbi_size size = {0, (uint32_t)(decimal->whole * 10 + decimal->fraction / step), ""};
    rbi_assert(size.permille <= 1000);
    return size.permille == 0 ? rbi_size_wrong(", a size of zero") : size;
}

/* For "22G" and what looks like it: what it may have meant. The number is `length` bytes long. */
static struct rbi_size wrong_unit(const char *number, size_t length, const char *unit)
{
    struct rbi_size size = rbi_size_wrong(unit[0] ? not_a_size : ", a number without a unit");
    static const char prefixes[] = "KkMmGgTt";
    const char *prefix = unit[0] ? strchr(prefixes, unit[0]) : NULL;
    if (!prefix || strlen(unit) > sizeof "GiB" - 1 || length > 20)
        return size;
    const char letter = prefixes[(prefix - prefixes) / 2 * 2];
    struct rbi_text t = {size.wrong, sizeof size.wrong, 0};
    rbi_text_add(&t, ", which may mean %.*s%ciB or %.*s%cB", (int)length, number, letter,
                 (int)length, number, letter);
    return size;
}

static struct rbi_size parse_unit(const struct decimal *decimal, const char *unit)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"B", 1},
        {"KB", UINT64_C(1000)},
        {"MB", UINT64_C(1000000)},
        {"GB", UINT64_C(1000000000)},
        {"TB", UINT64_C(1000000000000)},
        {"KiB", UINT64_C(1) << 10},
        {"MiB", UINT64_C(1) << 20},
        {"GiB", UINT64_C(1) << 30},
        {"TiB", UINT64_C(1) << 40},
    };
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(unit, units[i].name) != 0)
            continue;
        /* fraction < 10^6 < 2^20 and a unit is at most 2^40: the product fits */
        const uint64_t part = decimal->fraction * units[i].bytes / FRACTION_ONE;
        struct rbi_size size = {0, 0, ""};
        if (__builtin_mul_overflow(decimal->whole, units[i].bytes, &size.bytes) ||
            __builtin_add_overflow(size.bytes, part, &size.bytes) || size.bytes > RBI_NUMBER_MOST)
            return rbi_size_wrong(too_large);
        return size;
    }
    return wrong_unit(decimal->begin, (size_t)(decimal->end - decimal->begin), unit);
}

struct rbi_size rbi_size_parse(const char *text, bool may_be_share)
{
    if (text[0] == '\0')
        return rbi_size_wrong(", empty");
    const struct decimal decimal = parse_decimal(text);
    if (!decimal.end)
        return rbi_size_wrong(decimal.wrong);
    const char *unit = decimal.end;
    while (*unit == ' ')
        unit++;
    if (strcmp(unit, "%") == 0)
        return may_be_share ? parse_share(&decimal) : rbi_size_wrong(", a share");
    return parse_unit(&decimal, unit);
}
