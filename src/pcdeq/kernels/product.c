/* Wz for one sample that lies in the cache: 3x3 convolutions of few channels, and small dense matrices.
 *
 * A convolution of an image whose rows follow each other with one place of padding between them is a sum of nine
 * shifted copies of the whole image, so it vectorises over pixels whatever the width. A tile of OUTS output channels by
 * VECTORS vectors of pixels stays in registers while it runs over all input channels and taps.
 */
#include "product.h"
#include <string.h>

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
#define AT(pointer) (*(const vector *)(pointer))
#define SET(pointer) (*(vector *)(pointer))

static int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

layout layout_of(int conv, int64_t channels, int64_t height, int64_t width)
{
    layout l = { .channels = channels, .height = height, .width = width, .conv = conv };
    l.row = conv ? width + 1 : width;
    l.n = round_up(conv ? height * l.row - 1 : width);
    l.halo = conv ? round_up(l.row + 1) : 0;
    l.stride = l.n + 2 * l.halo;
    return l;
}

void fill_keep(const layout *l, float *keep)
{
    memset(keep, 0, l->n * sizeof(float));
    for (int64_t y = 0; y < l->height; y++)
        for (int64_t x = 0; x < l->width; x++) keep[y * l->row + x] = 1.0f;
}

/* Copies one sample; `to` holds zeros where nothing is written. */
void load(const layout *l, const strides *t, const float *from, float *to, int64_t stride)
{
    for (int64_t y = 0; y < l->height; y++)
        for (int64_t c = 0; c < l->channels; c++) {
            const float *in = from + y * t->row + c * t->channel;
            float *out = to + c * stride + y * l->row;
            if (t->column == 1) memcpy(out, in, l->width * sizeof(float));
            else
                for (int64_t x = 0; x < l->width; x++) out[x] = in[x * t->column];
        }
}

void store(const layout *l, const strides *t, const float *from, float *to)
{
    for (int64_t y = 0; y < l->height; y++)
        for (int64_t c = 0; c < l->channels; c++) {
            const float *in = from + c * l->n + y * l->row;
            float *out = to + y * t->row + c * t->channel;
            if (t->column == 1) memcpy(out, in, l->width * sizeof(float));
            else
                for (int64_t x = 0; x < l->width; x++) out[x * t->column] = in[x];
        }
}

/* Tiles of 3 channels by 4 vectors, or of 4 by 3 where that wastes less: twelve accumulators either way. */
static int tile_vectors(const layout *l)
{
    const int64_t vectors = l->n / LANES;
    return (vectors + 3) / 4 * 4 <= (vectors + 2) / 3 * 3 ? 4 : 3;
}

static int64_t tile_outs(const layout *l) { return 12 / tile_vectors(l); }

int64_t packed_size(const layout *l)
{
    if (!l->conv) return l->width * l->n;
    const int64_t outs = tile_outs(l);
    return (l->channels + outs - 1) / outs * outs * l->channels * 9;
}

/* Dense: column by column, each as long as a run. Convolution: tile of outputs, input channel, tap, output. */
void pack(const layout *l, int transposed, const float *weight, float *packed)
{
    memset(packed, 0, packed_size(l) * sizeof(float));
    if (!l->conv) {
        const int64_t n = l->width;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) packed[j * l->n + i] = transposed ? weight[j * n + i] : weight[i * n + j];
        return;
    }
    const int64_t channels = l->channels, outs = tile_outs(l);
    for (int64_t o = 0; o < channels; o++)
        for (int64_t i = 0; i < channels; i++)
            for (int64_t tap = 0; tap < 9; tap++) {
                const int64_t from = transposed ? (i * channels + o) * 9 + 8 - tap : (o * channels + i) * 9 + tap;
                packed[((o / outs * channels + i) * 9 + tap) * outs + o % outs] = weight[from];
            }
}

