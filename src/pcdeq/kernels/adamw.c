/* A step of AdamW (Loshchilov & Hutter 2019) for all parameters in one call. */
#include "kernels.h"
#include <math.h>

typedef struct { int64_t n; float *parameter, *mean, *square, *step; const float *grad; } moments;
typedef struct { float keep, rate, eps, beta1, other1, beta2, other2, root; } factors;

enum { PARALLEL_FROM = 32768 }; /* numbers; below, a second thread costs more than it saves */

/* mean and square are running means of the gradient and of its square. They start at 0, which `rate`, the learning rate,
 * and `root`, a factor on the square root, make up for. */
VERSIONS
static void update(int64_t n, factors f, const float *restrict grad, float *restrict mean, float *restrict square,
                   float *restrict parameter)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float g = grad[i], m = f.beta1 * mean[i] + f.other1 * g, s = f.beta2 * square[i] + f.other2 * g * g;
        mean[i] = m;
        square[i] = s;
        parameter[i] = f.keep * parameter[i] - f.rate * m / (sqrtf(s) * f.root + f.eps);
    }
}

/* Takes a list of (n, parameter, gradient, mean, square, step), addresses but for the first, and the options. */
PyObject *adamw(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *list;
    double rate, beta1, beta2, eps, decay;
    int threads;
    if (!PyArg_ParseTuple(args, "O!dddddi", &PyList_Type, &list, &rate, &beta1, &beta2, &eps, &decay, &threads)) return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(list);
    moments *all = PyMem_Malloc((count ? count : 1) * sizeof(moments));
    if (!all) return PyErr_NoMemory();
    for (Py_ssize_t k = 0; k < count; k++) {
        long long n;
        unsigned long long parameter, grad, mean, square, step;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, k), "LKKKKK", &n, &parameter, &grad, &mean, &square, &step)) {
            PyMem_Free(all);
            return NULL;
        }
        all[k] = (moments){ n, FLOATS(parameter), FLOATS(mean), FLOATS(square), FLOATS(step), FLOATS(grad) };
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t k = 0; k < count; k++) {
        const moments a = all[k];
        const double step = *a.step += 1.0f;
        const factors f = { .keep = (float)(1 - rate * decay), .rate = (float)(rate / (1 - pow(beta1, step))),
                            .eps = (float)eps, .beta1 = (float)beta1, .other1 = (float)(1 - beta1),
                            .beta2 = (float)beta2, .other2 = (float)(1 - beta2),
                            .root = (float)(1 / sqrt(1 - pow(beta2, step))) };
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && a.n >= PARALLEL_FROM)
        for (int part = 0; part < PARTS; part++) {
            const int64_t at = PART_FIRST(a.n, part);
            update(PART_SIZE(a.n, part), f, a.grad + at, a.mean + at, a.square + at, a.parameter + at);
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(all);
    Py_RETURN_NONE;
}
