/* Compiled kernels for per-example convolution gradients; `kernels.py` is their face, and says what each computes.
 *
 * Built when tacit is installed, if there is a C compiler; without one the same numbers come from PyTorch, slower. Float32, CPU,
 * images with their channels last in memory. Nothing here knows of privacy: sums over positions within one example, and nothing
 * else. Examples are shared out to the threads of OpenMP, the same that PyTorch uses.
 */

#ifdef __FAST_MATH__
#error "-ffast-math lets norms pass for finite that are not; build without it"
#endif

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef __linux__
#include <malloc.h>
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    long batch, views;                      /* examples, and images of each: their gradients are added up */
    long height, width, in;                 /* images */
    long rows, columns, out;                /* output gradients */
    long kernel_height, kernel_width, stride_height, stride_width;
    long top, left;                         /* padding before the first row and column */
    long padded_height, padded_width;       /* what the windows cover */
    const float *added;                     /* what is added to every example's weight gradient, laid out like a direction, or NULL */
} Conv;

typedef struct {
    long batch, positions, channels, groups;
    double eps;
} Norm;

typedef struct {
    long batch, positions, width, rows;     /* examples, tokens of each; the table: how many tokens there are, and numbers for each */
    long padding;                           /* the token that has no gradient, or -1 */
} Tokens;

