/* Products with one weight, sample by sample; see product.c. */
#ifndef PCDEQ_PRODUCT_H
#define PCDEQ_PRODUCT_H

#include "kernels.h"

enum {
    LANES = 8,              /* numbers a vector; every run is a multiple of it long */
    TILE_SLACK = 4 * LANES, /* `product` may write so many numbers beyond its result */
};

/* How a sample lies in scratch memory. A vector is one run. An image is one run a channel, its rows one after the
 * other with one place of padding between them: it is the right neighbour of one row and the left of the next. Around a
 * run that is to be convolved there are `halo` zeros on either side, a row and a place. */
typedef struct {
    int64_t channels, height, width; /* of a vector: 1, 1, features */
    int64_t row, n, halo, stride;    /* from row to row; length of a run; zeros around it; from run to run with them */
    int conv;
} layout;

/* How an image lies in a tensor: numbers from one sample, channel, row and column to the next. */
typedef struct { int64_t sample, channel, row, column; } strides;

layout layout_of(int conv, int64_t channels, int64_t height, int64_t width);
void fill_keep(const layout *l, float *keep);
void load(const layout *l, const strides *t, const float *from, float *to, int64_t stride);
void store(const layout *l, const strides *t, const float *from, float *to);

/* The weight, laid out for `product`; transposed for the adjoint. */
int64_t packed_size(const layout *l);
void pack(const layout *l, int transposed, const float *weight, float *packed);

/* out = W z, and for images gradient += the gradient of <y, Wz> with respect to W. z has the halo, out and y have not. */
void product(const layout *l, const float *packed, const float *z, float *out);
void add_weight_gradient(const layout *l, const float *z, const float *y, float *gradient);

#endif
