/* What the kernels share. Nothing of torch is linked, so building needs only a C compiler. The OpenMP runtime
 * is the one that torch has loaded (its symbols are left undefined), so that both share one pool of threads. */
#ifndef PCDEQ_KERNELS_H
#define PCDEQ_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* One build serves every x86 processor: the best version is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && __GNUC__ >= 12
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif
#define INLINE static inline __attribute__((always_inline))

/* Pointers travel from Python as integers. */
#define FLOATS(address) ((float *)(uintptr_t)(address))
#define INTS(address) ((int32_t *)(uintptr_t)(address))

PyObject *anderson_step(PyObject *self, PyObject *args);
PyObject *solve(PyObject *self, PyObject *args);
PyObject *conv_weight_gradient(PyObject *self, PyObject *args);
PyObject *batch_norm_forward(PyObject *self, PyObject *args);
PyObject *batch_norm_backward(PyObject *self, PyObject *args);
PyObject *max_pool_forward(PyObject *self, PyObject *args);
PyObject *max_pool_backward(PyObject *self, PyObject *args);

#endif
