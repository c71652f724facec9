/* Owns the host's matrix product and the three operations made of it: one accumulator an element,
 * ascending k, whatever the shape, tile or thread. Must not know what is multiplied. */
#include <stdatomic.h>

#include "gpt/host.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- which instruction set ---- */

static atomic_int chosen_isa = -1;

static enum gpt_isa best_isa(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("fma"))
        return GPT_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return GPT_ISA_AVX2;
#endif
    return GPT_ISA_PORTABLE;
}

enum gpt_isa gpt_isa(void)
{
    int isa = atomic_load_explicit(&chosen_isa, memory_order_relaxed);
    if (isa < 0) {
        isa = (int)best_isa();
        atomic_store_explicit(&chosen_isa, isa, memory_order_relaxed);
    }
    return (enum gpt_isa)isa;
}

bool gpt_isa_force(enum gpt_isa isa)
{
    if (isa > best_isa())
        return false;
    atomic_store_explicit(&chosen_isa, (int)isa, memory_order_relaxed);
    return true;
}

/* ---- tiles ---- */

/* A tile is a few rows of c by one panel of columns. Its part of b is packed: [k][panel width],
 * columns that are not there as zeros, in pieces of DEPTH values of k, so that a piece stays in the
 * first-level cache. Between pieces the accumulators are in c: storing and loading fp32 changes
 * nothing. */
#define DEPTH 256
#define PANEL_MOST 32
#define ROWS_MOST 12
#define CHUNK_ROWS 192 /* rows of c that share one packing of b; a multiple of every tile's rows */

/* One tile's work, for a panel whose columns are all there. */
struct tile {
    size_t depth; /* values of k */
    const float *a;
    size_t a_row, a_column;
    const float *b; /* packed */
    float *c;
    size_t c_row;
    enum gpt_product_start start;
    const float *bias; /* from the panel's first column on */
};

typedef void (*tile_function)(const struct tile *tile);

/* What an instruction set has: tiles of 1 to `rows` rows, all of `columns` columns. */
struct tile_set {
    size_t rows, columns;
    tile_function tiles[ROWS_MOST];
};

/* Where an accumulator row of a tile begins; NULL: at zero. */
GPT_INLINE const float *start_of(const struct tile *t, int row)
{
    return t->start == GPT_START_ZERO   ? NULL
           : t->start == GPT_START_BIAS ? t->bias
                                        : t->c + (size_t)row * t->c_row;
}

#if defined(__x86_64__)
/* 12 x 32: 24 accumulators, 2 registers of b, 1 of a. */
GPT_TARGET_AVX512 GPT_INLINE void tile_avx512(const struct tile *t, const int rows)
{
    __m512 sum[ROWS_MOST][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        const float *from = start_of(t, i);
        sum[i][0] = from ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
        sum[i][1] = from ? _mm512_loadu_ps(from + 16) : _mm512_setzero_ps();
    }
    const float *a = t->a, *b = t->b;
    const size_t a_row = t->a_row;
    for (size_t k = t->depth; k > 0; k--) {
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const __m512 value = _mm512_set1_ps(a[(size_t)i * a_row]);
            sum[i][0] = _mm512_fmadd_ps(value, b0, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(value, b1, sum[i][1]);
        }
        a += t->a_column;
        b += 32;
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        _mm512_storeu_ps(t->c + (size_t)i * t->c_row, sum[i][0]);
        _mm512_storeu_ps(t->c + (size_t)i * t->c_row + 16, sum[i][1]);
    }
}

/* 6 x 16: 12 accumulators, 2 registers of b, 1 of a. */
GPT_TARGET_AVX2 GPT_INLINE void tile_avx2(const struct tile *t, const int rows)
{
    __m256 sum[6][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        const float *from = start_of(t, i);
        sum[i][0] = from ? _mm256_loadu_ps(from) : _mm256_setzero_ps();
        sum[i][1] = from ? _mm256_loadu_ps(from + 8) : _mm256_setzero_ps();
    }
    const float *a = t->a, *b = t->b;
    const size_t a_row = t->a_row;
    for (size_t k = t->depth; k > 0; k--) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const __m256 value = _mm256_broadcast_ss(&a[(size_t)i * a_row]);
            sum[i][0] = _mm256_fmadd_ps(value, b0, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(value, b1, sum[i][1]);
        }
        a += t->a_column;
        b += 16;
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        _mm256_storeu_ps(t->c + (size_t)i * t->c_row, sum[i][0]);
        _mm256_storeu_ps(t->c + (size_t)i * t->c_row + 8, sum[i][1]);
    }
}
#endif

