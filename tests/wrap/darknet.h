/* What the image classifier of the tests computes, as kernels would, and a library of convolutions
 * that takes device memory of its own for each call and says by codes of its own if there is none.
 * Sums over samples are added in the order of the samples to what is there. Images are channels x
 * height x width. Must not know where buffers come from. */
#ifndef WRAP_DARKNET_H
#define WRAP_DARKNET_H

#include <cuda_runtime.h>
#include <cudnn.h>

#include "llm.h"

/* ---- the library: 3 x 3, padded ---- */

struct convolution {
    int n, c, f, h, w; /* images, channels, filters, size */
};

/* columns[image][pixel][channel and tap] */
static inline void unfold(float *columns, const float *x, const convolution &v)
{
    for (int i = 0; i < v.n; i++)
        for (int y = 0; y < v.h; y++)
            for (int z = 0; z < v.w; z++)
                for (int k = 0; k < v.c * 9; k++) {
                    const int row = y + k % 9 / 3 - 1, column = z + k % 3 - 1;
                    const bool inside = row >= 0 && row < v.h && column >= 0 && column < v.w;
                    *columns++ = inside ? x[((i * v.c + k / 9) * v.h + row) * v.w + column] : 0.0f;
                }
}

/* Calls `use` with the columns of x in device memory. */
template <class Use>
static cudnnStatus_t with_columns(const float *x, const convolution &v, const Use &use)
{
    float *columns;
    const size_t bytes = sizeof(float) * v.n * v.c * 9 * v.h * v.w;
    if (cudaMalloc(&columns, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
    }
    unfold(columns, x, v);
    use(columns);
    (void)cudaFree(columns);
    return CUDNN_STATUS_SUCCESS;
}

static inline cudnnStatus_t convolution_forward(float *y, const float *x, const float *weights,
                                                const convolution &v)
{
    return with_columns(x, v, [&](const float *columns) {
        const int pixels = v.h * v.w, taps = v.c * 9;
        for (int i = 0; i < v.n * v.f * pixels; i++) {
            const float *column = columns + (i / (v.f * pixels) * pixels + i % pixels) * taps;
            const float *filter = weights + i / pixels % v.f * taps;
            y[i] = 0;
            for (int k = 0; k < taps; k++)
                y[i] += filter[k] * column[k];
        }
    });
}

/* dweights += ... */
static inline cudnnStatus_t convolution_backward_filter(float *dweights, const float *dy,
                                                        const float *x, const convolution &v)
{
    return with_columns(x, v, [&](const float *columns) {
        const int pixels = v.h * v.w, taps = v.c * 9;
        for (int i = 0; i < v.n * v.f * pixels; i++) {
            const float *column = columns + (i / (v.f * pixels) * pixels + i % pixels) * taps;
            float *filter = dweights + i / pixels % v.f * taps;
            for (int k = 0; k < taps && dy[i] != 0; k++)
                filter[k] += dy[i] * column[k];
        }
    });
}

/* dx += ... */
static inline void convolution_backward_data(float *dx, const float *dy, const float *weights,
                                             const convolution &v)
{
    for (int i = 0; i < v.n * v.f * v.h * v.w; i++) {
        const int z = i % v.w, y = i / v.w % v.h, f = i / (v.w * v.h) % v.f;
        for (int k = 0; k < v.c * 9 && dy[i] != 0; k++) {
            const int row = y + k % 9 / 3 - 1, column = z + k % 3 - 1;
            const int image = i / (v.f * v.h * v.w);
            if (row >= 0 && row < v.h && column >= 0 && column < v.w)
                dx[((image * v.c + k / 9) * v.h + row) * v.w + column] +=
                    dy[i] * weights[f * v.c * 9 + k];
        }
    }
}

/* ---- kernels ---- */

static inline void leaky(float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        x[i] *= x[i] > 0 ? 1.0f : 0.1f;
}

static inline void leaky_gradient(float *delta, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        delta[i] *= x[i] > 0 ? 1.0f : 0.1f;
}

/* The largest of each 2 x 2, and where it is. h and w are those of y. */
static inline void maxpool(float *y, int *indexes, const float *x, int planes, int h, int w)
{
    for (int i = 0; i < planes * h * w; i++) {
        const int corner = (i / w * 2) * w * 2 + i % w * 2;
        indexes[i] = corner;
        for (int k = 1; k < 4; k++) {
            const int at = corner + k / 2 * w * 2 + k % 2;
            indexes[i] = x[at] > x[indexes[i]] ? at : indexes[i];
        }
        y[i] = x[indexes[i]];
    }
}

static inline void scatter(float *dx, const float *dy, const int *indexes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        dx[indexes[i]] += dy[i];
}

/* mean over the pixels of a plane */
static inline void average(float *y, const float *x, int planes, int pixels)
{
    for (int i = 0; i < planes; i++) {
        y[i] = 0;
        for (int k = 0; k < pixels; k++)
            y[i] += x[i * pixels + k] / (float)pixels;
    }
}

static inline void average_gradient(float *dx, const float *dy, int planes, int pixels)
{
    for (int i = 0; i < planes * pixels; i++)
        dx[i] += dy[i / pixels] / (float)pixels;
}

static inline void uniform(float *x, size_t count, uint64_t *random)
{
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(random_u32(random) % 1024) / 1024;
}

static inline void drop(float *y, const float *x, const float *chance, float p, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] += chance[i] < p ? 0.0f : x[i] / (1 - p);
}

static inline void connect(float *y, const float *x, const float *weights, int n, int in, int out)
{
    for (int i = 0; i < n * out; i++) {
        y[i] = 0;
        for (int k = 0; k < in; k++)
            y[i] += weights[i % out * in + k] * x[i / out * in + k];
    }
}

/* dweights += ..., dx += ... */
static inline void connect_gradient(float *dweights, float *dx, const float *dy, const float *x,
                                    const float *weights, int n, int in, int out)
{
    for (int i = 0; i < n * out; i++)
        for (int k = 0; k < in; k++) {
            dweights[i % out * in + k] += dy[i] * x[i / out * in + k];
            dx[i / out * in + k] += dy[i] * weights[i % out * in + k];
        }
}

/* delta = truth - softmax(x), and the loss of each image */
static inline void softmax(float *delta, float *loss, const float *x, const float *truth, int n,
                           int classes)
{
    for (int i = 0; i < n; i++, x += classes, truth += classes, delta += classes) {
        float sum = 0;
        loss[i] = 0;
        for (int k = 0; k < classes; k++)
            sum += expf(x[k]);
        for (int k = 0; k < classes; k++) {
            delta[k] = truth[k] - expf(x[k]) / sum;
            loss[i] -= truth[k] * logf(expf(x[k]) / sum);
        }
    }
}

/* y += a x; y *= a */
static inline void axpy(float *y, float a, const float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] += a * x[i];
}

static inline void scale(float *y, float a, size_t count)
{
    for (size_t i = 0; i < count; i++)
        y[i] *= a;
}

#endif
