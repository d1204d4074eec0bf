/* Wz for one sample that lies in the cache: 3x3 convolutions, and small dense matrices.
 *
 * Convolutions take Winograd's way, F(4x4, 3x3) (Lavin & Gray 2016): an image is cut into tiles of 4x4 outputs, each of
 * which needs 6x6 inputs. Both are transformed so that the convolution is one product of matrices for each of 36
 * frequencies, a quarter of the multiplications. Its rounding errors are not those of a sum: a small number beside large
 * ones is lost in the rounding of these. `pack` says how large they are, so that a solve can tell where that matters;
 * there it takes `plain_product`, whose sums of nonnegative numbers are exact to a few roundings each.
 */
#include "winograd.h"
#include <math.h>
#include <string.h>

enum { CHUNK = 192 * 1024 }; /* numbers that are worked on at a time: the second cache holds them, and weights are read less often */

typedef vector_8 vector;
#define AT(pointer) (*(const vector *)(pointer))
#define SET(pointer) (*(vector *)(pointer))

static int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

layout layout_of(int conv, int64_t channels, int64_t height, int64_t width)
{
    layout l = { .conv = conv, .channels = channels, .height = height, .width = width, .lanes = round_up(channels) };
    l.runs = conv ? height : 1;
    l.n = conv ? width * l.lanes : l.lanes;
    l.tiles_down = (height + OUT - 1) / OUT;
    l.tiles_across = (width + OUT - 1) / OUT;
    l.stride = conv ? (OUT * l.tiles_across + 2) * l.lanes : l.n;
    l.first = conv ? l.stride + l.lanes : 0;
    l.padded = conv ? (OUT * l.tiles_down + 2) * l.stride : l.n;
    return l;
}

void fill_keep(const layout *l, float *keep)
{
    for (int64_t i = 0; i < l->n; i++) keep[i] = i % l->lanes < l->channels ? 1.0f : 0.0f;
}

/* n numbers, few and not a constant: a call of memcpy would take longer. */
INLINE void copy(int64_t n, const float *from, float *to)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) SET(to + i) = AT(from + i);
    for (; i < n; i++) to[i] = from[i];
}

VERSIONS
void load(const layout *l, const strides *t, const float *from, float *to, int64_t stride)
{
    for (int64_t y = 0; y < l->height; y++) {
        const float *in = from + y * t->row;
        float *out = to + y * stride;
        if (t->channel == 1)
            for (int64_t x = 0; x < l->width; x++) copy(l->channels, in + x * t->column, out + x * l->lanes);
        else
            for (int64_t c = 0; c < l->channels; c++)
                for (int64_t x = 0; x < l->width; x++) out[x * l->lanes + c] = in[c * t->channel + x * t->column];
    }
}

VERSIONS
void store(const layout *l, const strides *t, const float *from, float *to)
{
    for (int64_t y = 0; y < l->height; y++) {
        const float *in = from + y * l->n;
        float *out = to + y * t->row;
        if (t->channel == 1)
            for (int64_t x = 0; x < l->width; x++) copy(l->channels, in + x * l->lanes, out + x * t->column);
        else
            for (int64_t c = 0; c < l->channels; c++)
                for (int64_t x = 0; x < l->width; x++) out[c * t->channel + x * t->column] = in[x * l->lanes + c];
    }
}

typedef double wide __attribute__((vector_size(LANES * sizeof(double))));

/* Winograd's transform of three weights in one dimension. */
INLINE void transform_weight(const wide *w, int64_t step, wide *out, int64_t out_step)
{
    const wide a = w[0], b = w[step], c = w[2 * step];
    out[0] = a / 4.0;
    out[out_step] = -(a + b + c) / 6.0;
    out[2 * out_step] = -(a - b + c) / 6.0;
    out[3 * out_step] = a / 24.0 + b / 12.0 + c / 6.0;
    out[4 * out_step] = a / 24.0 - b / 12.0 + c / 6.0;
    out[5 * out_step] = c;
}

int64_t packed_size(const layout *l) { return (l->conv ? FREQUENCIES : 1) * l->channels * l->lanes; }

static void pack_dense(const layout *l, int transposed, const float *weight, float *packed)
{
    const int64_t n = l->channels, block = 16;
    memset(packed, 0, packed_size(l) * sizeof(float));
    for (int64_t i = 0; transposed && i < n; i++) memcpy(packed + i * l->lanes, weight + i * n, n * sizeof(float));
    for (int64_t top = 0; !transposed && top < n; top += block) /* in blocks, for the cache's sake */
        for (int64_t i = 0; i < n; i++)
            for (int64_t o = top; o < n && o < top + block; o++) packed[i * l->lanes + o] = weight[o * n + i];
}

