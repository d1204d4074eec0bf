/* Around the solve: the paper's injection and its weight normalisation, forward and backward. */
#include "elementwise.h"
#include <math.h>
#include <string.h>

/* exp(-y) for y >= 0, relative error below 2e-7; from 87 on the smallest normal number. */
INLINE float exp_negative(float y, float largest)
{
    y = y > largest ? largest : y; /* keeps a NaN */
    const int k = (int)(y * 1.44269504f + 0.5f);
    const float kf = (float)k, f = -((y - kf * 0.693359375f) + kf * 2.12194440e-4f);
    union { int32_t bits; float value; } power = { (int32_t)((127u - (uint32_t)k) << 23) };
    return power.value * (expm1_small(f) + 1.0f);
}

/* Volatile for the same reason as in anderson.c. */
static const volatile float LARGEST = 87.0f;

/* log1p(t) = 2 artanh(t / (2 + t)), a series in at most 1/9. */
VERSIONS
void softplus_run(int64_t n, float beta, float floor, const float *restrict x, float *restrict out)
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

VERSIONS
void softplus_gradient_run(int64_t n, float beta, const float *restrict x, const float *restrict grad,
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
INLINE void row_sums(int64_t n, const float *restrict v, const float *restrict grad, double *squares, double *sum,
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

VERSIONS
void normalise_row(int64_t n, const float *restrict v, float g, float *restrict w)
{
    double squares, sum, along;
    row_sums(n, v, v, &squares, &sum, &along);
    const double norm = sqrt(squares), scale = (g < 0.0f ? 0.0f : g) / (norm == 0 ? 1 : norm);
    for (int64_t i = 0; i < n; i++) w[i] = (float)((v[i] < 0.0f ? 0.0f : v[i]) * scale);
}

/* Where the gradient of max(p, 0) passes: operators._passes. A NaN in p or grad is kept. */
#define PASSED(p, grad) (!((p) < 0.0f) || (grad) < 0.0f || (grad) != (grad) ? (grad) : 0.0f)

/* operators._Normalised says what a row of zeros does. */
VERSIONS
float normalise_gradient_row(int64_t n, const float *restrict v, float g, const float *restrict grad,
                             float *restrict grad_v)
{
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
    return PASSED(g, value);
}

PyObject *normalise(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, n;
    unsigned long long v, g, w;
    if (!PyArg_ParseTuple(args, "LLKKK", &rows, &n, &v, &g, &w)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; row < rows; row++) normalise_row(n, FLOATS(v) + row * n, FLOATS(g)[row], FLOATS(w) + row * n);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *normalise_gradient(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, n;
    unsigned long long v, g, grad, grad_v, grad_g;
    if (!PyArg_ParseTuple(args, "LLKKKKK", &rows, &n, &v, &g, &grad, &grad_v, &grad_g)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0, at = 0; row < rows; row++, at += n)
        FLOATS(grad_g)[row] = normalise_gradient_row(n, FLOATS(v) + at, FLOATS(g)[row], FLOATS(grad) + at,
                                                     FLOATS(grad_v) + at);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
