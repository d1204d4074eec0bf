/* A whole solve in one call: each sample is solved to its end while it lies in the cache.
 *
 * The steps are those of anderson.c, the products those of product.c. A batch need not wait for its slowest sample,
 * memory beyond the cache is read and written once a solve instead of once a step, and Python is called once.
 */
#include "anderson.h"
#include "product.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What the threads share. */
typedef struct {
    layout l;
    strides t;
    rule r;
    int max_steps, start_is_guess;
    int64_t samples, start_stride;
    const float *packed, *offset, *slope, *start;
    float *out;
    sample_state *states;
} batch;

/* Numbers that one thread works with. */
static size_t scratch_size(const layout *l) { return l->channels * (l->stride + 5 * l->n) + TILE_SLACK; }

static void solve_sample(const batch *b, int64_t index, float *scratch)
{
    const layout *l = &b->l;
    const int64_t size = l->channels * l->n, at = index * b->t.sample;
    float *point = scratch + l->halo, *value = scratch + l->channels * l->stride, *best = value + size + TILE_SLACK;
    float *residual = best + size, *offset = residual + size, *slope = offset + size;
    const sample a = { value, point, best, residual, offset, b->slope ? slope : NULL };
    sample_state *s = &b->states[index];
    load(l, &b->t, b->offset + at, offset, l->n);
    if (b->slope) load(l, &b->t, b->slope + at, slope, l->n);
    if (b->start_is_guess) {
        memset(value, 0, size * sizeof(float));
        if (b->start) load(l, &b->t, b->start + index * b->start_stride, value, l->n);
        evaluate_sample(&b->r, &a);
        for (int64_t plane = 0; plane < l->channels; plane++)
            memcpy(point + plane * l->stride, value + plane * l->n, l->n * sizeof(float));
    } else load(l, &b->t, b->start + index * b->start_stride, point, l->stride);
    for (int step = 0; step < b->max_steps && !s->done; step++) {
        product(l, b->packed, point, value);
        step_sample(&b->r, &a, s);
    }
    store(l, &b->t, best, b->out + at);
    /* What is not a number spreads into the padding, which must be 0 for the next sample. */
    if (!(s->relative < INFINITY)) memset(scratch, 0, scratch_size(l) * sizeof(float));
}

/* Each thread has its part of the samples, always the same. */
static int solve_batch(batch *b, int transposed, const float *weight, int threads)
{
    const layout *l = &b->l;
    float *packed = malloc((packed_size(l) + l->n) * sizeof(float));
    float *scratch = calloc(threads * scratch_size(l), sizeof(float));
    const int ok = packed && scratch;
    if (ok) {
        float *keep = packed + packed_size(l);
        fill_keep(l, keep);
        pack(l, transposed, weight, packed);
        b->packed = packed;
        b->r.keep = keep;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int thread = 0; thread < threads; thread++)
            for (int64_t i = b->samples * thread / threads; i < b->samples * (thread + 1) / threads; i++)
                solve_sample(b, i, scratch + thread * scratch_size(l));
    }
    free(packed);
    free(scratch);
    return ok;
}

/* Solve z = s(Wz + offset) or, if which is LINEAR, u = slope (W u + offset), W transposed if asked for. The start is
 * given, or is s(guess + offset) for a guess of Wz that may be 0 (no address) or the same for all samples (stride 0). */
PyObject *solve(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, channels, height, width, s[4], start_stride;
    unsigned long long weight, offset, slope, start, out, states;
    int conv, transposed, threads;
    batch b = { 0 };
    if (!PyArg_ParseTuple(args, "iii(LLLL)(LLLL)KKKpKLKKffffii", &conv, &transposed, &b.r.which, &samples, &channels,
                          &height, &width, &s[0], &s[1], &s[2], &s[3], &weight, &offset, &slope, &b.start_is_guess,
                          &start, &start_stride, &out, &states, &b.r.tol, &b.r.decay, &b.r.low, &b.r.high,
                          &b.max_steps, &threads))
        return NULL;
    b.l = layout_of(conv, channels, height, width);
    b.t = (strides){ s[0], s[1], s[2], s[3] };
    b.r.planes = b.l.channels;
    b.r.n = b.l.n;
    b.r.stride = b.l.stride;
    b.samples = samples;
    b.offset = FLOATS(offset);
    b.slope = FLOATS(slope);
    b.start = FLOATS(start);
    b.start_stride = start_stride;
    b.out = FLOATS(out);
    b.states = (sample_state *)(uintptr_t)states;
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = solve_batch(&b, transposed, FLOATS(weight), threads);
    Py_END_ALLOW_THREADS
    if (!ok) return PyErr_NoMemory();
    Py_RETURN_NONE;
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
    const int64_t size = 9 * channels * channels, share = channels * (l.stride + l.n) + size;
    float *scratch = calloc(threads * share, sizeof(float)), *total = FLOATS(gradient);
    if (!scratch) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++) {
        float *own = scratch + thread * share, *here_y = own + size, *here_z = here_y + channels * l.n + l.halo;
        for (int64_t i = samples * thread / threads; i < samples * (thread + 1) / threads; i++) {
            load(&l, &t, FLOATS(z) + i * t.sample, here_z, l.stride);
            load(&l, &t, FLOATS(y) + i * t.sample, here_y, l.n);
            add_weight_gradient(&l, here_z, here_y, own);
        }
    }
    /* In the order of the threads, each of which has always the same samples: the sum is always the same. */
    memset(total, 0, size * sizeof(float));
    for (int thread = 0; thread < threads; thread++)
        for (int64_t i = 0; i < size; i++) total[i] += scratch[thread * share + i];
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}
