/* What the kernels share. Nothing of torch is linked, so building needs only a C compiler. The OpenMP runtime
 * is the one that torch has loaded (its symbols are left undefined), so that both share one pool of threads. */
#ifndef PCDEQ_KERNELS_H
#define PCDEQ_KERNELS_H

/* One build serves every Python from 3.11 on. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* One build serves every x86 processor: the best version is chosen when the module is loaded. Not by clang, which (14)
 * gives such functions other names than those by which other files call them. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define CLONED 1
#else
#define VERSIONS
#define CLONED 0
#endif
/* Whether there are vectors of eight numbers, or nearly: without, torch's own convolutions are faster. */
#if CLONED || defined(__AVX2__) || defined(__ARM_NEON)
#define VECTORISED 1
#else
#define VECTORISED 0
#endif
#define INLINE static inline __attribute__((always_inline))

/* Work is cut into so many parts, whatever the number of threads, and each thread takes the next part when it is done
 * with one: no thread waits long for another on a busy machine, and sums over parts are always the same. */
enum { PARTS = 8 };
#define PART_FIRST(n, part) ((n) * (part) / PARTS)

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#define THREADED 1
#else
#define THREAD 0
#define THREADED 0
#endif

/* The functions of the module. */
PyObject *solve(PyObject *self, PyObject *const *objects, Py_ssize_t count);
PyObject *convolve(PyObject *self, PyObject *const *objects, Py_ssize_t count);
PyObject *weight_gradient(PyObject *self, PyObject *const *objects, Py_ssize_t count);
PyObject *batch_norm_forward(PyObject *self, PyObject *const *objects, Py_ssize_t count);
PyObject *batch_norm_inference(PyObject *self, PyObject *const *objects, Py_ssize_t count);
PyObject *batch_norm_backward(PyObject *self, PyObject *const *objects, Py_ssize_t count);

#endif
