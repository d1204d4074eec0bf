/* Convolutions of images in float64, as plain sums, for proofs: those of torch take several times as long.
 *
 * An image is copied with its padding, the channels of a pixel next to each other. Pixels side by side are then numbers
 * in a row, so that a row of the kernel is one product of matrices: its weights by some outputs of some pixels, whose
 * sums stay in registers to the end. Every term is rounded at most as often as there are terms.
 */
#include "tensors.h"
#include <stdlib.h>
#include <string.h>

enum { LANES = 8 }; /* numbers a vector */
typedef double vector __attribute__((vector_size(LANES * sizeof(double)), aligned(sizeof(double)), may_alias));
#define AT(pointer) (*(const vector *)(pointer))
#define SET(pointer) (*(vector *)(pointer))

/* Of an image. */
typedef struct { int64_t channels, height, width; } size;

typedef struct {
    size in, out, padded;      /* of images; `padded` with its zeros */
    int64_t rows, columns;     /* of the kernel */
    int64_t stride, top, left; /* from one place of the kernel to the next; zeros before the first row and column */
    int64_t lanes;             /* outputs filled up to whole vectors */
    int64_t samples;
    int threads;
    const double *x, *weight, *plus;
    double *y;
    int64_t x_strides[DIMENSIONS], y_strides[DIMENSIONS];
} work;

static int64_t numbers_of(const size *s) { return s->channels * s->height * s->width; }
static int64_t packed_count(const work *w) { return w->rows * w->columns * w->in.channels * w->lanes; }

/* In the order row of the kernel, its column, input, output filled up. */
static void pack(const work *w, double *packed)
{
    const int64_t taps = w->rows * w->columns;
    memset(packed, 0, packed_count(w) * sizeof(double));
    for (int64_t o = 0; o < w->out.channels; o++)
        for (int64_t i = 0; i < w->in.channels; i++)
            for (int64_t tap = 0; tap < taps; tap++)
                packed[(tap * w->in.channels + i) * w->lanes + o] = w->weight[(o * w->in.channels + i) * taps + tap];
}

/* One image in; the zeros around it stay. */
static void load(const work *w, int64_t sample, double *padded)
{
    const int64_t *s = w->x_strides, channels = w->in.channels;
    for (int64_t row = 0; row < w->in.height; row++) {
        const double *from = w->x + sample * s[0] + row * s[2];
        double *to = padded + ((w->top + row) * w->padded.width + w->left) * channels;
        if (s[1] == 1 && s[3] == channels) memcpy(to, from, w->in.width * channels * sizeof(double));
        else
            for (int64_t c = 0; c < channels; c++)
                for (int64_t x = 0; x < w->in.width; x++) to[x * channels + c] = from[c * s[1] + x * s[3]];
    }
}

/* One row of outputs out, with what is to be added, if anything is. */
INLINE void store(const work *w, int64_t sample, int64_t row, const double *sums)
{
    const int64_t *s = w->y_strides, start = sample * s[0] + row * s[2], channels = w->out.channels;
    for (int64_t x = 0; x < w->out.width; x++, sums += w->lanes) {
        double *restrict to = w->y + start + x * s[3];
        const double *restrict plus = w->plus ? w->plus + start + x * s[3] : NULL;
        if (s[1] == 1 && plus)
            for (int64_t c = 0; c < channels; c++) to[c] = sums[c] + plus[c];
        else if (s[1] == 1)
            for (int64_t c = 0; c < channels; c++) to[c] = sums[c];
        else
            for (int64_t c = 0; c < channels; c++) to[c * s[1]] = sums[c] + (plus ? plus[c * s[1]] : 0.0);
    }
}

/* Some pixels by some vectors of outputs. */
INLINE void multiply(const work *w, int pixels, int vectors, const double *from, const double *packed, double *sums)
{
    const int64_t numbers = w->columns * w->in.channels, step = w->stride * w->in.channels;
    vector sum[6][3];
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) sum[p][v] = (vector){ 0 };
    for (int64_t row = 0; row < w->rows; row++, from += w->padded.width * w->in.channels)
        for (int64_t j = 0; j < numbers; j++, packed += w->lanes) {
#pragma GCC unroll 6
            for (int p = 0; p < pixels; p++) {
                const vector number = from[p * step + j] - (vector){ 0 };
#pragma GCC unroll 3
                for (int v = 0; v < vectors; v++) sum[p][v] += number * AT(packed + v * LANES);
            }
        }
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) SET(sums + p * w->lanes + v * LANES) = sum[p][v];
}

/* A row of pixels in parts of nearly the same size, at most `most`. */
INLINE void multiply_row(const work *w, int most, int vectors, const double *from, const double *packed, double *sums)
{
    const int64_t step = w->stride * w->in.channels, parts = (w->out.width + most - 1) / most;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t x = w->out.width * part / parts, pixels = w->out.width * (part + 1) / parts - x;
        const double *at = from + x * step;
        double *to = sums + x * w->lanes;
        if (most > 4 && pixels == 6) multiply(w, 6, vectors, at, packed, to);
        else if (most > 4 && pixels == 5) multiply(w, 5, vectors, at, packed, to);
        else if (pixels == 4) multiply(w, 4, vectors, at, packed, to);
        else if (pixels == 3) multiply(w, 3, vectors, at, packed, to);
        else if (pixels == 2) multiply(w, 2, vectors, at, packed, to);
        else multiply(w, 1, vectors, at, packed, to);
    }
}

