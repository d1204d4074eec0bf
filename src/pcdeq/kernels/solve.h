/* A whole solve of a batch; see solve.c. */
#ifndef PCDEQ_SOLVE_H
#define PCDEQ_SOLVE_H

#include "anderson.h"
#include "product.h"

/* What the threads share. The start of a solve is `start`, or s(guess + offset) for a guess of the product: `base` and, if
 * there is a response matrix B, base + B (s(base + offset) - mean), or for the adjoint B (mean * offset). */
typedef struct {
    layout l;
    strides t;
    rule r;
    int steps_before, max_steps; /* steps that the start stands for; of these and those taken, the most */
    int64_t samples;
    const float *packed, *response, *offset, *slope, *start, *base, *mean;
    float *out, *residuals;
    int64_t *steps;
    unsigned char *converged;
} batch;

void set_layout(batch *b, int64_t samples, layout l, strides t);

/* Solve with this weight and, if it is not NULL, this response matrix; 0 if there is no memory. */
int solve_batch(batch *b, int transposed, const float *weight, const float *response, int threads);

/* How many samples did not converge, the steps of the slowest, and the largest relative residual. */
PyObject *summary_of(const batch *b);

#endif
