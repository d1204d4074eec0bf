/* A whole solve in one call: each sample is solved to its end while it lies in the cache.
 *
 * The steps are those of anderson.c, the products those of product.c. A batch need not wait for its slowest sample,
 * memory beyond the cache is read and written once a solve instead of once a step, and Python is called once.
 */
#include "solve.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    const int linear = b->r.which == LINEAR;
    float *guess = a->value;
    memset(guess, 0, size * sizeof(float));
    if (b->base) load(l, &b->t, b->base, guess, l->n);
    make_admissible(size, !linear, guess);
    if (b->response) { /* dense: one run */
        float *point = a->point, *base = a->residual;
        memcpy(base, guess, size * sizeof(float));
        if (!linear) evaluate_sample(&b->r, a);
        for (int64_t i = 0; i < l->channels; i++)
            point[i] = linear ? b->mean[i] * a->offset[i] : a->value[i] - b->mean[i];
        product(l, b->response, point, guess, NULL);
        for (int64_t i = 0; i < size; i++) guess[i] += base[i];
        make_admissible(size, !linear, guess);
    }
    evaluate_sample(&b->r, a);
    for (int64_t run = 0; run < l->runs; run++)
        memcpy(a->point + run * l->stride, a->value + run * l->n, l->n * sizeof(float));
}

static void solve_sample(const batch *b, int64_t index, float *scratch)
{
    const layout *l = &b->l;
    const int64_t size = l->runs * l->n, at = index * b->t.sample;
    float *point = scratch + l->first, *value = scratch + l->padded, *best = value + size;
    float *residual = best + size, *offset = residual + size, *slope = offset + size, *space = slope + size;
    const sample a = { value, point, best, residual, offset, b->slope ? slope : NULL };
    sample_state s = { 0 };
    load(l, &b->t, b->offset + at, offset, l->n);
    if (b->slope) load(l, &b->t, b->slope + at, slope, l->n);
    if (b->start) load(l, &b->t, b->start + at, point, l->stride);
    else make_start(b, &a);
    while (b->steps_before + s.steps < b->max_steps && !s.done) {
        product(l, b->packed, point, value, space);
        step_sample(&b->r, &a, &s);
    }
    store(l, &b->t, best, b->out + at);
    b->steps[index] = b->steps_before + s.steps;
    b->residuals[index] = s.relative;
    b->converged[index] = s.relative < b->r.tol;
    /* What is not a number spreads into the padding, which must be 0 for the next sample. */
    if (!(s.relative < INFINITY)) memset(scratch, 0, scratch_size(l) * sizeof(float));
}

/* A vector that lies in two lines of the cache takes twice as long to load. */
enum { LINE = 64 };
static float *at_line(char *memory) { return (float *)(memory + (LINE - (uintptr_t)memory % LINE) % LINE); }

/* Each thread takes the next samples when it is done with some. */
int solve_batch(batch *b, int transposed, const float *weight, const float *response, int threads)
{
    const layout *l = &b->l;
    const int64_t weights = packed_size(l);
    const size_t share = (scratch_size(l) + 31) / 32 * 32; /* threads share no cache line */
    char *packed_memory = malloc((2 * weights + l->n) * sizeof(float) + LINE);
    char *scratch_memory = calloc(threads * share * sizeof(float) + LINE, 1);
    const int ok = packed_memory && scratch_memory;
    if (ok) {
        float *packed = at_line(packed_memory), *scratch = at_line(scratch_memory);
        pack(l, transposed, weight, packed);
        if (response) pack(l, transposed, response, packed + weights);
        fill_keep(l, packed + 2 * weights);
        b->packed = packed;
        b->response = response ? packed + weights : NULL;
        b->r.keep = packed + 2 * weights;
        const int64_t few = l->conv ? 1 : 4;
#pragma omp parallel for schedule(dynamic, few) num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < b->samples; i++) solve_sample(b, i, scratch + THREAD * share);
    }
    free(packed_memory);
    free(scratch_memory);
    return ok;
}