INLINE void convolve_tile(int outs, int vectors, const layout *l, const float *weight, const float *z, float *out,
                          int64_t count)
{
    vector sum[4][4];
    for (int o = 0; o < outs; o++)
        for (int v = 0; v < vectors; v++) sum[o][v] = (vector){ 0 };
    for (int64_t channel = 0; channel < l->channels; channel++, z += l->stride) {
        const float *line = z - l->row - 1;
        for (int dy = 0; dy < 3; dy++, line += l->row) {
#pragma GCC unroll 3
            for (int dx = 0; dx < 3; dx++, weight += outs) {
                /* Twelve sums, the smaller side of the tile and one more: the sixteen registers of AVX2. */
                if (outs <= vectors) {
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; v++) {
                        const vector pixels = AT(line + dx + v * LANES);
#pragma GCC unroll 4
                        for (int o = 0; o < outs; o++) sum[o][v] += weight[o] * pixels;
                    }
                } else {
#pragma GCC unroll 4
                    for (int o = 0; o < outs; o++) {
                        const vector w = weight[o] - (vector){ 0 };
#pragma GCC unroll 4
                        for (int v = 0; v < vectors; v++) sum[o][v] += w * AT(line + dx + v * LANES);
                    }
                }
            }
        }
    }
    for (int o = 0; o < outs; o++)
        if (o < count)
            for (int v = 0; v < vectors; v++) SET(out + o * l->n + v * LANES) = sum[o][v];
}

INLINE void convolve(int outs, int vectors, const layout *l, const float *packed, const float *z, float *out)
{
    const int64_t tile = vectors * LANES;
    for (int64_t o = 0; o < l->channels; o += outs)
        for (int64_t start = 0; start < l->n; start += tile) {
            /* The last tile overlaps the one before, unless the image is smaller than a tile; then it reads and
             * writes into what follows, which the halo and the caller's slack allow. */
            const int64_t at = start + tile <= l->n || l->n < tile ? start : l->n - tile;
            convolve_tile(outs, vectors, l, packed + o * l->channels * 9, z + at, out + o * l->n + at,
                          l->channels - o);
        }
}

/* Runs of 8 vectors of outputs stay in registers while all inputs are added. */
INLINE void multiply(const layout *l, const float *packed, const float *z, float *out)
{
    int64_t start = 0;
#define BLOCK(VECTORS)                                                                         \
    for (; start + (VECTORS) * LANES <= l->n; start += (VECTORS) * LANES) {                    \
        vector sum[VECTORS];                                                                   \
        for (int v = 0; v < (VECTORS); v++) sum[v] = (vector){ 0 };                            \
        for (int64_t j = 0; j < l->width; j++)                                                 \
            _Pragma("GCC unroll 10") for (int v = 0; v < (VECTORS); v++)                       \
                sum[v] += z[j] * AT(packed + j * l->n + start + v * LANES);                    \
        for (int v = 0; v < (VECTORS); v++) SET(out + start + v * LANES) = sum[v];             \
    }
    BLOCK(10)
    BLOCK(4)
    BLOCK(1)
#undef BLOCK
}

VERSIONS
void product(const layout *l, const float *packed, const float *z, float *out)
{
    if (!l->conv) multiply(l, packed, z, out);
    else if (tile_vectors(l) == 4) convolve(3, 4, l, packed, z, out);
    else convolve(4, 3, l, packed, z, out);
}

/* For one input channel and one row of taps: y of four output channels against z shifted by -1, 0, 1. */
INLINE void correlate(int outs, const layout *l, const float *line, const float *y, float *gradient, int64_t outs_stride)
{
    vector sum[4][3];
    for (int o = 0; o < outs; o++)
        for (int dx = 0; dx < 3; dx++) sum[o][dx] = (vector){ 0 };
    for (int64_t i = 0; i < l->n; i += LANES) {
#pragma GCC unroll 3
        for (int dx = 0; dx < 3; dx++) {
            const vector pixels = AT(line + dx + i);
#pragma GCC unroll 4
            for (int o = 0; o < outs; o++) sum[o][dx] += AT(y + o * l->n + i) * pixels;
        }
    }
    for (int o = 0; o < outs; o++)
        for (int dx = 0; dx < 3; dx++) {
            const vector s = sum[o][dx];
            gradient[o * outs_stride + dx] += ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        }
}

VERSIONS
void add_weight_gradient(const layout *l, const float *z, const float *y, float *gradient)
{
    const int64_t channels = l->channels;
    for (int64_t o = 0; o < channels; o += 4)
        for (int64_t i = 0; i < channels; i++)
            for (int dy = 0; dy < 3; dy++) {
                const float *line = z + i * l->stride + (dy - 1) * l->row - 1;
                float *out = gradient + (o * channels + i) * 9 + 3 * dy;
                if (o + 4 <= channels) correlate(4, l, line, y + o * l->n, out, 9 * channels);
                else
                    for (int64_t one = o; one < channels; one++)
                        correlate(1, l, line, y + one * l->n, out + (one - o) * 9 * channels, 9 * channels);
            }
}
