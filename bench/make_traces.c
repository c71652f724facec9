/* Owns the traces of our own in bench/traces: allocation patterns that are harder than a plain
 * step. Must not know pools: it writes what programs ask for, whoever answers.
 *
 *   make_traces [FOLDER]      (bench/traces)
 *
 * Every trace has a seed of its own and comes out the same on every machine. Sizes follow from the
 * shapes of the models named below; nothing is measured. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <zlib.h>

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define BF16 2
#define FP32 4

/* ---- writing ---- */

struct writer {
    gzFile file;
    const char *path;
    uint64_t next_id;
    uint64_t state; /* of the random numbers, never 0 */
};

static void put(struct writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct writer *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int length = gzvprintf(w->file, format, arguments);
    va_end(arguments);
    if (length > 0)
        return;
    fprintf(stderr, "make_traces: %s: cannot write\n", w->path);
    exit(1);
}

static uint64_t take_on(struct writer *w, uint64_t bytes, unsigned stream)
{
    put(w, "a %" PRIu64 " %" PRIu64 " %u\n", w->next_id, bytes, stream);
    return w->next_id++;
}

static uint64_t take(struct writer *w, uint64_t bytes)
{
    return take_on(w, bytes, 0);
}

static void give(struct writer *w, uint64_t id)
{
    put(w, "f %" PRIu64 "\n", id);
}

static void use_on(struct writer *w, uint64_t id, unsigned stream)
{
    put(w, "u %" PRIu64 " %u\n", id, stream);
}

/* ---- chance: whole numbers only, so that no library's rounding shows ---- */

/* xorshift64*: the upper half is good. */
static uint32_t random32(struct writer *w)
{
    uint64_t x = w->state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    w->state = x;
    return (uint32_t)((x * UINT64_C(2685821657736338717)) >> 32);
}

/* In [low, high]. */
static uint64_t between(struct writer *w, uint64_t low, uint64_t high)
{
    const uint64_t wide = (uint64_t)random32(w) << 32 | random32(w);
    return low + wide % (high - low + 1);
}

/* Each octave from `low` to `high` as likely as any other, even within an octave. */
static uint64_t by_octave(struct writer *w, uint64_t low, uint64_t high)
{
    uint64_t octaves = 0;
    while (low << (octaves + 1) <= high)
        octaves++;
    const uint64_t from = low << between(w, 0, octaves - 1);
    return between(w, from, 2 * from - 1);
}

/* A sequence length with a heavy tail: half of them `least` to twice that, a quarter up to four
 * times, and so on up to `most`; a multiple of 8, as a collator pads. */
static uint64_t sequence_length(struct writer *w, uint64_t least, uint64_t most)
{
    uint64_t from = least;
    while (2 * from < most && random32(w) % 2)
        from *= 2;
    const uint64_t length = between(w, from, 2 * from - 1);
    return (length < most ? length : most) / 8 * 8;
}

/* ---- what the models have in common ---- */

struct shape {
    uint64_t layers, width, heads, vocabulary;
};

#define LAYER_WEIGHTS 6
static void layer_weights(uint64_t sizes[LAYER_WEIGHTS], const struct shape *m, uint64_t item)
{
    const uint64_t c = m->width;
    const uint64_t all[LAYER_WEIGHTS] = {2 * c, 3 * c * c, c * c, 2 * c, 4 * c * c, 4 * c * c};
    for (int i = 0; i < LAYER_WEIGHTS; i++)
        sizes[i] = all[i] * item;
}

/* Weights and `copies` more of the same size (gradients, moments), all of which stay. */
static void take_weights(struct writer *w, const struct shape *m, uint64_t item, int copies)
{
    for (int copy = 0; copy <= copies; copy++) {
        take(w, m->vocabulary * m->width * item);
        for (uint64_t layer = 0; layer < m->layers; layer++) {
            uint64_t sizes[LAYER_WEIGHTS];
            layer_weights(sizes, m, item);
            for (int i = 0; i < LAYER_WEIGHTS; i++)
                take(w, sizes[i]);
        }
    }
}

