/* The gradient of <u, Wz> with respect to the weight of a 3x3 convolution, by Winograd's way as well.
 *
 * Where Y = Aᵀ(GwGᵀ · BᵀdB)A are the outputs of a tile d of inputs, w has the gradient Gᵀ(A Y' Aᵀ · BᵀdB)G for gradients
 * Y' of the outputs. Sums over tiles and samples are taken before the last transform, one product of matrices for each
 * of 36 frequencies: a quarter of the multiplications. Some samples are transformed at a time, each by one thread, and
 * then each frequency is summed by one, tile after tile, so that sums do not depend on how the work is shared.
 */
#include "tensors.h"
#include "winograd.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* At a time: so many tiles at most, and numbers of a frequency; the second cache holds what is summed. */
enum { TILES = 128, NUMBERS = 8192 };

typedef struct {
    layout l;
    strides t; /* of both */
    int64_t samples, at_a_time, frequency; /* numbers from one frequency to the next, of tiles */
    int threads;
    const float *z, *u;
    float *gradient;
    float *padded, *inputs, *outputs, *sums; /* scratch memory: an image a thread, tiles of z and u, sums over them */
} work;

static int64_t sum_size(const work *w) { return w->l.channels * w->l.lanes + APART; }

/* The tiles of one sample of z, or of u, at its place among those that are transformed together. */
INLINE void transform_sample(int wide, const work *w, int of_z, int64_t sample, int64_t place)
{
    const layout *l = &w->l;
    const int64_t at = place * l->tiles_down * l->tiles_across * l->lanes;
    float *padded = w->padded + THREAD * l->padded, *image = padded + l->first;
    load(l, &w->t, (of_z ? w->z : w->u) + sample * w->t.sample, image, l->stride);
    if (of_z) gather_tiles(wide, l, padded, l->tiles_down, w->frequency, w->inputs + at);
    else gather_gradients(wide, l, image, l->tiles_down, w->frequency, w->outputs + at);
}

/* Tile by tile, sample by sample, in whichever parts. */
INLINE void sum_frequency(int wide, const work *w, int64_t f, int more, int64_t tiles)
{
    const layout *l = &w->l;
    multiply(wide, more, l->channels, tiles, l->lanes, by_column(w->outputs + f * w->frequency, l->lanes),
             w->inputs + f * w->frequency, w->sums + f * sum_size(w));
}

#define FOR_BOTH_WIDTHS(NAME, PARAMETERS, ARGUMENTS)                       \
    VERSIONS static void NAME##_narrow PARAMETERS { NAME(0, ARGUMENTS); } \
    FOR_WIDE static void NAME##_wide PARAMETERS { NAME(1, ARGUMENTS); }
#define LIST(...) __VA_ARGS__
FOR_BOTH_WIDTHS(transform_sample, (const work *w, int of_z, int64_t sample, int64_t place), LIST(w, of_z, sample, place))
FOR_BOTH_WIDTHS(sum_frequency, (const work *w, int64_t f, int more, int64_t tiles), LIST(w, f, more, tiles))

/* Winograd's transform of weights, transposed, in one dimension: six frequencies, three numbers. */
INLINE void to_weight(const float *m, int64_t step, float *out, int64_t out_step)
{
    const float sum1 = m[step] + m[2 * step], difference1 = m[2 * step] - m[step];
    const float sum2 = m[3 * step] + m[4 * step], difference2 = m[3 * step] - m[4 * step];
    out[0] = m[0] / 4 - sum1 / 6 + sum2 / 24;
    out[out_step] = difference1 / 6 + difference2 / 12;
    out[2 * out_step] = (sum2 - sum1) / 6 + m[5 * step];
}