void set_layout(batch *b, int64_t samples, layout l, strides t)
{
    b->samples = samples;
    b->l = l;
    b->t = t;
    b->r.runs = l.runs;
    b->r.n = l.n;
    b->r.stride = l.stride;
}

PyObject *summary_of(const batch *b)
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

/* Solve z = s(Wz + offset) or, if which is LINEAR, u = slope (W u + offset), with W transposed if asked for; returns
 * its summary. */
PyObject *solve(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, channels, height, width, s[4];
    unsigned long long weight, response, offset, slope, start, base, mean, out, steps, residuals, converged;
    int conv, transposed, threads;
    batch b = { 0 };
    if (!PyArg_ParseTuple(args, "iii(LLLL)(LLLL)(KKKKKKK)(KKKK)ffffiii", &conv, &transposed, &b.r.which, &samples,
                          &channels, &height, &width, &s[0], &s[1], &s[2], &s[3], &weight, &offset, &slope, &start, &base,
                          &mean, &response, &out, &steps, &residuals, &converged, &b.r.tol, &b.r.decay, &b.r.low,
                          &b.r.high, &b.steps_before, &b.max_steps, &threads))
        return NULL;
    set_layout(&b, samples, layout_of(conv, channels, height, width), (strides){ s[0], s[1], s[2], s[3] });
    b.offset = FLOATS(offset);
    b.slope = FLOATS(slope);
    b.start = FLOATS(start);
    b.base = FLOATS(base);
    b.mean = FLOATS(mean);
    b.out = FLOATS(out);
    b.residuals = FLOATS(residuals);
    b.steps = (int64_t *)(uintptr_t)steps;
    b.converged = (unsigned char *)(uintptr_t)converged;
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = solve_batch(&b, transposed, FLOATS(weight), FLOATS(response), threads);
    Py_END_ALLOW_THREADS
    return ok ? summary_of(&b) : PyErr_NoMemory();
}

/* The gradient of Σ <y, Wz> over the samples with respect to the weight of a 3x3 convolution. */
PyObject *conv_weight_gradient(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, channels, height, width, s[4];
    unsigned long long z, y, gradient;
    int threads;
    if (!PyArg_ParseTuple(args, "(LLLL)(LLLL)KKKi", &samples, &channels, &height, &width, &s[0], &s[1], &s[2], &s[3],
                          &z, &y, &gradient, &threads))
        return NULL;
    const layout l = layout_of(1, channels, height, width);
    const strides t = { s[0], s[1], s[2], s[3] };
    const int64_t size = 9 * channels * l.lanes, share = l.runs * l.n + l.padded;
    float *gradients = calloc(PARTS * size, sizeof(float)), *scratch = calloc(threads * share, sizeof(float));
    float *total = FLOATS(gradient);
    if (!gradients || !scratch) {
        free(gradients);
        free(scratch);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int part = 0; part < PARTS; part++) {
        float *here_y = scratch + THREAD * share, *here_z = here_y + l.runs * l.n + l.first;
        for (int64_t i = PART_FIRST(samples, part); i < PART_FIRST(samples, part + 1); i++) {
            load(&l, &t, FLOATS(z) + i * t.sample, here_z, l.stride);
            load(&l, &t, FLOATS(y) + i * t.sample, here_y, l.n);
            add_weight_gradient(&l, here_z, here_y, gradients + part * size);
        }
    }
    for (int64_t o = 0; o < channels; o++)
        for (int64_t i = 0; i < channels; i++)
            for (int64_t tap = 0; tap < 9; tap++) {
                float sum = 0.0f;
                for (int part = 0; part < PARTS; part++)
                    sum += gradients[part * size + (tap * channels + i) * l.lanes + o];
                total[(o * channels + i) * 9 + tap] = sum;
            }
    free(gradients);
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}
