/* Batch norm on channels-last float32 images, forward and backward.
 *
 * torch's own is slow where channels are few: of a training step of the MC network it took a fifth.
 * An image is a matrix of `rows` places by `channels`, as it lies in memory, taken eight rows at a time, a tile whose
 * length is a multiple of every vector width.
 */
#include "tensors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 8, BLOCK = 64 }; /* rows a tile; tiles summed in float before they are added in double */

/* sums[c] += Σ (a - from), and products[c] += Σ (a - from) (b - shift), over rows of a and b. */
VERSIONS
static void sum_rows(int64_t rows, int64_t channels, const float *a, const float *b, const float *from,
                     const float *shift, float *restrict scratch, double *restrict sums, double *restrict products)
{
    const int64_t tile = TILE * channels, size = rows * channels;
    float *restrict s = scratch, *restrict p = scratch + tile;
    for (int64_t start = 0; start < size; start += BLOCK * tile) {
        const int64_t end = start + BLOCK * tile < size ? start + BLOCK * tile : size;
        memset(scratch, 0, 2 * tile * sizeof(float));
        int64_t at = start;
        for (; at + tile <= end; at += tile) {
#pragma omp simd
            for (int64_t j = 0; j < tile; j++) {
                const float d = a[at + j] - from[j];
                s[j] += d;
                p[j] += d * (b[at + j] - shift[j]);
            }
        }
        for (int64_t j = 0; at + j < end; j++) {
            const float d = a[at + j] - from[j];
            s[j] += d;
            p[j] += d * (b[at + j] - shift[j]);
        }
        for (int64_t row = 0; row < TILE; row++)
            for (int64_t c = 0; c < channels; c++) {
                sums[c] += s[row * channels + c];
                products[c] += p[row * channels + c];
            }
    }
}

/* out = scale * a + slope * b + shift, channel by channel. */
VERSIONS
static void combine_rows(int64_t rows, int64_t channels, const float *a, const float *b, const float *scale,
                         const float *slope, const float *shift, float *restrict out)
{
    const int64_t tile = TILE * channels, size = rows * channels;
    int64_t at = 0;
    for (; at + tile <= size; at += tile) {
#pragma omp simd
        for (int64_t j = 0; j < tile; j++) out[at + j] = scale[j] * a[at + j] + slope[j] * b[at + j] + shift[j];
    }
    for (int64_t j = 0; at + j < size; j++) out[at + j] = scale[j] * a[at + j] + slope[j] * b[at + j] + shift[j];
}

/* out = scale * a + shift, channel by channel. */
VERSIONS
static void scale_rows(int64_t rows, int64_t channels, const float *a, const float *scale, const float *shift,
                       float *restrict out)
{
    const int64_t tile = TILE * channels, size = rows * channels;
    int64_t at = 0;
    for (; at + tile <= size; at += tile) {
#pragma omp simd
        for (int64_t j = 0; j < tile; j++) out[at + j] = scale[j] * a[at + j] + shift[j];
    }
    for (int64_t j = 0; at + j < size; j++) out[at + j] = scale[j] * a[at + j] + shift[j];
}

static void repeat(int64_t channels, float *tile)
{
    for (int64_t j = channels; j < TILE * channels; j++) tile[j] = tile[j - channels];
}

/* The first row of a part; every part but the last has whole tiles. Few rows are all in the last part. */
static int64_t first_row(int64_t rows, int64_t part)
{
    const int64_t tiles = rows < 64 * TILE ? 0 : rows / TILE;
    return part == PARTS ? rows : PART_FIRST(tiles, part) * TILE;
}

/* Sum over all rows. totals holds `channels` sums and as many products. */
static int sum_all(int64_t rows, int64_t channels, int threads, const float *a, const float *b, const float *from,
                   const float *shift, double *totals)
{
    float *scratch = malloc((size_t)PARTS * 2 * TILE * channels * sizeof(float));
    double *parts = calloc((size_t)PARTS * 2 * channels, sizeof(double));
    if (scratch && parts) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
        for (int i = 0; i < PARTS; i++) {
            const int64_t first = first_row(rows, i), last = first_row(rows, i + 1);
            if (first == last) continue;
            double *part = parts + 2 * channels * i;
            sum_rows(last - first, channels, a + first * channels, b + first * channels, from, shift,
                     scratch + 2 * TILE * channels * i, part, part + channels);
        }
        memset(totals, 0, 2 * channels * sizeof(double));
        for (int i = 0; i < PARTS; i++)
            for (int64_t c = 0; c < 2 * channels; c++) totals[c] += parts[2 * channels * i + c];
    }
    const int ok = scratch && parts;
    free(scratch);
    free(parts);
    return ok;
}

