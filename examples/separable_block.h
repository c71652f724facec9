/* The block of separable_cnn.c and separable_cnn.cu: depthwise 3x3 convolution, pointwise 1x1
 * convolution, batch norm over groups of GROUP samples, ReLU; forward and backward.
 *
 * Every operation computes element `i` of its result. Batch norm never looks beyond its group, and
 * a gradient is one chain of additions over the samples, which goes on where the last micro-batch
 * ended. So it does not matter where a batch is cut between two groups. */
#ifndef EXAMPLES_SEPARABLE_BLOCK_H
#define EXAMPLES_SEPARABLE_BLOCK_H

#include <math.h>
#include <stddef.h>

#ifdef __CUDACC__
#define OPERATION static inline __host__ __device__
#else
#define OPERATION static inline
#endif

enum {
    SIDE = 16, /* of an image */
    PIXELS = SIDE * SIDE,
    TAPS = 9, /* of a 3x3 filter */
    GROUP = 8 /* samples that are normalized together */
};

struct filters {
    float *depthwise;     /* [in][TAPS] */
    float *pointwise;     /* [out][in] */
    float *scale, *shift; /* [out], of the batch norm */
};

struct block {
    size_t in, out;                 /* channels */
    size_t count;                   /* samples of the micro-batch */
    struct filters w, g;            /* weights and gradients */
    float *run_mean, *run_variance; /* [out], for evaluation */
    const float *x;                 /* [count][in][PIXELS] */
    float *filtered;                /* [count][in][PIXELS], behind the depthwise convolution */
    float *mixed;                   /* [count][out][PIXELS], behind the pointwise convolution */
    float *y;                       /* [count][out][PIXELS], behind batch norm and ReLU */
    float *mean, *variance;         /* [count / GROUP][out] */
    float *dy, *dfiltered, *dx;     /* gradients: dy becomes that of `mixed` */
    float *sum, *sum_normal;        /* [count / GROUP][out], of dy, and of dy times normalized */
};

/* ---- forward ---- */

/* The pixel that tap `tap` of a 3x3 filter sees from pixel `p`, or -1 beyond the border. */
OPERATION int neighbor(int p, int tap)
{
    const int row = p / SIDE + tap / 3 - 1, column = p % SIDE + tap % 3 - 1;
    return row < 0 || row >= SIDE || column < 0 || column >= SIDE ? -1 : row * SIDE + column;
}

/* filtered[s][c][p] */
OPERATION void depthwise(const struct block *b, size_t i)
{
    const float *x = b->x + i / PIXELS * PIXELS;
    const float *w = b->w.depthwise + i / PIXELS % b->in * TAPS;
    float sum = 0;
    for (int tap = 0; tap < TAPS; tap++) {
        const int from = neighbor((int)(i % PIXELS), tap);
        sum += from < 0 ? 0 : w[tap] * x[from];
    }
    b->filtered[i] = sum;
}

/* mixed[s][o][p] */
OPERATION void pointwise(const struct block *b, size_t i)
{
    const size_t p = i % PIXELS, o = i / PIXELS % b->out, s = i / PIXELS / b->out;
    float sum = 0;
    for (size_t c = 0; c < b->in; c++)
        sum += b->w.pointwise[o * b->in + c] * b->filtered[(s * b->in + c) * PIXELS + p];
    b->mixed[i] = sum;
}

/* Element `k` of the GROUP * PIXELS elements of channel `i % out` in group `i / out`. */
OPERATION size_t in_group(const struct block *b, size_t i, size_t k)
{
    const size_t s = i / b->out * GROUP + k / PIXELS;
    return (s * b->out + i % b->out) * PIXELS + k % PIXELS;
}

/* mean[group][o] and variance[group][o] */
OPERATION void statistics(const struct block *b, size_t i)
{
    float sum = 0, squares = 0;
    for (size_t k = 0; k < GROUP * PIXELS; k++)
        sum += b->mixed[in_group(b, i, k)];
    const float mean = sum / (GROUP * PIXELS);
    for (size_t k = 0; k < GROUP * PIXELS; k++) {
        const float off = b->mixed[in_group(b, i, k)] - mean;
        squares += off * off;
    }
    b->mean[i] = mean;
    b->variance[i] = squares / (GROUP * PIXELS);
}

/* run_mean[o] and run_variance[o]: one update for each group, in the order of the samples. */
OPERATION void update_running(const struct block *b, size_t o)
{
    for (size_t group = 0; group < b->count / GROUP; group++) {
        b->run_mean[o] += 0.05f * (b->mean[group * b->out + o] - b->run_mean[o]);
        b->run_variance[o] += 0.05f * (b->variance[group * b->out + o] - b->run_variance[o]);
    }
}