/* Whether all numbers are finite: transforms may overflow where plain sums do not. */
static int finish(const work *w)
{
    const int64_t c = w->l.channels;
    int finite = 1;
    for (int64_t o = 0; o < c; o++)
        for (int64_t i = 0; i < c; i++) {
            float m[FREQUENCIES], half[3 * IN], *out = w->gradient + 9 * (o * c + i);
            for (int f = 0; f < FREQUENCIES; f++) m[f] = w->sums[f * sum_size(w) + o * w->l.lanes + i];
            for (int x = 0; x < IN; x++) to_weight(m + x, IN, half + x, IN);
            for (int y = 0; y < 3; y++) to_weight(half + y * IN, 1, out + 3 * y, 1);
            for (int tap = 0; tap < 9; tap++) finite &= isfinite(out[tap]) != 0;
        }
    return finite;
}

static int sum_all(const work *w)
{
    const int64_t tiles = w->l.tiles_down * w->l.tiles_across;
    for (int64_t first = 0; first < w->samples; first += w->at_a_time) {
        const int64_t left = w->samples - first, count = left < w->at_a_time ? left : w->at_a_time;
#pragma omp parallel for schedule(dynamic) num_threads(w->threads) if (w->threads > 1)
        for (int64_t i = 0; i < 2 * count; i++)
            (HAS_WIDE ? transform_sample_wide : transform_sample_narrow)(w, i % 2, first + i / 2, i / 2);
#pragma omp parallel for schedule(dynamic) num_threads(w->threads) if (w->threads > 1)
        for (int64_t f = 0; f < FREQUENCIES; f++)
            (HAS_WIDE ? sum_frequency_wide : sum_frequency_narrow)(w, f, first > 0, count * tiles);
    }
    return finish(w);
}

/* 1; 0 if a number is not finite; -1 if there is no memory. */
static int make_gradient(work *w)
{
    const layout *l = &w->l;
    const int64_t tiles = l->tiles_down * l->tiles_across, most = NUMBERS / l->lanes < TILES ? NUMBERS / l->lanes : TILES;
    const int64_t wanted = most / tiles > w->threads ? most / tiles : w->threads;
    w->at_a_time = wanted < w->samples ? wanted : w->samples;
    w->frequency = w->at_a_time * tiles * l->lanes + APART;
    const int64_t images = w->threads * l->padded, transformed = FREQUENCIES * w->frequency;
    w->padded = calloc(images, sizeof(float)); /* around an image there are zeros */
    w->inputs = malloc((2 * transformed + FREQUENCIES * sum_size(w)) * sizeof(float));
    int done = -1;
    if (w->padded && w->inputs) {
        w->outputs = w->inputs + transformed;
        w->sums = w->outputs + transformed;
        done = sum_all(w);
    }
    free(w->padded);
    free(w->inputs);
    return done;
}

static int take_work(arguments *a, work *w)
{
    const tensor z = take_tensor(a, "z", READ, FLOAT32, EITHER, 4, SHAPE(ANY, ANY, ANY, ANY));
    const int64_t c = z.shape[1], h = z.shape[2], width = z.shape[3];
    w->u = take_tensor(a, "u", READ, FLOAT32, z.order, 4, z.shape).data;
    w->gradient = take_tensor(a, "gradient", WRITE, FLOAT32, PLAIN, 4, SHAPE(c, c, 3, 3)).data;
    w->threads = (int)take_integer(a, "threads", 1, MOST_THREADS);
    require(a, c <= MOST_CHANNELS && c * h <= LARGEST_SAMPLE && c * h * width <= LARGEST_SAMPLE, "z", "is too large");
    if (!all_taken(a)) return 0;
    w->samples = z.shape[0];
    w->l = layout_of(1, c, h, width);
    w->z = z.data;
    w->t = (strides){ z.strides[0], z.strides[1], z.strides[2], z.strides[3] };
    return 1;
}

/* Returned is whether all of the gradient is finite. */
PyObject *weight_gradient(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    work w = { 0 };
    if (!take_work(&a, &w)) return NULL;
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = make_gradient(&w);
    Py_END_ALLOW_THREADS
    return done < 0 ? PyErr_NoMemory() : PyBool_FromLong(done);
}
