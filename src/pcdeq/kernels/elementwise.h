/* Injection and weight normalisation, by runs and rows; see elementwise.c. */
#ifndef PCDEQ_ELEMENTWISE_H
#define PCDEQ_ELEMENTWISE_H

#include "kernels.h"

/* out = log(1 + exp(beta x)) / beta + floor, and out = grad / (1 + exp(-beta x)). */
void softplus_run(int64_t n, float beta, float floor, const float *restrict x, float *restrict out);
void softplus_gradient_run(int64_t n, float beta, const float *restrict x, const float *restrict grad,
                           float *restrict out);

/* w = g v / |v| for v and g clamped at 0, zeros for a row of zeros; and the gradients with respect to v and g, of which
 * the second is returned. */
void normalise_row(int64_t n, const float *restrict v, float g, float *restrict w);
float normalise_gradient_row(int64_t n, const float *restrict v, float g, const float *restrict grad,
                             float *restrict grad_v);

#endif