/* What every machine has, or GCC makes of what it has. */
typedef float four __attribute__((vector_size(16)));

GPT_INLINE four load_four(const float *from)
{
    four value = {0};
    if (from)
        memcpy(&value, from, sizeof value);
    return value;
}

/* 4 x 8: multiply, round, add. */
GPT_INLINE void tile_portable(const struct tile *t, const int rows)
{
    four sum[4][2];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        const float *from = start_of(t, i);
        sum[i][0] = load_four(from);
        sum[i][1] = load_four(from ? from + 4 : NULL);
    }
    const float *a = t->a, *b = t->b;
    const size_t a_row = t->a_row;
    for (size_t k = t->depth; k > 0; k--) {
        const four b0 = load_four(b), b1 = load_four(b + 4);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const float value = a[(size_t)i * a_row];
            sum[i][0] += value * b0;
            sum[i][1] += value * b1;
        }
        a += t->a_column;
        b += 8;
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
        memcpy(t->c + (size_t)i * t->c_row, sum[i], sizeof sum[i]);
}

/* A function for each number of rows, so that the accumulators are registers in all of them. */
#define TILE(target, name, rows)                                                                   \
    target static void name##_##rows(const struct tile *tile)                                      \
    {                                                                                              \
        name(tile, rows);                                                                          \
    }
#define TILES_TO_4(target, name)                                                                   \
    TILE(target, name, 1) TILE(target, name, 2) TILE(target, name, 3) TILE(target, name, 4)
#define TILES_TO_6(target, name)                                                                   \
    TILES_TO_4(target, name) TILE(target, name, 5) TILE(target, name, 6)
#define TILES_TO_12(target, name)                                                                  \
    TILES_TO_6(target, name)                                                                       \
    TILE(target, name, 7)                                                                          \
    TILE(target, name, 8)                                                                          \
    TILE(target, name, 9) TILE(target, name, 10) TILE(target, name, 11) TILE(target, name, 12)

TILES_TO_4(, tile_portable)
static const struct tile_set portable_set = {
    4, 8, {tile_portable_1, tile_portable_2, tile_portable_3, tile_portable_4}};
#if defined(__x86_64__)
TILES_TO_6(GPT_TARGET_AVX2, tile_avx2)
static const struct tile_set avx2_set = {
    6, 16, {tile_avx2_1, tile_avx2_2, tile_avx2_3, tile_avx2_4, tile_avx2_5, tile_avx2_6}};
TILES_TO_12(GPT_TARGET_AVX512, tile_avx512)
static const struct tile_set avx512_set = {
    12,
    32,
    {tile_avx512_1, tile_avx512_2, tile_avx512_3, tile_avx512_4, tile_avx512_5, tile_avx512_6,
     tile_avx512_7, tile_avx512_8, tile_avx512_9, tile_avx512_10, tile_avx512_11, tile_avx512_12}};
#endif

static const struct tile_set *tile_set(void)
{
#if defined(__x86_64__)
    if (gpt_isa() == GPT_ISA_AVX512)
        return &avx512_set;
    if (gpt_isa() == GPT_ISA_AVX2)
        return &avx2_set;
#endif
    return &portable_set;
}

/* Runs a tile of which c has only some columns: in a copy that has all. */
static void run_edge(tile_function run, const struct tile *tile, size_t rows, size_t columns)
{
    float copy[ROWS_MOST * PANEL_MOST] = {0}, bias[PANEL_MOST] = {0};
    struct tile whole = *tile;
    whole.c = copy;
    whole.c_row = PANEL_MOST;
    whole.bias = bias;
    if (tile->start == GPT_START_BIAS)
        memcpy(bias, tile->bias, columns * sizeof *bias);
    if (tile->start == GPT_START_SUM)
        for (size_t i = 0; i < rows; i++)
            memcpy(copy + i * PANEL_MOST, tile->c + i * tile->c_row, columns * sizeof *copy);
    run(&whole);
    for (size_t i = 0; i < rows; i++)
        memcpy(tile->c + i * tile->c_row, copy + i * PANEL_MOST, columns * sizeof *copy);
}

