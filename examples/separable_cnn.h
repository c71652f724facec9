/* The network of separable_cnn.c and separable_cnn.cu: two blocks (separable_block.h), the average
 * of each channel, a linear layer, and softmax with cross entropy; and the images that it learns.
 *
 * EACH(operation, what, count), which the programs define before they include this file, computes
 * elements 0 to count - 1 of an operation: in a loop on the CPU, or as a kernel on the GPU. */
#ifndef EXAMPLES_SEPARABLE_CNN_H
#define EXAMPLES_SEPARABLE_CNN_H

#include <stdbool.h>
#include <stdint.h>

#include "separable_block.h"

enum {
    COLORS = 3,  /* channels of an image */
    MIDDLE = 8,  /* channels behind the first block */
    WIDE = 16,   /* channels behind the second */
    CLASSES = 4, /* directions of stripes */
    BATCH = 128,
    IMAGES = 512,   /* for training; those behind them are held out */
    HELD_OUT = 128, /* for evaluation */
    EPOCHS = 6,
    PARAMETERS = COLORS * (TAPS + MIDDLE) + 2 * MIDDLE + MIDDLE * (TAPS + WIDE) + 2 * WIDE +
                 CLASSES * WIDE + CLASSES,
    STATISTICS = 2 * MIDDLE + 2 * WIDE, /* running means and variances */
    RESULTS = 2,                        /* loss and accuracy of a batch */
    STATE = 3 * PARAMETERS + STATISTICS + RESULTS + HELD_OUT
};

struct network {
    float *weights, *velocity, *gradients; /* [PARAMETERS] */
    float *running;                        /* [STATISTICS] */
    float *results;                        /* [2]: loss and accuracy of the batch */
    float *held_out;                       /* [HELD_OUT]: 1 where the answer was right */
    struct block block[2];
    float *linear, *bias, *dlinear, *dbias; /* [CLASSES][WIDE], [CLASSES] */
    size_t image, count;                    /* the samples are images [image, image + count) */
    float weight;                           /* of a sample: 1 / batch */
    float *x;                               /* [count][COLORS][PIXELS] */
    float *average;                         /* [count][WIDE] */
    float *slope;                           /* [count][CLASSES], gradient of the linear layer */
    float *loss, *right;                    /* [count] */
};

/* ---- images by a formula ---- */

OPERATION float noise(size_t n) /* in [-1, 1) */
{
    uint32_t h = (uint32_t)n * 2654435761u + 1;
    h = (h ^ h >> 15) * 2246822519u;
    h = (h ^ h >> 13) * 3266489917u;
    return (float)((h ^ h >> 16) >> 8) / (1 << 23) - 1;
}

OPERATION size_t label_of(size_t image)
{
    return image % CLASSES;
}

/* x[s][c][p]: stripes in the direction of the label, behind noise. */
OPERATION void paint(const struct network *n, size_t i)
{
    const size_t p = i % PIXELS, c = i / PIXELS % COLORS, image = n->image + i / PIXELS / COLORS;
    const float row = (float)(p / SIDE), column = (float)(p % SIDE);
    const float along[CLASSES] = {row, column, row + column, row - column};
    const float color = 0.6f + 0.4f * noise(image * COLORS + c);
    const float pitch = 1.0f + 0.3f * noise(image + 50000);
    n->x[i] = color * sinf(pitch * along[label_of(image)] + 3 * noise(image + 90000)) +
              1.2f * noise((image * COLORS + c) * PIXELS + p);
}

/* ---- behind the blocks ---- */

/* average[s][c] */
OPERATION void average(const struct network *n, size_t i)
{
    float sum = 0;
    for (size_t p = 0; p < PIXELS; p++)
        sum += n->block[1].y[i * PIXELS + p];
    n->average[i] = sum / PIXELS;
}