static inline long round_up(long value, long multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* How many rows of positions are taken at a time: about 256 positions, in blocks of equal height. */
static inline long block_rows(long rows, long columns)
{
    const long most = columns >= 256 ? 1 : 256 / columns, blocks = (rows + most - 1) / most;
    return (rows + blocks - 1) / blocks;
}

/* So many rows of an image with its padding written out, in `space`; or the image itself if it has none. */
static const float *padded_rows(const Conv *s, const float *x, long first, long rows, float *space)
{
    if (s->top == 0 && s->left == 0 && s->padded_height <= s->height && s->padded_width == s->width)
        return x + first * s->width * s->in;
    const long row = s->padded_width * s->in;
    long columns = s->width < s->padded_width - s->left ? s->width : s->padded_width - s->left;
    columns = columns > 0 ? columns : 0;  /* no window reaches the image */
    for (long i = 0; i < rows; i++) {
        const long from = first + i - s->top;
        float *to = space + i * row;
        if (from < 0 || from >= s->height || columns == 0) {
            memset(to, 0, row * sizeof(float));
            continue;
        }
        memset(to, 0, s->left * s->in * sizeof(float));
        memcpy(to + s->left * s->in, x + from * s->width * s->in, columns * s->in * sizeof(float));
        memset(to + (s->left + columns) * s->in, 0, (s->padded_width - s->left - columns) * s->in * sizeof(float));
    }
    return space;
}

#define WIDEST 16  /* lanes of any version */

#define LANES 4
#define ROWS 6
#define NAME(f) f##_any
#define TARGET
#include "kernels_body.h"
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET

#if defined(__x86_64__)
#define LANES 8
#define ROWS 6
#define NAME(f) f##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "kernels_body.h"
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET

#define LANES 16
#define ROWS 12
#define NAME(f) f##_avx512
#define TARGET __attribute__((target("avx512f,fma")))
#include "kernels_body.h"
#undef LANES
#undef ROWS
#undef NAME
#undef TARGET
#endif

typedef void (*ConvExample)(const Conv *, const float *, const float *, const float *, float *, float *, float *);
typedef void (*NormExample)(const Norm *, const float *, const float *, const float *, float *, float *, float *, double *);
typedef void (*OuterExample)(const float *, long, const float *, long, const float *, const float *, double *);
typedef void (*Beside)(const float *, const float *, float, float *, long);
typedef double (*Square)(const float *, long);
typedef long (*Gather)(const Tokens *, long, const int64_t *, const float *, float *, int64_t *, long *);
typedef void (*Scatter)(const Tokens *, const float *, const int64_t *, const float *, const float *, float, long, long, float *);
typedef void (*HeldNorms)(const float *, const int64_t *, long, long, const float *, double *, double *);
typedef double (*GhostExample)(const Conv *, const float *, const float *, const float *, int, const float *, float *, double *, float *);

typedef struct {
    const char *name;
    ConvExample conv, conv_across;
    GhostExample ghost;
    NormExample norm, layer_norm;
    OuterExample outer;
    Beside beside;
    Square square;
    Gather gather;
    HeldNorms held_norms;
    Scatter scatter;
} Version;

#define VERSION(set) \
    {#set, conv_example_##set, conv_example_across_##set, ghost_example_##set, norm_example_##set, layer_norm_example_##set, \
     outer_example_##set, beside_##set, square_##set, gather_##set, held_norms_##set, scatter_##set}
static const Version versions[] = {
    VERSION(any),
#if defined(__x86_64__)
    VERSION(avx2),
    VERSION(avx512),
#endif
};
static Version chosen = VERSION(any);

static int runs_here(const char *name)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f");
#endif
    return strcmp(name, "any") == 0;
}

/* The last of the versions, which is the fastest, that this processor can run; or the one asked for. 0 if there is none. */
static int choose(const char *wanted)
{
    const Version *found = NULL;
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        if ((wanted == NULL || strcmp(wanted, versions[i].name) == 0) && runs_here(versions[i].name))
            found = &versions[i];
    if (found)
        chosen = *found;
    return found != NULL;
}

static float *scratch_of(long floats)
{
    return aligned_alloc(64, round_up(floats * (long)sizeof(float), 64) + 64);
}

/* The sum of the squares of `count` numbers: in double precision, in pieces whose sums are added up in order, so that it does not depend
 * on the number of threads. -1 without memory. */
static double squares_of(const float *x, long count, int threads)
{
    enum { PIECE = 1 << 14 };
    const long pieces = (count + PIECE - 1) / PIECE;
    if (pieces == 1)
        return chosen.square(x, count);
    const Square of = chosen.square;
    double *sums = malloc((pieces + 1) * sizeof(double)), sum = 0;
    if (!sums)
        return -1;
#pragma omp parallel for num_threads(threads) if (pieces > 2)
    for (long i = 0; i < pieces; i++)
        sums[i] = of(x + i * PIECE, i + 1 < pieces ? PIECE : count - i * PIECE);
    for (long i = 0; i < pieces; i++)
        sum += sums[i];
    free(sums);
    return sum;
}

/* Of one example's sums by channel ([squares, bias, totals, along][out]) the squared norm of its gradient, with what rounding may
 * have lost, `allowance` of the sizes that were added up: sum_c squares, or, with coefficients k,
 * sum_c k0 squares - k1 totals^2 - k2 along^2 + k3 along + k4, where |along| is at most the root of squares. What is not a number is
 * infinite. */
static double squared_norm(const float *sums, const double *k, long out, double allowance)
{
    double size = 0, norm = 0;
    for (long c = 0; c < out; c++) {
        const double squares = sums[c];
        if (!k) {
            size += squares;
            continue;
        }
        const double total = sums[2 * out + c], along = sums[3 * out + c];
        size += k[c] * squares + k[3 * out + c] * sqrt(squares) + k[4 * out + c];
        norm += k[c] * squares - k[out + c] * total * total - k[2 * out + c] * along * along + k[3 * out + c] * along + k[4 * out + c];
    }
    if (!k)
        norm = size;
    return isfinite(norm) && isfinite(size) ? (norm > 0 ? norm : 0) + allowance * size : INFINITY;
}

/* Four rows of four numbers, as columns: to[j][i] = by * from[i][j]. */
static inline void turn_four(const float *from, long from_row, float by, float *to, long to_row)
{
    typedef float quad __attribute__((vector_size(16), aligned(4)));
    typedef int order __attribute__((vector_size(16)));
    const quad a = by * *(const quad *)from, b = by * *(const quad *)(from + from_row);
    const quad c = by * *(const quad *)(from + 2 * from_row), d = by * *(const quad *)(from + 3 * from_row);
    const quad ab = __builtin_shuffle(a, b, (order){0, 4, 1, 5}), cd = __builtin_shuffle(c, d, (order){0, 4, 1, 5});
    const quad more_ab = __builtin_shuffle(a, b, (order){2, 6, 3, 7}), more_cd = __builtin_shuffle(c, d, (order){2, 6, 3, 7});
    *(quad *)to = __builtin_shuffle(ab, cd, (order){0, 1, 4, 5});
    *(quad *)(to + to_row) = __builtin_shuffle(ab, cd, (order){2, 3, 6, 7});
    *(quad *)(to + 2 * to_row) = __builtin_shuffle(more_ab, more_cd, (order){0, 1, 4, 5});
    *(quad *)(to + 3 * to_row) = __builtin_shuffle(more_ab, more_cd, (order){2, 3, 6, 7});
}

/* A weight [out][kernel] times a rate, in the order in which `conv_gradients` works: as it is if across, else [kernel][out, up to whole
 * vectors]. Neither lies in a cache when it begins: lines are asked for before they are needed. */
static void lay_out(const float *weight, long out, long kernel, double rate, int across, float *to)
{
    enum { LINE = 16 };
    const float by = (float)rate;
    const long wide = round_up(out, WIDEST), rows = out / 4 * 4, columns = kernel / 4 * 4;
    if (across) {
        for (long i = 0; i < out * kernel; i++)
            to[i] = by * weight[i];
        return;
    }
    for (long first = 0; first < kernel; first += LINE) {
        const long end = first + LINE < kernel ? first + LINE : kernel, next = end + LINE < kernel ? end + LINE : kernel;
        for (long k = first ? end : 0; k < next; k++)
            for (long c = 0; c < wide; c += LINE)
                __builtin_prefetch(to + k * wide + c, 1);
        for (long c = 0; c < out && end < kernel; c++)
            __builtin_prefetch(weight + c * kernel + end);
        for (long c = 0; c < rows; c += 4)
            for (long k = first; k + 4 <= end; k += 4)
                turn_four(weight + c * kernel + k, kernel, by, to + k * wide + c, wide);
        for (long k = first; k < end; k++)
            for (long c = k < columns ? rows : 0; c < wide; c++)
                to[k * wide + c] = c < out ? by * weight[c * kernel + k] : 0;
    }
}

static PyObject *conv_gradients(PyObject *self, PyObject *args)
{
    Conv s;
    Py_ssize_t x_at, g_at, direction_at, coefficients_at, weight_at, gradient_at, sums_at, norms_at;
    double rate, allowance;
    int across, threads;
    if (!PyArg_ParseTuple(args, "nnnnnnnn(lllll)(lll)(llllll)ddpi", &x_at, &g_at, &direction_at, &coefficients_at, &weight_at, &gradient_at,
                          &sums_at, &norms_at, &s.batch, &s.views, &s.height, &s.width, &s.in, &s.rows, &s.columns,
                          &s.out, &s.kernel_height, &s.kernel_width, &s.stride_height, &s.stride_width, &s.top, &s.left, &rate, &allowance,
                          &across, &threads))
        return NULL;
    s.padded_height = (s.rows - 1) * s.stride_height + s.kernel_height;
    s.padded_width = (s.columns - 1) * s.stride_width + s.kernel_width;
    const float *x = (const float *)x_at, *g = (const float *)g_at, *direction = (const float *)direction_at;
    const double *coefficients = (const double *)coefficients_at;
    float *gradient = (float *)gradient_at, *sums = (float *)sums_at;
    double *norms = (double *)norms_at;
    const long kernel = s.kernel_height * s.kernel_width * s.in, wide = round_up(s.out, WIDEST);
    const long block = block_rows(s.rows, s.columns);
    const ConvExample example = across ? chosen.conv_across : chosen.conv;
    const long floats = 4 * wide * (across ? WIDEST : 1) + block * s.columns * 2 * WIDEST + kernel * wide +
                        ((block - 1) * s.stride_height + s.kernel_height) * s.padded_width * s.in + WIDEST;
    const long images = s.views * s.height * s.width * s.in, maps = s.views * s.rows * s.columns * s.out;
    const long sum = (direction ? 4 : 2) * s.out;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel num_threads(threads) firstprivate(s) reduction(| : failed)
    {
        float *scratch = scratch_of(floats), *added = weight_at ? scratch_of(kernel * wide) : NULL;
        failed |= !scratch || (weight_at && !added);
        if (added)  /* one for each thread: to wait for one another costs more */
            lay_out((const float *)weight_at, s.out, kernel, rate, across, added);
        s.added = added;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < s.batch; i++)
            if (!failed) {
                example(&s, x + i * images, g + i * maps, direction, gradient + i * kernel * s.out, sums + i * sum, scratch);
                norms[i] = squared_norm(sums + i * sum, coefficients, s.out, allowance);
            }
        free(added);
        free(scratch);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* What the decay of a weight W adds to a squared norm, from the sums of `ghost_example`: 2 rate <g, y - b> + rate^2 |W|^2, where what
 * rounding may have taken from <g, y - b> is allowed for, `allowance` times |W| |a| |g| + |b| |g| sqrt(positions). */
static double decay_norm(const float *sums, const double *size, const float *bias, long out, long positions, double rate,
                         double allowance, double weight_squares)
{
    double along = 0, bias_squares = 0;
    for (long k = 0; k < out; k++) {
        const double b = bias ? bias[k] : 0;
        along += sums[out + k] - b * sums[k];
        bias_squares += b * b;
    }
    const double error = sqrt(size[0] * size[1] * weight_squares) + sqrt(size[1] * positions * bias_squares);
    return rate * (2 * (along + allowance * error) + rate * weight_squares);
}

static PyObject *conv_norms(PyObject *self, PyObject *args)
{
    Conv s;
    Py_ssize_t x_at, g_at, y_at, bias_at, weight_at, scale_at, norms_at, sums_at;
    double rate, allowance;
    int totals, threads;
    if (!PyArg_ParseTuple(args, "nnnnnnnn(llll)(lll)(llll)ddpi", &x_at, &g_at, &y_at, &bias_at, &weight_at, &scale_at, &norms_at,
                          &sums_at, &s.batch, &s.height, &s.width, &s.in, &s.rows, &s.columns, &s.out, &s.kernel_height, &s.kernel_width,
                          &s.top, &s.left, &rate, &allowance, &totals, &threads))
        return NULL;
    s.stride_height = s.stride_width = 1;
    s.padded_height = s.rows - 1 + s.kernel_height;
    s.padded_width = s.columns - 1 + s.kernel_width;
    const float *x = (const float *)x_at, *g = (const float *)g_at, *y = (const float *)y_at;
    const float *scale = (const float *)scale_at;
    double *norms = (double *)norms_at;
    float *sums = (float *)sums_at;
    const long pixels = s.padded_height * s.padded_width, positions = s.rows * s.columns;
    const long wide = round_up(pixels, WIDEST), across = round_up(positions, WIDEST);
    const long floats = (s.in + pixels + 1) * wide + (s.out + positions + 1) * across + WIDEST;
    const long image = s.height * s.width * s.in, map = positions * s.out, sum = (totals ? 3 : y ? 2 : 1) * s.out;
    const GhostExample example = chosen.ghost;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    const double squares =
        weight_at ? squares_of((const float *)weight_at, s.out * s.in * s.kernel_height * s.kernel_width, threads) : 0;
    failed |= squares < 0;
#pragma omp parallel num_threads(threads) firstprivate(s) reduction(| : failed)
    {
        float *scratch = scratch_of(floats);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < s.batch; i++)
            if (scratch) {
                double *found = norms + 4 * i;
                found[0] = example(&s, x + i * image, g + i * map, y ? y + i * map : NULL, totals, scale, sums + i * sum, found + 1,
                                   scratch);
                found[3] = weight_at ? decay_norm(sums + i * sum, found + 1, (const float *)bias_at, s.out, positions, rate, allowance,
                                                  squares)
                                     : 0;
            }
        free(scratch);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *norm_gradients(PyObject *self, PyObject *args)
{
    Norm s;
    Py_ssize_t x_at, g_at, affine_at, weight_at, bias_at, input_at;  /* affine, input: 0 if there is none, or none is wanted */
    int threads;  /* no groups: a layer normalisation */
    if (!PyArg_ParseTuple(args, "nnnnnn(llll)di", &x_at, &g_at, &affine_at, &weight_at, &bias_at, &input_at, &s.batch, &s.positions,
                          &s.channels, &s.groups, &s.eps, &threads))
        return NULL;
    const float *x = (const float *)x_at, *g = (const float *)g_at;
    const float *affine = (const float *)affine_at;
    float *weight = (float *)weight_at, *bias = (float *)bias_at, *input = (float *)input_at;
    const long map = s.positions * s.channels;
    const NormExample example = s.groups ? chosen.norm : chosen.layer_norm;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel num_threads(threads) firstprivate(s) reduction(| : failed)
    {
        double *scratch = malloc(s.channels * (4 * sizeof(double) + 4 * sizeof(float)));
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < s.batch; i++)
            if (scratch)
                example(&s, x + i * map, g + i * map, affine, weight + i * s.channels, bias + i * s.channels,
                        input ? input + i * map : NULL, scratch);
        free(scratch);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* Squared norms of products g a^T, an example each; with the outputs y = W a + b, of g a^T + rate W: what rounding may have taken from
 * <g, y - b> is allowed for, `allowance` times |g| (|W| |a| + |b|). */
static PyObject *outer_norms(PyObject *self, PyObject *args)
{
    Py_ssize_t a_at, g_at, y_at, bias_at, weight_at, norms_at;  /* y and weight, bias: 0 if there is none */
    long batch, in, out;
    double rate, allowance;
    int threads;
    if (!PyArg_ParseTuple(args, "nnnnnn(lll)ddi", &a_at, &g_at, &y_at, &bias_at, &weight_at, &norms_at, &batch, &in, &out, &rate,
                          &allowance, &threads))
        return NULL;
    const float *a = (const float *)a_at, *g = (const float *)g_at, *y = (const float *)y_at, *bias = (const float *)bias_at;
    double *norms = (double *)norms_at;
    const OuterExample example = chosen.outer;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    const double of_bias = bias ? sqrt(chosen.square(bias, out)) : 0;
    const double squares = weight_at ? squares_of((const float *)weight_at, in * out, threads) : 0, length = sqrt(squares);
    failed = squares < 0;
#pragma omp parallel for num_threads(threads) if (batch * (in + out) > 1 << 18)
    for (long i = 0; i < batch; i++) {
        double sums[3];
        example(a + i * in, in, g + i * out, out, y ? y + i * out : NULL, bias, sums);
        norms[i] = sums[0] * sums[1];
        if (y)
            norms[i] += rate * (2 * (sums[2] + allowance * sqrt(sums[1]) * (length * sqrt(sums[0]) + of_bias)) + rate * squares);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* In place: to a sum over examples with these factors, rate times the weight for each, which is as often as the factors add up to. */
static PyObject *add_decay(PyObject *self, PyObject *args)
{
    Py_ssize_t sum_at, weight_at, factors_at;
    long count, batch;
    double rate, together = 0;
    int threads;
    if (!PyArg_ParseTuple(args, "nnnlldi", &sum_at, &weight_at, &factors_at, &count, &batch, &rate, &threads))
        return NULL;
    float *sum = (float *)sum_at;
    const float *weight = (const float *)weight_at, *factors = (const float *)factors_at;
    enum { PIECE = 1 << 14 };
    const Beside beside = chosen.beside;
    Py_BEGIN_ALLOW_THREADS
    for (long i = 0; i < batch; i++)
        together += factors[i];
    const float amount = (float)(rate * together);
#pragma omp parallel for num_threads(threads) if (count > 4 * PIECE)
    for (long k = 0; k < count; k += PIECE)
        beside(sum + k, weight + k, amount, sum + k, count - k < PIECE ? count - k : PIECE);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Sums of output gradients by example and token, and their squared norms; with the weight W of the table, of these sums and rate W
 * together. |W|^2 and what is added to it are sums of rows x width numbers at most: what double precision may have lost is allowed for. */
static PyObject *embedding_sums(PyObject *self, PyObject *args)
{
    Tokens s;
    Py_ssize_t tokens_at, g_at, weight_at, sums_at, held_at, norms_at;
    double rate;
    int threads, failed = 0;
    if (!PyArg_ParseTuple(args, "nnnnnn(lllll)di", &tokens_at, &g_at, &weight_at, &sums_at, &held_at, &norms_at, &s.batch, &s.positions,
                          &s.width, &s.rows, &s.padding, &rate, &threads))
        return NULL;
    const float *weight = (const float *)weight_at;
    float *sums = (float *)sums_at;
    int64_t *held = (int64_t *)held_at;
    double *norms = (double *)norms_at;
    enum { NO_MEMORY = 1, NO_TOKEN = 2 };
    Py_BEGIN_ALLOW_THREADS
    const double length = weight ? squares_of(weight, s.rows * s.width, threads) : 0, decay = rate * rate * length;
    failed |= length < 0 ? NO_MEMORY : 0;
#pragma omp parallel num_threads(threads) firstprivate(s) reduction(| : failed)
    {
        long *place = calloc(s.rows, sizeof(long));
        failed |= place ? 0 : NO_MEMORY;
#pragma omp for schedule(dynamic, 4)
        for (long i = 0; i < s.batch; i++) {
            const long first = i * s.positions;
            const long rows = place ? chosen.gather(&s, i, (const int64_t *)tokens_at, (const float *)g_at, sums, held, place) : 0;
            failed |= rows < 0 ? NO_TOKEN : 0;
            double squares = 0, along = 0;
            if (rows > 0 && weight)
                chosen.held_norms(sums + first * s.width, held + first, rows, s.width, weight, &squares, &along);
            else if (rows > 0)
                squares = chosen.square(sums + first * s.width, rows * s.width);
            norms[i] = squares + 2 * rate * along + decay;
            if (weight)
                norms[i] += 2 * (double)(s.rows * s.width) * DBL_EPSILON * (squares + decay);
        }
        free(place);
    }
    Py_END_ALLOW_THREADS
    if (failed & NO_MEMORY)
        return PyErr_NoMemory();
    if (failed)
        return PyErr_Format(PyExc_IndexError, "a token is not in the table");
    Py_RETURN_NONE;
}

/* What `embedding_sums` found, each example with its factor, added up by token, and `amount` times the weight; threads share the columns. */
static PyObject *embedding_add(PyObject *self, PyObject *args)
{
    Tokens s;
    Py_ssize_t sums_at, held_at, factors_at, weight_at, to_at;
    double amount;
    int threads;
    if (!PyArg_ParseTuple(args, "nnnnn(lllll)di", &sums_at, &held_at, &factors_at, &weight_at, &to_at, &s.batch, &s.positions, &s.width,
                          &s.rows, &s.padding, &amount, &threads))
        return NULL;
    const long part = round_up((s.width + threads - 1) / threads, WIDEST);
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads(threads)
    for (long first = 0; first < s.width; first += part)
        chosen.scatter(&s, (const float *)sums_at, (const int64_t *)held_at, (const float *)factors_at, (const float *)weight_at,
                       (float)amount, first, first + part < s.width ? first + part : s.width, (float *)to_at);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Rows of several tensors side by side, each with a multiple of one more row added, and the squared norms of what comes out, in double
 * precision. `parts` is a tuple of (tensor [batch][count], count, row or 0, rate). */
static PyObject *beside(PyObject *self, PyObject *args)
{
    Py_ssize_t rows_at, norms_at;
    long batch, wide;
    PyObject *parts;
    if (!PyArg_ParseTuple(args, "O!nnll", &PyTuple_Type, &parts, &rows_at, &norms_at, &batch, &wide))
        return NULL;
    float *rows = (float *)rows_at;
    double *norms = (double *)norms_at;
    long place = 0;
    for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(parts); part++) {
        Py_ssize_t from_at, more_at;
        long count;
        double rate;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parts, part), "nlnd", &from_at, &count, &more_at, &rate))
            return NULL;
        for (long i = 0; i < batch; i++)
            chosen.beside((const float *)from_at + i * count, (const float *)more_at, (float)rate, rows + i * wide + place, count);
        place += count;
    }
    for (long i = 0; i < batch; i++)
        norms[i] = chosen.square(rows + i * wide, wide);
    Py_RETURN_NONE;
}

/* As `squares_of`. */
static PyObject *square(PyObject *self, PyObject *args)
{
    Py_ssize_t x_at;
    long count;
    int threads;
    double sum;
    if (!PyArg_ParseTuple(args, "nli", &x_at, &count, &threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sum = squares_of((const float *)x_at, count, threads);
    Py_END_ALLOW_THREADS
    return sum < 0 ? PyErr_NoMemory() : PyFloat_FromDouble(sum);
}

/* A weight [out][kernel] standardised by row: u_c = (w_c - mean) s_c with s_c = (kernel (variance + eps))^(-1/2). Written are u, like
 * the gradients of `conv_gradients` ([out][kernel] if across, else [kernel][out, up to whole vectors]), the scales s, and the coefficients
 * with which the squared norm of the projected gradients P, to which rate * w is added, follows from sums over the plain ones:
 * s^2, s^2 / kernel, s^2 (2 - |u_c|^2), and of 2 rate <P_c, w_c> + rate^2 |w_c|^2, where <P_c, w_c> = eps kernel s^2 <u_c, G_c>. */
static PyObject *standardize(PyObject *self, PyObject *args)
{
    Py_ssize_t weight_at, u_at, scale_at, coefficients_at;
    long out, kernel;
    double eps, rate;
    int across;
    if (!PyArg_ParseTuple(args, "nnnnllddp", &weight_at, &u_at, &scale_at, &coefficients_at, &out, &kernel, &eps, &rate, &across))
        return NULL;
    const long wide = round_up(out, WIDEST);
    float *u = (float *)u_at, *scale = (float *)scale_at;
    double *coefficients = (double *)coefficients_at;
    if (!across)
        memset(u, 0, kernel * wide * sizeof(float));
    for (long c = 0; c < out; c++) {
        const float *w = (const float *)weight_at + c * kernel;
        double mean = 0, variance = 0, length = 0;
#pragma omp simd reduction(+ : mean)
        for (long k = 0; k < kernel; k++)
            mean += w[k];
        mean /= kernel;
#pragma omp simd reduction(+ : variance)
        for (long k = 0; k < kernel; k++)
            variance += (w[k] - mean) * (w[k] - mean);
        const double s = 1 / sqrt(variance + kernel * eps);
        for (long k = 0; k < kernel; k++) {
            float *to = across ? u + c * kernel + k : u + k * wide + c;
            *to = (float)((w[k] - mean) * s);
            length += (double)*to * *to;
        }
        scale[c] = (float)s;
        coefficients[c] = s * s;
        coefficients[out + c] = s * s / kernel;
        coefficients[2 * out + c] = s * s * (2 - length);
        coefficients[3 * out + c] = 2 * rate * eps * kernel * s * s;
        coefficients[4 * out + c] = rate * rate * (variance + kernel * mean * mean);
    }
    Py_RETURN_NONE;
}

/* In place: a sum of plain gradients G, laid out like u, becomes s (G_c - mean(G_c) - u_c <u_c, G_c>) + amount * w_c. */
static PyObject *project(PyObject *self, PyObject *args)
{
    Py_ssize_t gradient_at, u_at, scale_at, weight_at;
    long out, kernel;
    double amount;
    int across;
    if (!PyArg_ParseTuple(args, "nnnnlldp", &gradient_at, &u_at, &scale_at, &weight_at, &out, &kernel, &amount, &across))
        return NULL;
    const long wide = across ? 1 : round_up(out, WIDEST), step = across ? 1 : out;
    const float *scale = (const float *)scale_at;
    for (long c = 0; c < out; c++) {
        float *g = (float *)gradient_at + (across ? c * kernel : c);
        const float *u = (const float *)u_at + (across ? c * kernel : c), *w = (const float *)weight_at + c * kernel;
        double total = 0, along = 0;
#pragma omp simd reduction(+ : total, along)
        for (long k = 0; k < kernel; k++) {
            total += g[k * step];
            along += (double)g[k * step] * u[k * wide];
        }
        for (long k = 0; k < kernel; k++)
            g[k * step] = (float)(scale[c] * (g[k * step] - total / kernel - along * u[k * wide]) + amount * w[k]);
    }
    Py_RETURN_NONE;
}

static PyObject *use(PyObject *self, PyObject *args)
{
    const char *wanted = NULL;
    if (!PyArg_ParseTuple(args, "|z", &wanted))
        return NULL;
    if (!choose(wanted))
        return PyErr_Format(PyExc_ValueError, "this processor cannot run %s", wanted);
    return PyUnicode_FromString(chosen.name);
}

/* Keep what is freed, up to so many bytes, for the next step, instead of handing it back to the operating system, which would clear each
 * page before it gives it out again. */
static PyObject *keep_memory(PyObject *self, PyObject *args)
{
    int bytes;
    if (!PyArg_ParseTuple(args, "i", &bytes))
        return NULL;
#ifdef __GLIBC__
    return PyBool_FromLong(mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, bytes));
#else
    Py_RETURN_FALSE;
#endif
}

/* Hand back what is free now. */
static PyObject *trim_memory(PyObject *self, PyObject *args)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    Py_RETURN_NONE;
}

static PyObject *name(PyObject *self, PyObject *args)
{
    return PyUnicode_FromString(chosen.name);
}

static PyMethodDef methods[] = {
    {"conv_gradients", conv_gradients, METH_VARARGS, "Per-example weight gradients of a convolution, and sums over them."},
    {"conv_norms", conv_norms, METH_VARARGS, "Squared norms of per-example weight gradients, by Gram matrices."},
    {"outer_norms", outer_norms, METH_VARARGS, "Squared norms of products of an output gradient and an input, with weight decay or without."},
    {"add_decay", add_decay, METH_VARARGS, "A weight's decay to a sum over examples."},
    {"embedding_sums", embedding_sums, METH_VARARGS, "Sums of output gradients by example and token, and their squared norms."},
    {"embedding_add", embedding_add, METH_VARARGS, "Those sums added up over the examples, with weight decay or without."},
    {"beside", beside, METH_VARARGS, "Rows of several tensors side by side, with weight decay or without, and their squared norms."},
    {"square", square, METH_VARARGS, "The sum of squares of a row of numbers."},
    {"standardize", standardize, METH_VARARGS, "A weight standardised by output channel, and what norms of projected gradients need."},
    {"project", project, METH_VARARGS, "The gradient of a standardised weight, from that of the weight it is made into."},
    {"norm_gradients", norm_gradients, METH_VARARGS, "Per-example gradients of a normalisation's weight and bias."},
    {"keep_memory", keep_memory, METH_VARARGS, "Keep freed memory, up to so many bytes; whether the C library can be told so."},
    {"trim_memory", trim_memory, METH_NOARGS, "Hand free memory back to the operating system."},
    {"name", name, METH_NOARGS, "The version in use."},
    {"use", use, METH_VARARGS, "Use the version for this instruction set (the best one if None); its name."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    choose(NULL);
    return PyModule_Create(&definition);
}
