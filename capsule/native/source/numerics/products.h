/* Sums of products, the arithmetic of every convolution and dense layer.
 *
 * Each element of a result is one chain of fused multiply-adds (IEEE 754 binary32), in the order of
 * (segment, step). Neither the width of the CPU's vectors nor the number or the position of the
 * rows and columns that are computed together has an effect. So the bits are those of the loop
 *
 *   for row, column: sum = continues ? c[row][column] : 0
 *     for segment, step: sum = fma(a[row][segment][step], b[segment][step][column], sum)
 *
 * on every CPU, for every batch size and every split of a batch. */

#ifndef CAPSULE_PRODUCTS_H
#define CAPSULE_PRODUCTS_H

#include <stdint.h>

/* Strides are in elements; the columns of c are contiguous, and those of b unless it is turned. */
struct product {
    const float *a;
    int64_t a_row, a_segment, a_step;
    const float *b;
    int64_t b_segment, b_step;
    float *c;
    int64_t c_row;
    int64_t rows, columns, segments, steps;
    int continues;
    int turned; /* b lies in columns, whose steps are contiguous, `b_step` from one to the next */
    int packed; /* b is a block of `multiply`'s own */
};

void multiply(const struct product *product);

#endif
