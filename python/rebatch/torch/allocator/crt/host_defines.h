/* What CUDA's runtime headers take from CUDA's folder crt, for a compiler of the host alone. pip's
 * nvidia-cuda-runtime, which PyTorch brings, has no such folder. It is looked for after all others:
 * where CUDA's own is there, that is taken. Of nvcc's words only the alignment means anything. */
#pragma once

#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __no_return__ __attribute__((noreturn))
#define __annotate__(word)
#define __location__(word)
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __nv_pure__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