/* By how much Winograd's products are off, in roundings: a component by ERROR times the sum of its weights times the
 * largest number of the sample, the norm by ERROR_OF_NORM times √(largest sum of a row × of a column) times its norm.
 * Measured, over channels from 1 to 256 and hostile data: at most 14 and 5.3. */
static const float ROUNDING = 1.1920929e-7f, ERROR = 16, ERROR_OF_NORM = 6;

VERSIONS
static float pack_conv(const layout *l, int transposed, const float *weight, float *packed, float *noise)
{
    const int64_t channels = l->channels;
    double rows = 0, columns = 0;
    memset(noise, 0, l->lanes * sizeof(float));
    for (int64_t i = 0; i < channels; i++) {
        double column = 0;
        for (int64_t o = 0; o < l->lanes; o += LANES) { /* outputs side by side */
            wide w[9] = { 0 }, half[3 * IN], whole[FREQUENCIES], sum = { 0 };
            for (int64_t lane = 0; lane < LANES && o + lane < channels; lane++) {
                const float *from = weight + 9 * (transposed ? i * channels + o + lane : (o + lane) * channels + i);
                for (int tap = 0; tap < 9; tap++) w[tap][lane] = from[transposed ? 8 - tap : tap];
            }
            for (int tap = 0; tap < 9; tap++) sum += w[tap];
            for (int lane = 0; lane < LANES; lane++) column += sum[lane];
            SET(noise + o) = AT(noise + o) + __builtin_convertvector(sum, vector);
            for (int x = 0; x < 3; x++) transform_weight(w + x, 3, half + x, 3);
            for (int y = 0; y < IN; y++) transform_weight(half + 3 * y, 1, whole + IN * y, 1);
            for (int f = 0; f < FREQUENCIES; f++)
                SET(packed + (f * channels + i) * l->lanes + o) = __builtin_convertvector(whole[f], vector);
        }
        columns = column > columns ? column : columns;
    }
    for (int64_t o = 0; o < l->lanes; o++) {
        rows = noise[o] > rows ? noise[o] : rows;
        noise[o] *= ERROR * ROUNDING;
    }
    for (int64_t i = l->lanes; i < l->n; i++) noise[i] = noise[i - l->lanes];
    return (float)(ERROR_OF_NORM * ROUNDING * sqrt(rows * columns));
}

/* In the order frequency, input, output filled up; a dense weight has one frequency. */
float pack(const layout *l, int transposed, const float *weight, float *packed, float *noise)
{
    if (l->conv) return pack_conv(l, transposed, weight, packed, noise);
    pack_dense(l, transposed, weight, packed);
    return 0;
}

int64_t plain_size(const layout *l) { return l->conv ? 9 * l->lanes * l->lanes : 0; }

/* In the order row of the kernel, its column, input filled up, output filled up. */
void pack_plain(const layout *l, int transposed, const float *weight, float *packed)
{
    const int64_t n = l->channels;
    memset(packed, 0, plain_size(l) * sizeof(float));
    for (int64_t o = 0; o < n; o++)
        for (int64_t i = 0; i < n; i++)
            for (int tap = 0; tap < 9; tap++)
                packed[(tap * l->lanes + i) * l->lanes + o] = weight[9 * (transposed ? i * n + o : o * n + i) + (transposed ? 8 - tap : tap)];
}

/* How many rows of tiles to work on at a time. */
static int64_t rows_at_a_time(const layout *l)
{
    const int64_t rows = CHUNK / (2 * FREQUENCIES * l->lanes * l->tiles_across);
    return rows < 1 ? 1 : rows > l->tiles_down ? l->tiles_down : rows;
}

int64_t product_space(const layout *l)
{
    return l->conv ? 2 * FREQUENCIES * (l->lanes * l->tiles_across * rows_at_a_time(l) + APART) : 0;
}

