/* Arguments from Python, checked.
 *
 * Tensors come as DLPack capsules, which hold shape, strides, type and device together with the address, so that
 * nothing that a caller says of a tensor need be believed. The capsule is not consumed: it keeps the memory alive
 * during the call, and frees itself. What cannot be seen here, that a tensor's storage is as large as its shape and
 * strides say, is checked by binding.py.
 */
#include "tensors.h"

/* The layout of a "dltensor" capsule, as DLPack (dmlc.github.io/dlpack) documents it. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } element;
    const int64_t *shape, *strides; /* no strides: as usual, without gaps */
    uint64_t byte_offset;
} dlpack_tensor;
enum { DLPACK_CPU = 1 };
static const struct { uint8_t code, bits; const char *demand; } ELEMENTS[] = {
    [FLOAT32] = { 2, 32, "must be float32" },
    [FLOAT64] = { 2, 64, "must be float64" },
    [INT64] = { 0, 64, "must be int64" },
    [BOOL] = { 6, 8, "must be bool" },
};

void require(arguments *a, int ok, const char *name, const char *what)
{
    if (ok || a->failed) return;
    PyErr_Format(PyExc_ValueError, "%s %s", name, what);
    a->failed = 1;
}

static PyObject *take(arguments *a, const char *name)
{
    require(a, a->next < a->count, name, "is missing");
    return a->failed ? Py_None : a->objects[a->next++];
}

int64_t take_integer(arguments *a, const char *name, int64_t least, int64_t most)
{
    PyObject *object = take(a, name);
    int overflow = 0;
    require(a, PyLong_Check(object), name, "must be an integer");
    const int64_t value = a->failed ? 0 : PyLong_AsLongLongAndOverflow(object, &overflow);
    require(a, !overflow && value >= least && value <= most, name, "is out of range");
    return a->failed ? 0 : value;
}

float take_number(arguments *a, const char *name, double least, double most)
{
    PyObject *object = take(a, name);
    require(a, PyFloat_Check(object) || PyLong_Check(object), name, "must be a number");
    const double value = a->failed ? 0.0 : PyFloat_AsDouble(object);
    if (PyErr_Occurred() && !a->failed) { /* an integer that no float holds */
        PyErr_Clear();
        require(a, 0, name, "is out of range");
    }
    require(a, value >= least && value <= most, name, "is out of range");
    return a->failed ? 0.0f : (float)value;
}

/* The strides of this shape in this order. */
static void set_strides(int dimensions, const int64_t *shape, enum order order, int64_t *strides)
{
    static const int from_last[] = { 3, 2, 1, 0 }, from_channel[] = { 1, 3, 2, 0 };
    int64_t numbers = 1;
    for (int i = 0; i < dimensions; i++) {
        const int d = order == CHANNELS_LAST ? from_channel[i] : from_last[i + DIMENSIONS - dimensions];
        strides[d] = numbers;
        numbers *= shape[d]; /* not too many: counted before */
    }
}

/* Whether it has the order that t says; a dimension of size 1 says nothing. */
static int lies_so(const dlpack_tensor *from, const tensor *t)
{
    int64_t usual[DIMENSIONS];
    set_strides(from->ndim, t->shape, PLAIN, usual);
    for (int d = 0; d < from->ndim; d++)
        if (t->shape[d] > 1 && (from->strides ? from->strides[d] : usual[d]) != t->strides[d]) return 0;
    return 1;
}

static int64_t bytes_of(const dlpack_tensor *from, int64_t bytes)
{
    for (int d = 0; d < from->ndim; d++)
        if (__builtin_mul_overflow(bytes, from->shape[d], &bytes)) return -1;
    return bytes;
}

tensor take_tensor(arguments *a, const char *name, enum access access, enum element element, enum order order,
                   int dimensions, const int64_t *shape)
{
    PyObject *object = take(a, name);
    tensor t = { .name = name, .order = order == EITHER ? PLAIN : order, .access = access };
    if (a->failed || (object == Py_None && access == READ_IF_GIVEN)) return t;
    require(a, PyCapsule_IsValid(object, "dltensor"), name, "must be a DLPack capsule that was not used");
    if (a->failed) return t;
    const dlpack_tensor *from = PyCapsule_GetPointer(object, "dltensor"); /* the first member of what it points to */
    require(a, from->device.type == DLPACK_CPU, name, "must be on the CPU");
    require(a, from->element.code == ELEMENTS[element].code && from->element.bits == ELEMENTS[element].bits
               && from->element.lanes == 1, name, ELEMENTS[element].demand);
    require(a, from->ndim == dimensions, name, "has the wrong number of dimensions");
    for (int d = 0; d < dimensions && !a->failed; d++) {
        t.shape[d] = from->shape[d];
        require(a, shape[d] == ANY || shape[d] == t.shape[d], name, "does not have the size of the other arguments");
        require(a, t.shape[d] >= 1 && t.shape[d] <= LONGEST, name, "is empty or too large");
    }
    if (a->failed) return (tensor){ 0 };
    t.bytes = bytes_of(from, ELEMENTS[element].bits / 8);
    require(a, t.bytes > 0, name, "is too large");
    if (a->failed) return (tensor){ 0 };
    set_strides(dimensions, t.shape, t.order, t.strides);
    if (order == EITHER && dimensions == 4 && !lies_so(from, &t)) {
        t.order = CHANNELS_LAST;
        set_strides(dimensions, t.shape, t.order, t.strides);
    }
    require(a, lies_so(from, &t), name, "does not lie in memory as it must");
    const uintptr_t address = (uintptr_t)from->data + from->byte_offset;
    require(a, from->data && address % (ELEMENTS[element].bits / 8) == 0, name, "has no memory, or is not aligned");
    require(a, address <= UINTPTR_MAX - (uintptr_t)t.bytes, name, "is too large");
    if (a->failed) return (tensor){ 0 };
    t.data = (void *)address;
    return a->taken[a->tensors++] = t;
}

static int overlap(const tensor *s, const tensor *t)
{
    const uintptr_t first = (uintptr_t)s->data, second = (uintptr_t)t->data;
    return first < second + t->bytes && second < first + s->bytes;
}

int all_taken(arguments *a)
{
    require(a, a->next == a->count, "arguments", "are too many");
    for (int i = 0; i < a->tensors; i++)
        for (int j = 0; j < a->tensors; j++)
            if (i != j && a->taken[i].access == WRITE)
                require(a, !overlap(&a->taken[i], &a->taken[j]), a->taken[i].name, "overlaps another argument");
    return !a->failed;
}
