#include "products.h"

#include <string.h>

#include "processor.h"

typedef float v4 __attribute__((ext_vector_type(4)));
typedef float v8 __attribute__((ext_vector_type(8)));
typedef float v16 __attribute__((ext_vector_type(16)));

#define UNROLL _Pragma("clang loop unroll(full)")

enum {
  MOST_ROWS = 12,     // of a tile
  CACHED_STEPS = 64,  // rows of a wide b whose pages and lines the first level still knows
  NARROW = 64,        // columns
  // What of c, with its part of a and b, the second level keeps from one chunk of steps to the next.
  BLOCK_ROWS = 252,  // full tiles of any height
  BLOCK_COLUMNS = 512,
  APART = BLOCK_ROWS + 16,  // not a power of two: else steps would drive each other from the cache
};

// Defines tile_V_N: `rows` (a constant) times N vectors of type V of the result, held in registers.
#define DEFINE_TILE(V, N)                                                                       \
  typedef V V##_##N##_unaligned __attribute__((aligned(4)));                                    \
  INLINE void tile_##V##_##N(const Product *p, int64_t row, int64_t column, const int rows) {   \
    enum { WIDTH = sizeof(V) / sizeof(float) };                                                 \
    const int64_t a_row = p->a_row, a_step = p->a_step, b_step = p->b_step;                     \
    float *c = p->c + row * p->c_row + column;                                                  \
    V sum[MOST_ROWS][N];                                                                        \
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int n = 0; n < N; n++)                    \
        sum[r][n] = p->continues ? *(V##_##N##_unaligned *)(c + r * p->c_row + n * WIDTH) : (V)0; \
    for (int64_t segment = 0; segment < p->segments; segment++) {                               \
      const float *a = p->a + row * a_row + segment * p->a_segment;                             \
      const float *a3 = a + 3 * a_row, *a6 = a + 6 * a_row, *a9 = a + 9 * a_row;                \
      const float *b = p->b + column + segment * p->b_segment;                                  \
      for (int64_t step = 0; step < p->steps; step++) {                                         \
        V factor[N];                                                                            \
        UNROLL for (int n = 0; n < N; n++) factor[n] = *(V##_##N##_unaligned *)(b + n * WIDTH); \
        UNROLL for (int r = 0; r < rows; r++) {                                                 \
          const float *base = r < 3 ? a : r < 6 ? a3 : r < 9 ? a6 : a9;                         \
          V other = (V)base[r % 3 * a_row];                                                     \
          UNROLL for (int n = 0; n < N; n++)                                                    \
              sum[r][n] = __builtin_elementwise_fma(other, factor[n], sum[r][n]);               \
        }                                                                                       \
        a += a_step, a3 += a_step, a6 += a_step, a9 += a_step, b += b_step;                     \
      }                                                                                         \
    }                                                                                           \
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int n = 0; n < N; n++)                    \
        *(V##_##N##_unaligned *)(c + r * p->c_row + n * WIDTH) = sum[r][n];                     \
  }

// Defines panel_V_N_SET: N vectors of columns, all rows, in tiles of nearly equal height.
#define DEFINE_PANEL(V, N, SET, TARGET, MOST)                                                  \
  TARGET static void panel_##V##_##N##_##SET(const Product *p, int64_t column) {               \
    int64_t tiles = (p->rows + MOST - 1) / MOST;                                               \
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {                                    \
      int64_t rows = (p->rows - row + tiles - tile - 1) / (tiles - tile);                      \
      switch (rows) {                                                                          \
        case 1: tile_##V##_##N(p, row, column, 1); break;                                      \
        case 2: tile_##V##_##N(p, row, column, 2); break;                                      \
        case 3: tile_##V##_##N(p, row, column, 3); break;                                      \
        case 4: tile_##V##_##N(p, row, column, 4); break;                                      \
        case 5: tile_##V##_##N(p, row, column, 5); break;                                      \
        case 6: tile_##V##_##N(p, row, column, 6); break;                                      \
        case 7: if (MOST >= 7) tile_##V##_##N(p, row, column, 7); break;                       \
        case 8: if (MOST >= 8) tile_##V##_##N(p, row, column, 8); break;                       \
        case 9: if (MOST >= 9) tile_##V##_##N(p, row, column, 9); break;                       \
        case 10: if (MOST >= 10) tile_##V##_##N(p, row, column, 10); break;                    \
        case 11: if (MOST >= 11) tile_##V##_##N(p, row, column, 11); break;                    \
        case 12: if (MOST >= 12) tile_##V##_##N(p, row, column, 12); break;                    \
      }                                                                                        \
      row += rows;                                                                             \
    }                                                                                          \
  }

