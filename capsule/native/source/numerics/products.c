#include "products.h"

#include <string.h>

#include "processor.h"

typedef float v4 __attribute__((ext_vector_type(4)));
typedef float v8 __attribute__((ext_vector_type(8)));
typedef float v16 __attribute__((ext_vector_type(16)));

/* Counts `i` up to a constant, without a loop in the compiled code. */
#define UNROLLED(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < count; i++)

enum {
    MOST_ROWS = 12, /* of a tile */
    NARROW = 64,    /* columns */
    FEW = 64,       /* rows, for which copying b costs more than it saves */
    FEW_STEPS = 64, /* rows of a wide b, not copied, whose pages and lines the first level knows */
    /* A panel of b with a tile of a stays in the first level, a block of a in the second. */
    BLOCK_STEPS = 192,
    BLOCK_ROWS = 252, /* full tiles of any height */
    BLOCK_COLUMNS = 1600,
    /* Not powers of two: otherwise rows or steps would evict each other from the cache. */
    ROWS_APART = BLOCK_STEPS + 16,
    STEPS_APART = BLOCK_ROWS + 16,
};

/* Defines tile_V_N: `rows` (a constant) times N vectors of type V of the result, in registers. */
#define DEFINE_TILE(V, N)                                                                          \
    typedef V V##_##N##_unaligned __attribute__((aligned(4)));                                     \
    INLINE void tile_##V##_##N(const struct product *p, int64_t row, int64_t column,               \
                               const int rows) {                                                   \
        const int64_t WIDTH = sizeof(V) / sizeof(float);                                           \
        const int64_t a_row = p->a_row, a_step = p->a_step;                                        \
        const int64_t b_step = p->packed ? N * WIDTH : p->b_step;                                  \
        float *c = p->c + row * p->c_row + column;                                                 \
        V sum[MOST_ROWS][N];                                                                       \
        UNROLLED(r, rows)                                                                          \
            UNROLLED(n, N)                                                                         \
                sum[r][n] =                                                                        \
                    p->continues ? *(V##_##N##_unaligned *)(c + r * p->c_row + n * WIDTH) : (V)0;  \
        if (p->packed)                                                                             \
            UNROLLED(r, rows)                                                                      \
                UNROLLED(n, N) __builtin_prefetch(c + (rows + r) * p->c_row + n * WIDTH, 1);       \
        for (int64_t segment = 0; segment < p->segments; segment++) {                              \
            const float *a = p->a + row * a_row + segment * p->a_segment;                          \
            const float *a3 = a + 3 * a_row, *a6 = a + 6 * a_row, *a9 = a + 9 * a_row;             \
            const float *b = p->b + column * (p->packed ? p->steps : 1) + segment * p->b_segment;  \
            for (int64_t step = 0; step < p->steps; step++) {                                      \
                V factor[N];                                                                       \
                UNROLLED(n, N) factor[n] = *(V##_##N##_unaligned *)(b + n * WIDTH);                \
                UNROLLED(r, rows) {                                                                \
                    const float *base = r < 3 ? a : r < 6 ? a3 : r < 9 ? a6 : a9;                  \
                    V other = (V)base[r % 3 * a_row];                                              \
                    UNROLLED(n, N)                                                                 \
                        sum[r][n] = __builtin_elementwise_fma(other, factor[n], sum[r][n]);        \
                }                                                                                  \
                a += a_step, a3 += a_step, a6 += a_step, a9 += a_step, b += b_step;                \
            }                                                                                      \
        }                                                                                          \
        UNROLLED(r, rows)                                                                          \
            UNROLLED(n, N) *(V##_##N##_unaligned *)(c + r * p->c_row + n * WIDTH) = sum[r][n];     \
    }

/* Defines panel_V_N_SET: N vectors of columns, all rows, in tiles of nearly equal height. */
#define DEFINE_PANEL(V, N, SET, TARGET, MOST)                                                      \
    TARGET static void panel_##V##_##N##_##SET(const struct product *p, int64_t column) {          \
        int64_t tiles = (p->rows + MOST - 1) / MOST;                                               \
        for (int64_t tile = 0, row = 0; tile < tiles; tile++) {                                    \
            int64_t rows = (p->rows - row + tiles - tile - 1) / (tiles - tile);                    \
            switch (rows) {                                                                        \
            case 1: tile_##V##_##N(p, row, column, 1); break;                                      \
            case 2: tile_##V##_##N(p, row, column, 2); break;                                      \
            case 3: tile_##V##_##N(p, row, column, 3); break;                                      \
            case 4: tile_##V##_##N(p, row, column, 4); break;                                      \
            case 5: tile_##V##_##N(p, row, column, 5); break;                                      \
            case 6: tile_##V##_##N(p, row, column, 6); break;                                      \
            case 7:                                                                                \
                if (MOST >= 7) tile_##V##_##N(p, row, column, 7);                                  \
                break;                                                                             \
            case 8:                                                                                \
                if (MOST >= 8) tile_##V##_##N(p, row, column, 8);                                  \
                break;                                                                             \
            case 9:                                                                                \
                if (MOST >= 9) tile_##V##_##N(p, row, column, 9);                                  \
                break;                                                                             \
            case 10:                                                                               \
                if (MOST >= 10) tile_##V##_##N(p, row, column, 10);                                \
                break;                                                                             \
            case 11:                                                                               \
                if (MOST >= 11) tile_##V##_##N(p, row, column, 11);                                \
                break;                                                                             \
            case 12:                                                                               \
                if (MOST >= 12) tile_##V##_##N(p, row, column, 12);                                \
                break;                                                                             \
            default: break; /* no tile is higher */                                                \
            }                                                                                      \
            row += rows;                                                                           \
        }                                                                                          \
    }

DEFINE_TILE(v16, 2)
DEFINE_TILE(v16, 1)
DEFINE_TILE(v8, 2)
DEFINE_TILE(v8, 1)
DEFINE_TILE(v4, 1)
DEFINE_TILE(float, 1) /* NOLINT(bugprone-sizeof-expression,cert-arr39-c): a vector of one */

DEFINE_PANEL(v16, 2, avx512, AVX512, 12)
DEFINE_PANEL(v16, 1, avx512, AVX512, 12)
DEFINE_PANEL(v8, 1, avx512, AVX512, 12)
DEFINE_PANEL(v4, 1, avx512, AVX512, 12)
DEFINE_PANEL(float, 1, avx512, AVX512, 12)
DEFINE_PANEL(v8, 2, avx2, AVX2, 6)
DEFINE_PANEL(v8, 1, avx2, AVX2, 6)
DEFINE_PANEL(v4, 1, avx2, AVX2, 6)
DEFINE_PANEL(float, 1, avx2, AVX2, 6)

static void multiply_avx512(const struct product *p) {
    int64_t column = 0;
    for (; column + 32 <= p->columns; column += 32) panel_v16_2_avx512(p, column);
    for (; column + 16 <= p->columns; column += 16) panel_v16_1_avx512(p, column);
    for (; column + 8 <= p->columns; column += 8) panel_v8_1_avx512(p, column);
    for (; column + 4 <= p->columns; column += 4) panel_v4_1_avx512(p, column);
    for (; column < p->columns; column++) panel_float_1_avx512(p, column);
}

static void multiply_avx2(const struct product *p) {
    int64_t column = 0;
    for (; column + 16 <= p->columns; column += 16) panel_v8_2_avx2(p, column);
    for (; column + 8 <= p->columns; column += 8) panel_v8_1_avx2(p, column);
    for (; column + 4 <= p->columns; column += 4) panel_v4_1_avx2(p, column);
    for (; column < p->columns; column++) panel_float_1_avx2(p, column);
}

static void multiply_cached(const struct product *p) {
    if (instruction_set() == SET_AVX512) multiply_avx512(p);
    else multiply_avx2(p);
}

/* Copies a block of a whose rows, or else whose steps, are contiguous. */
static void pack_a(struct product *block, float *to) {
    int by_row = block->a_step == 1;
    int64_t lines = by_row ? block->rows : block->steps;
    int64_t length = by_row ? block->steps : block->rows;
    int64_t apart = by_row ? ROWS_APART : STEPS_APART;
    int64_t stride = by_row ? block->a_row : block->a_step;
    for (int64_t line = 0; line < lines; line++)
        memcpy(to + line * apart, block->a + line * stride, (size_t)length * sizeof *to);
    block->a = to;
    *(by_row ? &block->a_row : &block->a_step) = apart;
}

/* Copies a block of b into panels as wide as the tiles that `multiply_cached` takes. */
static void pack_b(struct product *block, float *to) {
    int64_t apart = block->turned ? block->b_step : 1; /* columns */
    int64_t width = instruction_set() == SET_AVX512 ? 32 : 16;
    const float *from = block->b;
    block->b = to;
    block->packed = 1;
    for (int64_t left = block->columns; left > 0; left -= width, from += width * apart) {
        while (width > left) width = width > 4 ? width / 2 : 1;
        for (int64_t s = 0; s < block->steps; s++, to += width)
            if (block->turned)
                for (int64_t c = 0; c < width; c++) to[c] = from[c * apart + s];
            else memcpy(to, from + s * block->b_step, (size_t)width * sizeof *to);
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* In blocks. A chain can be interrupted and continued, because the result contains every bit of
 * it. */
static void multiply_blocks(const struct product *p) {
    static _Thread_local _Alignas(64) float a[BLOCK_ROWS * ROWS_APART],
        b[BLOCK_STEPS * BLOCK_COLUMNS];
    const int copies = p->turned || p->rows > FEW;
    const int64_t most_steps = copies ? BLOCK_STEPS : FEW_STEPS;
    for (int64_t column = 0; column < p->columns; column += BLOCK_COLUMNS)
        for (int64_t step = 0; step < p->steps; step += most_steps) {
            struct product strip = *p;
            strip.columns = least(p->columns - column, BLOCK_COLUMNS);
            strip.steps = least(p->steps - step, most_steps);
            strip.b += p->turned ? column * p->b_step + step : column + step * p->b_step;
            strip.continues = p->continues || step > 0;
            if (copies) pack_b(&strip, b);
            for (int64_t row = 0; row < p->rows; row += BLOCK_ROWS) {
                struct product block = strip;
                block.rows = least(p->rows - row, BLOCK_ROWS);
                block.a += row * p->a_row + step * p->a_step;
                block.c += row * p->c_row + column;
                pack_a(&block, a);
                multiply_cached(&block);
            }
        }
}

void multiply(const struct product *product) {
    int narrow = product->columns <= NARROW && !product->turned;
    /* Blocks divide the steps of one segment. With several segments, this would change the order of
     * a chain, which completes a segment before it begins the next one. */
    if (product->segments > 1 || narrow) multiply_cached(product);
    else multiply_blocks(product);
}