/* What one layer keeps of `tokens` tokens for its backward pass. */
#define LAYER_ACTIVATIONS 12
static void take_layer(struct writer *w, uint64_t ids[LAYER_ACTIVATIONS], const struct shape *m,
                       uint64_t tokens)
{
    const uint64_t x = tokens * m->width * BF16;
    const uint64_t statistics = tokens * FP32;
    const uint64_t sizes[LAYER_ACTIVATIONS] = {
        x, statistics, statistics,     3 * x, x,     tokens * m->heads * FP32,
        x, statistics, statistics + 1, 4 * x, 4 * x, x,
    };
    for (int i = 0; i < LAYER_ACTIVATIONS; i++)
        ids[i] = take(w, sizes[i]);
}

/* The layer's backward pass: scratch comes, goes in another order, and what the layer kept goes. */
static void give_layer(struct writer *w, const uint64_t ids[LAYER_ACTIVATIONS],
                       const struct shape *m, uint64_t tokens)
{
    const uint64_t x = tokens * m->width * BF16;
    const uint64_t wide = take(w, 4 * x);
    give(w, ids[11]);
    const uint64_t thin = take(w, x);
    give(w, ids[10]);
    give(w, wide);
    give(w, ids[9]);
    const uint64_t qkv = take(w, 3 * x);
    for (int i = 8; i >= 5; i--)
        give(w, ids[i]);
    const uint64_t sums = take(w, m->width * FP32 * (1 + tokens / 1024));
    give(w, thin);
    for (int i = 4; i >= 0; i--)
        give(w, ids[i]);
    give(w, qkv);
    give(w, sums);
}

/* ---- the traces ---- */

/* A 12-layer language model on batches of 8 sequences padded to the longest of them: no two steps
 * have the same sizes. AdamW's moments come with the first update. */
static void write_variable_length(struct writer *w)
{
    const struct shape m = {12, 768, 12, 50304};
    enum { STEPS = 22, BATCH = 8 };
    take_weights(w, &m, BF16, 1);
    uint64_t layer[12][LAYER_ACTIVATIONS];
    for (int step = 0; step < STEPS; step++) {
        uint64_t longest = 0;
        for (int i = 0; i < BATCH; i++) {
            const uint64_t length = sequence_length(w, 32, 2048);
            longest = length > longest ? length : longest;
        }
        const uint64_t tokens = BATCH * longest;
        const uint64_t input = take(w, tokens * 8);
        for (uint64_t i = 0; i < m.layers; i++)
            take_layer(w, layer[i], &m, tokens);
        const uint64_t logits = take(w, tokens * m.vocabulary * BF16);
        const uint64_t losses = take(w, tokens * FP32);
        const uint64_t gradient = take(w, tokens * m.vocabulary * BF16);
        give(w, logits);
        give(w, gradient);
        give(w, losses);
        for (uint64_t i = m.layers; i-- > 0;)
            give_layer(w, layer[i], &m, tokens);
        give(w, input);
        if (step == 0)
            take_weights(w, &m, FP32, 1);
    }
}

/* Sharded training (each layer's weights are gathered before it runs and dropped after): stream 1
 * gathers one layer ahead and reduces gradients, stream 2 fetches the batches, stream 0 computes.
 * Blocks are freed while another stream than their own still uses them. */
static void write_two_streams(struct writer *w)
{
    const struct shape m = {24, 2048, 16, 32000};
    enum { COMPUTE, NETWORK, FETCH, STEPS = 9, LAYERS = 24, RANKS = 4 };
    take_weights(w, &m, FP32 / RANKS, 3);
    const uint64_t gathered_bytes = 12 * m.width * m.width * BF16;
    uint64_t layer[LAYERS][LAYER_ACTIVATIONS];
    uint64_t next_batch = take_on(w, 4 * 2048 * 8, FETCH);
    for (int step = 0; step < STEPS; step++) {
        const uint64_t batch = next_batch;
        const uint64_t tokens = 4 * sequence_length(w, 256, 2048);
        use_on(w, batch, COMPUTE);
        next_batch = take_on(w, tokens * 8, FETCH);
        uint64_t ahead = take_on(w, gathered_bytes, NETWORK);
        for (int i = 0; i < LAYERS; i++) {
            const uint64_t weights = ahead;
            use_on(w, weights, COMPUTE);
            if (i + 1 < LAYERS)
                ahead = take_on(w, gathered_bytes, NETWORK);
            take_layer(w, layer[i], &m, tokens);
            give(w, weights);
        }
        ahead = take_on(w, gathered_bytes, NETWORK);
        uint64_t reducing = 0; /* the gradients of the layer before, on their way */
        for (int i = LAYERS - 1; i >= 0; i--) {
            const uint64_t weights = ahead;
            use_on(w, weights, COMPUTE);
            if (i > 0)
                ahead = take_on(w, gathered_bytes, NETWORK);
            const uint64_t gradients = take_on(w, gathered_bytes, COMPUTE);
            give_layer(w, layer[i], &m, tokens);
            use_on(w, gradients, NETWORK);
            const uint64_t shard = take_on(w, gathered_bytes / RANKS, NETWORK);
            give(w, weights);
            if (i < LAYERS - 1)
                give(w, reducing);
            reducing = gradients;
            use_on(w, shard, COMPUTE);
            give(w, shard);
        }
        give(w, reducing);
        give(w, batch);
    }
}