static void combine_all(int64_t rows, int64_t channels, int threads, const float *a, const float *b,
                        const float *scale, const float *slope, const float *shift, float *out)
{
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int i = 0; i < PARTS; i++) {
        const int64_t first = first_row(rows, i), last = first_row(rows, i + 1);
        const int64_t at = first * channels;
        if (b) combine_rows(last - first, channels, a + at, b + at, scale, slope, shift, out + at);
        else scale_rows(last - first, channels, a + at, scale, shift, out + at);
    }
}

/* What the three functions are given; each has some of it. The statistics are mean, 1 / sqrt(variance + eps), and the
 * variance as running statistics count it, a row each. */
typedef struct {
    int64_t rows, channels;
    const float *x, *weight, *bias, *grad, *mean, *variance;
    float *y, *statistics, *grad_x, *grad_weight, *grad_bias, eps;
    int threads;
} normalisation;

static tensor take_images(arguments *a, normalisation *b)
{
    const tensor x = take_tensor(a, "x", READ, FLOAT32, CHANNELS_LAST, 4, SHAPE(ANY, ANY, ANY, ANY));
    require(a, x.shape[1] <= MOST_CHANNELS, "x", "is too large");
    b->channels = x.shape[1];
    b->rows = x.shape[0] * x.shape[2] * x.shape[3];
    return x;
}

/* y = weight (x - mean) / sqrt(variance + eps) + bias by the statistics of the batch, which are kept. */
static int forward(const normalisation *b)
{
    const int64_t rows = b->rows, channels = b->channels, tile = TILE * channels;
    float *mean = b->statistics, *inverse = mean + channels, *variances = inverse + channels;
    float *tiles = calloc(3 * tile, sizeof(float));
    double *totals = malloc(2 * channels * sizeof(double));
    int ok = tiles && totals;
    if (ok) {
        float *scale = tiles, *shift = tiles + tile, *zero = tiles + 2 * tile;
        ok = sum_all(rows, channels, b->threads, b->x, b->x, zero, zero, totals);
        for (int64_t c = 0; ok && c < channels; c++) shift[c] = mean[c] = (float)(totals[c] / rows);
        repeat(channels, shift);
        ok = ok && sum_all(rows, channels, b->threads, b->x, b->x, shift, shift, totals);
        for (int64_t c = 0; ok && c < channels; c++) {
            const double variance = totals[channels + c] / rows;
            inverse[c] = (float)(1 / sqrt(variance + b->eps));
            variances[c] = (float)(totals[channels + c] / (rows - 1));
            scale[c] = b->weight[c] * inverse[c];
            shift[c] = b->bias[c] - mean[c] * scale[c];
        }
        repeat(channels, scale);
        repeat(channels, shift);
        if (ok) combine_all(rows, channels, b->threads, b->x, NULL, scale, NULL, shift, b->y);
    }
    free(tiles);
    free(totals);
    return ok;
}

/* The same by the running statistics. */
static int inference(const normalisation *b)
{
    const int64_t channels = b->channels, tile = TILE * channels;
    float *tiles = malloc(2 * tile * sizeof(float));
    if (!tiles) return 0;
    float *scale = tiles, *shift = tiles + tile;
    for (int64_t c = 0; c < channels; c++) {
        scale[c] = (float)(b->weight[c] / sqrt((double)b->variance[c] + b->eps));
        shift[c] = b->bias[c] - b->mean[c] * scale[c];
    }
    repeat(channels, scale);
    repeat(channels, shift);
    combine_all(b->rows, channels, b->threads, b->x, NULL, scale, NULL, shift, b->y);
    free(tiles);
    return 1;
}

