/* The clock and the median of the programs here. Must not know what they measure. */
#ifndef REBATCH_BENCH_MEASURE_H
#define REBATCH_BENCH_MEASURE_H

#include <stdlib.h>
#include <time.h>

static inline double measure_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline int measure_by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the values; at least one. */
static inline double measure_median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, measure_by_value);
    return values[count / 2];
}

#endif