/* A 32-layer model with activation checkpointing: forward keeps one tensor a layer, backward runs
 * each layer again. Lengths vary, and every fifth step is an evaluation that keeps nothing. */
static void write_checkpointed(struct writer *w)
{
    const struct shape m = {32, 2560, 32, 50304};
    enum { STEPS = 13, LAYERS = 32 };
    take_weights(w, &m, BF16, 3);
    for (int step = 0; step < STEPS; step++) {
        const uint64_t tokens = 4 * sequence_length(w, 512, 4096);
        const uint64_t kept_bytes = tokens * m.width * BF16;
        const bool evaluates = step % 5 == 4;
        uint64_t kept[LAYERS];
        uint64_t inside[LAYER_ACTIVATIONS];
        for (int i = 0; i < LAYERS; i++) {
            kept[i] = take(w, kept_bytes);
            const uint64_t wide = take(w, 4 * kept_bytes);
            const uint64_t scratch = take(w, kept_bytes);
            give(w, wide);
            give(w, scratch);
            if (evaluates && i > 0)
                give(w, kept[i - 1]);
        }
        const uint64_t logits = take(w, tokens * m.vocabulary * BF16);
        give(w, logits);
        if (evaluates) {
            give(w, kept[LAYERS - 1]);
            continue;
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            take_layer(w, inside, &m, tokens);
            give_layer(w, inside, &m, tokens);
            give(w, kept[i]);
        }
    }
}

/* Fine-tuning a 7-billion-parameter model with adapters of rank 16: large frozen weights, thousands
 * of tiny gradients and moments, activations of every length between them. */
static void write_adapters(struct writer *w)
{
    const struct shape m = {32, 4096, 32, 32000};
    enum { STEPS = 9, LAYERS = 32, ADAPTERS = 8, RANK = 16 };
    take_weights(w, &m, BF16, 0);
    const uint64_t adapter_bytes = RANK * m.width * FP32;
    for (int i = 0; i < LAYERS * ADAPTERS; i++)
        take(w, adapter_bytes);
    uint64_t kept[LAYERS][3];
    uint64_t gradients[LAYERS * ADAPTERS];
    for (int step = 0; step < STEPS; step++) {
        const uint64_t tokens = sequence_length(w, 128, 4096);
        const uint64_t x = tokens * m.width * BF16;
        for (int i = 0; i < LAYERS; i++) {
            kept[i][0] = take(w, x);
            kept[i][1] = take(w, tokens * RANK * BF16 * ADAPTERS);
            const uint64_t wide = take(w, tokens * 11008 * BF16);
            kept[i][2] = take(w, tokens * m.heads * FP32);
            give(w, wide);
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            const uint64_t wide = take(w, tokens * 11008 * BF16);
            for (int a = 0; a < ADAPTERS; a++) {
                gradients[i * ADAPTERS + a] = take(w, adapter_bytes);
                if (a % 4 == 0)
                    give(w, take(w, x));
            }
            for (int k = 2; k >= 0; k--)
                give(w, kept[i][k]);
            give(w, wide);
        }
        if (step == 0)
            for (int i = 0; i < 2 * LAYERS * ADAPTERS; i++)
                take(w, adapter_bytes);
        for (int i = 0; i < LAYERS * ADAPTERS; i++)
            give(w, gradients[i]);
    }
}

/* Generation with a cache that grows by concatenation: each time a longer buffer is taken, copied
 * into, and the old one given back, a layer after the other. Sequences come and go. */
