/* One safeguarded Anderson step of a sample, in one pass over memory.
 *
 * This is the step of solvers/anderson.py with memory 1 for float32 on a CPU; that file is the reference. The product
 * Wz has been computed; everything else happens here: activation, residual, dot products, the decision of T6, and the
 * next point.
 */
#include "anderson.h"
#include <float.h>
#include <math.h>
#include <string.h>

/* Beyond this the activations are 1 in float32. Volatile, or else gcc makes a branch of the comparison with a
 * constant and vectorises nothing. */
static const volatile float SATURATED = 40.0f;

/* exp(f) - 1 for |f| <= ln(2) / 2, relative error below 2e-7. */
INLINE float expm1_small(float f)
{
    float tail = 1.9875691e-4f;
    tail = tail * f + 1.3981999e-3f;
    tail = tail * f + 8.3334519e-3f;
    tail = tail * f + 4.1665796e-2f;
    tail = tail * f + 1.6666666e-1f;
    tail = tail * f + 0.5f;
    return tail * f * f + f;
}

/* exp(y) - 1 for y >= 0: y = k ln 2 + f, and a polynomial for exp(f) - 1, relative error below 2e-7. */
INLINE float expm1_nonnegative(float y, float saturated)
{
    y = y > saturated ? saturated : y; /* keeps a NaN */
    int k = (int)(y * 1.44269504f + 0.5f);
    float kf = (float)k;
    float f = (y - kf * 0.693359375f) + kf * 2.12194440e-4f;
    float small = expm1_small(f);
    union { int32_t bits; float value; } power = { (int32_t)((uint32_t)(k + 127) << 23) };
    return power.value * small + (power.value - 1.0f);
}

INLINE float activate(enum activation which, float y, float saturated)
{
    float t;
    switch (which) {
    case TANH: t = expm1_nonnegative(2.0f * y, saturated); return t / (t + 2.0f);
    case SOFTSIGN: return y / (1.0f + y);
    case RELU6: return y > 6.0f ? 6.0f : y;
    case SIGMOID: t = expm1_nonnegative(y, saturated); return (t + 1.0f) / (t + 2.0f);
    case ONE_MINUS_EXP: t = expm1_nonnegative(y, saturated); return t / (t + 1.0f);
    case HARD_TANH: return y > 1.0f ? 1.0f : y;
    case HARD_SIGMOID: t = y / 6.0f + 0.5f; return t > 1.0f ? 1.0f : t;
    default: return y;
    }
}

/* Whether a sum of squares may have lost terms to underflow, or overflowed: either would look converged. */
#define DOUBTFUL(sum) (!((sum) > 1e-30 && (sum) < 1e30))

/* value = s(product + offset), or slope * (product + offset), over one run; and the four sums that decide what is
 * next. */
INLINE void evaluate(enum activation which, int64_t n, const float *restrict keep, float *restrict value,
                     const float *restrict offset, const float *restrict slope, const float *restrict point,
                     const float *restrict residual, sums *t)
{
    float rr = 0, vv = 0, rd = 0, dd = 0;
    const float saturated = SATURATED;
#pragma omp simd reduction(+ : rr, vv, rd, dd)
    for (int64_t i = 0; i < n; i++) {
        float product = value[i];
        if (which != LINEAR) product = product < 0.0f ? 0.0f : product; /* W, z >= 0: below 0 by rounding only */
        float y = product + offset[i];
        float v = which == LINEAR ? slope[i] * y : activate(which, y, saturated);
        if (keep) v *= keep[i];
        float r = v - point[i];
        float d = r - residual[i];
        value[i] = v;
        rr += r * r;
        vv += v * v;
        rd += r * d;
        dd += d * d;
    }
    t->squared_residual += rr;
    t->squared_value += vv;
    t->along += rd;
    t->change += dd;
}

