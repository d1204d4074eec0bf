/* The gradient of <u, Wz> with respect to the weight of a 3x3 convolution, by Winograd's way as well.
 *
 * Where Y = Aᵀ(GwGᵀ · BᵀdB)A are the outputs of a tile d of inputs, w has the gradient Gᵀ(A Y' Aᵀ · BᵀdB)G for gradients
 * Y' of the outputs. Sums over tiles are taken before the last transform, one product of matrices for each of 36
 * frequencies: a quarter of the multiplications. Some rows of tiles are transformed at a time, each by one thread, and
 * then each frequency is summed by one, tile after tile, so that sums do not depend on how the work is shared.
 *
 * As with products, what is small in a tile is rounded against what is large: a sum is off by some roundings not of what
 * is added but of Σ max|u| max|z| over the tiles, for the largest numbers of a tile in their two channels (measured: at
 * most 57 for hostile numbers, 31 for others).
 */
#include "tensors.h"
#include "winograd.h"
#include <stdlib.h>
#include <string.h>

/* So many tiles at a time, or a row of them, and half of it where channels are many: of a frequency they lie in the cache. */
enum { TILES = 128, MANY = 64 };

typedef struct {
    layout l;
    strides t;                  /* of both */
    int64_t rows, at_a_time;    /* of tiles, of all samples; those that are transformed together */
    int64_t frequency, sum;     /* numbers from one frequency to the next: of tiles, and of sums over them */
    int threads;
    const float *z, *u;
    float *gradient;
    float *bands, *inputs, *outputs, *sums; /* scratch memory: pixels of a row of tiles for each thread, tiles of z and u */
} work;

static int64_t band_size(const work *w) { return IN * w->l.stride; }

/* The pixels under a row of tiles, from the one above it on, with zeros where there are none. */
static void load_band(const work *w, const float *sample, int64_t top, float *band)
{
    layout line = w->l;
    line.height = 1;
    for (int64_t y = top; y < top + IN; y++, band += w->l.stride) {
        if (y < 0 || y >= w->l.height) memset(band, 0, w->l.stride * sizeof(float));
        else load(&line, &w->t, sample + y * w->t.row, band + w->l.lanes, w->l.stride);
    }
}

/* A row of tiles of z, or of u, at its place among those that are transformed together. */
INLINE void transform_row(int wide, const work *w, int of_z, int64_t row, int64_t place)
{
    const layout *l = &w->l;
    const int64_t at = place * l->tiles_across * l->lanes;
    float *band = w->bands + THREAD * band_size(w);
    load_band(w, (of_z ? w->z : w->u) + row / l->tiles_down * w->t.sample, row % l->tiles_down * OUT - 1, band);
    if (of_z) gather_tiles(wide, l, band, 1, w->frequency, w->inputs + at);
    else gather_gradients(wide, l, band + l->first, 1, w->frequency, w->outputs + at);
}

INLINE void sum_frequency(int wide, const work *w, int64_t f, int more, int64_t rows)
{
    const layout *l = &w->l;
    multiply(wide, more, l->channels, rows * l->tiles_across, l->lanes,
             by_column(w->outputs + f * w->frequency, l->lanes), w->inputs + f * w->frequency, w->sums + f * w->sum);
}

VERSIONS
static void transform_row_narrow(const work *w, int of_z, int64_t row, int64_t place)
{
    transform_row(0, w, of_z, row, place);
}

FOR_WIDE
static void transform_row_wide(const work *w, int of_z, int64_t row, int64_t place)
{
    transform_row(1, w, of_z, row, place);
}

VERSIONS
static void sum_frequency_narrow(const work *w, int64_t f, int more, int64_t rows) { sum_frequency(0, w, f, more, rows); }

FOR_WIDE
static void sum_frequency_wide(const work *w, int64_t f, int more, int64_t rows) { sum_frequency(1, w, f, more, rows); }