static void write_growing_cache(struct writer *w)
{
    const struct shape m = {16, 4096, 32, 32000};
    enum { LAYERS = 16, SEQUENCES = 6, ROUNDS = 75, TOKENS_A_ROUND = 64 };
    take_weights(w, &m, BF16, 0);
    struct {
        uint64_t length, most; /* 0: no sequence */
        uint64_t cache[LAYERS];
    } sequences[SEQUENCES] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        for (int s = 0; s < SEQUENCES; s++) {
            const bool begins = sequences[s].most == 0;
            if (begins) {
                sequences[s].length = sequence_length(w, 64, 4096);
                sequences[s].most = sequences[s].length + between(w, 100, 3000);
            } else {
                sequences[s].length += TOKENS_A_ROUND;
            }
            const bool ends = sequences[s].length > sequences[s].most;
            const uint64_t bytes = 2 * sequences[s].length * m.width * BF16;
            const uint64_t scratch = take(w, sequences[s].length * m.heads * FP32);
            for (int i = 0; i < LAYERS; i++) {
                const uint64_t longer = ends ? 0 : take(w, bytes);
                if (!begins)
                    give(w, sequences[s].cache[i]);
                sequences[s].cache[i] = longer;
            }
            give(w, scratch);
            if (ends)
                sequences[s].most = 0;
        }
    }
}

/* 10,000 blocks of 512 B to 1 GiB, each octave as likely, taken and given back in any order within
 * 48 GiB in use. */
static void write_churn(struct writer *w)
{
    enum { BLOCKS = 10000, IN_USE_MOST = 4096 };
    static struct {
        uint64_t id, bytes;
    } blocks[IN_USE_MOST];
    size_t count = 0;
    uint64_t live = 0;
    for (int i = 0; i < BLOCKS; i++) {
        /* Two or three digits that differ, as sizes of tensors do; the file stays small. */
        const uint64_t exact = by_octave(w, 512, GIB);
        uint64_t grain = 512;
        while (exact / grain >= 64)
            grain *= 2;
        const uint64_t bytes = (exact + grain - 1) / grain * grain;
        while (count == IN_USE_MOST || live + bytes > 48 * GIB || random32(w) % 5 == 0) {
            if (count == 0)
                break;
            const size_t k = (size_t)between(w, 0, count - 1);
            give(w, blocks[k].id);
            live -= blocks[k].bytes;
            blocks[k] = blocks[--count];
        }
        blocks[count].id = take(w, bytes);
        blocks[count++].bytes = bytes;
        live += bytes;
    }
}

/* Gradients accumulate over four micro-batches of different lengths before each update, in fp32
 * beside weights in bf16. Layers are of two widths in turns; the update casts a weight at a time
 * and has scratch as large as the weight for it. */
static void write_accumulation(struct writer *w)
{
    const struct shape shapes[2] = {{18, 1152, 18, 64000}, {18, 1664, 26, 64000}};
    enum { STEPS = 6, PARTS = 4, LAYERS = 18 };
    uint64_t sizes[LAYER_WEIGHTS];
    uint64_t layer[LAYERS][LAYER_ACTIVATIONS];
    uint64_t gradients[LAYERS][LAYER_WEIGHTS];
    for (int copy = 0; copy < 2; copy++) /* in bf16, then the masters in fp32 */
        for (int i = 0; i < LAYERS; i++) {
            layer_weights(sizes, &shapes[i % 2], copy ? FP32 : BF16);
            for (int k = 0; k < LAYER_WEIGHTS; k++)
                take(w, sizes[k]);
        }
    for (int step = 0; step < STEPS; step++) {
        for (int part = 0; part < PARTS; part++) {
            const uint64_t tokens = 4 * sequence_length(w, 128, 1024);
            for (int i = 0; i < LAYERS; i++)
                take_layer(w, layer[i], &shapes[i % 2], tokens);
            const uint64_t logits = take(w, tokens * shapes[0].vocabulary * BF16);
            const uint64_t losses = take(w, tokens * FP32);
            give(w, logits);
            for (int i = LAYERS - 1; i >= 0; i--) {
                layer_weights(sizes, &shapes[i % 2], FP32);
                for (int k = LAYER_WEIGHTS - 1; k >= 0; k--) {
                    const uint64_t gradient = take(w, sizes[k] / 2);
                    if (part == 0)
                        gradients[i][k] = take(w, sizes[k]);
                    give(w, gradient);
                }
                give_layer(w, layer[i], &shapes[i % 2], tokens);
            }
            give(w, losses);
        }
        for (int i = 0; i < LAYERS; i++) {
            layer_weights(sizes, &shapes[i % 2], FP32);
            for (int k = 0; k < LAYER_WEIGHTS; k++) {
                if (step == 0) { /* the moments */
                    take(w, sizes[k]);
                    take(w, sizes[k]);
                }
                give(w, take(w, sizes[k]));
                give(w, gradients[i][k]);
            }
        }
    }
}