/* The same sums in double, from the values. */
static sums evaluate_again(const rule *r, const sample *a)
{
    sums t = { 0, 0, 0, 0 };
    for (int64_t run = 0; run < r->runs; run++) {
        const float *value = a->value + run * r->n, *residual = a->residual + run * r->n;
        const float *point = a->point + run * r->stride;
        for (int64_t i = 0; i < r->n; i++) {
            const double v = value[i], res = v - point[i], d = res - residual[i];
            t.squared_residual += res * res;
            t.squared_value += v * v;
            t.along += res * d;
            t.change += d * d;
        }
    }
    return t;
}

VERSIONS
sums evaluate_sample(const rule *r, const sample *a)
{
    sums t = { 0, 0, 0, 0 };
    for (int64_t run = 0; run < r->runs; run++) {
        const int64_t at = run * r->n, n = r->n;
        float *value = a->value + at;
        const float *offset = a->offset + at, *slope = a->slope ? a->slope + at : NULL;
        const float *point = a->point + run * r->stride, *residual = a->residual + at;
#define RUN(A, KEEP) evaluate(A, n, KEEP, value, offset, slope, point, residual, &t)
#define CASE(A)                                   \
    case A:                                       \
        if (r->keep) RUN(A, r->keep);             \
        else RUN(A, NULL);                        \
        break
        switch (r->which) {
            CASE(TANH); CASE(SOFTSIGN); CASE(RELU6); CASE(SIGMOID); CASE(ONE_MINUS_EXP); CASE(HARD_TANH);
            CASE(HARD_SIGMOID); CASE(LINEAR);
        }
    }
    return t;
}

/* The next point, v + weight * (last - v), or, if this one is not kept, the last value, from which the plain step will
 * start; both within the box. Kept or not, `last` and `residual` take over this point's, for the next secant. */
INLINE void advance(int kept, float weight, const rule *r, const sample *a)
{
    const float low = r->low, high = r->high;
    for (int64_t run = 0; run < r->runs; run++) {
        const float *restrict value = a->value + run * r->n;
        float *restrict point = a->point + run * r->stride, *restrict last = a->last + run * r->n;
        float *restrict residual = a->residual + run * r->n;
#pragma omp simd
        for (int64_t i = 0; i < r->n; i++) {
            const float v = value[i];
            float next = kept ? v + weight * (last[i] - v) : last[i];
            next = next < low ? low : next;
            next = next > high ? high : next;
            residual[i] = v - point[i];
            last[i] = v;
            point[i] = next;
        }
    }
}

VERSIONS
static void advance_sample(int kept, float weight, const rule *r, const sample *a)
{
    if (kept) advance(1, weight, r, a);
    else advance(0, 0.0f, r, a);
}

void step_sample(const rule *r, const sample *a, sample_state *s)
{
    const int first = s->steps++ == 0, plain = !s->accelerated;
    sums t = evaluate_sample(r, a);
    if (DOUBTFUL(t.squared_residual) || DOUBTFUL(t.squared_value)) t = evaluate_again(r, a);
    /* 0 is an answer, and its relative residual 0 */
    const double relative = t.squared_residual == 0 ? 0 : sqrt(t.squared_residual) / sqrt(t.squared_value);
    s->relative = (float)relative;
    s->converged = t.squared_residual == 0 || relative < r->tol;
    s->done = s->converged || relative != relative; /* a NaN stops its sample */
    if (s->done) return;
    if (first) memcpy(a->last, a->value, r->runs * r->n * sizeof(float)); /* it was never written */
    if (first) s->power = 1.0f;
    const float norm = (float)sqrt(t.squared_residual), power = s->power * r->decay;
    const int kept = plain || norm <= fminf(s->norm, s->largest * power);
    float weight = first || !(t.change > 0) ? 0.0f : (float)(t.along / t.change);
    weight = kept && weight < 1.0f ? weight : 0.0f;
    if (kept) {
        s->norm = norm;
        if (plain) s->largest = fmaxf(s->largest, norm);
        else s->power = power;
    }
    s->accelerated = weight != 0.0f;
    advance_sample(kept, weight, r, a);
}
