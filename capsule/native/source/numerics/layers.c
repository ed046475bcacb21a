/* Convolutions and dense layers, forwards and backwards, based on `multiply`.
 *
 * Images are channels-last, [rows, height, width, channels]; filters are [filters, size, size,
 * channels], as `capsule.training.networks.feedforward.Parameters` keeps them. */

#include <string.h>

#include "processor.h"
#include "products.h"

/* Sizes of the images, of the filters, and of the outputs. */
struct convolution {
    int64_t rows, height, width, channels, filters, size, stride, down, across;
};

/* Transpose a [rows, columns] matrix block by block into [columns, stride]; the elements beyond
 * `rows` become zero. */
static void transpose(const float *from, int64_t rows, int64_t columns, float *to, int64_t stride) {
    enum { BLOCK = 16 };
    for (int64_t r = 0; r < stride; r += BLOCK)
        for (int64_t c = 0; c < columns; c += BLOCK)
            for (int64_t j = c; j < columns && j < c + BLOCK; j++)
                for (int64_t i = r; i < stride && i < r + BLOCK; i++)
                    to[j * stride + i] = i < rows ? from[i * columns + j] : 0;
}

INLINE void add_bias(float *restrict y, const float *restrict bias, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, y += columns)
        for (int64_t c = 0; c < columns; c++) y[c] = y[c] + bias[c];
}

/* y = y + bias for [rows, columns]. */
DISPATCH(capsule_add_bias, add_bias,
         (float *restrict y, const float *restrict bias, int64_t rows, int64_t columns),
         (y, bias, rows, columns))

INLINE void add_and_rectify(float *restrict y, const float *restrict bias, int64_t rows,
                            int64_t columns) {
    for (int64_t r = 0; r < rows; r++, y += columns)
        for (int64_t c = 0; c < columns; c++) {
            float value = y[c] + bias[c];
            y[c] = value <= 0 ? 0 : value; /* a NaN stays one */
        }
}

/* y = max(y + bias, 0) for [rows, columns]. */
DISPATCH(capsule_rectify, add_and_rectify,
         (float *restrict y, const float *restrict bias, int64_t rows, int64_t columns),
         (y, bias, rows, columns))

/* y = x * w + bias, or max(x * w + bias, 0) if `rectified`. `scratch` has room for as many elements
 * as w has. */
EXPORT void capsule_convolution(const struct convolution *k, const float *x, const float *w,
                                const float *bias, float *y, float *scratch, int64_t rectified) {
    void (*finish)(float *, const float *, int64_t, int64_t) =
        rectified ? capsule_rectify : capsule_add_bias;
    /* A patch is `size` runs of contiguous elements, a line apart: as segments of a product they
     * need not be copied. */
    int64_t line = k->width * k->channels, run = k->size * k->channels;
    transpose(w, k->filters, k->size * run, scratch, k->filters);
    for (int64_t row = 0; row < k->rows; row++)
        for (int64_t i = 0; i < k->down; i++) {
            float *out = y + (row * k->down + i) * k->across * k->filters;
            multiply(&(struct product){.a = x + (row * k->height + i * k->stride) * line,
                                       .a_row = k->stride * k->channels,
                                       .a_segment = line,
                                       .a_step = 1,
                                       .b = scratch,
                                       .b_segment = run * k->filters,
                                       .b_step = k->filters,
                                       .c = out,
                                       .c_row = k->filters,
                                       .rows = k->across,
                                       .columns = k->filters,
                                       .segments = k->size,
                                       .steps = run});
            finish(out, bias, k->across, k->filters);
        }
}

INLINE void relu_backward(const float *restrict dy, const float *restrict y, float *restrict dx,
                          float *restrict db, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, dy += columns, y += columns, dx += columns)
        for (int64_t c = 0; c < columns; c++) {
            dx[c] = y[c] <= 0 ? 0 : dy[c];
            db[c] += dx[c];
        }
}

/* dx = dy where y is positive, else 0, for [rows, columns]; adds its rows to db. */
DISPATCH(capsule_relu_backward, relu_backward,
         (const float *restrict dy, const float *restrict y, float *restrict dx, float *restrict db,
          int64_t rows, int64_t columns),
         (dy, y, dx, db, rows, columns))

/* Adds the gradient that follows from x and dy to dw. */
EXPORT void capsule_conv2d_weight_grad(const struct convolution *k, const float *x, const float *dy,
                                       float *dw) {
    int64_t line = k->width * k->channels, run = k->size * k->channels;
    for (int64_t row = 0; row < k->rows; row++)
        for (int64_t i = 0; i < k->size; i++)
            multiply(&(struct product){.a = dy + row * k->down * k->across * k->filters,
                                       .a_row = 1,
                                       .a_segment = k->across * k->filters,
                                       .a_step = k->filters,
                                       .b = x + (row * k->height + i) * line,
                                       .b_segment = k->stride * line,
                                       .b_step = k->stride * k->channels,
                                       .c = dw + i * run,
                                       .c_row = k->size * run,
                                       .rows = k->filters,
                                       .columns = run,
                                       .segments = k->down,
                                       .steps = k->across,
                                       .continues = 1});
}

