/* Products with one weight, sample by sample; see product.c. */
#ifndef PCDEQ_PRODUCT_H
#define PCDEQ_PRODUCT_H

#include "kernels.h"

enum { LANES = 8 }; /* numbers a vector */

/* How a sample lies in scratch memory: `runs` of n numbers, a multiple of LANES. A vector is one run. An image is one
 * run a row, the channels of a pixel next to each other and filled up with zeros to a multiple of LANES. Where it is to
 * be convolved, its rows are `stride` apart, and there are so many zeros around it that every tile lies inside; the
 * first pixel is at `first`. */
typedef struct {
    int conv;
    int64_t channels, height, width; /* of a vector: features, 1, 1 */
    int64_t lanes, runs, n;          /* channels filled up; runs; their length */
    int64_t stride, first, padded;   /* of what is to be multiplied: from run to run; its first number; its size */
    int64_t tiles_down, tiles_across;
} layout;

/* How an image lies in a tensor: numbers from one sample, channel, row and column to the next. */
typedef struct { int64_t sample, channel, row, column; } strides;

layout layout_of(int conv, int64_t channels, int64_t height, int64_t width);
void fill_keep(const layout *l, float *keep);

/* Copy one sample in and out. What is not written stays: `to` holds zeros around the sample. */
void load(const layout *l, const strides *t, const float *from, float *to, int64_t stride);
void store(const layout *l, const strides *t, const float *from, float *to);

/* The weight, laid out for `product`; transposed for the adjoint. `noise` is by how much each place of a run of a
 * convolution may be off, for a sample whose largest number is 1; returned is the same for the norms, 0 for a matrix. */
int64_t packed_size(const layout *l);
float pack(const layout *l, int transposed, const float *weight, float *packed, float *noise);

/* out = W z. z lies with the padding, out without; space is scratch memory. */
int64_t product_space(const layout *l);
void product(const layout *l, const float *packed, const float *z, float *out, float *space);

/* The same for convolutions as plain sums, by a weight laid out for that. */
int64_t plain_size(const layout *l);
void pack_plain(const layout *l, int transposed, const float *weight, float *packed);
void plain_product(const layout *l, const float *packed, const float *z, float *out);

/* Of a sample without padding: whether a number is below a factor times the bound of its place; the largest number. */
int any_below(const layout *l, const float *value, float factor, const float *bound);
float peak_of(const layout *l, const float *value);

#endif
