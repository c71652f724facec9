/* A generator of cuRAND and a code of cuDNN, in C++. */
#ifndef WRAP_GENERATOR_H
#define WRAP_GENERATOR_H

#include <cuda_runtime.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Guards the generator, which can go to a place or cannot. */
cudaError_t wrap_libraries_guard(bool cannot_go);
void wrap_libraries_go(unsigned long long place);
/* Draws from it, and counts. */
void wrap_libraries_draw(float *out, size_t count);
/* Does not come back within a step. */
void wrap_libraries_escape(void);

#ifdef __cplusplus
}
#endif
#endif
