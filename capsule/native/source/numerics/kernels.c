/* Fused loops for the training side.
 *
 * Every result is computed by IEEE 754 operations in the written order, in binary32 unless stated
 * otherwise, and never contracted. So the bits are the same at every vector width, and equal those
 * of numpy's operations, one after another. */

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "processor.h"

enum { BLOCK = 1024 }; /* elements that stay in the first-level cache */

/* Zero instead of a subnormal number. A moment of a dead unit, to which nothing is added any more,
 * decays towards zero, and processors are slow when products are subnormal. */
INLINE float normal(float value) { return __builtin_fabsf(value) < FLT_MIN ? 0.0f : value; }

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
            float mean = normal(m[k] * decay + g[i] * rest);
            float square = normal(v[k] * square_decay + (g[i] * g[i]) * square_rest);
            float variance = square - mean * mean; /* below zero if the decays differ much */
            float root = __builtin_sqrtf((variance < 0 ? 0.0f : variance) + floor);
            m[k] = mean;
            v[k] = square;
            w[k] = w[k] - (g[i] / root) * rate;
        }
    }
}

/* Centred RMSProp in place; capsule/training/optimizers/centred_rmsprop.py has the formulas. The
 * gradient is the sum of `shards` parts, added in their order. */
DISPATCH(capsule_centred_rmsprop, rmsprop,
         (float *restrict w, float *restrict m, float *restrict v, const float *const *parts,
          int64_t shards, int64_t size, float decay, float rest, float square_decay,
          float square_rest, float floor, float rate),
         (w, m, v, parts, shards, size, decay, rest, square_decay, square_rest, floor, rate))

INLINE void adam(float *restrict w, float *restrict m, float *restrict v, const float *restrict g,
                 int64_t size, float factor, float decay, float rest, float square_decay,
                 float square_rest, float correction, float square_correction, float epsilon,
                 float rate) {
    for (int64_t i = 0; i < size; i++) {
        float gradient = g[i] * factor;
        float mean = normal(m[i] * decay + gradient * rest);
        float square = normal(v[i] * square_decay + (gradient * gradient) * square_rest);
        float root = __builtin_sqrtf(square / square_correction) + epsilon;
        m[i] = mean;
        v[i] = square;
        w[i] = w[i] - ((mean / correction) / root) * rate;
    }
}

/* Adam in place, with `factor` times the gradient; capsule/training/optimizers/adam.py has the
 * formulas. */
DISPATCH(capsule_adam, adam,
         (float *restrict w, float *restrict m, float *restrict v, const float *restrict g,
          int64_t size, float factor, float decay, float rest, float square_decay,
          float square_rest, float correction, float square_correction, float epsilon, float rate),
         (w, m, v, g, size, factor, decay, rest, square_decay, square_rest, correction,
          square_correction, epsilon, rate))

INLINE void rmsprop_momentum(float *restrict w, float *restrict v, float *restrict u,
                             const float *restrict g, int64_t size, float factor, float decay,
                             float rest, float momentum, float epsilon, float rate) {
    for (int64_t i = 0; i < size; i++) {
        float gradient = g[i] * factor;
        float square = normal(v[i] * decay + (gradient * gradient) * rest);
        float step =
            normal(u[i] * momentum + (gradient / __builtin_sqrtf(square + epsilon)) * rate);
        v[i] = square;
        u[i] = step;
        w[i] = w[i] - step;
    }
}

/* RMSProp with momentum in place, with `factor` times the gradient;
 * capsule/training/optimizers/rmsprop.py has the formulas. */
DISPATCH(capsule_rmsprop, rmsprop_momentum,
         (float *restrict w, float *restrict v, float *restrict u, const float *restrict g,
          int64_t size, float factor, float decay, float rest, float momentum, float epsilon,
          float rate),
         (w, v, u, g, size, factor, decay, rest, momentum, epsilon, rate))

/* The sum of the squares of `values`, first to last in binary64, in which each square is exact. */
EXPORT double capsule_sum_of_squares(const float *values, int64_t size) {
    double total = 0;
    for (int64_t i = 0; i < size; i++) total += (double)values[i] * values[i];
    return total;
}