/* The gradients with respect to x, weight and bias. */
static int backward(const normalisation *b)
{
    const int64_t rows = b->rows, channels = b->channels, tile = TILE * channels;
    const float *mean = b->statistics, *inverse = mean + channels;
    float *tiles = calloc(4 * tile, sizeof(float));
    double *totals = malloc(2 * channels * sizeof(double));
    int ok = tiles && totals;
    if (ok) {
        float *scale = tiles, *slope = tiles + tile, *shift = tiles + 2 * tile, *zero = tiles + 3 * tile;
        memcpy(shift, mean, channels * sizeof(float));
        repeat(channels, shift);
        ok = sum_all(rows, channels, b->threads, b->grad, b->x, zero, shift, totals);
        for (int64_t c = 0; ok && c < channels; c++) {
            const double sum = totals[c], along = totals[channels + c] * inverse[c];
            b->grad_bias[c] = (float)sum;
            b->grad_weight[c] = (float)along;
            scale[c] = b->weight[c] * inverse[c];
            slope[c] = (float)(-scale[c] * along * inverse[c] / rows);
            shift[c] = (float)(-scale[c] * sum / rows - slope[c] * mean[c]);
        }
        repeat(channels, scale);
        repeat(channels, slope);
        repeat(channels, shift);
        if (ok) combine_all(rows, channels, b->threads, b->grad, b->x, scale, slope, shift, b->grad_x);
    }
    free(tiles);
    free(totals);
    return ok;
}

static PyObject *run(int (*work)(const normalisation *), const normalisation *b)
{
    int ok;
    Py_BEGIN_ALLOW_THREADS
    ok = work(b);
    Py_END_ALLOW_THREADS
    if (!ok) return PyErr_NoMemory();
    Py_RETURN_TRUE;
}

PyObject *batch_norm_forward(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    normalisation b = { 0 };
    const tensor x = take_images(&a, &b);
    b.x = x.data;
    b.weight = take_tensor(&a, "weight", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.bias = take_tensor(&a, "bias", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.y = take_tensor(&a, "y", WRITE, FLOAT32, CHANNELS_LAST, 4, x.shape).data;
    b.statistics = take_tensor(&a, "statistics", WRITE, FLOAT32, PLAIN, 2, SHAPE(3, b.channels)).data;
    b.eps = take_number(&a, "eps", -INFINITY, INFINITY);
    b.threads = (int)take_integer(&a, "threads", 1, MOST_THREADS);
    return all_taken(&a) ? run(forward, &b) : NULL;
}

PyObject *batch_norm_inference(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    normalisation b = { 0 };
    const tensor x = take_images(&a, &b);
    b.x = x.data;
    b.weight = take_tensor(&a, "weight", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.bias = take_tensor(&a, "bias", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.mean = take_tensor(&a, "mean", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.variance = take_tensor(&a, "variance", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.y = take_tensor(&a, "y", WRITE, FLOAT32, CHANNELS_LAST, 4, x.shape).data;
    b.eps = take_number(&a, "eps", -INFINITY, INFINITY);
    b.threads = (int)take_integer(&a, "threads", 1, MOST_THREADS);
    return all_taken(&a) ? run(inference, &b) : NULL;
}

PyObject *batch_norm_backward(PyObject *self, PyObject *const *objects, Py_ssize_t count)
{
    (void)self;
    arguments a = { .objects = objects, .count = count };
    normalisation b = { 0 };
    const tensor x = take_images(&a, &b);
    b.x = x.data;
    b.grad = take_tensor(&a, "grad", READ, FLOAT32, CHANNELS_LAST, 4, x.shape).data;
    b.weight = take_tensor(&a, "weight", READ, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.statistics = take_tensor(&a, "statistics", READ, FLOAT32, PLAIN, 2, SHAPE(3, b.channels)).data;
    b.grad_x = take_tensor(&a, "grad_x", WRITE, FLOAT32, CHANNELS_LAST, 4, x.shape).data;
    b.grad_weight = take_tensor(&a, "grad_weight", WRITE, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.grad_bias = take_tensor(&a, "grad_bias", WRITE, FLOAT32, PLAIN, 1, SHAPE(b.channels)).data;
    b.threads = (int)take_integer(&a, "threads", 1, MOST_THREADS);
    return all_taken(&a) ? run(backward, &b) : NULL;
}
