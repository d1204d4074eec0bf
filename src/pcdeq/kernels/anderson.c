/* One safeguarded Anderson step for every sample of a batch, in one pass over memory.
 *
 * This is the loop body of solvers/anderson.py (memory 1) for float32 on a CPU; that file is the
 * reference, and tests hold the two equal. Between two steps the caller computes the product Wz;
 * everything else happens here: activation, residual, dot products, the decision of T6, and the
 * next candidate. Each sample is one contiguous block of n numbers, in any order that all arrays share.
 */
#include "kernels.h"
#include <float.h>
#include <math.h>
#include <string.h>

/* The order is that of CODES in solvers/fused.py. */
enum activation { TANH, SOFTSIGN, RELU6, SIGMOID, ONE_MINUS_EXP, HARD_TANH, HARD_SIGMOID, LINEAR };

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
    float tail = 1.9875691e-4f;
    tail = tail * f + 1.3981999e-3f;
    tail = tail * f + 8.3334519e-3f;
    tail = tail * f + 4.1665796e-2f;
    tail = tail * f + 1.6666666e-1f;
    tail = tail * f + 0.5f;
    float small = tail * f * f + f;
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

typedef struct { double squared_residual, squared_value, along, change; } sums;

/* Whether a sum of squares may have lost terms to underflow, or overflowed: either would look converged. */
#define DOUBTFUL(sum) (!((sum) > 1e-30 && (sum) < 1e30))

/* value = s(product + offset), or slope * (product + offset); and the four sums that decide what is next. */
INLINE sums evaluate(enum activation which, int64_t n, float *restrict value, const float *restrict offset,
                     const float *restrict slope, const float *restrict point, const float *restrict residual)
{
    float rr = 0, vv = 0, rd = 0, dd = 0;
    const float saturated = SATURATED;
#pragma omp simd reduction(+ : rr, vv, rd, dd)
    for (int64_t i = 0; i < n; i++) {
        float y = value[i] + offset[i];
        float v = which == LINEAR ? slope[i] * y : activate(which, y, saturated);
        float r = v - point[i];
        float d = r - residual[i];
        value[i] = v;
        rr += r * r;
        vv += v * v;
        rd += r * d;
        dd += d * d;
    }
    return (sums){ rr, vv, rd, dd };
}

/* The same sums in double, from the values. */
static sums evaluate_again(int64_t n, const float *value, const float *point, const float *residual)
{
    sums t = { 0, 0, 0, 0 };
    for (int64_t i = 0; i < n; i++) {
        const double v = value[i], r = v - point[i], d = r - residual[i];
        t.squared_residual += r * r;
        t.squared_value += v * v;
        t.along += r * d;
        t.change += d * d;
    }
    return t;
}

VERSIONS
static sums evaluate_sample(int which, int64_t n, float *value, const float *offset, const float *slope,
                            const float *point, const float *residual)
{
#define CASE(A) case A: return evaluate(A, n, value, offset, slope, point, residual)
    switch (which) {
        CASE(TANH); CASE(SOFTSIGN); CASE(RELU6); CASE(SIGMOID); CASE(ONE_MINUS_EXP); CASE(HARD_TANH);
        CASE(HARD_SIGMOID);
    default: return evaluate(LINEAR, n, value, offset, slope, point, residual);
    }
}

/* Keep the candidate: best and residual take it over, and point becomes best + weight * (old best - best). */
VERSIONS
static void advance_sample(int64_t n, float weight, float low, float high, const float *restrict value,
                           float *restrict point, float *restrict best, float *restrict residual)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float v = value[i];
        float next = v + weight * (best[i] - v);
        next = next < low ? low : next;
        next = next > high ? high : next;
        residual[i] = v - point[i];
        best[i] = v;
        point[i] = next;
    }
}

/* What is remembered of a sample between steps, all 0 before the first; solvers/fused.py reads two of it.
 * "accelerated" says that the candidate is a proposal, not the plain step. */
typedef struct { float norm, largest, power, relative; int32_t steps, done, accelerated, started; } sample_state;

typedef struct {
    int which;
    int64_t n;
    float *value, *point, *best, *residual;
    const float *offset, *slope;
    float tol, decay, low, high;
} batch;

static void step_sample(const batch *b, int64_t index, sample_state *s)
{
    const int64_t n = b->n, at = index * n;
    float *value = b->value + at, *point = b->point + at, *best = b->best + at, *residual = b->residual + at;
    const float *offset = b->offset + at, *slope = b->slope ? b->slope + at : NULL;
    sums t = evaluate_sample(b->which, n, value, offset, slope, point, residual);
    if (DOUBTFUL(t.squared_residual) || DOUBTFUL(t.squared_value)) t = evaluate_again(n, value, point, residual);
    const float norm = (float)sqrt(t.squared_residual);
    const float relative = (float)(sqrt(t.squared_residual) / (sqrt(t.squared_value) + DBL_MIN));
    s->steps++;
    if (s->accelerated) {
        const float power = s->power * b->decay, bound = fminf(s->norm, s->largest * power);
        if (!(norm <= bound || relative < b->tol)) {
            s->accelerated = 0; /* rejected: the plain step from where the sample was */
            memcpy(point, best, n * sizeof(float));
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
        memcpy(best, value, n * sizeof(float)); /* it was never written, and 0 * NaN is NaN */
    }
    s->accelerated = weight != 0.0f;
    s->started = 1;
    s->norm = norm;
    s->relative = relative;
    s->done = !(relative >= b->tol); /* a NaN stops its sample */
    advance_sample(n, weight, b->low, b->high, value, point, best, residual);
}

PyObject *anderson_step(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, n;
    unsigned long long value, offset, slope, point, best, residual, state;
    int which, threads, active = 0;
    batch b;
    if (!PyArg_ParseTuple(args, "iLLKKKKKKKffffi", &which, &samples, &n, &value, &offset, &slope, &point, &best,
                          &residual, &state, &b.tol, &b.decay, &b.low, &b.high, &threads))
        return NULL;
    b.which = which;
    b.n = n;
    b.value = (float *)(uintptr_t)value;
    b.point = (float *)(uintptr_t)point;
    b.best = (float *)(uintptr_t)best;
    b.residual = (float *)(uintptr_t)residual;
    b.offset = (const float *)(uintptr_t)offset;
    b.slope = (const float *)(uintptr_t)slope;
    sample_state *states = (sample_state *)(uintptr_t)state;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : active) if (samples * n > 16384)
    for (int64_t i = 0; i < samples; i++) {
        if (!states[i].done) step_sample(&b, i, &states[i]);
        active += !states[i].done;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(active);
}
