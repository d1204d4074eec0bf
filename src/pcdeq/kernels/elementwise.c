/* Around the solve: the paper's injection and its weight normalisation, forward and backward. */
#include "kernels.h"
#include <math.h>
#include <string.h>

/* exp(-y) for y >= 0, relative error below 2e-7; from 87 on the smallest normal number. */
INLINE float exp_negative(float y, float largest)
{
    y = y > largest ? largest : y; /* keeps a NaN */
    const int k = (int)(y * 1.44269504f + 0.5f);
    const float kf = (float)k, f = -((y - kf * 0.693359375f) + kf * 2.12194440e-4f);
    union { int32_t bits; float value; } power = { (int32_t)((uint32_t)(127 - k) << 23) };
    return power.value * (expm1_small(f) + 1.0f);
}

/* Volatile for the same reason as in anderson.c. */
static const volatile float LARGEST = 87.0f;

/* out = log(1 + exp(beta x)) / beta + floor. log1p(t) = 2 artanh(t / (2 + t)), a series in at most 1/9. */
VERSIONS
static void softplus_run(int64_t n, float beta, float floor, const float *restrict x, float *restrict out)
{
    const float largest = LARGEST, per_beta = 1.0f / beta;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float a = beta * x[i], t = exp_negative(fabsf(a), largest);
        const float s = t / (2.0f + t), q = s * s;
        float tail = 1.0f / 15.0f;
        tail = tail * q + 1.0f / 13.0f;
        tail = tail * q + 1.0f / 11.0f;
        tail = tail * q + 1.0f / 9.0f;
        tail = tail * q + 1.0f / 7.0f;
        tail = tail * q + 1.0f / 5.0f;
        tail = tail * q + 1.0f / 3.0f;
        const float log1p = 2.0f * s * (tail * q + 1.0f);
        out[i] = (x[i] > 0.0f ? x[i] : 0.0f) + log1p * per_beta + floor;
    }
}

/* out = grad / (1 + exp(-beta x)). */
VERSIONS
static void softplus_gradient_run(int64_t n, float beta, const float *restrict x, const float *restrict grad,
                                  float *restrict out)
{
    const float largest = LARGEST;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float a = beta * x[i], t = exp_negative(fabsf(a), largest);
        out[i] = grad[i] * (a < 0.0f ? t : 1.0f) / (1.0f + t);
    }
}

PyObject *softplus(PyObject *self, PyObject *args)
{
    (void)self;
    long long n;
    unsigned long long x, out;
    float beta, floor;
    int threads;
    if (!PyArg_ParseTuple(args, "LffKKi", &n, &beta, &floor, &x, &out, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int part = 0; part < PARTS; part++)
        softplus_run(PART_SIZE(n, part), beta, floor, FLOATS(x) + PART_FIRST(n, part), FLOATS(out) + PART_FIRST(n, part));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *softplus_gradient(PyObject *self, PyObject *args)
{
    (void)self;
    long long n;
    unsigned long long x, grad, out;
    float beta;
    int threads;
    if (!PyArg_ParseTuple(args, "LfKKKi", &n, &beta, &x, &grad, &out, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int part = 0; part < PARTS; part++) {
        const int64_t at = PART_FIRST(n, part);
        softplus_gradient_run(PART_SIZE(n, part), beta, FLOATS(x) + at, FLOATS(grad) + at, FLOATS(out) + at);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Sums over a row of max(v, 0): of its squares, of grad, and of grad * max(v, 0); in double, where no square of a
 * float under- or overflows. */
VERSIONS
static void row_sums(int64_t n, const float *restrict v, const float *restrict grad, double *squares, double *sum,
                     double *along)
{
    double a = 0, b = 0, c = 0;
#pragma omp simd reduction(+ : a, b, c)
    for (int64_t i = 0; i < n; i++) {
        const double d = v[i] < 0.0f ? 0.0f : v[i], g = grad[i];
        a += d * d;
        b += g;
        c += g * d;
    }
    *squares = a;
    *sum = b;
    *along = c;
}

/* w = g v / |v| by rows, for v and g clamped at 0; a row of zeros gives zeros. */
PyObject *normalise(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, n;
    unsigned long long v_, g_, w_;
    if (!PyArg_ParseTuple(args, "LLKKK", &rows, &n, &v_, &g_, &w_)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < rows; row++) {
        const float *v = FLOATS(v_) + row * n, g = FLOATS(g_)[row];
        float *w = FLOATS(w_) + row * n;
        double squares, sum, along;
        row_sums(n, v, v, &squares, &sum, &along);
        const double norm = sqrt(squares), scale = (g < 0.0f ? 0.0f : g) / (norm == 0 ? 1 : norm);
        for (int64_t i = 0; i < n; i++) w[i] = (float)((v[i] < 0.0f ? 0.0f : v[i]) * scale);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Where the gradient of max(p, 0) passes: operators._passes. A NaN in p or grad is kept. */
#define PASSED(p, grad) (!((p) < 0.0f) || (grad) < 0.0f || (grad) != (grad) ? (grad) : 0.0f)

/* The gradients of `normalise`; operators._Normalised says what a row of zeros does. */
PyObject *normalise_gradient(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, n;
    unsigned long long v_, g_, grad_, grad_v_, grad_g_;
    if (!PyArg_ParseTuple(args, "LLKKKKK", &rows, &n, &v_, &g_, &grad_, &grad_v_, &grad_g_)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < rows; row++) {
        const float *v = FLOATS(v_) + row * n, *grad = FLOATS(grad_) + row * n, g = FLOATS(g_)[row];
        float *grad_v = FLOATS(grad_v_) + row * n;
        double squares, sum, along;
        row_sums(n, v, grad, &squares, &sum, &along);
        const double norm = sqrt(squares), unit = norm == 0 ? 1 : norm, scale = (g < 0.0f ? 0.0f : g) / unit;
        along /= unit;
        for (int64_t i = 0; i < n; i++) {
            const double direction = (v[i] < 0.0f ? 0.0f : v[i]) / unit;
            const float value = (float)(scale * (grad[i] - direction * along));
            grad_v[i] = PASSED(v[i], value);
        }
        const float value = (float)(along + (norm == 0 ? sum / sqrt((double)n) : 0));
        FLOATS(grad_g_)[row] = PASSED(g, value);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
