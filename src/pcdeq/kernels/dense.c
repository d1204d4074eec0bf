/* A small dense layer in two calls: injection, weight and solve; then all its gradients.
 *
 * Called one by one from Python, the parts of such a layer take less time than the calls.
 */
#include "elementwise.h"
#include "solve.h"
#include <math.h>
#include <stdlib.h>

/* A dense batch without gaps. */
static void set_dense(batch *b, int64_t samples, int64_t features)
{
    set_layout(b, samples, layout_of(0, features, 1, 1), (strides){ features, 1, 0, 0 });
}

/* The injection and its gradient: softplus, or ReLU if beta is 0. */
VERSIONS
static void inject(int64_t n, float beta, float floor, const float *restrict x, float *restrict out)
{
    if (beta > 0) softplus_run(n, beta, floor, x, out);
    else
        for (int64_t i = 0; i < n; i++) out[i] = (x[i] < 0.0f ? 0.0f : x[i]) + floor; /* a NaN stays */
}

VERSIONS
static void inject_gradient(int64_t n, float beta, const float *restrict x, const float *restrict grad,
                            float *restrict out)
{
    if (beta > 0) softplus_gradient_run(n, beta, x, grad, out);
    else
        for (int64_t i = 0; i < n; i++) out[i] = grad[i] * (x[i] > 0.0f ? 1.0f : 0.0f);
}

/* s'(y) where z = s(y). */
VERSIONS
static void slopes(int which, int64_t n, const float *restrict z, float *restrict out)
{
#define EACH(value)                                         \
    for (int64_t i = 0; i < n; i++) out[i] = (float)(value); \
    break
    switch (which) {
    case TANH: EACH(1.0f - z[i] * z[i]);
    case SOFTSIGN: EACH((1.0f - z[i]) * (1.0f - z[i]));
    case RELU6: EACH(z[i] < 6.0f ? 1.0f : 0.0f);
    case SIGMOID: EACH(z[i] * (1.0f - z[i]));
    case ONE_MINUS_EXP: EACH(1.0f - z[i]);
    case HARD_TANH: EACH(z[i] < 1.0f ? 1.0f : 0.0f);
    case HARD_SIGMOID: EACH((z[i] < 1.0f ? 1.0f : 0.0f) / 6.0f);
    default: EACH(NAN); /* forgotten here: let it be seen */
    }
#undef EACH
}

/* row = Σ u z over the samples, u one number and z one vector of each; four samples a pass over the row. */
VERSIONS
static void weight_gradient_row(int64_t samples, int64_t n, const float *restrict u, const float *restrict z,
                                float *restrict row)
{
    int64_t s = 0;
    for (int64_t i = 0; i < n; i++) row[i] = 0.0f;
    for (; s + 4 <= samples; s += 4) {
        const float *a = z + s * n, *b = a + n, *c = b + n, *d = c + n;
        const float p = u[s * n], q = u[(s + 1) * n], r = u[(s + 2) * n], t = u[(s + 3) * n];
#pragma omp simd
        for (int64_t i = 0; i < n; i++) row[i] += p * a[i] + q * b[i] + r * c[i] + t * d[i];
    }
    for (; s < samples; s++)
        for (int64_t i = 0; i < n; i++) row[i] += u[s * n] * z[s * n + i];
}

/* z = s(W z + inject(x)), with W made of v and g, if these are given; returns the summary of the solve. */
PyObject *dense_forward(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, n;
    unsigned long long x, v, g, base, mean, response, weight, z, steps, residuals, converged;
    float beta, floor;
    int threads;
    batch b = { .r.low = 0.0f, .steps_before = 1 };
    if (!PyArg_ParseTuple(args, "LL(KKKKKK)(KKKKK)ifffffii", &samples, &n, &x, &v, &g, &base, &mean, &response, &weight,
                          &z, &steps, &residuals, &converged, &b.r.which, &beta, &floor, &b.r.tol, &b.r.decay, &b.r.high,
                          &b.max_steps, &threads))
        return NULL;
    set_dense(&b, samples, n);
    b.base = FLOATS(base);
    b.mean = FLOATS(mean);
    b.out = FLOATS(z);
    b.steps = (int64_t *)(uintptr_t)steps;
    b.residuals = FLOATS(residuals);
    b.converged = (unsigned char *)(uintptr_t)converged;
    float *injected = malloc(samples * n * sizeof(float));
    int ok = injected != NULL;
    b.offset = injected;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        inject(samples * n, beta, floor, FLOATS(x), injected);
        for (int64_t row = 0; v && row < n; row++)
            normalise_row(n, FLOATS(v) + row * n, FLOATS(g)[row], FLOATS(weight) + row * n);
        ok = solve_batch(&b, 0, FLOATS(weight), FLOATS(response), threads);
        Py_END_ALLOW_THREADS
    }
    free(injected);
    return ok ? summary_of(&b) : PyErr_NoMemory();
}

/* From the gradient of a loss with respect to z those with respect to x, v and g; returns the summary of the solve. For
 * its start, `mean` is the mean slope. */
PyObject *dense_backward(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, n;
    unsigned long long x, v, g, weight, z, grad, mean, response, grad_x, grad_v, grad_g, steps, residuals, converged;
    float beta;
    int which, threads;
    batch b = { .r.which = LINEAR, .r.low = -HUGE_VALF, .r.high = HUGE_VALF };
    if (!PyArg_ParseTuple(args, "LL(KKKKKKKK)(KKKKKK)ifffii", &samples, &n, &x, &v, &g, &weight, &z, &grad, &mean,
                          &response, &grad_x, &grad_v, &grad_g, &steps, &residuals, &converged, &which, &beta, &b.r.tol,
                          &b.r.decay, &b.max_steps, &threads))
        return NULL;
    const int64_t size = samples * n;
    float *slope = malloc((2 * size + n * n) * sizeof(float)), *u = slope + size, *gradient = u + size;
    int ok = slope != NULL;
    set_dense(&b, samples, n);
    b.offset = FLOATS(grad);
    b.slope = slope;
    b.mean = FLOATS(mean);
    b.out = u;
    b.steps = (int64_t *)(uintptr_t)steps;
    b.residuals = FLOATS(residuals);
    b.converged = (unsigned char *)(uintptr_t)converged;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        slopes(which, size, FLOATS(z), slope);
        ok = solve_batch(&b, 1, FLOATS(weight), FLOATS(response), threads);
        if (ok) {
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads) if (threads > 1)
            for (int64_t row = 0; row < n; row++) {
                float *here = gradient + row * n;
                weight_gradient_row(samples, n, u + row, FLOATS(z), here);
                FLOATS(grad_g)[row] = normalise_gradient_row(n, FLOATS(v) + row * n, FLOATS(g)[row], here,
                                                             FLOATS(grad_v) + row * n);
            }
            inject_gradient(size, beta, FLOATS(x), u, FLOATS(grad_x));
        }
        Py_END_ALLOW_THREADS
    }
    free(slope);
    return ok ? summary_of(&b) : PyErr_NoMemory();
}
