// Fused loops of the training side.
//
// Every result is one IEEE 754 operation on binary32 after another, in the order written, never
// contracted: the same bits at every vector width, and the same as numpy's one by one.

#include <stdint.h>

#include "processor.h"

enum { BLOCK = 1024 };  // elements that stay in the first-level cache

INLINE void rmsprop(float *restrict w, float *restrict m, float *restrict v,
                    const float *const *parts, int64_t shards, int64_t size, float decay,
                    float rest, float square_decay, float square_rest, float floor, float rate) {
  for (int64_t start = 0; start < size; start += BLOCK) {
    int64_t n = size - start < BLOCK ? size - start : BLOCK;
    float g[BLOCK];
    for (int64_t i = 0; i < n; i++) g[i] = parts[0][start + i];
    for (int64_t s = 1; s < shards; s++) {
      const float *restrict part = parts[s] + start;
      for (int64_t i = 0; i < n; i++) g[i] = g[i] + part[i];
    }
    for (int64_t i = 0; i < n; i++) {
      int64_t k = start + i;
      float mean = m[k] * decay + g[i] * rest;
      float square = v[k] * square_decay + (g[i] * g[i]) * square_rest;
      float root = __builtin_sqrtf((square - mean * mean) + floor);
      m[k] = mean;
      v[k] = square;
      w[k] = w[k] - (g[i] / root) * rate;
    }
  }
}

// Centred RMSProp in place; capsule/training/optimizer.py has the formulas. The gradient is the
// sum of `shards` parts, added in their order.
DISPATCH(capsule_centred_rmsprop, rmsprop,
         (float *restrict w, float *restrict m, float *restrict v, const float *const *parts,
          int64_t shards, int64_t size, float decay, float rest, float square_decay,
          float square_rest, float floor, float rate),
         (w, m, v, parts, shards, size, decay, rest, square_decay, square_rest, floor, rate))

INLINE void interleave(const uint8_t *restrict frames, int64_t rows, int64_t row_stride,
                       int64_t channels, int64_t pixels, float scale, float *restrict out) {
  for (int64_t row = 0; row < rows; row++) {
    const uint8_t *restrict from = frames + row * row_stride;
    float *restrict to = out + row * pixels * channels;
    if (channels == 4) {  // the usual frame stack, written so that it becomes vector code
      const uint8_t *restrict a = from, *restrict b = a + pixels;
      const uint8_t *restrict c = b + pixels, *restrict d = c + pixels;
      for (int64_t p = 0; p < pixels; p++) {
        to[4 * p] = (float)a[p] * scale;
        to[4 * p + 1] = (float)b[p] * scale;
        to[4 * p + 2] = (float)c[p] * scale;
        to[4 * p + 3] = (float)d[p] * scale;
      }
    } else {
      for (int64_t p = 0; p < pixels; p++)
        for (int64_t channel = 0; channel < channels; channel++)
          to[p * channels + channel] = (float)from[channel * pixels + p] * scale;
    }
  }
}

// uint8 images [rows, channels, pixels], rows `row_stride` bytes apart, to binary32
// [rows, pixels, channels], times `scale`.
DISPATCH(capsule_interleave, interleave,
         (const uint8_t *restrict frames, int64_t rows, int64_t row_stride, int64_t channels,
          int64_t pixels, float scale, float *restrict out),
         (frames, rows, row_stride, channels, pixels, scale, out))