/* loss[s], right[s] and slope[s][class] */
OPERATION void classify(const struct network *n, size_t s)
{
    const size_t label = label_of(n->image + s);
    float score[CLASSES], sum = 0;
    size_t best = 0;
    for (size_t k = 0; k < CLASSES; k++) {
        score[k] = n->bias[k];
        for (size_t c = 0; c < WIDE; c++)
            score[k] += n->linear[k * WIDE + c] * n->average[s * WIDE + c];
        best = score[k] > score[best] ? k : best;
    }
    for (size_t k = 0; k < CLASSES; k++)
        sum += expf(score[k] - score[best]);
    n->loss[s] = logf(sum) - (score[label] - score[best]);
    n->right[s] = best == label;
    for (size_t k = 0; k < CLASSES; k++)
        n->slope[s * CLASSES + k] =
            n->weight * (expf(score[k] - score[best]) / sum - (k == label ? 1.0f : 0.0f));
}

/* results[i]: sample after sample. */
OPERATION void add_results(const struct network *n, size_t i)
{
    for (size_t s = 0; s < n->count; s++)
        n->results[i] += n->weight * (i == 0 ? n->loss[s] : n->right[s]);
}

/* dlinear[class][c]: sample after sample. */
OPERATION void gradient_linear(const struct network *n, size_t i)
{
    for (size_t s = 0; s < n->count; s++)
        n->dlinear[i] += n->slope[s * CLASSES + i / WIDE] * n->average[s * WIDE + i % WIDE];
}

/* dbias[class]: sample after sample. */
OPERATION void gradient_bias(const struct network *n, size_t i)
{
    for (size_t s = 0; s < n->count; s++)
        n->dbias[i] += n->slope[s * CLASSES + i];
}

/* dy[s][c][p] of the last block */
OPERATION void back_average(const struct network *n, size_t i)
{
    const size_t c = i / PIXELS % WIDE, s = i / PIXELS / WIDE;
    float sum = 0;
    for (size_t k = 0; k < CLASSES; k++)
        sum += n->linear[k * WIDE + c] * n->slope[s * CLASSES + k];
    n->block[1].dy[i] = sum / PIXELS;
}

/* held_out[image]: a place for each image. */
OPERATION void keep_right(const struct network *n, size_t s)
{
    n->held_out[n->image - IMAGES + s] = n->right[s];
}

/* weights[i] and velocity[i] */
OPERATION void descend(const struct network *n, size_t i)
{
    n->velocity[i] = 0.9f * n->velocity[i] + n->gradients[i];
    n->weights[i] -= 0.3f * n->velocity[i];
}

/* ---- memory ---- */

static inline float *next(float **at, size_t floats)
{
    float *const here = *at;
    *at += floats;
    return here;
}

static inline struct filters filters_of(float **at, size_t in, size_t out)
{
    struct filters f;
    f.depthwise = next(at, in * TAPS);
    f.pointwise = next(at, out * in);
    f.scale = next(at, out);
    f.shift = next(at, out);
    return f;
}

/* What lives from the first step to the last, in STATE floats at `state`. */
static inline void place_state(struct network *n, float *state)
{
    const size_t channels[] = {COLORS, MIDDLE, WIDE};
    n->weights = next(&state, PARAMETERS);
    n->gradients = next(&state, PARAMETERS);
    n->velocity = next(&state, PARAMETERS);
    n->running = next(&state, STATISTICS);
    n->results = next(&state, RESULTS);
    n->held_out = next(&state, HELD_OUT);
    float *w = n->weights, *g = n->gradients, *running = n->running;
    for (int k = 0; k < 2; k++) {
        struct block *b = &n->block[k];
        b->in = channels[k];
        b->out = channels[k + 1];
        b->w = filters_of(&w, b->in, b->out);
        b->g = filters_of(&g, b->in, b->out);
        b->run_mean = next(&running, b->out);
        b->run_variance = next(&running, b->out);
    }
    n->linear = next(&w, CLASSES * WIDE);
    n->bias = next(&w, CLASSES);
    n->dlinear = next(&g, CLASSES * WIDE);
    n->dbias = next(&g, CLASSES);
}

