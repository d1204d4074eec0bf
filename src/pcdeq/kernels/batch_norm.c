/* Batch norm and 3x3 max pooling of stride 1 on channels-last float32 images, forward and backward.
 *
 * torch's own are slow where channels are few: of a training step of the MC network they took a third.
 * Both run over memory as it lies. For batch norm an image is a matrix of `rows` places by `channels`,
 * taken eight rows at a time, a tile whose length is a multiple of every vector width.
 */
#include "kernels.h"
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

/* y = weight (x - mean) / sqrt(variance + eps) + bias by the statistics of the batch, which are kept as mean and
 * 1 / sqrt(...), and of which the running statistics take over a part. */
PyObject *batch_norm_forward(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, channels;
    unsigned long long x_, weight_, bias_, y_, mean_, inverse_, running_mean_, running_variance_;
    float eps, momentum;
    int threads;
    if (!PyArg_ParseTuple(args, "LLKKKKKKKKffi", &rows, &channels, &x_, &weight_, &bias_, &y_, &mean_, &inverse_,
                          &running_mean_, &running_variance_, &momentum, &eps, &threads))
        return NULL;
    const float *x = FLOATS(x_), *weight = FLOATS(weight_), *bias = FLOATS(bias_);
    float *y = FLOATS(y_), *mean = FLOATS(mean_), *inverse = FLOATS(inverse_);
    float *running_mean = FLOATS(running_mean_), *running_variance = FLOATS(running_variance_);
    const int64_t tile = TILE * channels;
    float *tiles = calloc(3 * tile, sizeof(float));
    double *totals = malloc(2 * channels * sizeof(double));
    int ok = tiles && totals;
    if (ok) {
        float *scale = tiles, *shift = tiles + tile, *zero = tiles + 2 * tile;
        Py_BEGIN_ALLOW_THREADS
        ok = sum_all(rows, channels, threads, x, x, zero, zero, totals);
        for (int64_t c = 0; ok && c < channels; c++) shift[c] = mean[c] = (float)(totals[c] / rows);
        repeat(channels, shift);
        ok = ok && sum_all(rows, channels, threads, x, x, shift, shift, totals);
        for (int64_t c = 0; ok && c < channels; c++) {
            const double variance = totals[channels + c] / rows;
            inverse[c] = (float)(1 / sqrt(variance + eps));
            scale[c] = weight[c] * inverse[c];
            shift[c] = bias[c] - mean[c] * scale[c];
            running_mean[c] += momentum * (mean[c] - running_mean[c]);
            running_variance[c] += momentum * ((float)(variance * rows / (rows - 1)) - running_variance[c]);
        }
        repeat(channels, scale);
        repeat(channels, shift);
        if (ok) combine_all(rows, channels, threads, x, NULL, scale, NULL, shift, y);
        Py_END_ALLOW_THREADS
    }
    free(tiles);
    free(totals);
    if (!ok) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* The same by the running statistics. */
PyObject *batch_norm_inference(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, channels;
    unsigned long long x, weight, bias, mean, variance, y;
    float eps;
    int threads;
    if (!PyArg_ParseTuple(args, "LLKKKKKKfi", &rows, &channels, &x, &weight, &bias, &mean, &variance, &y, &eps, &threads))
        return NULL;
    const int64_t tile = TILE * channels;
    float *tiles = malloc(2 * tile * sizeof(float));
    if (!tiles) return PyErr_NoMemory();
    float *scale = tiles, *shift = tiles + tile;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t c = 0; c < channels; c++) {
        scale[c] = (float)(FLOATS(weight)[c] / sqrt((double)FLOATS(variance)[c] + eps));
        shift[c] = FLOATS(bias)[c] - FLOATS(mean)[c] * scale[c];
    }
    repeat(channels, scale);
    repeat(channels, shift);
    combine_all(rows, channels, threads, FLOATS(x), NULL, scale, NULL, shift, FLOATS(y));
    Py_END_ALLOW_THREADS
    free(tiles);
    Py_RETURN_NONE;
}