/* ---- packing ---- */

/* packed[k][panel]: `columns` of them from b, the rest zero. */
static void pack_rows(float *restrict packed, const float *b, size_t b_row, size_t depth,
                      size_t columns, size_t panel)
{
    for (size_t k = 0; k < depth; k++) {
        memcpy(packed + k * panel, b + k * b_row, columns * sizeof *packed);
        memset(packed + k * panel + columns, 0, (panel - columns) * sizeof *packed);
    }
}

/* The same from a transposed b, in squares that stay in cache lines. */
static void pack_columns(float *restrict packed, const float *b, size_t b_column, size_t depth,
                         size_t columns, size_t panel)
{
    enum { SQUARE = 16 };
    if (columns < panel)
        memset(packed, 0, depth * panel * sizeof *packed);
    for (size_t k0 = 0; k0 < depth; k0 += SQUARE) {
        const size_t k1 = depth - k0 < SQUARE ? depth : k0 + SQUARE;
        for (size_t j = 0; j < columns; j++)
            for (size_t k = k0; k < k1; k++)
                packed[k * panel + j] = b[j * b_column + k];
    }
}

static void pack(float *packed, const struct gpt_product *p, size_t k, size_t depth, size_t column,
                 size_t columns, size_t panel)
{
    const float *b = p->b + k * p->b_row + column * p->b_column;
    if (p->b_column == 1)
        pack_rows(packed, b, p->b_row, depth, columns, panel);
    else
        pack_columns(packed, b, p->b_column, depth, columns, panel);
}

/* ---- the product ---- */

/* Rows [row, row + rows) of one panel, one piece of k. */
static void run_piece(const struct gpt_product *p, const struct tile_set *set, const float *packed,
                      size_t k, size_t depth, size_t row, size_t rows, size_t column)
{
    const size_t columns = p->n - column < set->columns ? p->n - column : set->columns;
    struct tile tile = {.depth = depth,
                        .a_row = p->a_row,
                        .a_column = p->a_column,
                        .b = packed,
                        .c_row = p->c_row,
                        .start = k == 0 ? p->start : GPT_START_SUM,
                        .bias = p->start == GPT_START_BIAS ? p->bias + column : NULL};
    for (size_t i = row; i < row + rows; i += set->rows) {
        const size_t count = row + rows - i < set->rows ? row + rows - i : set->rows;
        tile.a = p->a + i * p->a_row + k * p->a_column;
        tile.c = p->c + i * p->c_row + column;
        if (columns == set->columns)
            set->tiles[count - 1](&tile);
        else
            run_edge(set->tiles[count - 1], &tile, count, columns);
    }
}

/* Items are (chunk of rows, panel), panel running faster. */
static void run_items(size_t begin, size_t end, const void *user)
{
    const struct gpt_product *p = user;
    const struct tile_set *set = tile_set();
    const size_t panels = (p->n + set->columns - 1) / set->columns;
    _Alignas(64) float packed[DEPTH * PANEL_MOST];
    for (size_t item = begin; item < end; item++) {
        const size_t row = item / panels * CHUNK_ROWS, column = item % panels * set->columns;
        const size_t rows = p->m - row < CHUNK_ROWS ? p->m - row : CHUNK_ROWS;
        const size_t columns = p->n - column < set->columns ? p->n - column : set->columns;
        for (size_t k = 0; k < p->k; k += DEPTH) {
            const size_t depth = p->k - k < DEPTH ? p->k - k : DEPTH;
            pack(packed, p, k, depth, column, columns, set->columns);
            run_piece(p, set, packed, k, depth, row, rows, column);
        }
    }
}

static size_t item_count(const struct gpt_product *p)
{
    const size_t columns = tile_set()->columns;
    return (p->m + CHUNK_ROWS - 1) / CHUNK_ROWS * ((p->n + columns - 1) / columns);
}

