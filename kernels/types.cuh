/** @file types.cuh
 *  Loads and stores of the three dtypes, 8 elements at a time, and conversions. Device side. */
#ifndef REBATCH_KERNELS_TYPES_CUH
#define REBATCH_KERNELS_TYPES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline float to_float(float x)
{
    return x;
}

__device__ inline float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

__device__ inline float to_float(__half x)
{
    return __half2float(x);
}

template <typename T> __device__ inline T from_float(float x);

template <> __device__ inline float from_float<float>(float x)
{
    return x;
}

template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <> __device__ inline __half from_float<__half>(float x)
{
    return __float2half_rn(x);
}

/** Two 16-bit elements in one register, `low` at the lower address. */
template <typename T> __device__ inline unsigned pack2(float low, float high);

template <> __device__ inline unsigned pack2<__nv_bfloat16>(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <> __device__ inline unsigned pack2<__half>(float low, float high)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <typename T> __device__ inline float2 unpack2(unsigned pair);

template <> __device__ inline float2 unpack2<__nv_bfloat16>(unsigned pair)
{
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&pair));
}

template <> __device__ inline float2 unpack2<__half>(unsigned pair)
{
    return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

/** 8 elements as they lie in memory: one 16-byte word, or two for fp32. Keeping them raw until they
 *  are used halves the registers of loads in flight. */
template <typename T> struct raw8 {
    uint4 word;
};

template <> struct raw8<float> {
    float4 low, high;
};

/** `from` is a multiple of 8 elements into an array that starts at a multiple of 16 bytes. */
template <typename T> __device__ inline raw8<T> load_raw8(const T *from)
{
    return {*reinterpret_cast<const uint4 *>(from)};
}

template <> __device__ inline raw8<float> load_raw8<float>(const float *from)
{
    const float4 *words = reinterpret_cast<const float4 *>(from);
    return {words[0], words[1]};
}

template <typename T> __device__ inline void unpack8(float (&v)[8], const raw8<T> &raw)
{
    const unsigned pairs[4] = {raw.word.x, raw.word.y, raw.word.z, raw.word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack2<T>(pairs[i]);
        v[2 * i] = two.x;
        v[2 * i + 1] = two.y;
    }
}

template <> __device__ inline void unpack8<float>(float (&v)[8], const raw8<float> &raw)
{
    v[0] = raw.low.x;
    v[1] = raw.low.y;
    v[2] = raw.low.z;
    v[3] = raw.low.w;
    v[4] = raw.high.x;
    v[5] = raw.high.y;
    v[6] = raw.high.z;
    v[7] = raw.high.w;
}

template <typename T> __device__ inline void load8(float (&v)[8], const T *from)
{
    unpack8<T>(v, load_raw8(from));
}

template <typename T> __device__ inline void store8(T *to, const float (&v)[8])
{
    *reinterpret_cast<uint4 *>(to) = make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]),
                                                pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
}

template <> __device__ inline void store8<float>(float *to, const float (&v)[8])
{
    float4 *words = reinterpret_cast<float4 *>(to);
    words[0] = make_float4(v[0], v[1], v[2], v[3]);
    words[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/** The elements [first, first + size) that belong to this thread of a one-dimensional grid over
 *  `count`: 8 of them, fewer at the end, none past it. */
struct chunk {
    size_t first;
    int size;
};

__device__ inline chunk thread_chunk(size_t count)
{
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (first >= count)
        return {0, 0};
    return {first, count - first < 8 ? (int)(count - first) : 8};
}

/** Elements that are not there read as 0. The arithmetic between load and store is thus the same
 *  code for a whole chunk and for the last one. */
template <typename T> __device__ inline void load_chunk(float (&v)[8], const T *from, chunk c)
{
    if (c.size == 8) {
        load8(v, from + c.first);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = i < c.size ? to_float(from[c.first + i]) : 0.0f;
}

template <typename T> __device__ inline void store_chunk(T *to, const float (&v)[8], chunk c)
{
    if (c.size == 8) {
        store8(to + c.first, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < c.size)
            to[c.first + i] = from_float<T>(v[i]);
}

#endif
