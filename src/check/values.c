/* Owns copies of what is watched, and how two of them differ.
 * Must not know why they were made. */
#include <math.h>
#include <string.h>

#include "check/check.h"

/* ---- copies ---- */

rebatch_status rbi_values_open(struct rbi_values *values, const rebatch *rb)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, rb);
    values->copies = rbi_heap_calloc(rbi_max(count, 1), sizeof *values->copies);
    bool is_whole = values->copies != NULL;
    for (size_t i = 0; i < count && is_whole; i++)
        is_whole = (values->copies[i] = rbi_heap_calloc(1, watched[i].bytes)) != NULL;
    return is_whole ? REBATCH_OK
                    : rbi_error(REBATCH_E_HOST_OOM, "no host memory to copy what is watched");
}

void rbi_values_close(struct rbi_values *values, const rebatch *rb)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, rb);
    for (size_t i = 0; i < count && values->copies; i++)
        rbi_heap_free(values->copies[i]);
    rbi_heap_free(values->copies);
    values->copies = NULL;
}

static rebatch_status copy(const rebatch *rb, const struct rbi_watched *watched, void *to,
                           const void *from)
{
    if (watched->kind == REBATCH_GUARD_HOST) {
        memcpy(to, from, watched->bytes);
        return REBATCH_OK;
    }
    rebatch_device *device = rbi_session_device(rb);
    const rebatch_stream stream = rbi_session_options(rb)->stream;
    const rebatch_status status = rebatch_copy(device, to, from, watched->bytes, stream);
    return status ? status : rebatch_stream_synchronize(device, stream);
}

rebatch_status rbi_values_read(struct rbi_values *values, const rebatch *rb)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, rb);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < count && !status; i++)
        status = copy(rb, &watched[i], values->copies[i], watched[i].pointer);
    return status;
}

rebatch_status rbi_values_write(const struct rbi_values *values, const rebatch *rb)
{
    const struct rbi_watched *watched;
    const size_t count = rbi_watched_get(&watched, rb);
    rebatch_status status = REBATCH_OK;
    for (size_t i = 0; i < count && !status; i++)
        status = copy(rb, &watched[i], watched[i].pointer, values->copies[i]);
    return status;
}

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

static double value_at(const struct rbi_watched *watched, const char *values, size_t at)
{
    const char *from = values + at * bytes_of(watched->number);
    double f64;
    float f32;
    uint32_t wide;
    uint16_t bits;
    switch (watched->number) {
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

/* ---- differences ---- */

static double largest_value(const struct rbi_watched *watched, const char *values, size_t count)
{
    double largest = 0;
    for (size_t i = 0; i < count; i++) {
        const double value = fabs(value_at(watched, values, i));
        if (isfinite(value) && value > largest)
            largest = value;
    }
    return largest;
}

struct rbi_difference rbi_values_compare(const struct rbi_watched *watched, const char *was,
                                         const char *is)
{
    struct rbi_difference found = {.differs = memcmp(was, is, watched->bytes) != 0};
    if (!found.differs)
        return found;
    const size_t unit = bytes_of(watched->number);
    const size_t count = watched->bytes / unit;
    const double scale = largest_value(watched, was, count);
    bool has_first = false;
    for (size_t i = 0; i < count; i++) {
        if (memcmp(was + i * unit, is + i * unit, unit) == 0)
            continue;
        const double a = value_at(watched, was, i), b = value_at(watched, is, i);
        const double part = a == b ? 0 : fabs(b - a) / scale;
        if (!has_first || !(part <= found.largest)) { /* the largest is shown */
            found.at = i;
            found.was = a;
            found.is = b;
        }
        has_first = true;
        found.largest =
            isnan(part) || part > found.largest ? (isnan(part) ? INFINITY : part) : found.largest;
        if (isinf(found.largest))
            break;
    }
    if (watched->number == REBATCH_BYTES)
        found.largest = INFINITY;
    return found;
}

bool rbi_values_doubled(const struct rbi_watched *watched, const char *was, const char *is)
{
    const size_t count = watched->bytes / bytes_of(watched->number);
    const double largest = largest_value(watched, was, count);
    if (watched->number == REBATCH_BYTES || largest <= 0)
        return false;
    double both = 0, square = 0;
    for (size_t i = 0; i < count; i++) {
        const double a = value_at(watched, was, i) / largest;
        both += a * value_at(watched, is, i) / largest;
        square += a * a;
    }
    return fabs(both / square - 2) < 0.2;
}
