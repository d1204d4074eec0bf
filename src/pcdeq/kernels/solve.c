/* A whole solve in one call: each sample is solved to its end while it lies in the cache.
 *
 * The steps are those of anderson.c, the products those of product.c. A batch need not wait for its slowest sample,
 * memory beyond the cache is read and written once a solve instead of once a step, and Python is called once.
 */
#include "anderson.h"
#include "product.h"
#include "tensors.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What the threads share. The start of a solve is `start`, or s(base + offset) for a guess `base` of the product. */
typedef struct {
    layout l;
    strides t;
    rule r;
    int transposed, threads;
    int steps_before, max_steps; /* steps that the start stands for; of these and those taken, the most */
    int64_t samples;
    const float *weight, *packed, *offset, *slope, *start, *base;
    float *out, *residuals;
    int64_t *steps;
    unsigned char *converged;
} batch;

/* Numbers that one thread works with. */
static size_t scratch_size(const layout *l) { return l->padded + 5 * l->runs * l->n + product_space(l); }

/* A guess of a product is finite, whatever the buffers hold that it is made of, and nonnegative, as a start must be;
 * that of the adjoint may have any sign. */
VERSIONS
static void make_admissible(int64_t n, int nonnegative, float *restrict guess)
{
    const float least = nonnegative ? 0.0f : -FLT_MAX, most = nonnegative ? FLT_MAX : 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float v = guess[i];
        v = v >= least ? v : 0.0f; /* a NaN is 0 */
        guess[i] = v <= FLT_MAX ? v : most;
    }
}

static void make_start(const batch *b, const sample *a)
{
    const layout *l = &b->l;
    const int64_t size = l->runs * l->n;
    memset(a->value, 0, size * sizeof(float));
    if (b->base) load(l, &b->t, b->base, a->value, l->n);
    make_admissible(size, b->r.which != LINEAR, a->value);
    evaluate_sample(&b->r, a);
    for (int64_t run = 0; run < l->runs; run++)
        memcpy(a->point + run * l->stride, a->value + run * l->n, l->n * sizeof(float));
}

static void solve_sample(const batch *b, int64_t index, float *scratch)
{
    const layout *l = &b->l;
    const int64_t size = l->runs * l->n, at = index * b->t.sample;
    float *point = scratch + l->first, *value = scratch + l->padded, *last = value + size;
    float *residual = last + size, *offset = residual + size, *slope = offset + size, *space = slope + size;
    const sample a = { value, point, last, residual, offset, b->slope ? slope : NULL };
    sample_state s = { 0 };
    load(l, &b->t, b->offset + at, offset, l->n);
    if (b->slope) load(l, &b->t, b->slope + at, slope, l->n);
    if (b->start) load(l, &b->t, b->start + at, point, l->stride);
    else make_start(b, &a);
    while (b->steps_before + s.steps < b->max_steps && !s.done) {
        product(l, b->packed, point, value, space);
        step_sample(&b->r, &a, &s);
    }
    store(l, &b->t, last, b->out + at);
    b->steps[index] = b->steps_before + s.steps;
    b->residuals[index] = s.relative;
    b->converged[index] = s.converged;
    /* What is not a number spreads into the padding, which must be 0 for the next sample. */
    if (!(s.relative < INFINITY)) memset(scratch, 0, scratch_size(l) * sizeof(float));
}

/* A vector that lies in two lines of the cache takes twice as long to load. */
enum { LINE = 64 };
static float *at_line(char *memory) { return (float *)(memory + (LINE - (uintptr_t)memory % LINE) % LINE); }

/* Each thread takes the next samples when it is done with some; 0 if there is no memory. */
static int solve_batch(batch *b)
{
    const layout *l = &b->l;
    const int64_t weights = packed_size(l), few = l->conv ? 1 : 4;
    const size_t share = (scratch_size(l) + 31) / 32 * 32; /* threads share no cache line */
    char *packed_memory = malloc((weights + l->n) * sizeof(float) + LINE);
    char *scratch_memory = calloc(b->threads * share * sizeof(float) + LINE, 1);
    const int ok = packed_memory && scratch_memory;
    if (ok) {
        float *packed = at_line(packed_memory), *scratch = at_line(scratch_memory);
        pack(l, b->transposed, b->weight, packed);
        fill_keep(l, packed + weights);
        b->packed = packed;
        b->r.keep = packed + weights;
#pragma omp parallel for schedule(dynamic, few) num_threads(b->threads) if (b->threads > 1)
        for (int64_t i = 0; i < b->samples; i++) solve_sample(b, i, scratch + THREAD * share);
    }
    free(packed_memory);
    free(scratch_memory);
    return ok;
}