/* The outputs of the tiles, without those beyond the image. */
INLINE void scatter_tiles(int wide, const layout *l, const float *in, int64_t first_row, int64_t rows, float *out)
{
    const int64_t tiles = rows * l->tiles_across, frequency = tiles * l->lanes + APART;
    for (int64_t tile = 0; tile < tiles; tile++, in += l->lanes) {
        const int64_t top = (first_row + tile / l->tiles_across) * OUT, left = tile % l->tiles_across * OUT;
        const int64_t down = l->height - top < OUT ? l->height - top : OUT;
        const int64_t across = l->width - left < OUT ? l->width - left : OUT;
        float *corner = out + top * l->n + left * l->lanes;
        int64_t c = 0;
#define SCATTER(WIDTH)                        \
    for (; c + WIDTH <= l->lanes; c += WIDTH) \
    scatter_tile_##WIDTH(frequency, in + c, down, across, l->n, l->lanes, corner + c)
        if (wide) SCATTER(16);
        SCATTER(8);
#undef SCATTER
    }
}

INLINE void product_of_tiles(int wide, const layout *l, const float *packed, const float *z, float *out, float *space)
{
    const int64_t most = rows_at_a_time(l), weights = l->channels * l->lanes;
    for (int64_t row = 0; row < l->tiles_down; row += most) {
        const int64_t rows = l->tiles_down - row < most ? l->tiles_down - row : most, tiles = rows * l->tiles_across;
        const int64_t size = tiles * l->lanes + APART;
        float *inputs = space, *outputs = space + FREQUENCIES * size;
        gather_tiles(wide, l, z - l->first + row * OUT * l->stride, rows, size, inputs);
        for (int f = 0; f < FREQUENCIES; f++)
            multiply(wide, 0, tiles, l->channels, l->lanes, by_row(inputs + f * size, l->lanes), packed + f * weights,
                     outputs + f * size);
        scatter_tiles(wide, l, outputs, row, rows, out);
    }
}

/* Three pixels side by side are 3 * lanes numbers in a row, so a row of the kernel is one product of matrices. */
INLINE void product_of_rows(int wide, const layout *l, const float *packed, const float *z, float *out)
{
    const int64_t inputs = 3 * l->lanes, weights = inputs * l->lanes;
    for (int64_t y = 0; y < l->height; y++) {
        const float *above = z - l->first + y * l->stride;
        for (int64_t row = 0; row < 3; row++)
            multiply(wide, row > 0, l->width, inputs, l->lanes, by_row(above + row * l->stride, l->lanes),
                     packed + row * weights, out + y * l->n);
    }
}

/* By vectors of either width: Wz of a matrix; of a convolution, with scratch memory; without, by plain sums. */
INLINE void multiply_sample(int wide, const layout *l, const float *packed, const float *z, float *out, float *space)
{
    if (l->conv && space) product_of_tiles(wide, l, packed, z, out, space);
    else if (l->conv) product_of_rows(wide, l, packed, z, out);
    else if (wide && l->lanes >= 2 * LANES) multiply_vector_16(l->channels, l->lanes, z, packed, out);
    else multiply_vector_8(l->channels, l->lanes, z, packed, out);
}

VERSIONS
static void multiply_narrow(const layout *l, const float *packed, const float *z, float *out, float *space)
{
    multiply_sample(0, l, packed, z, out, space);
}

FOR_WIDE
static void multiply_wide(const layout *l, const float *packed, const float *z, float *out, float *space)
{
    multiply_sample(1, l, packed, z, out, space);
}

#define MULTIPLY (HAS_WIDE ? multiply_wide : multiply_narrow)

void product(const layout *l, const float *packed, const float *z, float *out, float *space)
{
    MULTIPLY(l, packed, z, out, space);
}

void plain_product(const layout *l, const float *packed, const float *z, float *out)
{
    MULTIPLY(l, packed, z, out, NULL);
}

/* Comparisons by vectors, whose result is all bits or none: a compiler would not reorder those of single numbers. */
typedef int32_t mask __attribute__((vector_size(LANES * sizeof(int32_t))));

VERSIONS
int any_below(const layout *l, const float *value, float factor, const float *bound)
{
    mask found = { 0 };
    for (int64_t run = 0; run < l->runs; run++, value += l->n)
        for (int64_t i = 0; i < l->n; i += LANES) found |= (mask)(AT(value + i) < factor * AT(bound + i));
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= found[lane];
    return any != 0;
}

VERSIONS
float peak_of(const layout *l, const float *value)
{
    vector peaks = { 0 };
    for (int64_t i = 0; i < l->runs * l->n; i += LANES) {
        const mask larger = (mask)(AT(value + i) > peaks);
        peaks = (vector)((larger & (mask)AT(value + i)) | (~larger & (mask)peaks));
    }
    float peak = 0;
    for (int lane = 0; lane < LANES; lane++) peak = peaks[lane] > peak ? peaks[lane] : peak;
    return peak;
}