/* The first values of the state of a network in host memory; the rest of it is 0. */
static inline void initialize(struct network *n)
{
    for (size_t i = 0; i < PARAMETERS; i++)
        n->weights[i] = 0.4f * noise(i + 1000);
    for (int k = 0; k < 2; k++)
        for (size_t o = 0; o < n->block[k].out; o++) {
            n->block[k].w.scale[o] = 1;
            n->block[k].w.shift[o] = 0;
            n->block[k].run_variance[o] = 1;
        }
}

/* What a micro-batch needs: where the pointer is, and how many floats it points to. */
struct buffer {
    float **at;
    size_t floats;
};
enum { FORWARD_BUFFERS = 15, BUFFERS = 23 };

static inline void need(struct buffer **list, float **at, size_t floats)
{
    (*list)->at = at;
    (*list)++->floats = floats;
}

/* The buffers of the micro-batch. Those of the backward pass come last. */
static inline void list_buffers(struct buffer list[BUFFERS], struct network *n)
{
    const size_t count = n->count;
    need(&list, &n->x, count * COLORS * PIXELS);
    for (struct block *b = n->block; b < n->block + 2; b++) {
        b->count = count;
        need(&list, &b->filtered, count * b->in * PIXELS);
        need(&list, &b->mixed, count * b->out * PIXELS);
        need(&list, &b->y, count * b->out * PIXELS);
        need(&list, &b->mean, count / GROUP * b->out);
        need(&list, &b->variance, count / GROUP * b->out);
    }
    need(&list, &n->average, count * WIDE);
    need(&list, &n->slope, count * CLASSES);
    need(&list, &n->loss, count);
    need(&list, &n->right, count);
    for (struct block *b = n->block; b < n->block + 2; b++) {
        need(&list, &b->dy, count * b->out * PIXELS);
        need(&list, &b->dfiltered, count * b->in * PIXELS);
        need(&list, &b->sum, count / GROUP * b->out);
        need(&list, &b->sum_normal, count / GROUP * b->out);
    }
}

/* ---- the two passes ---- */

/* Training normalizes with the statistics of each group, and updates the running ones. */
static inline void forward(struct network *n, bool trains)
{
    EACH(paint, n, n->count * COLORS * PIXELS);
    for (int k = 0; k < 2; k++) {
        struct block *b = &n->block[k];
        b->x = k ? n->block[0].y : n->x;
        EACH(depthwise, b, b->count * b->in * PIXELS);
        EACH(pointwise, b, b->count * b->out * PIXELS);
        if (trains) {
            EACH(statistics, b, b->count / GROUP * b->out);
            EACH(update_running, b, b->out);
        } else {
            EACH(use_running, b, b->count / GROUP * b->out);
        }
        EACH(normalize, b, b->count * b->out * PIXELS);
    }
    EACH(average, n, n->count * WIDE);
    EACH(classify, n, n->count);
}

/* Adds to gradients and results. */
static inline void backward(struct network *n)
{
    EACH(add_results, n, RESULTS);
    EACH(gradient_linear, n, CLASSES * WIDE);
    EACH(gradient_bias, n, CLASSES);
    EACH(back_average, n, n->count * WIDE * PIXELS);
    for (int k = 1; k >= 0; k--) {
        struct block *b = &n->block[k];
        EACH(group_sums, b, b->count / GROUP * b->out);
        EACH(gradient_normalize, b, b->out);
        EACH(back_normalize, b, b->count * b->out * PIXELS);
        EACH(gradient_pointwise, b, b->out * b->in);
        EACH(back_pointwise, b, b->count * b->in * PIXELS);
        EACH(gradient_depthwise, b, b->in * TAPS);
        b->dx = n->block[0].dy;
        if (k > 0)
            EACH(back_depthwise, b, b->count * b->in * PIXELS);
    }
}

/* A number that differs when any bit of `floats` does (FNV-1a). */
static inline uint64_t fingerprint(const float *floats, size_t count)
{
    const unsigned char *const bytes = (const unsigned char *)floats;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count * sizeof *floats; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

#endif
