/* The extension module pcdeq._kernels: float32, CPU, and optional; every caller has a path in plain torch. */
#include "kernels.h"

static PyMethodDef methods[] = {
    { "anderson_step", anderson_step, METH_VARARGS, "A safeguarded Anderson step; returns the samples left." },
    { "solve", solve, METH_VARARGS, "A whole solve, forward or adjoint." },
    { "dense_forward", dense_forward, METH_VARARGS, "A dense layer: injection, weight and solve." },
    { "dense_backward", dense_backward, METH_VARARGS, "Its gradients." },
    { "adamw", adamw, METH_VARARGS, "A step of AdamW." },
    { "conv_weight_gradient", conv_weight_gradient, METH_VARARGS, "Of a 3x3 convolution." },
    { "softplus", softplus, METH_VARARGS, "The injection of kind 1." },
    { "softplus_gradient", softplus_gradient, METH_VARARGS, "Its gradient." },
    { "normalise", normalise, METH_VARARGS, "Weight normalisation of a nonnegative weight." },
    { "normalise_gradient", normalise_gradient, METH_VARARGS, "Its gradients." },
    { "batch_norm_forward", batch_norm_forward, METH_VARARGS, "Normalise by batch statistics." },
    { "batch_norm_inference", batch_norm_inference, METH_VARARGS, "Normalise by running statistics." },
    { "batch_norm_backward", batch_norm_backward, METH_VARARGS, "Its gradients." },
    { "max_pool_forward", max_pool_forward, METH_VARARGS, "3x3 maximum, stride 1, and where it was." },
    { "max_pool_backward", max_pool_backward, METH_VARARGS, "Its gradient." },
    { NULL, NULL, 0, NULL },
};

static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL };

PyMODINIT_FUNC PyInit__kernels(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VECTORISED", VECTORISED) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "INTERFACE", 2) < 0) Py_CLEAR(made); /* as in kernels/__init__.py */
    return made;
}