void gpt_product_run(const struct gpt_product *product)
{
    run_items(0, item_count(product), product);
}

void gpt_product_run_parallel(const struct gpt_product *product)
{
    const size_t rows = product->m < CHUNK_ROWS ? product->m : CHUNK_ROWS;
    const size_t grain = gpt_product_grain(rows * tile_set()->columns * product->k);
    gpt_parallel_for(item_count(product), grain, run_items, product);
}

/* ---- the operations ---- */

static void run_product(size_t begin, size_t end, const void *user)
{
    (void)begin, (void)end; /* one item: it spreads itself over threads */
    gpt_product_run_parallel(user);
}

/* The strides of b(k, j) = W(k, j), or with `swap` of b(k, j) = W(j, k). */
static void weight_strides(struct gpt_product *product, const struct gpt_matmul *shape, bool swap)
{
    const bool rows_are_outputs = shape->transposed != swap;
    const size_t stride = shape->transposed ? shape->inputs : shape->outputs;
    product->b_row = rows_are_outputs ? 1 : stride;
    product->b_column = rows_are_outputs ? stride : 1;
}

rebatch_status gpt_host_matmul_forward(const struct gpt_queue *queue, void *y, const void *x,
                                       const void *weight, const void *bias,
                                       const struct gpt_matmul *shape)
{
    struct gpt_product product = {.m = shape->rows,
                                  .n = shape->outputs,
                                  .k = shape->inputs,
                                  .a = x,
                                  .a_row = shape->inputs,
                                  .a_column = 1,
                                  .b = weight,
                                  .c = y,
                                  .c_row = shape->outputs,
                                  .start = bias ? GPT_START_BIAS : GPT_START_ZERO,
                                  .bias = bias};
    weight_strides(&product, shape, false);
    return gpt_host_for(queue, 1, 1, run_product, &product);
}

rebatch_status gpt_host_matmul_backward_input(const struct gpt_queue *queue, void *dx,
                                              const void *dy, const void *weight,
                                              const struct gpt_matmul *shape)
{
    struct gpt_product product = {.m = shape->rows,
                                  .n = shape->inputs,
                                  .k = shape->outputs,
                                  .a = dy,
                                  .a_row = shape->outputs,
                                  .a_column = 1,
                                  .b = weight,
                                  .c = dx,
                                  .c_row = shape->inputs,
                                  .start = GPT_START_ZERO};
    weight_strides(&product, shape, true);
    return gpt_host_for(queue, 1, 1, run_product, &product);
}

struct column_sums {
    float *sums;
    const float *values;
    size_t rows, columns;
};

/* Columns [begin, end). */
GPT_INLINE void sum_columns_body(size_t begin, size_t end, const void *user)
{
    const struct column_sums *s = user;
    float *restrict sums = s->sums;
    for (size_t row = 0; row < s->rows; row++) {
        const float *restrict values = s->values + row * s->columns;
        for (size_t j = begin; j < end; j++)
            sums[j] += values[j];
    }
}
GPT_VARIANTS(sum_columns)

rebatch_status gpt_host_matmul_backward_weight(const struct gpt_queue *queue, float *dweight,
                                               float *dbias, const void *dy, const void *x,
                                               const struct gpt_matmul *shape)
{
    const bool transposed = shape->transposed;
    const size_t m = transposed ? shape->outputs : shape->inputs;
    const size_t n = transposed ? shape->inputs : shape->outputs;
    const struct gpt_product product = {.m = m,
                                        .n = n,
                                        .k = shape->rows,
                                        .a = transposed ? dy : x,
                                        .a_row = 1,
                                        .a_column = m,
                                        .b = transposed ? x : dy,
                                        .b_row = n,
                                        .b_column = 1,
                                        .c = dweight,
                                        .c_row = n,
                                        .start = GPT_START_SUM};
    const rebatch_status status = gpt_host_for(queue, 1, 1, run_product, &product);
    if (status || !dbias)
        return status;
    const struct column_sums sums = {dbias, dy, shape->rows, shape->outputs};
    return gpt_host_for(queue, shape->outputs, GPT_COLUMN_GRAIN, sum_columns, &sums);
}
