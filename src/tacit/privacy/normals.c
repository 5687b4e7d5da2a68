/* Box and Muller's transform of random words into standard normal numbers; `normals.py` is its face.
 *
 * Built when tacit is installed, if there is a C compiler; without one PyTorch computes the same numbers up to the last digits, slower.
 * Everything is in double precision. The series are Taylor's, with as many terms as a double can tell.
 */

#ifdef __FAST_MATH__
#error "-ffast-math takes out the rounding to the grid; build without it"
#endif

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

static const double PI = 3.14159265358979323846, LOG2 = 0.69314718055994530942;

/* A whole number as a double, rounded once; by halves put into the digits of 2^84 and 2^52, which every instruction set can do to
 * many at once. */
static inline double whole(uint64_t number)
{
    const uint64_t high_bits = 0x4530000000000000 | number >> 32, low_bits = 0x4330000000000000 | (number & 0xFFFFFFFF);
    double high, low;
    memcpy(&high, &high_bits, sizeof high);
    memcpy(&low, &low_bits, sizeof low);
    return (high - 0x1p84) + (low - 0x1p52);
}

/* log(u) for 2^-96 <= u <= 1: u = 2^k m with m about 1, and log m = 2 artanh s = 2 (s + s^3/3 + s^5/5 + ...), s = (m - 1)/(m + 1).
 * With m from 0.707 to 1.414, s^2 < 0.0295, and the first term left out is less than 1e-18 of the sum. Near u = 1, `below` = 1 - u
 * has digits that u has not. */
static inline double logarithm(double u, double below)
{
    const uint64_t one = 0x3FF0000000000000, root_of_half = 0x3FE6A09E00000000; /* as the bits of a double */
    uint64_t bits;
    memcpy(&bits, &u, sizeof bits);
    bits += one - root_of_half;
    const double k = whole(bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFF) + root_of_half;
    double m;
    memcpy(&m, &bits, sizeof m);
    const double s = (k == 0 ? -below : m - 1) / (m + 1), z = s * s;
    double sum = 1.0 / 21;
#pragma GCC unroll 10
    for (int odd = 19; odd >= 1; odd -= 2)
        sum = sum * z + 1.0 / odd;
    return k * LOG2 + 2 * s * sum;
}

/* sin x and cos x for |x| <= pi/4: the first terms left out are less than 1e-19. */
static inline double sine(double x)
{
    const double z = x * x;
    double sum = 1;
#pragma GCC unroll 10
    for (int n = 18; n >= 2; n -= 2)
        sum = 1 - sum * (z * (1.0 / (n * (n + 1))));
    return sum * x;
}

static inline double cosine(double x)
{
    const double z = x * x;
    double sum = 1;
#pragma GCC unroll 10
    for (int n = 19; n >= 1; n -= 2)
        sum = 1 - sum * (z * (1.0 / (n * (n + 1))));
    return sum;
}

/* r = sqrt(-2 log u) with u the middle of one of 2^95 cells of (0, 1), t one of 2^64 angles: r cos t and r sin t. Of the 95 bits, 63
 * are in `radii` and the last 32 in `finer`; these matter in the tails, where u is small. The nearest quarter turn is taken off an
 * angle while it is a whole number, exactly. */
static inline __attribute__((always_inline)) void transform(
    const uint64_t *restrict radii, const uint64_t *restrict angles, const uint32_t *restrict finer, double *restrict cosines,
    double *restrict sines, long pairs)
{
    for (long i = 0; i < pairs; i++) {
        const double last = (whole(finer[i]) + 0.5) * 0x1p-32;
        const double u = (whole(radii[i] & INT64_MAX) + last) * 0x1p-63, below = (whole(~radii[i] & INT64_MAX) + (1 - last)) * 0x1p-63;
        const double r = sqrt(-2 * logarithm(u, below));
        const uint64_t shifted = angles[i] + ((uint64_t)1 << 61), quarter = shifted >> 62;
        const double x = (whole(shifted & (((uint64_t)1 << 62) - 1)) - 0x1p61) * (PI * 0x1p-63), c = cosine(x), s = sine(x);
        const double across = quarter & 1 ? s : c, along = quarter & 1 ? c : s;
        cosines[i] = quarter == 1 || quarter == 2 ? -(r * across) : r * across;
        sines[i] = quarter >= 2 ? -(r * along) : r * along;
    }
}

