/* Owns what the gpt_* tests share.
 * Must not know private headers of the library. */
#include "gpt_common.h"

#include <math.h>
#include <stdlib.h>

#include "step_common.h"

/* ---- numbers ---- */

void fill_random(float *values, size_t count, float scale, uint64_t *state)
{
    for (size_t i = 0; i < count; i++)
        values[i] = scale * ((float)(script_random(state) >> 40) / 8388608.0f - 1.0f);
}

#define ARRAYS_MOST 4096
static void *arrays[ARRAYS_MOST];
static size_t array_count;

static void *array(size_t count, size_t size)
{
    void *values = calloc(count ? count : 1, size);
    cr_assert_not_null(values);
    cr_assert_lt(array_count, ARRAYS_MOST);
    arrays[array_count++] = values;
    return values;
}

void release_arrays(void)
{
    while (array_count > 0)
        free(arrays[--array_count]);
}

float *random_floats(size_t count, float scale, uint64_t *state)
{
    float *values = array(count, sizeof *values);
    fill_random(values, count, scale, state);
    return values;
}

float *poisoned_floats(size_t count)
{
    float *values = array(count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = NAN;
    return values;
}

double *to_doubles(const float *values, size_t count)
{
    double *doubles = array(count, sizeof *doubles);
    for (size_t i = 0; i < count; i++)
        doubles[i] = (double)values[i];
    return doubles;
}

float *zero_floats(size_t count)
{
    return array(count, sizeof(float));
}

double *zero_doubles(size_t count)
{
    return array(count, sizeof(double));
}

double relative_error(const float *got, const double *want, size_t count)
{
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(got[i]))
            return INFINITY;
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    return size > 0.0 ? sqrt(difference / size) : sqrt(difference);
}
