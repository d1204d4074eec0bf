/* The work on tiles, with vectors of WIDTH numbers: winograd.h includes this once for each width that there is.
 *
 * Each output is summed in the same order whatever the width, so that results do not depend on it.
 */
#define WITH(name, width) name##_##width
#define NAMED(name, width) WITH(name, width)
#define OF_WIDTH(name) NAMED(name, WIDTH)
#define vector OF_WIDTH(vector)
#define AT(pointer) (*(const vector *)(pointer))
#define SET(pointer) (*(vector *)(pointer))

typedef float vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float)), may_alias));

/* Winograd's transforms in one dimension: six inputs, four outputs. */
INLINE void OF_WIDTH(transform_input)(const vector *d, int64_t step, vector *out, int64_t out_step)
{
    const vector even = d[4 * step] - 4.0f * d[2 * step], odd = d[3 * step] - 4.0f * d[step];
    const vector near = d[4 * step] - d[2 * step], twice = 2.0f * (d[3 * step] - d[step]);
    out[0] = 4.0f * d[0] - 5.0f * d[2 * step] + d[4 * step];
    out[out_step] = even + odd;
    out[2 * out_step] = even - odd;
    out[3 * out_step] = near + twice;
    out[4 * out_step] = near - twice;
    out[5 * out_step] = 4.0f * d[step] - 5.0f * d[3 * step] + d[5 * step];
}

INLINE void OF_WIDTH(transform_output)(const vector *m, int64_t step, vector *out, int64_t out_step)
{
    const vector sum1 = m[step] + m[2 * step], difference1 = m[step] - m[2 * step];
    const vector sum2 = m[3 * step] + m[4 * step], difference2 = m[3 * step] - m[4 * step];
    out[0] = m[0] + sum1 + sum2;
    out[out_step] = difference1 + 2.0f * difference2;
    out[2 * out_step] = sum1 + 4.0f * sum2;
    out[3 * out_step] = difference1 + 8.0f * difference2 + m[5 * step];
}

/* The transpose of the second: four numbers, six frequencies. */
INLINE void OF_WIDTH(transform_gradient)(const vector *d, int64_t step, vector *out, int64_t out_step)
{
    const vector even = d[0] + d[2 * step], odd = d[step] + d[3 * step];
    const vector far = d[0] + 4.0f * d[2 * step], twice = 2.0f * d[step] + 8.0f * d[3 * step];
    out[0] = d[0];
    out[out_step] = even + odd;
    out[2 * out_step] = even - odd;
    out[3 * out_step] = far + twice;
    out[4 * out_step] = far - twice;
    out[5 * out_step] = d[3 * step];
}

/* The frequencies of one tile, for a vector of its channels. */
INLINE void OF_WIDTH(gather_tile)(int64_t stride, int64_t lanes, const float *corner, int64_t frequency, float *out)
{
    vector d[FREQUENCIES], half[FREQUENCIES];
    for (int y = 0; y < IN; y++)
        for (int x = 0; x < IN; x++) d[y * IN + x] = AT(corner + y * stride + x * lanes);
    for (int x = 0; x < IN; x++) OF_WIDTH(transform_input)(d + x, IN, half + x, IN);
    for (int y = 0; y < IN; y++) OF_WIDTH(transform_input)(half + y * IN, 1, d + y * IN, 1);
    for (int f = 0; f < FREQUENCIES; f++) SET(out + f * frequency) = d[f];
}

/* Those of a tile of gradients of outputs. */
INLINE void OF_WIDTH(gather_gradient)(int64_t stride, int64_t lanes, const float *corner, int64_t frequency, float *out)
{
    vector d[OUT * OUT], half[IN * OUT], whole[FREQUENCIES];
    for (int y = 0; y < OUT; y++)
        for (int x = 0; x < OUT; x++) d[y * OUT + x] = AT(corner + y * stride + x * lanes);
    for (int x = 0; x < OUT; x++) OF_WIDTH(transform_gradient)(d + x, OUT, half + x, OUT);
    for (int y = 0; y < IN; y++) OF_WIDTH(transform_gradient)(half + y * OUT, 1, whole + y * IN, 1);
    for (int f = 0; f < FREQUENCIES; f++) SET(out + f * frequency) = whole[f];
}

/* And back: its outputs, as many as lie in the image. */
INLINE void OF_WIDTH(scatter_tile)(int64_t frequency, const float *in, int64_t down, int64_t across, int64_t row,
                                   int64_t lanes, float *out)
{
    vector m[FREQUENCIES], half[OUT * IN], whole[OUT * OUT];
    for (int f = 0; f < FREQUENCIES; f++) m[f] = AT(in + f * frequency);
    for (int x = 0; x < IN; x++) OF_WIDTH(transform_output)(m + x, IN, half + x, IN);
    for (int y = 0; y < OUT; y++) OF_WIDTH(transform_output)(half + y * IN, 1, whole + y * OUT, 1);
    for (int64_t y = 0; y < down; y++)
        for (int64_t x = 0; x < across; x++) SET(out + y * row + x * lanes) = whole[y * OUT + x];
}