INLINE void interleave(const uint8_t *restrict frames, int64_t rows, int64_t row_stride,
                       int64_t channels, int64_t channel_stride, int64_t pixels, float scale,
                       float *restrict out) {
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *restrict from = frames + row * row_stride;
        float *restrict to = out + row * pixels * channels;
        if (channels == 4) { /* the usual frame stack, in two steps that become vector code */
            const uint8_t *restrict a = from, *restrict b = a + channel_stride;
            const uint8_t *restrict c = b + channel_stride, *restrict d = c + channel_stride;
            uint8_t mixed[BLOCK];
            for (int64_t start = 0; start < pixels; start += BLOCK / 4) {
                int64_t n = pixels - start < BLOCK / 4 ? pixels - start : BLOCK / 4;
                for (int64_t p = 0; p < n; p++) {
                    mixed[4 * p] = a[start + p];
                    mixed[4 * p + 1] = b[start + p];
                    mixed[4 * p + 2] = c[start + p];
                    mixed[4 * p + 3] = d[start + p];
                }
                for (int64_t i = 0; i < 4 * n; i++) to[4 * start + i] = (float)mixed[i] * scale;
            }
        } else {
            for (int64_t p = 0; p < pixels; p++)
                for (int64_t channel = 0; channel < channels; channel++)
                    to[p * channels + channel] = (float)from[channel * channel_stride + p] * scale;
        }
    }
}

/* uint8 images [rows, channels, pixels], rows `row_stride` and channels `channel_stride` bytes
 * apart, to binary32 [rows, pixels, channels], times `scale`. */
DISPATCH(capsule_interleave, interleave,
         (const uint8_t *restrict frames, int64_t rows, int64_t row_stride, int64_t channels,
          int64_t channel_stride, int64_t pixels, float scale, float *restrict out),
         (frames, rows, row_stride, channels, channel_stride, pixels, scale, out))

/* e^x in binary64, with a relative error below 1e-14; x is limited to the range from -700 to 700.
 */
INLINE double exponential(double x) {
    const double shift = 0x1.8p52; /* brings an integer into the low bits, rounded to nearest */
    x = x < -700 ? -700 : x > 700 ? 700 : x;
    double shifted = x * 0x1.71547652b82fep0 + shift; /* 1 / ln 2 */
    double whole = shifted - shift;
    /* The first part of ln 2 ends in zeros, so that its product with `whole` is exact. */
    double r = (x - whole * 0x1.62e42fee00000p-1) - whole * 0x1.a39ef35793c76p-33; /* ln 2 in two */
    double sum = 1.0 / 479001600; /* the series up to r^12 / 12!, |r| <= ln 2 / 2 */
    sum = sum * r + 1.0 / 39916800;
    sum = sum * r + 1.0 / 3628800;
    sum = sum * r + 1.0 / 362880;
    sum = sum * r + 1.0 / 40320;
    sum = sum * r + 1.0 / 5040;
    sum = sum * r + 1.0 / 720;
    sum = sum * r + 1.0 / 120;
    sum = sum * r + 1.0 / 24;
    sum = sum * r + 1.0 / 6;
    sum = sum * r + 0.5;
    sum = sum * r + 1;
    sum = sum * r + 1;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52; /* 2^whole */
    double scale;
    memcpy(&scale, &bits, sizeof scale);
    return sum * scale;
}

/* Computed in binary64: correctly rounded, unless an error in about the 46th binary place decides
 * between two results of 24. */
INLINE float logistic(float x) { return (float)(1 / (1 + exponential(-(double)x))); }

INLINE float hyperbolic_tangent(float x) {
    double squared = exponential(2 * (double)x);
    float result = (float)((squared - 1) / (squared + 1));
    return __builtin_fabsf(x) < 0x1p-12f ? x : result; /* x^3 / 3 no longer counts; -0 stays */
}

INLINE void lstm(const float *restrict in, const float *restrict back, const float *restrict before,
                 float *restrict active, float *restrict cell, float *restrict squashed,
                 float *restrict hidden, int64_t rows, int64_t units) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t k = 0; k < 4 * units; k++) active[k] = in[k] + back[k];
        for (int64_t k = 0; k < 2 * units; k++) active[k] = logistic(active[k]);
        for (int64_t k = 2 * units; k < 3 * units; k++) active[k] = hyperbolic_tangent(active[k]);
        for (int64_t k = 3 * units; k < 4 * units; k++) active[k] = logistic(active[k]);
        const float *restrict i = active, *restrict f = i + units;
        const float *restrict g = f + units, *restrict o = g + units;
        for (int64_t k = 0; k < units; k++) {
            cell[k] = f[k] * before[k] + i[k] * g[k];
            squashed[k] = hyperbolic_tangent(cell[k]);
            hidden[k] = o[k] * squashed[k];
        }
        in += 4 * units, back += 4 * units, active += 4 * units;
        before += units, cell += units, squashed += units, hidden += units;
    }
}

/* One step of `rows` LSTM cells; capsule/training/networks/recurrent.py has the formulas. The gates
 * `in + back` and the `active` ones are [rows, 4, units], all others [rows, units]; `before` is the
 * cell before the step, `squashed` the tanh of the cell after it. */
DISPATCH(capsule_lstm, lstm,
         (const float *restrict in, const float *restrict back, const float *restrict before,
          float *restrict active, float *restrict cell, float *restrict squashed,
          float *restrict hidden, int64_t rows, int64_t units),
         (in, back, before, active, cell, squashed, hidden, rows, units))