/* A mixture of experts: which expert gets how many of a layer's tokens is different in every layer
 * and step, to the token. Every expert keeps three tensors of its share for its backward pass. */
static void write_experts(struct writer *w)
{
    const struct shape m = {12, 1024, 16, 32000};
    enum { STEPS = 8, LAYERS = 12, EXPERTS = 8, KEPT = 3 };
    take_weights(w, &m, BF16, 1);
    for (int i = 0; i < LAYERS * EXPERTS; i++)
        for (int k = 0; k < 6; k++) /* weights, gradients and moments of two matrices */
            take(w, 3584 * m.width * BF16);
    uint64_t layer[LAYERS][LAYER_ACTIVATIONS];
    uint64_t kept[LAYERS][EXPERTS][KEPT];
    uint64_t routed[LAYERS];
    uint64_t share[LAYERS][EXPERTS];
    for (int step = 0; step < STEPS; step++) {
        const uint64_t tokens = 8 * sequence_length(w, 256, 1024);
        for (int i = 0; i < LAYERS; i++) {
            take_layer(w, layer[i], &m, tokens);
            routed[i] = take(w, 2 * tokens * m.width * BF16);
            uint64_t left = 2 * tokens;
            for (int e = 0; e < EXPERTS; e++) {
                const uint64_t even = left / (uint64_t)(EXPERTS - e);
                share[i][e] = e + 1 == EXPERTS ? left : between(w, even / 3, even + even / 2);
                left -= share[i][e];
                kept[i][e][0] = take(w, share[i][e] * m.width * BF16);
                kept[i][e][1] = take(w, share[i][e] * 3584 * BF16);
                const uint64_t scratch = take(w, share[i][e] * 3584 * BF16);
                kept[i][e][2] = take(w, share[i][e] * m.width * BF16);
                give(w, scratch);
            }
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            for (int e = 0; e < EXPERTS; e++) {
                const uint64_t wide = take(w, share[i][e] * 3584 * BF16);
                const uint64_t thin = take(w, share[i][e] * m.width * BF16);
                for (int k = KEPT - 1; k >= 0; k--)
                    give(w, kept[i][e][k]);
                give(w, wide);
                give(w, thin);
            }
            give(w, routed[i]);
            give_layer(w, layer[i], &m, tokens);
        }
    }
}

/* Inference: a request's prompt is read in one go, with scratch for all its tokens, and then its
 * cache grows by a piece for 192 tokens and layer at a time until the answer is complete. */
static void write_serving(struct writer *w)
{
    const struct shape m = {20, 3072, 24, 32000};
    enum { LAYERS = 20, REQUESTS = 10, ROUNDS = 160, PIECE = 192, PIECES = 16 };
    take_weights(w, &m, BF16, 0);
    struct {
        uint64_t prompt[LAYERS], pieces[PIECES][LAYERS];
        uint64_t count, most;
        bool runs;
    } requests[REQUESTS] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        const size_t r = (size_t)between(w, 0, REQUESTS - 1);
        if (!requests[r].runs) {
            const uint64_t tokens = between(w, 17, 150) * between(w, 3, 21);
            const uint64_t hidden = take(w, tokens * m.width * BF16);
            for (int i = 0; i < LAYERS; i++) {
                const uint64_t qkv = take(w, 3 * tokens * m.width * BF16);
                requests[r].prompt[i] = take(w, 2 * tokens * m.width / 4 * BF16);
                const uint64_t wide = take(w, tokens * 8192 * BF16);
                give(w, qkv);
                give(w, wide);
            }
            give(w, hidden);
            requests[r].count = 0;
            requests[r].most = between(w, 1, PIECES);
            requests[r].runs = true;
        } else if (requests[r].count < requests[r].most) {
            for (int i = 0; i < LAYERS; i++)
                requests[r].pieces[requests[r].count][i] = take(w, PIECE * m.width / 2 * BF16);
            requests[r].count++;
        } else {
            for (int i = 0; i < LAYERS; i++) {
                give(w, requests[r].prompt[i]);
                for (uint64_t k = 0; k < requests[r].count; k++)
                    give(w, requests[r].pieces[k][i]);
            }
            requests[r].runs = false;
        }
        give(w, take(w, REQUESTS * m.vocabulary * FP32));
    }
}

