/** @file kernels_support.h
 *  What the kernel tests share: random arrays that exist on the device and, in double, on the host;
 *  poisoned outputs; comparisons. Run these tests with -j1: each test makes its own CUDA context,
 *  and Criterion would otherwise run as many at once as there are processors. */
#ifndef REBATCH_TESTS_KERNELS_SUPPORT_H
#define REBATCH_TESTS_KERNELS_SUPPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "kernels.h"

#define DTYPE_COUNT 3

/** RBK_F32, RBK_BF16, RBK_F16 and their names. */
extern const rbk_dtype support_dtypes[DTYPE_COUNT];
const char *support_dtype_name(rbk_dtype dtype);

/** What a result may be off by, as a relative norm: 1e-5 in fp32, 1e-2 in bf16 and fp16. */
double support_tolerance(rbk_dtype dtype);

/** The nearest number that `dtype` can hold, ties to even. */
double support_round(rbk_dtype dtype, double x);

/** A sequence of random numbers; any seed will do. */
typedef struct support_random {
    uint64_t state;
} support_random;

uint64_t support_next(support_random *random);
double support_uniform(support_random *random); /* in [0, 1) */
double support_normal(support_random *random);

/** A device array. `host` holds its numbers as they were uploaded or last read. */
typedef struct support_array {
    rbk_dtype dtype;
    size_t count;
    void *device;
    double *host;
} support_array;

/** Normal numbers times `scale`, rounded to `dtype` on both sides. */
support_array support_array_random(rbk_dtype dtype, size_t count, double scale,
                                   support_random *random);

/** Every byte 0xFF: NaN in all three types. */
support_array support_array_poisoned(rbk_dtype dtype, size_t count);

/** Another array with the same numbers. */
support_array support_array_copy(const support_array *array);

/** Upload `host`. */
void support_array_write(support_array *array);

/** Wait for the device and bring its numbers to `host`. */
void support_array_read(support_array *array);

/** The device address of element `index`. */
void *support_at(const support_array *array, size_t index);
float *support_float_at(const support_array *array, size_t index);

/** int32_t on the device. */
int32_t *support_upload_ints(const int32_t *values, size_t count);

/** Raw device memory, every byte 0xFF. */
void *support_scratch(size_t bytes);

/** Host memory, as calloc() gives it. */
void *support_calloc(size_t count, size_t size);

/** Frees all that the functions above have made: the end of each suite, or of a part of a test. */
void support_free_all(void);

/** Runs a check for each type, with numbers of one sequence, and frees what it made. */
void support_each_dtype(void (*check)(rbk_dtype dtype, support_random *random), uint64_t seed);

/** A launcher must have said cudaSuccess, and so must what it launched. */
void support_must(cudaError_t status, const char *what);

/** |got - want| / |want| over the array must be at most `tolerance`; a NaN never is. */
void support_expect_close(support_array *got, const double *want, double tolerance,
                          const char *what);

/** Elements [a_first, a_first + count) of one array and [b_first, ...) of another: the same bits.
 *  */
void support_expect_same(const support_array *a, size_t a_first, const support_array *b,
                         size_t b_first, size_t count, const char *what);

/** Slow kinds of run, as racecheck, take every n-th case: n is REBATCH_TEST_STRIDE, or 1. */
size_t support_stride(void);

/** Ways to cut BATCH samples into micro-batches: lists of counts that end with 0. */
#define SUPPORT_CUT_BATCH 13
#define SUPPORT_CUT_COUNT 5
extern const size_t support_cuts[SUPPORT_CUT_COUNT][SUPPORT_CUT_BATCH + 1];

#endif