/* Two or three vectors of outputs at a time are twelve sums, for which there must be registers of that width. */
static int has_wide_registers(void)
{
#if CLONED
    return __builtin_cpu_supports("avx512f");
#else
    return 0;
#endif
}

VERSIONS
static void convolve_sample(const work *w, int64_t sample, int wide, const double *packed, double *padded, double *sums)
{
    load(w, sample, padded);
    for (int64_t row = 0; row < w->out.height; row++) {
        const double *from = padded + row * w->stride * w->padded.width * w->in.channels;
        int64_t o = 0;
        for (; wide && (w->lanes - o == 2 * LANES || w->lanes - o >= 4 * LANES); o += 2 * LANES)
            multiply_row(w, 6, 2, from, packed + o, sums + o);
        if (wide && w->lanes - o == 3 * LANES) multiply_row(w, 4, 3, from, packed + o, sums + o);
        else
            for (; o < w->lanes; o += LANES) multiply_row(w, 6, 1, from, packed + o, sums + o);
        store(w, sample, row, sums);
    }
}

/* 0 if there is no memory. */
static int convolve_all(const work *w)
{
    const int64_t sums = w->out.width * w->lanes, share = (numbers_of(&w->padded) + sums + 15) / 16 * 16;
    double *packed = malloc(packed_count(w) * sizeof(double)), *scratch = calloc(w->threads * share, sizeof(double));
    const int ok = packed && scratch, wide = has_wide_registers();
    if (ok) {
        pack(w, packed);
#pragma omp parallel for schedule(dynamic) num_threads(w->threads) if (w->threads > 1)
        for (int64_t i = 0; i < w->samples; i++) {
            double *own = scratch + THREAD * share;
            convolve_sample(w, i, wide, packed, own + sums, own);
        }
    }
    free(packed);
    free(scratch);
    return ok;
}

/* How many places there are for a kernel of `size` in `padded` numbers; 0 if it is larger. */
static int64_t places(int64_t padded, int64_t size, int64_t stride) { return padded < size ? 0 : (padded - size) / stride + 1; }

static int take_work(arguments *a, work *w)
{
    w->rows = take_integer(a, "rows", 1, MOST_CHANNELS);
    w->columns = take_integer(a, "columns", 1, MOST_CHANNELS);
    w->stride = take_integer(a, "stride", 1, MOST_CHANNELS);
    w->top = take_integer(a, "top", 0, MOST_CHANNELS);
    w->left = take_integer(a, "left", 0, MOST_CHANNELS);
    const tensor x = take_tensor(a, "x", READ, FLOAT64, EITHER, 4, SHAPE(ANY, ANY, ANY, ANY));
    if (a->failed) return 0;
    const int64_t n = x.shape[0], c = x.shape[1];
    w->in = (size){ c, x.shape[2], x.shape[3] };
    w->padded = (size){ c, x.shape[2] + 2 * w->top, x.shape[3] + 2 * w->left };
    const int64_t height = places(w->padded.height, w->rows, w->stride), width = places(w->padded.width, w->columns, w->stride);
    require(a, height > 0 && width > 0, "x", "is smaller than the kernel");
    require(a, c <= MOST_CHANNELS && w->padded.width <= LARGEST_SAMPLE / c / w->padded.height, "x", "is too large");
    const enum order order = c == 1 || x.shape[2] * x.shape[3] == 1 ? EITHER : x.order; /* which x may not tell */
    const tensor y = take_tensor(a, "y", WRITE, FLOAT64, order, 4, SHAPE(n, ANY, height, width));
    w->out = (size){ y.shape[1], height, width };
    w->lanes = (y.shape[1] + LANES - 1) / LANES * LANES;
    const tensor weight = take_tensor(a, "weight", READ, FLOAT64, PLAIN, 4, SHAPE(y.shape[1], c, w->rows, w->columns));
    require(a, y.shape[1] <= MOST_CHANNELS && weight.bytes <= LARGEST_SAMPLE, "weight", "is too large");
    const tensor plus = take_tensor(a, "plus", READ_IF_GIVEN, FLOAT64, y.order, 4, y.shape);
    w->threads = (int)take_integer(a, "threads", 1, MOST_THREADS);
    if (!all_taken(a)) return 0;
    w->samples = n;
    w->x = x.data;
    w->weight = weight.data;
    w->y = y.data;
    w->plus = plus.data;
    memcpy(w->x_strides, x.strides, sizeof x.strides);
    memcpy(w->y_strides, y.strides, sizeof y.strides);
    return 1;
}

/* y = the convolution of x, and `plus`, if given. */
PyObject *convolve(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    work w = { 0 };
    if (!take_work(&a, &w)) return NULL;
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = convolve_all(&w);
    Py_END_ALLOW_THREADS
    if (!ok) return PyErr_NoMemory();
    Py_RETURN_TRUE;
}