DEFINE_TILE(v16, 2)
DEFINE_TILE(v16, 1)
DEFINE_TILE(v8, 2)
DEFINE_TILE(v8, 1)
DEFINE_TILE(v4, 1)
DEFINE_TILE(float, 1)

DEFINE_PANEL(v16, 2, avx512, AVX512, 12)
DEFINE_PANEL(v16, 1, avx512, AVX512, 12)
DEFINE_PANEL(v8, 1, avx512, AVX512, 12)
DEFINE_PANEL(v4, 1, avx512, AVX512, 12)
DEFINE_PANEL(float, 1, avx512, AVX512, 12)
DEFINE_PANEL(v8, 2, avx2, AVX2, 6)
DEFINE_PANEL(v8, 1, avx2, AVX2, 6)
DEFINE_PANEL(v4, 1, avx2, AVX2, 6)
DEFINE_PANEL(float, 1, avx2, AVX2, 6)

static void multiply_avx512(const Product *p) {
  int64_t column = 0;
  for (; column + 32 <= p->columns; column += 32) panel_v16_2_avx512(p, column);
  for (; column + 16 <= p->columns; column += 16) panel_v16_1_avx512(p, column);
  for (; column + 8 <= p->columns; column += 8) panel_v8_1_avx512(p, column);
  for (; column + 4 <= p->columns; column += 4) panel_v4_1_avx512(p, column);
  for (; column < p->columns; column++) panel_float_1_avx512(p, column);
}

static void multiply_avx2(const Product *p) {
  int64_t column = 0;
  for (; column + 16 <= p->columns; column += 16) panel_v8_2_avx2(p, column);
  for (; column + 8 <= p->columns; column += 8) panel_v8_1_avx2(p, column);
  for (; column + 4 <= p->columns; column += 4) panel_v4_1_avx2(p, column);
  for (; column < p->columns; column++) panel_float_1_avx2(p, column);
}

static void multiply_cached(const Product *p) {
  if (instruction_set() == SET_AVX512) multiply_avx512(p);
  else multiply_avx2(p);
}

// Brings the steps of a transposed a next to each other.
static void gather(Product *part, float *memory) {
  for (int64_t step = 0; step < part->steps; step++)
    memcpy(memory + step * APART, part->a + step * part->a_step,
           (size_t)part->rows * sizeof *memory);
  part->a = memory;
  part->a_step = APART;
}

// In chunks of steps. A chain may be put down and taken up again: the result holds every bit of it.
static void multiply_block(const Product *block) {
  float memory[CACHED_STEPS * APART];
  for (int64_t step = 0; step < block->steps; step += CACHED_STEPS) {
    int64_t left = block->steps - step;
    Product part = *block;
    part.steps = left < CACHED_STEPS ? left : CACHED_STEPS;
    part.a += step * block->a_step;
    part.b += step * block->b_step;
    part.continues = block->continues || step > 0;
    if (block->a_row == 1) gather(&part, memory);
    multiply_cached(&part);
  }
}

void multiply(const Product *product) {
  if (product->segments > 1 || product->columns <= NARROW) {
    multiply_cached(product);
    return;
  }
  Product block = *product;
  for (int64_t row = 0; row < product->rows; row += BLOCK_ROWS)
    for (int64_t column = 0; column < product->columns; column += BLOCK_COLUMNS) {
      int64_t rows = product->rows - row, columns = product->columns - column;
      block.rows = rows < BLOCK_ROWS ? rows : BLOCK_ROWS;
      block.columns = columns < BLOCK_COLUMNS ? columns : BLOCK_COLUMNS;
      block.a = product->a + row * product->a_row;
      block.b = product->b + column;
      block.c = product->c + row * product->c_row + column;
      multiply_block(&block);
    }
}