/* Training on images of any size and aspect: a pyramid of convolutions whose feature maps halve in
 * each direction as channels double, odd sizes rounded up, and heads on every level. */
static void write_images(struct writer *w)
{
    enum { STEPS = 24, LEVELS = 5, BLOCKS = 4, KEPT = 3 };
    uint64_t weights = 9 * 64 * 64;
    for (int l = 0; l < LEVELS; l++, weights *= 4)
        for (int i = 0; i < 4 * BLOCKS; i++) { /* weights, gradients, two moments */
            take(w, weights * FP32);
            take(w, (UINT64_C(64) << l) * FP32);
        }
    for (int step = 0; step < STEPS; step++) {
        uint64_t kept[LEVELS][BLOCKS][KEPT];
        uint64_t heads[LEVELS];
        uint64_t height = between(w, 480, 1100);
        uint64_t width = between(w, 480, 1400);
        const uint64_t image = take(w, 2 * 3 * height * width * FP32);
        uint64_t map[LEVELS];
        for (int l = 0; l < LEVELS; l++) {
            height = (height + 1) / 2;
            width = (width + 1) / 2;
            map[l] = 2 * (UINT64_C(64) << l) * height * width * FP32;
            for (int i = 0; i < BLOCKS; i++) {
                kept[l][i][0] = take(w, map[l]);
                const uint64_t workspace = take(w, map[l] / 3 + (UINT64_C(1) << 20));
                kept[l][i][1] = take(w, map[l]);
                kept[l][i][2] = take(w, (UINT64_C(64) << l) * 2 * FP32);
                give(w, workspace);
            }
            heads[l] = take(w, 2 * 85 * 3 * height * width * FP32);
        }
        for (int l = LEVELS - 1; l >= 0; l--) {
            give(w, heads[l]);
            for (int i = BLOCKS - 1; i >= 0; i--) {
                const uint64_t gradient = take(w, map[l]);
                for (int k = KEPT - 1; k >= 0; k--)
                    give(w, kept[l][i][k]);
                give(w, gradient);
            }
        }
        give(w, image);
    }
}

/* ---- all of them ---- */

static const struct recipe {
    const char *name;
    uint64_t seed;
    const char *text;
    void (*write)(struct writer *w);
} recipes[] = {
    {"variable-length", 1, "12 layers, batches padded to lengths with a heavy tail, AdamW",
     write_variable_length},
    {"two-streams", 2, "24 layers, weights gathered and gradients reduced on other streams",
     write_two_streams},
    {"checkpointed", 3, "32 layers that are run again in backward, variable length, evaluations",
     write_checkpointed},
    {"adapters", 4, "7 billion frozen parameters, adapters of rank 16, variable length",
     write_adapters},
    {"growing-cache", 5, "generation with caches that grow by concatenation", write_growing_cache},
    {"churn", 6, "10,000 blocks of 512 B to 1 GiB in any order, 48 GiB in use", write_churn},
    {"accumulation", 7, "layers of two widths, gradients of four micro-batches a step, AdamW",
     write_accumulation},
    {"experts", 8, "12 layers of 8 experts, which share the tokens unevenly", write_experts},
    {"serving", 9, "20 layers, prompts of any length, caches that grow by pieces", write_serving},
    {"images", 10, "a pyramid of convolutions over images of any size", write_images},
};

int main(int count, char **arguments)
{
    const char *folder = count > 1 ? arguments[1] : "bench/traces";
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++) {
        const struct recipe *recipe = &recipes[i];
        char path[4096];
        snprintf(path, sizeof path, "%s/%s.trace.gz", folder, recipe->name);
        struct writer w = {gzopen(path, "wb9"), path, 0, recipe->seed};
        if (!w.file) {
            fprintf(stderr, "make_traces: %s: cannot write\n", path);
            return 1;
        }
        put(&w, "# %s: bench/make_traces.c, seed %" PRIu64 ": %s\n", recipe->name, recipe->seed,
            recipe->text);
        recipe->write(&w);
        if (gzclose(w.file) != Z_OK) {
            fprintf(stderr, "make_traces: %s: cannot write\n", path);
            return 1;
        }
        struct stat status;
        printf("%-28s %7lld bytes, %" PRIu64 " allocations\n", path,
               stat(path, &status) == 0 ? (long long)status.st_size : 0, w.next_id);
    }
    return 0;
}
