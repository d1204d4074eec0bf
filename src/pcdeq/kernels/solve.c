/* A whole solve in one call: each sample is solved to its end while it lies in the cache.
 *
 * The steps are those of anderson.c, the products those of product.c. A batch need not wait for its slowest sample,
 * memory beyond the cache is read and written once a solve instead of once a step, and Python is called once.
 *
 * Winograd's products round a component against the largest numbers around it. While it is small beside them its growth
 * can be lost, and then it stays small: so a look at where a solve ended tells, and where a component may have been
 * hidden, the sample is solved again by plain sums. Trained networks hardly ever have one. A residual near their noise tells
 * nothing, either: where the tolerance is so fine, the last steps of each sample are by plain sums.
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
    int plain_packed;            /* whether `plain` is filled */
    float turn;                  /* the relative residual from which on products are plain: 0 never, infinite always */
    int64_t samples, plain_samples; /* and how many were solved by plain products, to the end at least */
    const float *weight, *packed, *noise, *offset, *slope, *start, *base;
    float *plain, *out, *residuals;
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

/* A component is not hidden by noise that is at most 1 / CLEAR of it: far from what could stop its growth. */
static const float CLEAR = 64;

/* Whether Winograd's noise may have hidden a component. An adjoint has signs, and no small sums to lose. The end of the
 * box is above the peak, so that the first look is mostly enough. */
static int hides(const batch *b, const float *value)
{
    if (!b->l.conv || b->r.which == LINEAR) return 0;
    if (b->r.high < INFINITY && !any_below(&b->l, value, CLEAR * b->r.high, b->noise)) return 0;
    return any_below(&b->l, value, CLEAR * peak_of(&b->l, value), b->noise);
}

/* The weight for plain products is laid out when the first sample needs it; few ever do. */
static void prepare_plain(batch *b)
{
#pragma omp critical(pcdeq_plain)
    {
        if (!b->plain_packed) pack_plain(&b->l, b->transposed, b->weight, b->plain);
        b->plain_packed = 1;
    }
}

/* A residual is above Winograd's noise by this factor where it is believed; relative ones above FAR are not waited for. */
static const float BELIEVED = 64, FAR = 1e-2f;

static float turn_of(float noise, float tol)
{
    if (4 * noise <= tol) return 0; /* even at its end a sample's residual is noise only in a small part */
    return BELIEVED * noise < FAR ? BELIEVED * noise : INFINITY;
}

/* `plain` tells whether products are plain from the start, and then whether they are at the end. */
static sample_state iterate(batch *b, int64_t at, int *plain, const sample *a, float *space)
{
    sample_state s = { 0 };
    if (*plain) prepare_plain(b);
    if (b->start) load(&b->l, &b->t, b->start + at, a->point, b->l.stride);
    else make_start(b, a);
    while (b->steps_before + s.steps < b->max_steps && !s.done) {
        if (!*plain && s.steps && s.relative <= b->turn) {
            prepare_plain(b);
            *plain = 1;
        }
        if (*plain) plain_product(&b->l, b->plain, a->point, a->value);
        else product(&b->l, b->packed, a->point, a->value, space);
        step_sample(&b->r, a, &s);
    }
    return s;
}

/* One that is done by Winograd's products though it was to turn to plain ones met its tolerance by chance, or is not a
 * number: like one that hides a component it is solved again. */
static sample_state iterate_safely(batch *b, int64_t at, const sample *a, float *space)
{
    const int always = b->turn == INFINITY;
    int plain = always;
    sample_state s = iterate(b, at, &plain, a, space);
    const int by_chance = s.done && !plain && b->turn > 0;
    if (!always && (by_chance || hides(b, s.done ? a->value : a->last))) {
        plain = 1;
        s = iterate(b, at, &plain, a, space);
    }
#pragma omp atomic
    b->plain_samples += plain;
    return s;
}

static void solve_sample(batch *b, int64_t index, float *scratch)
{
    const layout *l = &b->l;
    const int64_t size = l->runs * l->n, at = index * b->t.sample;
    float *point = scratch + l->first, *value = scratch + l->padded, *last = value + size;
    float *residual = last + size, *offset = residual + size, *slope = offset + size, *space = slope + size;
    const sample a = { value, point, last, residual, offset, b->slope ? slope : NULL };
    load(l, &b->t, b->offset + at, offset, l->n);
    if (b->slope) load(l, &b->t, b->slope + at, slope, l->n);
    const sample_state s = iterate_safely(b, at, &a, space);
    store(l, &b->t, s.done ? value : last, b->out + at);
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
    char *packed_memory = malloc((weights + 2 * l->n + plain_size(l)) * sizeof(float) + LINE);
    char *scratch_memory = calloc(b->threads * share * sizeof(float) + LINE, 1);
    const int ok = packed_memory && scratch_memory;
    if (ok) {
        float *packed = at_line(packed_memory), *scratch = at_line(scratch_memory);
        float *keep = packed + weights, *noise = keep + l->n;
        b->turn = turn_of(pack(l, b->transposed, b->weight, packed, noise), b->r.tol);
        fill_keep(l, keep);
        b->packed = packed;
        b->r.keep = keep;
        b->noise = noise;
        b->plain = noise + l->n;
#pragma omp parallel for schedule(dynamic, few) num_threads(b->threads) if (b->threads > 1)
        for (int64_t i = 0; i < b->samples; i++) solve_sample(b, i, scratch + THREAD * share);
    }
    free(packed_memory);
    free(scratch_memory);
    return ok;
}

/* How many samples did not converge, the steps of the slowest, the largest relative residual, and how many samples were
 * solved by plain products. */
static PyObject *summary_of(const batch *b)
{
    long long failed = 0, slowest = 0;
    double largest = 0;
    for (int64_t i = 0; i < b->samples; i++) {
        failed += !b->converged[i];
        slowest = b->steps[i] > slowest ? b->steps[i] : slowest;
        if (largest == largest && !(b->residuals[i] <= largest)) largest = b->residuals[i]; /* a NaN is the largest */
    }
    return Py_BuildValue("LLdL", failed, slowest, largest, (long long)b->plain_samples);
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