INLINE void lstm_backward(const float *restrict active, const float *restrict before,
                          const float *restrict squashed, const float *restrict d_hidden,
                          float *restrict d_cell, float *restrict d_gates, int64_t rows,
                          int64_t units) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict i = active, *restrict f = i + units;
        const float *restrict g = f + units, *restrict o = g + units;
        float *restrict di = d_gates, *restrict df = di + units;
        float *restrict dg = df + units, *restrict d_o = dg + units;
        for (int64_t k = 0; k < units; k++) {
            float dc = d_cell[k] + (d_hidden[k] * o[k]) * (1 - squashed[k] * squashed[k]);
            di[k] = (dc * g[k]) * (i[k] * (1 - i[k]));
            df[k] = (dc * before[k]) * (f[k] * (1 - f[k]));
            dg[k] = (dc * i[k]) * (1 - g[k] * g[k]);
            d_o[k] = (d_hidden[k] * squashed[k]) * (o[k] * (1 - o[k]));
            d_cell[k] = dc * f[k];
        }
        active += 4 * units, d_gates += 4 * units;
        before += units, squashed += units, d_hidden += units, d_cell += units;
    }
}

/* The backward pass of capsule_lstm. d_cell is the gradient of the cell after the step, and becomes
 * that of the cell before the step. */
DISPATCH(capsule_lstm_backward, lstm_backward,
         (const float *restrict active, const float *restrict before,
          const float *restrict squashed, const float *restrict d_hidden, float *restrict d_cell,
          float *restrict d_gates, int64_t rows, int64_t units),
         (active, before, squashed, d_hidden, d_cell, d_gates, rows, units))

INLINE void exponentiate(const float *restrict x, float *restrict out, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = (float)exponential((double)x[i]);
}

/* e^x of each element, computed in binary64. */
DISPATCH(capsule_exponentiate, exponentiate,
         (const float *restrict x, float *restrict out, int64_t size), (x, out, size))

/* The natural logarithm in binary64, with an error below 1e-14, of a number that is at least 1, or
 * NaN. */
static double logarithm(double x) {
    if (x != x) return x;
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    /* With the bits of sqrt(1/2) subtracted, the exponent leaves a rest from sqrt(1/2) to sqrt(2).
     */
    uint64_t shift = (bits - 0x3fe6a09e667f3bcd) & 0x7ffull << 52;
    bits -= shift;
    double rest;
    memcpy(&rest, &bits, sizeof rest);
    double z = (rest - 1) / (rest + 1), squared = z * z;
    double sum = 1.0 / 21; /* ln rest = 2 (z + z^3 / 3 + ... + z^21 / 21), |z| < 0.172 */
    for (int odd = 19; odd > 0; odd -= 2) sum = sum * squared + 1.0 / odd;
    return (double)(shift >> 52) * 0x1.62e42fefa39efp-1 + 2 * z * sum; /* ln 2 */
}

/* The logarithms of the softmax of each of the `rows` of logits, the softmax and its entropy. Sums
 * are taken in binary64, first to last. */
EXPORT void capsule_log_softmax(const float *logits, float *logarithms, float *probabilities,
                                float *entropies, int64_t rows, int64_t actions) {
    for (int64_t row = 0; row < rows; row++) {
        /* Exponents are taken relative to the largest logit, so that no weight exceeds 1. */
        float top = logits[0];
        for (int64_t k = 1; k < actions; k++) top = logits[k] > top ? logits[k] : top;
        double sum = 0, weighted = 0;
        for (int64_t k = 0; k < actions; k++) {
            double below = (double)logits[k] - top, weight = exponential(below);
            sum += weight;
            weighted += weight * below;
        }
        double normalizer = logarithm(sum);
        for (int64_t k = 0; k < actions; k++) {
            double below = (double)logits[k] - top;
            logarithms[k] = (float)(below - normalizer);
            probabilities[k] = (float)(exponential(below) / sum);
        }
        entropies[row] = (float)(normalizer - weighted / sum);
        logits += actions, logarithms += actions, probabilities += actions;
    }
}

/* The gradient for the logits, from those for the logarithms and the entropies. */
EXPORT void capsule_log_softmax_backward(const float *logarithms, const float *probabilities,
                                         const float *entropies, const float *d_logarithms,
                                         const float *d_entropies, float *d_logits, int64_t rows,
                                         int64_t actions) {
    for (int64_t row = 0; row < rows; row++) {
        float total = 0;
        for (int64_t k = 0; k < actions; k++) total += d_logarithms[k];
        for (int64_t k = 0; k < actions; k++) {
            float bend = d_entropies[row] * (logarithms[k] + entropies[row]);
            d_logits[k] = d_logarithms[k] - probabilities[k] * (total + bend);
        }
        logarithms += actions, probabilities += actions;
        d_logarithms += actions, d_logits += actions;
    }
}