/* mean[group][o] and variance[group][o] in evaluation */
OPERATION void use_running(const struct block *b, size_t i)
{
    b->mean[i] = b->run_mean[i % b->out];
    b->variance[i] = b->run_variance[i % b->out];
}

/* Where the statistics of element `i` of `mixed` are. */
OPERATION size_t statistics_of(const struct block *b, size_t i)
{
    return i / PIXELS / b->out / GROUP * b->out + i / PIXELS % b->out;
}

OPERATION float normalized(const struct block *b, size_t i)
{
    const size_t k = statistics_of(b, i);
    return (b->mixed[i] - b->mean[k]) / sqrtf(b->variance[k] + 1e-5f);
}

/* y[s][o][p] */
OPERATION void normalize(const struct block *b, size_t i)
{
    const size_t o = i / PIXELS % b->out;
    const float y = b->w.scale[o] * normalized(b, i) + b->w.shift[o];
    b->y[i] = y > 0 ? y : 0;
}

/* ---- backward ---- */

/* sum[group][o] and sum_normal[group][o] */
OPERATION void group_sums(const struct block *b, size_t i)
{
    float sum = 0, sum_normal = 0;
    for (size_t k = 0; k < GROUP * PIXELS; k++) {
        const size_t at = in_group(b, i, k);
        const float dy = b->y[at] > 0 ? b->dy[at] : 0;
        sum += dy;
        sum_normal += dy * normalized(b, at);
    }
    b->sum[i] = sum;
    b->sum_normal[i] = sum_normal;
}

/* g.scale[o] and g.shift[o]: group after group. */
OPERATION void gradient_normalize(const struct block *b, size_t o)
{
    for (size_t group = 0; group < b->count / GROUP; group++) {
        b->g.scale[o] += b->sum_normal[group * b->out + o];
        b->g.shift[o] += b->sum[group * b->out + o];
    }
}

/* dy[s][o][p] becomes the gradient of mixed[s][o][p]. */
OPERATION void back_normalize(const struct block *b, size_t i)
{
    const size_t k = statistics_of(b, i);
    const float dy = b->y[i] > 0 ? b->dy[i] : 0;
    const float others = b->sum[k] + normalized(b, i) * b->sum_normal[k];
    b->dy[i] = b->w.scale[i / PIXELS % b->out] / sqrtf(b->variance[k] + 1e-5f) *
               (dy - others / (GROUP * PIXELS));
}

/* g.pointwise[o][c]: sample after sample. */
OPERATION void gradient_pointwise(const struct block *b, size_t i)
{
    const size_t c = i % b->in, o = i / b->in;
    for (size_t s = 0; s < b->count; s++) {
        float sum = 0;
        for (size_t p = 0; p < PIXELS; p++)
            sum += b->dy[(s * b->out + o) * PIXELS + p] * b->filtered[(s * b->in + c) * PIXELS + p];
        b->g.pointwise[i] += sum;
    }
}

/* dfiltered[s][c][p] */
OPERATION void back_pointwise(const struct block *b, size_t i)
{
    const size_t p = i % PIXELS, c = i / PIXELS % b->in, s = i / PIXELS / b->in;
    float sum = 0;
    for (size_t o = 0; o < b->out; o++)
        sum += b->w.pointwise[o * b->in + c] * b->dy[(s * b->out + o) * PIXELS + p];
    b->dfiltered[i] = sum;
}

/* g.depthwise[c][tap]: sample after sample. */
OPERATION void gradient_depthwise(const struct block *b, size_t i)
{
    for (size_t s = 0; s < b->count; s++) {
        const size_t plane = (s * b->in + i / TAPS) * PIXELS;
        float sum = 0;
        for (int p = 0; p < PIXELS; p++) {
            const int from = neighbor(p, (int)(i % TAPS));
            sum += from < 0 ? 0 : b->dfiltered[plane + (size_t)p] * b->x[plane + (size_t)from];
        }
        b->g.depthwise[i] += sum;
    }
}

/* dx[s][c][p]: the filter turned by half a circle. */
OPERATION void back_depthwise(const struct block *b, size_t i)
{
    const float *dfiltered = b->dfiltered + i / PIXELS * PIXELS;
    const float *w = b->w.depthwise + i / PIXELS % b->in * TAPS;
    float sum = 0;
    for (int tap = 0; tap < TAPS; tap++) {
        const int from = neighbor((int)(i % PIXELS), TAPS - 1 - tap);
        sum += from < 0 ? 0 : w[tap] * dfiltered[from];
    }
    b->dx[i] = sum;
}

#endif