/* The gradients with respect to x, weight and bias. */
PyObject *batch_norm_backward(PyObject *self, PyObject *args)
{
    (void)self;
    long long rows, channels;
    unsigned long long grad_, x_, weight_, mean_, inverse_, grad_x_, grad_weight_, grad_bias_;
    int threads;
    if (!PyArg_ParseTuple(args, "LLKKKKKKKKi", &rows, &channels, &grad_, &x_, &weight_, &mean_, &inverse_, &grad_x_,
                          &grad_weight_, &grad_bias_, &threads))
        return NULL;
    const float *grad = FLOATS(grad_), *x = FLOATS(x_), *weight = FLOATS(weight_);
    const float *mean = FLOATS(mean_), *inverse = FLOATS(inverse_);
    float *grad_weight = FLOATS(grad_weight_), *grad_bias = FLOATS(grad_bias_);
    const int64_t tile = TILE * channels;
    float *tiles = calloc(4 * tile, sizeof(float));
    double *totals = malloc(2 * channels * sizeof(double));
    int ok = tiles && totals;
    if (ok) {
        float *scale = tiles, *slope = tiles + tile, *shift = tiles + 2 * tile, *zero = tiles + 3 * tile;
        Py_BEGIN_ALLOW_THREADS
        memcpy(shift, mean, channels * sizeof(float));
        repeat(channels, shift);
        ok = sum_all(rows, channels, threads, grad, x, zero, shift, totals);
        for (int64_t c = 0; ok && c < channels; c++) {
            const double sum = totals[c], along = totals[channels + c] * inverse[c];
            grad_bias[c] = (float)sum;
            grad_weight[c] = (float)along;
            scale[c] = weight[c] * inverse[c];
            slope[c] = (float)(-scale[c] * along * inverse[c] / rows);
            shift[c] = (float)(-scale[c] * sum / rows - slope[c] * mean[c]);
        }
        repeat(channels, scale);
        repeat(channels, slope);
        repeat(channels, shift);
        if (ok) combine_all(rows, channels, threads, grad, x, scale, slope, shift, FLOATS(grad_x_));
        Py_END_ALLOW_THREADS
    }
    free(tiles);
    free(totals);
    if (!ok) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* best = max(best, x) and which = code where x wins, over n numbers; the first maximum stays, as in torch. */
VERSIONS
static void take_larger(int64_t n, const float *restrict x, int code, float *restrict best, int32_t *restrict which)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float old = best[i], new = x[i];
        const int wins = (new > old) | (new != new); /* a NaN wins */
        best[i] = wins ? new : old;
        which[i] = wins ? code : which[i];
    }
}

/* out += grad where which == code, over n numbers. */
VERSIONS
static void give_back(int64_t n, const float *restrict grad, int code, const int32_t *restrict which,
                      float *restrict out)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] += which[i] == code ? grad[i] : 0.0f;
}

/* The place in a row of outputs, and in a row of inputs, where those that look by dx to the side begin. */
#define OUT_AT(dx) ((dx) < 0 ? channels : 0)
#define IN_AT(dx) ((dx) > 0 ? channels : 0)
#define COUNT(dx) (row - ((dx) ? channels : 0))

PyObject *max_pool_forward(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, height, width, channels;
    unsigned long long x_, out_, which_;
    int threads;
    if (!PyArg_ParseTuple(args, "LLLLKKKi", &samples, &height, &width, &channels, &x_, &out_, &which_, &threads))
        return NULL;
    const float *x = FLOATS(x_);
    float *out = FLOATS(out_);
    int32_t *which = INTS(which_);
    const int64_t row = width * channels;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic, 32) num_threads(threads) if (threads > 1)
    for (int64_t line = 0; line < samples * height; line++) {
        const int64_t y = line % height, at = line * row;
        for (int64_t i = 0; i < row; i++) out[at + i] = -INFINITY, which[at + i] = 4;
        for (int dy = -1; dy <= 1; dy++) {
            if (y + dy < 0 || y + dy >= height) continue;
            for (int dx = -1; dx <= 1; dx++)
                take_larger(COUNT(dx), x + at + dy * row + IN_AT(dx), 3 * (dy + 1) + dx + 1, out + at + OUT_AT(dx),
                            which + at + OUT_AT(dx));
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *max_pool_backward(PyObject *self, PyObject *args)
{
    (void)self;
    long long samples, height, width, channels;
    unsigned long long grad_, which_, out_;
    int threads;
    if (!PyArg_ParseTuple(args, "LLLLKKKi", &samples, &height, &width, &channels, &grad_, &which_, &out_, &threads))
        return NULL;
    const float *grad = FLOATS(grad_);
    const int32_t *which = INTS(which_);
    float *out = FLOATS(out_);
    const int64_t row = width * channels;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for schedule(dynamic, 32) num_threads(threads) if (threads > 1)
    for (int64_t line = 0; line < samples * height; line++) {
        /* Input row y is seen by output row y - dy under the code of (dy, dx). */
        const int64_t y = line % height, at = line * row;
        memset(out + at, 0, row * sizeof(float));
        for (int dy = -1; dy <= 1; dy++) {
            if (y - dy < 0 || y - dy >= height) continue;
            const int64_t from = at - dy * row;
            for (int dx = -1; dx <= 1; dx++)
                give_back(COUNT(dx), grad + from + OUT_AT(dx), 3 * (dy + 1) + dx + 1, which + from + OUT_AT(dx),
                          out + at + IN_AT(dx));
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