/* How many samples did not converge, the steps of the slowest, and the largest relative residual. */
static PyObject *summary_of(const batch *b)
{
    long long failed = 0, slowest = 0;
    double largest = 0;
    for (int64_t i = 0; i < b->samples; i++) {
        failed += !b->converged[i];
        slowest = b->steps[i] > slowest ? b->steps[i] : slowest;
        if (largest == largest && !(b->residuals[i] <= largest)) largest = b->residuals[i]; /* a NaN is the largest */
    }
    return Py_BuildValue("LLd", failed, slowest, largest);
}

/* Everything that a solve is given. */
static int take_batch(arguments *a, batch *b)
{
    const int conv = (int)take_integer(a, "conv", 0, 1), ndim = conv ? 4 : 2;
    b->transposed = (int)take_integer(a, "transposed", 0, 1);
    b->r.which = (int)take_integer(a, "activation", 0, ACTIVATIONS - 1);
    const enum access slope = b->r.which == LINEAR ? READ : READ_IF_GIVEN;
    const tensor offset = take_tensor(a, "offset", READ, FLOAT32, EITHER, ndim, SHAPE(ANY, ANY, ANY, ANY));
    const enum order order = offset.order;
    const int64_t n = offset.shape[0], c = offset.shape[1], h = conv ? offset.shape[2] : 1, w = conv ? offset.shape[3] : 1;
    b->offset = offset.data;
    b->weight = take_tensor(a, "weight", READ, FLOAT32, PLAIN, ndim, SHAPE(c, c, 3, 3)).data;
    b->slope = take_tensor(a, "slope", slope, FLOAT32, order, ndim, offset.shape).data;
    b->start = take_tensor(a, "start", READ_IF_GIVEN, FLOAT32, order, ndim, offset.shape).data;
    b->base = take_tensor(a, "base", READ_IF_GIVEN, FLOAT32, order, ndim, SHAPE(1, c, h, w)).data;
    b->out = take_tensor(a, "out", WRITE, FLOAT32, order, ndim, offset.shape).data;
    b->steps = take_tensor(a, "steps", WRITE, INT64, PLAIN, 1, SHAPE(n)).data;
    b->residuals = take_tensor(a, "residual", WRITE, FLOAT32, PLAIN, 1, SHAPE(n)).data;
    b->converged = take_tensor(a, "converged", WRITE, BOOL, PLAIN, 1, SHAPE(n)).data;
    b->r.tol = take_number(a, "tol", 0, INFINITY);
    b->r.decay = take_number(a, "decay", 0, 1);
    b->r.low = take_number(a, "low", -INFINITY, 0); /* the padding is 0, and must stay so */
    b->r.high = take_number(a, "high", 0, INFINITY);
    b->steps_before = (int)take_integer(a, "steps_before", 0, INT32_MAX - 1);
    b->max_steps = (int)take_integer(a, "max_steps", b->steps_before + 1, INT32_MAX);
    b->threads = (int)take_integer(a, "threads", 1, MOST_THREADS);
    require(a, c <= MOST_CHANNELS && c * h <= LARGEST_SAMPLE && c * h * w <= LARGEST_SAMPLE, "offset", "is too large");
    if (!all_taken(a)) return 0;
    b->samples = n;
    b->l = layout_of(conv, c, h, w);
    b->r.runs = b->l.runs;
    b->r.n = b->l.n;
    b->r.stride = b->l.stride;
    b->t = (strides){ offset.strides[0], offset.strides[1], offset.strides[2], offset.strides[3] };
    return 1;
}

/* Solve z = s(Wz + offset) or, if the activation is linear, u = slope (W u + offset), with W transposed if asked for;
 * returns a summary. */
PyObject *solve(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    batch b = { 0 };
    if (!take_batch(&a, &b)) return NULL;
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = solve_batch(&b);
    Py_END_ALLOW_THREADS
    return ok ? summary_of(&b) : PyErr_NoMemory();
}
