/* What the two language models of the tests compute, as kernels would: hidden = tanh(W mean of the
 * tokens so far), trained to say the next token. The numbers of a tensor are of type X: float, or
 * bfloat16. Sums over samples are added in the order of the samples to what is there. Must not know
 * where memory comes from. */
#ifndef WRAP_LLM_H
#define WRAP_LLM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

constexpr int C = 32, V = 128; /* channels, vocabulary */

/* Rounded to the nearest when it is stored. */
struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    bfloat16(float x)
    {
        uint32_t word;
        memcpy(&word, &x, sizeof word);
        bits = (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    operator float() const
    {
        const uint32_t word = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &word, sizeof x);
        return x;
    }
};

static inline unsigned random_u32(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*state >> 33);
}

/* ---- a data loader, which reads on from where it is ---- */

struct loader {
    int *inputs, *targets; /* B x T of the batch that was read last */
    int B, T;
    uint64_t position;
};

static inline void loader_init(loader *l, int B, int T)
{
    *l = {(int *)malloc(sizeof(int) * B * T), (int *)malloc(sizeof(int) * B * T), B, T, 1};
}

static inline void loader_reset(loader *l)
{
    l->position = 1;
}

static inline void loader_next(loader *l)
{
    for (int i = 0; i < l->B * l->T; i++) {
        l->inputs[i] = (int)(random_u32(&l->position) % V);
        l->targets[i] = (l->inputs[i] * 5 + 1) % V;
    }
}

/* ---- forward ---- */

template <class X> static void encode(X *out, const int *inputs, const X *wte, int B, int T)
{
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++)
            out[i * C + c] = wte[inputs[i] * C + c];
}

/* att[b][t][t2], of which only t2 <= t is written: the rest is zero from the beginning. */
template <class X> static void attend(X *att, X *out, const X *in, int B, int T)
{
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            X *row = att + (b * T + t) * T;
            for (int t2 = 0; t2 <= t; t2++)
                row[t2] = 1.0f / (float)(t + 1);
            for (int c = 0; c < C; c++) {
                float sum = 0;
                for (int t2 = 0; t2 < T; t2++)
                    sum += (float)row[t2] * (float)in[(b * T + t2) * C + c];
                out[(b * T + t) * C + c] = sum;
            }
        }
}

/* Dropout with a probability of 1/16, if `random` is not NULL. */
template <class X>
static void hidden_forward(X *out, const X *in, const X *w, int B, int T, uint64_t *random)
{
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            float sum = 0;
            for (int k = 0; k < C; k++)
                sum += (float)w[c * C + k] * (float)in[i * C + k];
            out[i * C + c] = random && random_u32(random) % 16 == 0 ? 0.0f : tanhf(sum);
        }
}

template <class X> static void logits_forward(X *out, const X *in, const X *wout, int B, int T)
{
    for (int i = 0; i < B * T; i++)
        for (int v = 0; v < V; v++) {
            float sum = 0;
            for (int c = 0; c < C; c++)
                sum += (float)wout[v * C + c] * (float)in[i * C + c];
            out[i * V + v] = sum;
        }
}

/* The loss of each token, and in place of the logits their gradients. */
template <class X>
static void classify(X *logits, float *losses, const int *targets, float dloss, int B, int T)
{
    for (int i = 0; i < B * T; i++) {
        float sum = 0;
        for (int v = 0; v < V; v++)
            sum += expf(logits[i * V + v]);
        losses[i] = logf(sum) - (float)logits[i * V + targets[i]];
        for (int v = 0; v < V; v++)
            logits[i * V + v] =
                (expf(logits[i * V + v]) / sum - (v == targets[i] ? 1.0f : 0.0f)) * dloss;
    }
}

/* ---- backward: dw += ..., and what is for another kernel = ... ---- */

template <class X>
static void logits_backward(X *dwout, X *dhidden, const X *dlogits, const X *hidden, const X *wout,
                            int B, int T)
{
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            float sum = 0;
            for (int v = 0; v < V; v++) {
                sum += (float)dlogits[i * V + v] * (float)wout[v * C + c];
                dwout[v * C + c] =
                    (float)dwout[v * C + c] + (float)dlogits[i * V + v] * (float)hidden[i * C + c];
            }
            dhidden[i * C + c] = sum;
        }
}

template <class X>
static void hidden_backward(X *dw, X *dmixed, const X *dhidden, const X *hidden, const X *mixed,
                            const X *w, int B, int T)
{
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            const float h = hidden[i * C + c];
            const float slope = h == 0 ? 0 : (float)dhidden[i * C + c] * (1 - h * h);
            for (int k = 0; k < C; k++) {
                dw[c * C + k] = (float)dw[c * C + k] + slope * (float)mixed[i * C + k];
                dmixed[i * C + k] =
                    (c == 0 ? 0 : (float)dmixed[i * C + k]) + slope * (float)w[c * C + k];
            }
        }
}

/* dencoded += ... */
template <class X>
static void attend_backward(X *dencoded, const X *dmixed, const X *att, int B, int T)
{
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int t2 = 0; t2 < T; t2++)
                for (int c = 0; c < C; c++)
                    dencoded[(b * T + t2) * C + c] =
                        (float)dencoded[(b * T + t2) * C + c] +
                        (float)att[(b * T + t) * T + t2] * (float)dmixed[(b * T + t) * C + c];
}

template <class X>
static void encode_backward(X *dwte, const X *dencoded, const int *inputs, int B, int T)
{
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++)
            dwte[inputs[i] * C + c] = (float)dwte[inputs[i] * C + c] + (float)dencoded[i * C + c];
}

/* ---- the update, and what the program says ---- */

template <class X> static void adamw(X *w, const X *g, float *m, float *v, size_t count, int step)
{
    for (size_t i = 0; i < count; i++) {
        m[i] = 0.9f * m[i] + 0.1f * (float)g[i];
        v[i] = 0.95f * v[i] + 0.05f * (float)g[i] * (float)g[i];
        const float fresh = m[i] / (1 - powf(0.9f, (float)step));
        const float size = sqrtf(v[i] / (1 - powf(0.95f, (float)step))) + 1e-8f;
        w[i] = (float)w[i] - 0.01f * fresh / size;
    }
}

template <class X> static void initialize(X *w, size_t count)
{
    uint64_t state = 42;
    for (size_t i = 0; i < count; i++)
        w[i] = 0.2f * ((float)(random_u32(&state) % 2048) / 1024 - 1);
}

/* A number that differs when any bit of the weights does (FNV-1a). */
static inline void print_weights(const void *weights, size_t bytes)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)weights)[i]) * 1099511628211u;
    printf("weights %016llx\n", (unsigned long long)hash);
}

#endif
