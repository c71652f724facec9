/* Owns numbers: how two copies of what is compared differ.
 * Must not know why they were made. */
#include <math.h>
#include <string.h>

#include "check/check.h"

/* ---- numbers ---- */

static size_t bytes_of(rebatch_number number)
{
    switch (number) {
    case REBATCH_F64:
        return 8;
    case REBATCH_F32:
        return 4;
    case REBATCH_F16:
    case REBATCH_BF16:
        return 2;
    default:
        return 1;
    }
}

static double half_value(uint16_t bits)
{
    const double sign = bits & 0x8000 ? -1 : 1;
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    if (exponent == 31)
        return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static double value_at(const struct rbi_item *item, const char *values, size_t at)
{
    rbi_assert(at < item->bytes / bytes_of(item->number));
    const char *from = values + at * bytes_of(item->number);
    double f64;
    float f32;
    uint32_t wide;
    uint16_t bits;
    switch (item->number) {
    case REBATCH_F64:
        memcpy(&f64, from, sizeof f64);
        return f64;
    case REBATCH_F32:
        memcpy(&f32, from, sizeof f32);
        return (double)f32;
    case REBATCH_F16:
        memcpy(&bits, from, sizeof bits);
        return half_value(bits);
    case REBATCH_BF16:
        memcpy(&bits, from, sizeof bits);
        wide = (uint32_t)bits << 16;
        memcpy(&f32, &wide, sizeof f32);
        return (double)f32;
    default:
        return (double)(unsigned char)*from;
    }
}

size_t rbi_values_count(const struct rbi_item *item)
{
    return item->bytes / bytes_of(item->number);
}

/* ---- differences ---- */

double rbi_values_largest(const struct rbi_item *item, const char *values)
{
    const size_t count = rbi_values_count(item);
    double largest = 0;
    for (size_t i = 0; i < count; i++) {
        const double value = fabs(value_at(item, values, i));
        if (isfinite(value) && value > largest)
            largest = value;
    }
    return largest;
}

static double part_of(double difference, double scale)
{
    const double part = difference == 0 ? 0 : fabs(difference) / scale;
    return isnan(part) ? INFINITY : part;
}

struct rbi_difference rbi_values_compare(const struct rbi_item *item, const char *was,
                                         const char *is, double factor)
{
    struct rbi_difference found = {.differs = memcmp(was, is, item->bytes) != 0};
    if (!found.differs)
        return found;
    const size_t unit = bytes_of(item->number);
    const size_t count = item->bytes / unit;
    const double scale = fabs(factor) * rbi_values_largest(item, was);
    double squares = 0;
    bool has_first = false;
    for (size_t i = 0; i < count; i++) {
        if (memcmp(was + i * unit, is + i * unit, unit) == 0 && factor == 1.0)
            continue;
        const double a = factor * value_at(item, was, i), b = value_at(item, is, i);
        const double part = a == b ? 0 : part_of(b - a, scale);
        if (!has_first || part > found.largest) { /* the largest is shown */
            found.at = i;
            found.was = a;
            found.is = b;
            found.largest = part;
        }
        has_first = true;
        squares += part * part;
        if (item->number == REBATCH_BYTES || isinf(part)) {
            found.largest = found.rms = INFINITY;
            return found;
        }
    }
    found.rms = sqrt(squares / (double)count);
    return found;
}

double rbi_values_add_difference(float *sums, const struct rbi_item *item, const char *was,
                                 const char *is)
{
    double squares = 0;
    for (size_t i = 0; i < rbi_values_count(item); i++) {
        const double difference = value_at(item, is, i) - value_at(item, was, i);
        sums[i] += (float)difference;
        squares += difference * difference;
    }
    return squares;
}

double rbi_values_share_beyond(const struct rbi_item *item, const char *was, const char *is,
                               double part, double of_own)
{
    const size_t count = rbi_values_count(item);
    const double scale = rbi_values_largest(item, was);
    size_t all = 0, beyond = 0;
    for (size_t i = 0; i < count; i++) {
        const double a = value_at(item, was, i), b = value_at(item, is, i);
        const double most = fmax(part * scale, of_own * fmax(fabs(a), fabs(b)));
        all += a != 0 || b != 0; /* else of a sparse gradient */
        beyond += !(fabs(b - a) <= most);
    }
    return all ? (double)beyond / (double)all : 0;
}

double rbi_values_rms(const struct rbi_item *item, const char *values)
{
    const size_t count = rbi_values_count(item);
    const double largest = rbi_values_largest(item, values);
    double squares = 0;
    for (size_t i = 0; i < count && largest > 0; i++) {
        const double part = value_at(item, values, i) / largest;
        squares += part * part;
    }
    return sqrt(squares / (double)count);
}

double rbi_values_growth(const struct rbi_item *item, const char *was, const char *is)
{
    const size_t count = rbi_values_count(item);
    const double largest = rbi_values_largest(item, was);
    if (item->number == REBATCH_BYTES || largest <= 0)
        return 0;
    double both = 0, square = 0;
    for (size_t i = 0; i < count; i++) {
        const double a = value_at(item, was, i) / largest;
        both += a * value_at(item, is, i) / largest;
        square += a * a;
    }
    return isfinite(both / square) ? both / square : 0;
}

bool rbi_values_find_no_number(size_t *at, const struct rbi_item *item, const char *values)
{
    const size_t count = item->number == REBATCH_BYTES ? 0 : rbi_values_count(item);
    for (*at = 0; *at < count; ++*at)
        if (!isfinite(value_at(item, values, *at)))
            return true;
    return false;
}

/* ---- contents without a name ---- */

/* How many numbers are not 0, where all are of sizes that a model has: other bits, read as such
 * numbers, hardly ever are. 0: they are not. */
static size_t count_likely(rebatch_number number, const char *values, size_t bytes)
{
    const struct rbi_item item = {.bytes = bytes, .number = number};
    size_t count = 0;
    for (size_t i = 0; i < bytes / bytes_of(number); i++) {
        const double value = fabs(value_at(&item, values, i));
        if (!(value <= 1e15 && (value >= 1e-30 || value <= 0)))
            return 0;
        count += value > 0;
    }
    return bytes % bytes_of(number) ? 0 : count;
}

/* Half of a float is an arbitrary bfloat16, and half of a double an arbitrary float, so the
 * narrowest type that fits is the one; for bfloat16 a few numbers prove nothing. */
rebatch_number rbi_values_guess(const char *values, size_t bytes)
{
    if (count_likely(REBATCH_BF16, values, bytes) >= 64)
        return REBATCH_BF16;
    if (count_likely(REBATCH_F32, values, bytes))
        return REBATCH_F32;
    return count_likely(REBATCH_F64, values, bytes) ? REBATCH_F64 : REBATCH_BYTES;
}
