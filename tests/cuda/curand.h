/* What rebatch/wrap.h and a trainer need of cuRAND, under its name: a generator that can go to any
 * place in its sequence and does not tell where it is, or with `cannot_go` one that cannot. */
#ifndef CURAND_STANDIN_H
#define CURAND_STANDIN_H

#include <stdbool.h>
#include <stddef.h>

#define CURAND_VERSION 10000

typedef enum { CURAND_STATUS_SUCCESS = 0, CURAND_STATUS_TYPE_ERROR = 103 } curandStatus_t;
typedef struct curandGenerator_st {
    unsigned long long place;
    bool cannot_go;
} * curandGenerator_t;

static inline curandStatus_t curandSetGeneratorOffset(curandGenerator_t generator,
                                                      unsigned long long offset)
{
    if (generator->cannot_go)
        return CURAND_STATUS_TYPE_ERROR;
    generator->place = offset;
    return CURAND_STATUS_SUCCESS;
}

static inline curandStatus_t curandGenerateUniform(curandGenerator_t generator, float *out,
                                                   size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const unsigned long long bits = ++generator->place * 0x9e3779b97f4a7c15u;
        out[i] = (float)((bits ^ bits >> 29) * 0xbf58476d1ce4e5b9u >> 40) / (float)(1 << 24);
    }
    return CURAND_STATUS_SUCCESS;
}

#endif
