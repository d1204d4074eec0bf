/* What comes from Python, one argument after the other, checked before anything is read; see tensors.c. */
#ifndef PCDEQ_TENSORS_H
#define PCDEQ_TENSORS_H

#include "kernels.h"

enum element { FLOAT32, FLOAT64, INT64, BOOL };
enum access { READ, READ_IF_GIVEN, WRITE };
/* How dimensions lie in memory, always without gaps: as usual; with the channels of a pixel next to each other; or
 * whichever of the two it is. */
enum order { PLAIN, CHANNELS_LAST, EITHER };
enum { ANY = -1, DIMENSIONS = 4, ARGUMENTS = 20 };
/* No dimension is longer, no channels are more, no sample is larger, nor are there more threads: so that no size which
 * is computed from these overflows 64 bits. */
#define LONGEST INT32_MAX
#define MOST_CHANNELS ((int64_t)1 << 20)
#define LARGEST_SAMPLE ((int64_t)1 << 36)
#define MOST_THREADS 1024

/* A tensor whose memory holds what its shape says; data is NULL where None was given. */
typedef struct {
    const char *name;
    void *data;
    int64_t shape[DIMENSIONS], strides[DIMENSIONS], bytes; /* strides count numbers */
    enum order order;
    enum access access;
} tensor;

/* The arguments of a call, of which the first `next` have been taken. After a failure, which has set an exception,
 * whatever is taken is zero. */
typedef struct {
    PyObject *const *objects;
    Py_ssize_t count, next;
    int failed, tensors;
    tensor taken[ARGUMENTS];
} arguments;

/* The next argument: a tensor of this shape, where ANY stands for any size of at least 1; an integer; a number. */
tensor take_tensor(arguments *a, const char *name, enum access access, enum element element, enum order order,
                   int dimensions, const int64_t *shape);
#define SHAPE(...) ((const int64_t[]){ __VA_ARGS__ })
int64_t take_integer(arguments *a, const char *name, int64_t least, int64_t most);
float take_number(arguments *a, const char *name, double least, double most);

/* Fail, with a ValueError that names the argument, unless ok. */
void require(arguments *a, int ok, const char *name, const char *what);

/* Whether all were as they must be, none is left over, and what is written lies apart from all else. */
int all_taken(arguments *a);

#endif