/* dx from dy and w. `scratch` holds as many elements as w. */
EXPORT void capsule_conv2d_input_grad(const struct convolution *k, const float *dy, const float *w,
                                      float *dx, float *scratch) {
    int64_t line = k->width * k->channels, places = k->size * k->size;
    for (int64_t f = 0; f < k->filters; f++)
        for (int64_t place = 0; place < places; place++)
            memcpy(scratch + (place * k->filters + f) * k->channels,
                   w + (f * places + place) * k->channels, (size_t)k->channels * sizeof *w);
    memset(dx, 0, (size_t)(k->rows * k->height * line) * sizeof *dx);
    for (int64_t row = 0; row < k->rows; row++)
        for (int64_t i = 0; i < k->down; i++)
            for (int64_t place = 0; place < places; place++)
                multiply(&(struct product){
                    .a = dy + (row * k->down + i) * k->across * k->filters,
                    .a_row = k->filters,
                    .a_step = 1,
                    .b = scratch + place * k->filters * k->channels,
                    .b_step = k->channels,
                    .c = dx + (row * k->height + i * k->stride + place / k->size) * line +
                         place % k->size * k->channels,
                    .c_row = k->stride * k->channels,
                    .rows = k->across,
                    .columns = k->channels,
                    .segments = 1,
                    .steps = k->filters,
                    .continues = 1});
}

/* c = a b for b [steps, columns]. Element (row, step) of a is at a[row * a_row + step * a_step]. */
static void whole_product(const float *a, int64_t a_row, int64_t a_step, const float *b, float *c,
                          int64_t rows, int64_t columns, int64_t steps) {
    multiply(&(struct product){.a = a,
                               .a_row = a_row,
                               .a_step = a_step,
                               .b = b,
                               .b_step = columns,
                               .c = c,
                               .c_row = columns,
                               .rows = rows,
                               .columns = columns,
                               .segments = 1,
                               .steps = steps});
}

/* y = x w^T + bias for x [rows, inputs], w [units, inputs]; no bias if it is null. */
EXPORT void capsule_dense(const float *x, const float *w, const float *bias, float *y, int64_t rows,
                          int64_t inputs, int64_t units) {
    multiply(&(struct product){.a = x,
                               .a_row = inputs,
                               .a_step = 1,
                               .b = w,
                               .b_step = inputs,
                               .turned = 1,
                               .c = y,
                               .c_row = units,
                               .rows = rows,
                               .columns = units,
                               .segments = 1,
                               .steps = inputs});
    if (bias) capsule_add_bias(y, bias, rows, units);
}

/* The same for few rows or units. The rows of x become the columns of a product, `lanes` of them,
 * so that vectors are full. `scratch` holds (inputs + units) * lanes. */
EXPORT void capsule_narrow_dense(const float *x, const float *w, const float *bias, float *y,
                                 float *scratch, int64_t rows, int64_t inputs, int64_t units,
                                 int64_t lanes) {
    float *turned = scratch + inputs * lanes;
    transpose(x, rows, inputs, scratch, lanes);
    whole_product(w, inputs, 1, scratch, turned, units, lanes, inputs);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t u = 0; u < units; u++) {
            float sum = turned[u * lanes + r];
            y[r * units + u] = bias ? sum + bias[u] : sum;
        }
}

/* c = a^T b for a [steps, rows] and b [steps, columns] whose rows are `a_step` elements apart. */
EXPORT void capsule_outer(const float *a, int64_t a_step, const float *b, float *c, int64_t rows,
                          int64_t columns, int64_t steps) {
    whole_product(a, 1, a_step, b, c, rows, columns, steps);
}

/* c = a b for a [rows, steps] and b [steps, columns]. */
EXPORT void capsule_matrix_product(const float *a, const float *b, float *c, int64_t rows,
                                   int64_t columns, int64_t steps) {
    whole_product(a, steps, 1, b, c, rows, columns, steps);
}

INLINE void column_sums(const float *restrict a, float *restrict c, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < columns; i++) c[i] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i++) c[i] += a[r * columns + i];
}

/* c = the sum of the rows of a [rows, columns], first to last. */
DISPATCH(capsule_column_sums, column_sums,
         (const float *restrict a, float *restrict c, int64_t rows, int64_t columns),
         (a, c, rows, columns))
