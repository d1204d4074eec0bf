/* One safeguarded Anderson step for every sample of a batch, in one pass over memory.
 *
 * This is the loop body of solvers/anderson.py (memory 1) for float32 on a CPU; that file is the
 * reference, and tests hold the two equal. Between two steps the caller computes the product Wz;
 * everything else happens here: activation, residual, dot products, the decision of T6, and the
 * next candidate. Each sample is one contiguous block of n numbers, in any order that all arrays share.
 */
#include "anderson.h"
#include <float.h>
#include <math.h>
#include <string.h>

/* Beyond this the activations are 1 in float32. Volatile, or else gcc makes a branch of the comparison with a
 * constant and vectorises nothing. */
static const volatile float SATURATED = 40.0f;

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

/* Keep the candidate: best and residual take it over, and point becomes best + weight * (old best - best). */
VERSIONS
static void advance_sample(const rule *r, const sample *a, float weight)
{
    const float low = r->low, high = r->high;
    for (int64_t run = 0; run < r->runs; run++) {
        const float *restrict value = a->value + run * r->n;
        float *restrict point = a->point + run * r->stride, *restrict best = a->best + run * r->n;
        float *restrict residual = a->residual + run * r->n;
#pragma omp simd
        for (int64_t i = 0; i < r->n; i++) {
            float v = value[i];
            float next = v + weight * (best[i] - v);
            next = next < low ? low : next;
            next = next > high ? high : next;
            residual[i] = v - point[i];
            best[i] = v;
            point[i] = next;
        }
    }
}

void step_sample(const rule *r, const sample *a, sample_state *s)
{
    const size_t bytes = r->n * sizeof(float);
    sums t = evaluate_sample(r, a);
    if (DOUBTFUL(t.squared_residual) || DOUBTFUL(t.squared_value)) t = evaluate_again(r, a);
    const float norm = (float)sqrt(t.squared_residual);
    const float relative = (float)(sqrt(t.squared_residual) / (sqrt(t.squared_value) + DBL_MIN));
    s->steps++;
    if (s->accelerated) {
        const float power = s->power * r->decay, bound = fminf(s->norm, s->largest * power);
        if (!(norm <= bound || relative < r->tol)) {
            s->accelerated = 0; /* rejected: the plain step from where the sample was */
            for (int64_t run = 0; run < r->runs; run++)
                memcpy(a->point + run * r->stride, a->best + run * r->n, bytes);
            return;
        }
        s->power = power;
    }
    else s->largest = fmaxf(s->largest, norm);
    float weight = 0.0f;
    if (s->started) {
        weight = t.change > 0 ? (float)(t.along / t.change) : 0.0f;
        weight = weight < 1.0f ? weight : 0.0f;
    } else {
        s->power = 1.0f;
        memcpy(a->best, a->value, r->runs * bytes); /* it was never written, and 0 * NaN is NaN */
    }
    s->accelerated = weight != 0.0f;
    s->started = 1;
    s->norm = norm;
    s->relative = relative;
    s->done = !(relative >= r->tol); /* a NaN stops its sample */
    if (s->done) memcpy(a->best, a->value, r->runs * bytes); /* no further candidate is wanted */
    else advance_sample(r, a, weight);
}

/* One step for every sample of a batch that is not done; the products are the caller's. */
PyObject *anderson_step(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, n;
    unsigned long long value, offset, slope, point, best, residual, state;
    int threads, active = 0;
    rule r = { .runs = 1 };
    if (!PyArg_ParseTuple(args, "iLLKKKKKKKffffi", &r.which, &samples, &n, &value, &offset, &slope, &point, &best,
                          &residual, &state, &r.tol, &r.decay, &r.low, &r.high, &threads))
        return NULL;
    r.n = r.stride = n;
    sample_state *states = (sample_state *)(uintptr_t)state;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : active) if (samples * n > 16384)
    for (int64_t i = 0; i < samples; i++) {
        const int64_t at = i * n;
        const sample a = { FLOATS(value) + at, FLOATS(point) + at, FLOATS(best) + at, FLOATS(residual) + at,
                           FLOATS(offset) + at, slope ? FLOATS(slope) + at : NULL };
        if (!states[i].done) step_sample(&r, &a, &states[i]);
        active += !states[i].done;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(active);
}