typedef void (*Transform)(const uint64_t *, const uint64_t *, const uint32_t *, double *, double *, long);

static void any(
    const uint64_t *radii, const uint64_t *angles, const uint32_t *finer, double *cosines, double *sines, long pairs)
{
    transform(radii, angles, finer, cosines, sines, pairs);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,fma")))
static void avx512(
    const uint64_t *radii, const uint64_t *angles, const uint32_t *finer, double *cosines, double *sines, long pairs)
{
    transform(radii, angles, finer, cosines, sines, pairs);
}

__attribute__((target("avx2,fma")))
static void avx2(
    const uint64_t *radii, const uint64_t *angles, const uint32_t *finer, double *cosines, double *sines, long pairs)
{
    transform(radii, angles, finer, cosines, sines, pairs);
}
#endif

/* The best version that this processor can run, or the one of this name; NULL if it cannot run that. */
static Transform version(const char *name)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && (!name || strcmp(name, "avx512") == 0))
        return avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (!name || strcmp(name, "avx2") == 0))
        return avx2;
#endif
    return !name || strcmp(name, "any") == 0 ? any : NULL;
}

/* normals(words, finer, numbers, version = None): 2n random words and n half words, which are left as they are, become 2n numbers,
 * cosines first. */
static PyObject *normals(PyObject *self, PyObject *args)
{
    Py_buffer words, finer, numbers;
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "y*y*w*|z", &words, &finer, &numbers, &name))
        return NULL;
    const Transform box_muller = version(name);
    const int fit = box_muller && words.len == numbers.len && words.len % 16 == 0 && finer.len * 4 == words.len;
    if (fit) {
        const long pairs = words.len / 16;
        const uint64_t *word = words.buf;
        double *number = numbers.buf;
        Py_BEGIN_ALLOW_THREADS
        box_muller(word, word + pairs, finer.buf, number, number + pairs, pairs);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&finer);
    PyBuffer_Release(&numbers);
    if (!box_muller)
        return PyErr_Format(PyExc_ValueError, "this processor cannot run %s", name);
    if (!fit)
        return PyErr_Format(PyExc_ValueError, "as many numbers as words, an even count, and half as many half words");
    Py_RETURN_NONE;
}

/* noisy_mean(clipped, normals, std, divisor, grid, private): private[i] = (clipped[i] + std * normals[i]) / divisor, rounded to the
 * nearest multiple of the grid, a power of two, then to a float. Numbers beside 3/2 2^52 grid have no digits below the grid, so that
 * adding it rounds; a grid of 0 rounds nothing. */
static PyObject *noisy_mean(PyObject *self, PyObject *args)
{
    Py_buffer clipped, normals, private;
    double std, divisor, grid;
    if (!PyArg_ParseTuple(args, "y*y*dddw*", &clipped, &normals, &std, &divisor, &grid, &private))
        return NULL;
    const int fit = clipped.len == private.len && clipped.len * 2 == normals.len;
    if (fit) {
        const float *sum = clipped.buf;
        const double *normal = normals.buf;
        const double anchor = 0x1.8p52 * grid;
        float *result = private.buf;
        for (long i = 0; i < clipped.len / (long)sizeof(float); i++)
            result[i] = (float)(((sum[i] + std * normal[i]) / divisor + anchor) - anchor);
    }
    PyBuffer_Release(&clipped);
    PyBuffer_Release(&normals);
    PyBuffer_Release(&private);
    if (!fit)
        return PyErr_Format(PyExc_ValueError, "as many floats as normals");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"normals", normals, METH_VARARGS, "Turn random words, an even count, and half as many half words into as many standard normal doubles as words."},
    {"noisy_mean", noisy_mean, METH_VARARGS, "Add normal doubles, scaled, to floats, divide, and round to a grid."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_normals", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__normals(void)
{
    return PyModule_Create(&definition);
}