/* out[row] = Σ_j a[row][j] weight[j], or so much more, for some rows and vectors of outputs, all sums in registers. */
INLINE void OF_WIDTH(multiply_tile)(int more, int rows, int vectors, int64_t inputs, int64_t lanes, matrix a,
                                    const float *weight, float *out)
{
    vector sum[SUMS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r * vectors + v] = more ? AT(out + r * lanes + v * WIDTH) : (vector){ 0 };
    for (int64_t j = 0; j < inputs; j++) {
        const float *w = weight + j * lanes;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const vector number = a.first[r * a.row + j * a.column] - (vector){ 0 };
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) sum[r * vectors + v] += number * AT(w + v * WIDTH);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) SET(out + r * lanes + v * WIDTH) = sum[r * vectors + v];
}

/* The same for all rows. */
INLINE void OF_WIDTH(multiply_columns)(int more, int vectors, int64_t rows, int64_t inputs, int64_t lanes,
                                       matrix a, const float *weight, float *out)
{
    int64_t r = 0;
#define ROWS(COUNT)                         \
    for (; r + (COUNT) <= rows; r += COUNT) \
    OF_WIDTH(multiply_tile)(more, COUNT, vectors, inputs, lanes, from_row(a, r), weight, out + r * lanes)
    if (vectors == 1) ROWS(SUMS);
    if (vectors == 2) ROWS(SUMS / 2);
    ROWS(SUMS / 3);
    ROWS(2);
    ROWS(1);
#undef ROWS
}

/* As many vectors as there are from the column `at` on, two or three at a time; returned is the first column left. */
INLINE int64_t OF_WIDTH(multiply)(int64_t at, int more, int64_t rows, int64_t inputs, int64_t lanes, matrix a,
                                  const float *weight, float *out)
{
#define COLUMNS(VECTORS)                                                                                     \
    {                                                                                                        \
        OF_WIDTH(multiply_columns)(more, VECTORS, rows, inputs, lanes, a, weight + at, out + at);            \
        at += (VECTORS) * WIDTH;                                                                             \
    }
    while (lanes - at >= 4 * WIDTH || (lanes - at) / WIDTH == 2) COLUMNS(2)
    if (lanes - at >= 3 * WIDTH) COLUMNS(3)
    if (lanes - at >= WIDTH) COLUMNS(1)
    return at;
#undef COLUMNS
}

/* The same for a single row of at least WIDTH numbers; the last vector may overlap the one before. */
INLINE void OF_WIDTH(multiply_vector)(int64_t inputs, int64_t lanes, const float *z, const float *weight, float *out)
{
    for (int64_t at = 0; at < lanes; at += SUMS * WIDTH) {
        const int64_t left = (lanes - at + WIDTH - 1) / WIDTH;
#define PLACE(v, VECTORS) (at + ((v) + 1 < (VECTORS) ? (v) * WIDTH : end))
#define BLOCK(VECTORS)                                                                        \
    {                                                                                         \
        const int64_t end = at + (VECTORS) * WIDTH <= lanes ? ((VECTORS) - 1) * WIDTH : lanes - WIDTH - at; \
        vector sum[VECTORS];                                                                  \
        for (int v = 0; v < (VECTORS); v++) sum[v] = (vector){ 0 };                           \
        for (int64_t j = 0; j < inputs; j++)                                                  \
            _Pragma("GCC unroll 12") for (int v = 0; v < (VECTORS); v++)                      \
                sum[v] += z[j] * AT(weight + j * lanes + PLACE(v, VECTORS));                  \
        for (int v = 0; v < (VECTORS); v++) SET(out + PLACE(v, VECTORS)) = sum[v];            \
    }                                                                                         \
    break
        switch (left < SUMS ? left : SUMS) {
        case 1: BLOCK(1);
        case 2: BLOCK(2);
        case 3: BLOCK(3);
        case 4: BLOCK(4);
        case 5: BLOCK(5);
        case 6: BLOCK(6);
        case 7: BLOCK(7);
        case 8: BLOCK(8);
        case 9: BLOCK(9);
        case 10: BLOCK(10);
        case 11: BLOCK(11);
        default: BLOCK(12);
        }
#undef BLOCK
#undef PLACE
    }
}

#undef vector
#undef AT
#undef SET
#undef WIDTH
