/* What products and gradients by Winograd's way share: tiles, their frequencies, and sums over these. */
#ifndef PCDEQ_WINOGRAD_H
#define PCDEQ_WINOGRAD_H

#include "product.h"

enum { OUT = 4, IN = 6, FREQUENCIES = IN * IN };
enum { SUMS = 12 };  /* with the weights and one number, what the sixteen registers of AVX2 hold */
enum { APART = 16 }; /* numbers between two frequencies, lest all fall into the same sets of the first cache */

/* A matrix in memory: numbers from one row, and from one column, to the next. */
typedef struct { const float *first; int64_t row, column; } matrix;
INLINE matrix by_row(const float *first, int64_t row) { return (matrix){ first, row, 1 }; }
INLINE matrix by_column(const float *first, int64_t column) { return (matrix){ first, 1, column }; }
INLINE matrix from_row(matrix a, int64_t row) { return (matrix){ a.first + row * a.row, a.row, a.column }; }

/* Vectors of LANES, and `wide` ones of twice as many for the processors that have them. */
#define WIDTH 8
#include "tiles.h"
#define WIDTH 16
#include "tiles.h"

/* What a function with wide vectors is compiled for, and whether this processor has them. */
#if CLONED && !defined(PCDEQ_NARROW) /* which is for tests on a processor that has wide ones */
#define HAS_WIDE __builtin_cpu_supports("x86-64-v4")
#define FOR_WIDE __attribute__((target("arch=x86-64-v4")))
#elif defined(__AVX512F__) && !defined(PCDEQ_NARROW)
#define HAS_WIDE 1
#define FOR_WIDE
#else
#define HAS_WIDE 0
#define FOR_WIDE
#endif

/* out[row] = Σ_j a[row][j] weight[j], or so much more, for all rows. */
INLINE void multiply(int wide, int more, int64_t rows, int64_t inputs, int64_t lanes, matrix a, const float *weight,
                     float *out)
{
    int64_t at = 0;
    if (wide) at = multiply_16(at, more, rows, inputs, lanes, a, weight, out);
    multiply_8(at, more, rows, inputs, lanes, a, weight, out);
}

/* Some rows of tiles, in the order frequency, tile, channel: frequencies are `frequency` numbers apart. */
#define GATHER_TILES(NAME, TILE)                                                                                       \
    INLINE void NAME(int wide, const layout *l, const float *z, int64_t rows, int64_t frequency, float *out)           \
    {                                                                                                                  \
        for (int64_t tile = 0; tile < rows * l->tiles_across; tile++, out += l->lanes) {                               \
            const float *corner = z + tile / l->tiles_across * OUT * l->stride + tile % l->tiles_across * OUT * l->lanes; \
            int64_t c = 0;                                                                                             \
            for (; wide && c + 16 <= l->lanes; c += 16) TILE##_16(l->stride, l->lanes, corner + c, frequency, out + c); \
            for (; c + 8 <= l->lanes; c += 8) TILE##_8(l->stride, l->lanes, corner + c, frequency, out + c);           \
        }                                                                                                              \
    }
GATHER_TILES(gather_tiles, gather_tile)
GATHER_TILES(gather_gradients, gather_gradient)

#endif