/* Winograd's transform of weights, transposed, in one dimension: six frequencies, three numbers. */
INLINE void to_weight(const vector_8 *m, int64_t step, vector_8 *out, int64_t out_step)
{
    const float sixth = 1.0f / 6, twelfth = 1.0f / 12;
    const vector_8 sum1 = m[step] + m[2 * step], difference1 = m[2 * step] - m[step];
    const vector_8 sum2 = m[3 * step] + m[4 * step], difference2 = m[3 * step] - m[4 * step];
    out[0] = 0.25f * m[0] + sixth * (0.25f * sum2 - sum1);
    out[out_step] = sixth * difference1 + twelfth * difference2;
    out[2 * out_step] = sixth * (sum2 - sum1) + m[5 * step];
}

/* The weights of one output; whether all are finite: transforms may overflow where plain sums do not. */
VERSIONS
static int finish_output(const work *w, int64_t o)
{
    const int64_t channels = w->l.channels;
    vector_8 check = { 0 };
    for (int64_t i = 0; i < channels; i += LANES) {
        vector_8 m[FREQUENCIES], half[3 * IN], whole[9];
        for (int f = 0; f < FREQUENCIES; f++) m[f] = *(const vector_8 *)(w->sums + f * w->sum + o * w->l.lanes + i);
        for (int x = 0; x < IN; x++) to_weight(m + x, IN, half + x, IN);
        for (int y = 0; y < 3; y++) to_weight(half + y * IN, 1, whole + 3 * y, 1);
        for (int tap = 0; tap < 9; tap++) check += 0.0f * whole[tap]; /* what is not finite is not 0 then */
        float *out = w->gradient + 9 * (o * channels + i);
        for (int64_t lane = 0; lane < LANES && i + lane < channels; lane++)
            for (int tap = 0; tap < 9; tap++) out[9 * lane + tap] = whole[tap][lane];
    }
    int finite = 1;
    for (int lane = 0; lane < LANES; lane++) finite &= check[lane] == 0;
    return finite;
}

static int sum_all(const work *w)
{
    for (int64_t first = 0; first < w->rows; first += w->at_a_time) {
        const int64_t left = w->rows - first, count = left < w->at_a_time ? left : w->at_a_time;
#pragma omp parallel for schedule(dynamic) num_threads(w->threads) if (w->threads > 1)
        for (int64_t i = 0; i < 2 * count; i++)
            (HAS_WIDE ? transform_row_wide : transform_row_narrow)(w, i % 2, first + i / 2, i / 2);
#pragma omp parallel for schedule(dynamic) num_threads(w->threads) if (w->threads > 1)
        for (int64_t f = 0; f < FREQUENCIES; f++)
            (HAS_WIDE ? sum_frequency_wide : sum_frequency_narrow)(w, f, first > 0, count);
    }
    int finite = 1;
#pragma omp parallel for reduction(& : finite) num_threads(w->threads) if (w->threads > 1)
    for (int64_t o = 0; o < w->l.channels; o++) finite &= finish_output(w, o);
    return finite;
}

/* 0 if a number is not finite, or if there is no memory. */
static int make_gradient(work *w)
{
    const layout *l = &w->l;
    const int64_t most = l->lanes > MANY ? TILES / 2 : TILES;
    const int64_t wanted = most > l->tiles_across ? most / l->tiles_across : 1;
    w->at_a_time = wanted < w->rows ? wanted : w->rows;
    w->frequency = w->at_a_time * l->tiles_across * l->lanes + APART;
    w->sum = l->channels * l->lanes + APART;
    w->bands = calloc(w->threads * band_size(w), sizeof(float)); /* beside an image there are zeros */
    w->inputs = malloc(FREQUENCIES * (2 * w->frequency + w->sum) * sizeof(float));
    int done = 0;
    if (w->bands && w->inputs) {
        w->outputs = w->inputs + FREQUENCIES * w->frequency;
        w->sums = w->outputs + FREQUENCIES * w->frequency;
        done = sum_all(w);
    }
    free(w->bands);
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
    w->z = z.data;
    w->t = (strides){ z.strides[0], z.strides[1], z.strides[2], z.strides[3] };
    w->l = layout_of(1, c, h, width);
    w->rows = z.shape[0] * w->l.tiles_down;
    return 1;
}

/* Returned is whether there is an answer: all of it finite, and memory to find it. */
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
    return PyBool_FromLong(done);
}
