/* The safeguarded Anderson step of one sample; see anderson.c. */
#ifndef PCDEQ_ANDERSON_H
#define PCDEQ_ANDERSON_H

#include "kernels.h"

enum activation { TANH, SOFTSIGN, RELU6, SIGMOID, ONE_MINUS_EXP, HARD_TANH, HARD_SIGMOID, LINEAR, ACTIVATIONS };

/* What is remembered of a sample between steps, all 0 before the first. "norm" is that of the residual at the last
 * point kept; "accelerated" says that the point is a proposal, not the plain step. */
typedef struct { float norm, largest, power, relative; int steps, converged, done, accelerated; } sample_state;

/* What all samples of a solve share. A sample is `runs` runs of n numbers; in `point` the runs lie `stride`
 * apart. Where keep is given, a place of a run whose keep is 0 is padding: there everything is 0. */
typedef struct {
    int which;
    int64_t runs, n, stride;
    const float *keep;
    float tol, decay, low, high;
} rule;

/* A sample: the product Wz, which becomes the value; the point z; the last value, and its residual. */
typedef struct {
    float *value, *point, *last, *residual;
    const float *offset, *slope;
} sample;

/* Sums over a sample: squares of the residual and the value; residual times, and square of, its change. */
typedef struct { double squared_residual, squared_value, along, change; } sums;

/* value becomes s(value + offset) or slope * (value + offset). */
sums evaluate_sample(const rule *r, const sample *a);

/* Given the product at the point, decide whether to keep the point, and make the next one. Then the value is
 * in `last`, or, if the sample is done, still in `value`. */
void step_sample(const rule *r, const sample *a, sample_state *s);

#endif
