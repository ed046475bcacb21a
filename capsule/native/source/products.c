#include "products.h"

#include "processor.h"

typedef float v4 __attribute__((ext_vector_type(4)));
typedef float v8 __attribute__((ext_vector_type(8)));
typedef float v16 __attribute__((ext_vector_type(16)));

#define UNROLL _Pragma("clang loop unroll(full)")

enum {
  MOST_ROWS = 12,     // of a tile
  CACHED_STEPS = 64,  // rows of a wide b whose pages and lines the first level still knows
  NARROW = 64,        // columns
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

void multiply(const Product *product) {
  if (product->segments > 1 || product->columns <= NARROW) {
    multiply_cached(product);
    return;
  }
  // A chain may be put down and taken up again: the result holds every bit of it.
  Product part = *product;
  for (int64_t step = 0; step < product->steps; step += CACHED_STEPS) {
    int64_t left = product->steps - step;
    part.steps = left < CACHED_STEPS ? left : CACHED_STEPS;
    part.a = product->a + step * product->a_step;
    part.b = product->b + step * product->b_step;
    multiply_cached(&part);
    part.continues = 1;
  }
}
