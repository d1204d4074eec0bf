/* The extension module pcdeq._kernels: for the CPU, and optional; binding.py, its one caller, declines without it. */
#include "anderson.h"
#include "tensors.h"

#define FUNCTION(name, what) { #name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, what }
static PyMethodDef methods[] = {
    FUNCTION(solve, "A whole solve, forward or adjoint."),
    FUNCTION(convolve, "A convolution in float64."),
    FUNCTION(weight_gradient, "The gradient of a 3x3 convolution with respect to its weight."),
    FUNCTION(batch_norm_forward, "Normalise by batch statistics."),
    FUNCTION(batch_norm_inference, "Normalise by running statistics."),
    FUNCTION(batch_norm_backward, "The gradients of the first."),
    { NULL, NULL, 0, NULL },
};

static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL };

/* The names of the activations that `solve` knows, in the order of their numbers. */
static PyObject *activations(void)
{
    return Py_BuildValue("(ssssssss)", "tanh", "softsign", "relu6", "sigmoid", "1-exp", "hard-tanh", "hard-sigmoid",
                         "linear");
}

PyMODINIT_FUNC PyInit__kernels(void)
{
    PyObject *made = PyModule_Create(&module), *names = made ? activations() : NULL;
    if (made && (!names || PyModule_AddObjectRef(made, "ACTIVATIONS", names) < 0)) Py_CLEAR(made);
    Py_XDECREF(names);
    if (made && PyModule_AddIntConstant(made, "VECTORISED", VECTORISED) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "MOST_THREADS", THREADED ? MOST_THREADS : 1) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "INTERFACE", 6) < 0) Py_CLEAR(made); /* as in binding.py */
    return made;
}
