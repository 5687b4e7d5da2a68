/* One instruction set's version of the kernels; `kernels.c` includes this file once for each, with
 *
 *   NAME(f)   the name of function f in this version          TARGET   the attribute that turns the instructions on
 *   LANES     floats in a vector                              ROWS     rows of a register tile (x 2 vectors)
 *
 * Everything rests on one register tile:  c[m][n] += sum_p a[p][m] * b[p][n].  Neither factor is packed: positions p are pixels
 * of channels-last images, whose channels lie next to each other in memory.
 */

typedef float NAME(vector) __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef float NAME(half) __attribute__((vector_size(LANES / 2 * sizeof(float)), aligned(4)));
typedef double NAME(doubles) __attribute__((vector_size(LANES / 2 * sizeof(double))));
#define VECTOR NAME(vector)
#define HALF NAME(half)
#define DOUBLES NAME(doubles)

/* positions p = (i, j), i < rows, j < columns; the two factors advance by their own strides (in floats) */
typedef struct {
    long rows, columns;
    long a_row, a_column, b_row, b_column;
} NAME(walk);

/* What a tile does with c: add to it or begin with it; and, when a sum is complete, what to gather of its entries. */
typedef struct {
    int begin;
    int by_row;                             /* whether sums belong to the rows m (a vector each) or to the columns n of c */
    float *squares, *totals, *along;        /* NULL: nothing is gathered, or only squares */
    const float *direction;
    const float *added;                     /* to the complete sum, before anything is gathered of it; NULL: nothing */
} NAME(ends);

TARGET static inline __attribute__((always_inline)) void NAME(tile)(
    const int height, const int width, const NAME(walk) *walk, const float *a, const float *b, float *c, long c_row,
    const NAME(ends) *ends, long direction_at, long direction_row, long column)
{
    VECTOR sum[ROWS][3];
    for (int m = 0; m < height; m++)
        for (int n = 0; n < width; n++)
            sum[m][n] = ends->begin ? (VECTOR){0} : *(const VECTOR *)(c + m * c_row + n * LANES);
    for (long i = 0; i < walk->rows; i++) {
        const float *ap = a + i * walk->a_row, *bp = b + i * walk->b_row;
        for (long j = 0; j < walk->columns; j++, ap += walk->a_column, bp += walk->b_column) {
            VECTOR right[3];
            for (int n = 0; n < width; n++)
                right[n] = *(const VECTOR *)(bp + n * LANES);
            for (int m = 0; m < height; m++)
                for (int n = 0; n < width; n++)
                    sum[m][n] += ap[m] * right[n];
        }
    }
    if (ends->added)
        for (int m = 0; m < height; m++)
            for (int n = 0; n < width; n++)
                sum[m][n] += *(const VECTOR *)(ends->added + direction_at + m * direction_row + n * LANES);
    for (int m = 0; m < height; m++)
        for (int n = 0; n < width; n++)
            *(VECTOR *)(c + m * c_row + n * LANES) = sum[m][n];
    if (ends->squares && !ends->by_row)
        for (int n = 0; n < width; n++) {
            VECTOR squares = {0};
            for (int m = 0; m < height; m++)
                squares += sum[m][n] * sum[m][n];
            *(VECTOR *)(ends->squares + column + n * LANES) += squares;
        }
    if (ends->direction && !ends->by_row)
        for (int n = 0; n < width; n++) {
            VECTOR total = {0}, along = {0};
            for (int m = 0; m < height; m++) {
                total += sum[m][n];
                along += sum[m][n] * *(const VECTOR *)(ends->direction + direction_at + m * direction_row + n * LANES);
            }
            *(VECTOR *)(ends->totals + column + n * LANES) += total;
            *(VECTOR *)(ends->along + column + n * LANES) += along;
        }
    if (ends->squares && ends->by_row)
        for (int m = 0; m < height; m++)
            for (int n = 0; n < width; n++)
                *(VECTOR *)(ends->squares + (column + m) * LANES) += sum[m][n] * sum[m][n];
    if (ends->direction && ends->by_row)
        for (int m = 0; m < height; m++)
            for (int n = 0; n < width; n++) {
                *(VECTOR *)(ends->totals + (column + m) * LANES) += sum[m][n];
                *(VECTOR *)(ends->along + (column + m) * LANES) +=
                    sum[m][n] * *(const VECTOR *)(ends->direction + direction_at + m * direction_row + n * LANES);
            }
}

/* one strip of one to three vectors: all rows m < height, `most` at a time. A switch makes each height a constant, so that sums stay
 * in registers. `step` is how far `column` moves with a row: 1 if sums belong to rows. */
TARGET static inline __attribute__((always_inline)) void NAME(strip)(
    const int most, long height, const int width, const NAME(walk) *walk, const float *a, const float *b, float *c, long c_row,
    const NAME(ends) *ends, long direction_at, long direction_row, long column, const int step)
{
#define TILE(rows)                                                                                                             \
    NAME(tile)(rows, width, walk, a + m, b, c + m * c_row, c_row, ends, direction_at + m * direction_row, direction_row,       \
               column + step * m)
    long m = 0;
    for (; m + most <= height; m += most)
        TILE(most);
    switch (height - m) {
#define REST(rows)                                                                                                             \
    case rows:                                                                                                                 \
        if (rows < most)                                                                                                       \
            TILE(rows);                                                                                                        \
        break;
    REST(1) REST(2) REST(3) REST(4) REST(5)
#if ROWS > 6
    REST(6) REST(7) REST(8) REST(9) REST(10) REST(11)
#endif
#undef REST
#undef TILE
    }
}

/* The weight gradient of one example, added up over its views, and sums over it. A block of rows of positions at a time: its padded
 * pixels and a strip of its gradients, copied side by side, stay in the nearest caches while all of the kernel's rows pass over them. */
TARGET static void NAME(conv_example)(const Conv *s, const float *x, const float *g, const float *direction, float *gradient,
                                      float *sums, float *scratch)
{
    const long row = s->kernel_width * s->in, kernel = s->kernel_height * row, out = s->out;
    const long wide = round_up(out, LANES), direction_row = round_up(out, WIDEST);
    const long block = block_rows(s->rows, s->columns), blocks = (s->rows + block - 1) / block, parts = s->views * blocks;
    const long pixels = s->padded_width * s->in;
    float *gathered = scratch, *bias = gathered + 3 * wide, *strip = bias + wide;
    float *pixel_rows = strip + block * s->columns * 2 * LANES;
    float *c = gradient;
    if (wide != out)
        c = pixel_rows + ((block - 1) * s->stride_height + s->kernel_height) * pixels;
    memset(gathered, 0, 4 * wide * sizeof(float));
    for (long part = 0; part < parts; part++) {
        const long view = part / blocks, first = part % blocks * block;
        const long rows = first + block < s->rows ? block : s->rows - first;
        const float *image = padded_rows(s, x + view * s->height * s->width * s->in, first * s->stride_height,
                                         (rows - 1) * s->stride_height + s->kernel_height, pixel_rows);
        const int last = part + 1 == parts;
        NAME(ends) ends = {.begin = part == 0};
        if (last) {
            ends.squares = gathered;
            ends.added = s->added;
        }
        if (last && direction) {
            ends.totals = gathered + wide;
            ends.along = gathered + 2 * wide;
            ends.direction = direction;
        }
        for (long n = 0; n < wide; n += 2 * LANES) {
            const int vectors = n + LANES < wide ? 2 : 1;
            const long lanes = n + vectors * LANES <= out ? vectors * LANES : out - n;
            const float *from = g + (view * s->rows + first) * s->columns * out + n;
            VECTOR total[2] = {{0}, {0}};
            for (long p = 0; p < rows * s->columns; p++, from += out) {
                float *to = strip + p * vectors * LANES;
                if (lanes == vectors * LANES)
                    for (int v = 0; v < vectors; v++)
                        *(VECTOR *)(to + v * LANES) = *(const VECTOR *)(from + v * LANES);
                else {  /* lanes past the last channel are zero */
                    memset(to, 0, vectors * LANES * sizeof(float));
                    memcpy(to, from, lanes * sizeof(float));
                }
                for (int v = 0; v < vectors; v++)
                    total[v] += *(const VECTOR *)(to + v * LANES);
            }
            for (int v = 0; v < vectors; v++)
                *(VECTOR *)(bias + n + v * LANES) += total[v];
            const NAME(walk) walk = {
                .rows = rows,
                .columns = s->columns,
                .a_row = s->stride_height * pixels,
                .a_column = s->stride_width * s->in,
                .b_row = s->columns * vectors * LANES,
                .b_column = vectors * LANES,
            };
            for (long i = 0; i < s->kernel_height; i++) {
                const float *a = image + i * pixels;
                float *to = c + i * row * wide + n;
                const long at = i * row * direction_row + n;
                if (vectors == 2)
                    NAME(strip)(ROWS, row, 2, &walk, a, strip, to, wide, &ends, at, direction_row, n, 0);
                else
                    NAME(strip)(ROWS, row, 1, &walk, a, strip, to, wide, &ends, at, direction_row, n, 0);
            }
        }
    }
    memcpy(sums, gathered, out * sizeof(float));
    memcpy(sums + out, bias, out * sizeof(float));
    if (direction) {
        memcpy(sums + 2 * out, gathered + wide, out * sizeof(float));
        memcpy(sums + 3 * out, gathered + 2 * wide, out * sizeof(float));
    }
    if (wide != out)
        for (long m = 0; m < kernel; m++)
            memcpy(gradient + m * out, c + m * wide, out * sizeof(float));
}

/* The same for few output channels: vectors run along a row of the window (a multiple of LANES numbers), and the gradient comes out as
 * out x kernel. */
TARGET static void NAME(conv_example_across)(const Conv *s, const float *x, const float *g, const float *direction,
                                             float *gradient, float *sums, float *scratch)
{
    const long row = s->kernel_width * s->in, kernel = s->kernel_height * row, out = s->out;
    const long block = block_rows(s->rows, s->columns), blocks = (s->rows + block - 1) / block, parts = s->views * blocks;
    const long pixels = s->padded_width * s->in;
    float *gathered = scratch, *pixel_rows = gathered + 3 * out * LANES;
    memset(gathered, 0, 3 * out * LANES * sizeof(float));
    memset(sums + out, 0, out * sizeof(float));
    for (long part = 0; part < parts; part++) {
        const long view = part / blocks, first = part % blocks * block;
        const long rows = first + block < s->rows ? block : s->rows - first;
        const float *image = padded_rows(s, x + view * s->height * s->width * s->in, first * s->stride_height,
                                         (rows - 1) * s->stride_height + s->kernel_height, pixel_rows);
        const float *from = g + (view * s->rows + first) * s->columns * out;
        const int last = part + 1 == parts;
        NAME(ends) ends = {.begin = part == 0, .by_row = 1};
        if (last) {
            ends.squares = gathered;
            ends.added = s->added;
        }
        if (last && direction) {
            ends.totals = gathered + out * LANES;
            ends.along = gathered + 2 * out * LANES;
            ends.direction = direction;
        }
        for (long p = 0; p < rows * s->columns; p++)
            for (long k = 0; k < out; k++)
                sums[out + k] += from[p * out + k];
        const NAME(walk) walk = {
            .rows = rows,
            .columns = s->columns,
            .a_row = s->columns * out,
            .a_column = out,
            .b_row = s->stride_height * pixels,
            .b_column = s->stride_width * s->in,
        };
        for (long i = 0; i < s->kernel_height; i++) {
            const float *b = image + i * pixels;
            long n = 0;
            for (; n + 3 * LANES <= row; n += 3 * LANES)
                NAME(strip)(2 * ROWS / 3, out, 3, &walk, from, b + n, gradient + i * row + n, kernel, &ends, i * row + n, kernel, 0, 1);
            if (n + 2 * LANES <= row) {
                NAME(strip)(ROWS, out, 2, &walk, from, b + n, gradient + i * row + n, kernel, &ends, i * row + n, kernel, 0, 1);
                n += 2 * LANES;
            }
            if (n < row)
                NAME(strip)(ROWS, out, 1, &walk, from, b + n, gradient + i * row + n, kernel, &ends, i * row + n, kernel, 0, 1);
        }
    }
    for (long k = 0; k < out; k++)
        for (int part = 0; part < (direction ? 3 : 1); part++) {
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++)
                sum += gathered[(part * out + k) * LANES + lane];
            sums[(part ? part + 1 : 0) * out + k] = sum;
        }
}

/* The Gram matrix of the columns of a (channels x wide): on and above the diagonal blocks only. */
TARGET static void NAME(gram)(const float *a, long channels, long used, long wide, float *c)
{
    /* channels in blocks, so that a strip of them stays in the nearest cache */
    const long block = 128;
    for (long first = 0; first < channels; first += block) {
        const float *part = a + first * wide;
        const NAME(walk) walk = {
            .rows = 1, .columns = channels - first < block ? channels - first : block, .a_column = wide, .b_column = wide};
        const NAME(ends) ends = {.begin = first == 0};
        for (long n = 0; n < used; n += 2 * LANES) {
            const long height = n + 2 * LANES < used ? n + 2 * LANES : used;
            if (n + 2 * LANES <= wide)
                NAME(strip)(ROWS, height, 2, &walk, part, part + n, c + n, wide, &ends, 0, 0, 0, 0);
            else
                NAME(strip)(ROWS, height, 1, &walk, part, part + n, c + n, wide, &ends, 0, 0, 0, 0);
        }
    }
}

/* to[k][p] = from[p][k] * scale[k] for p < rows, k < columns; four rows at a time */
TARGET static void NAME(turn)(const float *restrict from, long rows, long columns, const float *restrict scale, float *restrict to,
                              long to_row)
{
    typedef float quad __attribute__((vector_size(16), aligned(4)));
    long p = 0;
    for (; p + 4 <= rows; p += 4) {
        const float *a = from + p * columns, *b = a + columns, *c = b + columns, *d = c + columns;
        float *at = to + p;
        if (scale)
            for (long k = 0; k < columns; k++, at += to_row)
                *(quad *)at = (quad){a[k], b[k], c[k], d[k]} * scale[k];
        else
            for (long k = 0; k < columns; k++, at += to_row)
                *(quad *)at = (quad){a[k], b[k], c[k], d[k]};
    }
    for (; p < rows; p++)
        for (long k = 0; k < columns; k++)
            to[k * to_row + p] = scale ? from[p * columns + k] * scale[k] : from[p * columns + k];
}

TARGET static inline float NAME(dot)(const float *a, const float *b, long length)
{
    float sum = 0;
    VECTOR sums = {0};
    long k = 0;
    for (; k + LANES <= length; k += LANES)
        sums += *(const VECTOR *)(a + k) * *(const VECTOR *)(b + k);
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    for (; k < length; k++)
        sum += a[k] * b[k];
    return sum;
}

/* sums[k] = sum_p g[p][k] * by[p][k], or times one number a row (`by_row` 1), or, without `by`, as it is. */
TARGET static void NAME(column_sums)(const float *g, const float *by, long by_row, long rows, long columns, float *sums)
{
    long k = 0;
    for (; k + LANES <= columns; k += LANES) {
        VECTOR sum = {0};
        for (long p = 0; p < rows; p++) {
            const VECTOR value = *(const VECTOR *)(g + p * columns + k);
            sum += by == NULL ? value : by_row == 1 ? value * by[p] : value * *(const VECTOR *)(by + p * columns + k);
        }
        *(VECTOR *)(sums + k) = sum;
    }
    for (; k < columns; k++) {
        float sum = 0;
        for (long p = 0; p < rows; p++)
            sum += by == NULL ? g[p * columns + k] : g[p * columns + k] * (by_row == 1 ? by[p] : by[p * columns + k]);
        sums[k] = sum;
    }
}

/* The squared norm of one example's weight gradient, without the gradient:
 * sum over pairs of output positions t, s of <g_t, g_s> <a_t, a_s>, with a_t the window at t. For windows one pixel apart,
 * <a_t, a_s> is a sum of entries of the pixels' Gram matrix along a diagonal. Pairs are taken once, t before s.
 * `sums` gets sum_t g_t; if the layer's outputs y are given, sum_t g_t y_t; and if `totals`, sum_t g_t sum(a_t): a channel at a time. */
TARGET static double NAME(ghost_example)(const Conv *s, const float *x, const float *g, const float *y, int totals, const float *scale,
                                         float *sums, double *size, float *scratch)
{
    const long pixels = s->padded_height * s->padded_width, positions = s->rows * s->columns;
    const long wide = round_up(pixels, LANES), across = round_up(positions, LANES);
    float *space = scratch;
    float *turned = space;
    space += s->in * wide;
    float *left = space;
    space += pixels * wide;
    float *gradients = space;
    space += s->out * across;
    float *right = space;
    space += positions * across;
    /* channels first, padding written out */
    memset(turned, 0, s->in * wide * sizeof(float));
    for (long i = 0; i < s->height; i++) {
        const long row = i + s->top;
        if (row < 0 || row >= s->padded_height)
            continue;
        const long room = s->padded_width - s->left, columns = s->width < room ? s->width : room;
        NAME(turn)(x + i * s->width * s->in, columns, s->in, NULL, turned + row * s->padded_width + s->left, wide);
    }
    memset(gradients, 0, s->out * across * sizeof(float));
    NAME(turn)(g, positions, s->out, scale, gradients, across);
    NAME(column_sums)(g, NULL, 0, positions, s->out, sums);
    if (y)
        NAME(column_sums)(g, y, s->out, positions, s->out, sums + s->out);
    if (totals) {
        float *pixel_sums = space, *windows = space + wide;
        for (long q = 0; q < pixels; q++)
            pixel_sums[q] = 0;
        for (long k = 0; k < s->in; k++)
            for (long q = 0; q < pixels; q++)
                pixel_sums[q] += turned[k * wide + q];
        for (long p = 0; p < positions; p++) {
            windows[p] = 0;
            for (long di = 0; di < s->kernel_height; di++)
                for (long dj = 0; dj < s->kernel_width; dj++)
                    windows[p] += pixel_sums[(p / s->columns + di) * s->padded_width + p % s->columns + dj];
        }
        NAME(column_sums)(g, windows, 1, positions, s->out, sums + 2 * s->out);
    }
    NAME(gram)(turned, s->in, pixels, wide, left);
    NAME(gram)(gradients, s->out, positions, across, right);
    float *windows = space, *compact = space + wide;  /* <a_t, a_s> for one t and all later s, by padded pixels and by positions */
    double norm = 0, inputs = 0, outputs = 0;
    for (long i = 0; i < s->rows; i++)
        for (long j = 0; j < s->columns; j++) {
            const long t = i * s->columns + j, corner = i * s->padded_width + j;
            const long last = (s->rows - 1) * s->padded_width + s->columns;
            for (long di = 0; di < s->kernel_height; di++)
                for (long dj = 0; dj < s->kernel_width; dj += 3) {  /* up to three columns of the kernel at once */
                    const long shift = di * s->padded_width + dj, more = s->kernel_width - dj;
                    const float *one = left + (corner + shift) * wide + shift, *two = one + wide + 1, *three = two + wide + 1;
                    if (shift == 0)
                        memset(windows + corner, 0, (last - corner) * sizeof(float));
                    if (more >= 3)
                        for (long q = corner; q < last; q++)
                            windows[q] += one[q] + two[q] + three[q];
                    else if (more == 2)
                        for (long q = corner; q < last; q++)
                            windows[q] += one[q] + two[q];
                    else
                        for (long q = corner; q < last; q++)
                            windows[q] += one[q];
                }
            const float *weights = right + t * across;
            for (long ii = i; ii < s->rows; ii++)  /* without the columns between the maps' rows */
                memcpy(compact + ii * s->columns, windows + ii * s->padded_width, s->columns * sizeof(float));
            const double here = NAME(dot)(weights + t, compact + t, positions - t);
            const double own = weights[t], window = windows[corner];
            norm += 2 * here - own * window;  /* the pair (t, t) was counted once in `here` */
            inputs += window;
            outputs += own;
        }
    size[0] = inputs;
    size[1] = outputs;
    return norm;
}

/* Gradients of a group normalisation's weight and bias for one example: sum_p g n and sum_p g, with n the normalised input. One pass:
 * x is taken relative to the first pixel, so that variances do not cancel. A second one, while x and g are near in memory, gives
 * the gradient of the input, if `input` is not NULL: with w the weight (`affine`; 1 if NULL) and means over the group,
 * scale (w g - mean(w g) - n mean(w g n)), both means being sums over channels of what the first pass found. */
TARGET static void NAME(norm_example)(const Norm *s, const float *x, const float *g, const float *affine, float *weight, float *bias,
                                      float *input, double *scratch)
{
    double *totals = scratch, *squares = totals + s->channels, *products = squares + s->channels, *slopes = products + s->channels;
    float *centre = (float *)(slopes + s->channels), *of_g = centre + s->channels, *of_x = of_g + s->channels, *rest = of_x + s->channels;
    for (long c = 0; c < 4 * s->channels; c++)
        scratch[c] = 0;
    const long block = 256;  /* positions added up in single precision before they go into doubles */
    for (long first = 0; first < s->positions; first += block) {
        const long end = first + block < s->positions ? first + block : s->positions;
        long k = 0;
        for (; k + LANES <= s->channels; k += LANES) {
            VECTOR origin = *(const VECTOR *)(x + k), total = {0}, square = {0}, gradient = {0}, product = {0};
            for (long p = first; p < end; p++) {
                VECTOR value = *(const VECTOR *)(x + p * s->channels + k) - origin, slope = *(const VECTOR *)(g + p * s->channels + k);
                total += value;
                square += value * value;
                gradient += slope;
                product += slope * value;
            }
            for (int lane = 0; lane < LANES; lane++) {
                totals[k + lane] += total[lane];
                squares[k + lane] += square[lane];
                slopes[k + lane] += gradient[lane];
                products[k + lane] += product[lane];
            }
        }
        for (; k < s->channels; k++)
            for (long p = first; p < end; p++) {
                const float value = x[p * s->channels + k] - x[k], slope = g[p * s->channels + k];
                totals[k] += value, squares[k] += (double)value * value, slopes[k] += slope, products[k] += (double)slope * value;
            }
    }
    for (long c = 0; c < s->channels; c++)
        bias[c] = (float)slopes[c];
    const long group = s->channels / s->groups;
    const double count = s->positions;
    for (long first = 0; first < s->channels; first += group) {
        double mean = 0, spread = 0;
        for (long c = first; c < first + group; c++)
            mean += x[c] + totals[c] / count;
        mean /= group;
        for (long c = first; c < first + group; c++) {
            const double own = totals[c] / count, apart = x[c] + own - mean;
            spread += squares[c] / count - own * own + apart * apart;
        }
        const double scale = 1 / sqrt((spread > 0 ? spread : 0) / group + s->eps);
        double along = 0, across = 0;  /* mean(w g) and mean(w g n) */
        for (long c = first; c < first + group; c++) {
            const double found = scale * (products[c] + (x[c] - mean) * slopes[c]), own = affine ? affine[c] : 1;
            weight[c] = (float)found;
            along += own * slopes[c] / (group * count);
            across += own * found / (group * count);
        }
        for (long c = first; c < first + group; c++) {
            centre[c] = (float)mean;
            of_g[c] = (float)(scale * (affine ? affine[c] : 1));
            of_x[c] = (float)(-scale * scale * across);
            rest[c] = (float)(-scale * along);
        }
    }
    if (input == NULL)
        return;
    for (long p = 0; p < s->positions; p++) {
        const long at = p * s->channels;
        long k = 0;
        for (; k + LANES <= s->channels; k += LANES) {
            const VECTOR apart = *(const VECTOR *)(x + at + k) - *(const VECTOR *)(centre + k);
            *(VECTOR *)(input + at + k) = *(const VECTOR *)(of_g + k) * *(const VECTOR *)(g + at + k) +
                                          (*(const VECTOR *)(of_x + k) * apart + *(const VECTOR *)(rest + k));
        }
        for (; k < s->channels; k++)
            input[at + k] = of_g[k] * g[at + k] + (of_x[k] * (x[at + k] - centre[k]) + rest[k]);
    }
}

/* The same for a layer normalisation: every position is normalised by itself, over its channels. */
TARGET static void NAME(layer_norm_example)(const Norm *s, const float *x, const float *g, const float *affine, float *weight,
                                            float *bias, float *input, double *scratch)
{
    (void)scratch, (void)affine, (void)input;
    const long channels = s->channels, whole = channels / LANES * LANES;
    for (long k = 0; k < channels; k++)
        weight[k] = bias[k] = 0;
    for (long p = 0; p < s->positions; p++, x += channels, g += channels) {
        float mean = 0, spread = 0;
        VECTOR sums = {0}, squares = {0};
        for (long k = 0; k < whole; k += LANES)
            sums += *(const VECTOR *)(x + k);
        for (int lane = 0; lane < LANES; lane++)
            mean += sums[lane];
        for (long k = whole; k < channels; k++)
            mean += x[k];
        mean /= channels;
        for (long k = 0; k < whole; k += LANES) {
            VECTOR apart = *(const VECTOR *)(x + k) - mean;
            squares += apart * apart;
        }
        for (int lane = 0; lane < LANES; lane++)
            spread += squares[lane];
        for (long k = whole; k < channels; k++)
            spread += (x[k] - mean) * (x[k] - mean);
        const float scale = (float)(1 / sqrt(spread / channels + s->eps));
        for (long k = 0; k < whole; k += LANES) {
            VECTOR slope = *(const VECTOR *)(g + k);
            *(VECTOR *)(weight + k) += slope * ((*(const VECTOR *)(x + k) - mean) * scale);
            *(VECTOR *)(bias + k) += slope;
        }
        for (long k = whole; k < channels; k++) {
            weight[k] += g[k] * ((x[k] - mean) * scale);
            bias[k] += g[k];
        }
    }
}

/* The sum of the squares of so many numbers, in double precision. */
TARGET static double NAME(square)(const float *x, long count)
{
    DOUBLES sums[4] = {{0}};  /* four, so that no addition waits for the one before it */
    double sum = 0;
    long k = 0;
    for (; k + 2 * LANES <= count; k += 2 * LANES)
        for (int part = 0; part < 4; part++) {
            const DOUBLES value = __builtin_convertvector(*(const HALF *)(x + k + part * LANES / 2), DOUBLES);
            sums[part] += value * value;
        }
    const DOUBLES all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < LANES / 2; lane++)
        sum += all[lane];
    for (; k < count; k++)
        sum += (double)x[k] * x[k];
    return sum;
}

/* Of one product g a^T: |a|^2, |g|^2, and, if the output y = W a + b is given, <g, y - b>. */
TARGET static void NAME(outer_example)(const float *a, long in, const float *g, long out, const float *y, const float *bias,
                                       double *sums)
{
    double along = 0;
    if (y && bias)
#pragma omp simd reduction(+ : along)
        for (long k = 0; k < out; k++)
            along += (double)g[k] * ((double)y[k] - bias[k]);
    else if (y)
#pragma omp simd reduction(+ : along)
        for (long k = 0; k < out; k++)
            along += (double)g[k] * y[k];
    sums[0] = NAME(square)(a, in), sums[1] = NAME(square)(g, out), sums[2] = along;
}

/* to = from + rate * more (nothing more if NULL) */
TARGET static void NAME(beside)(const float *from, const float *more, float rate, float *to, long count)
{
    if (more == NULL)
        memcpy(to, from, count * sizeof(float));
    else
#pragma omp simd
        for (long k = 0; k < count; k++)
            to[k] = from[k] + rate * more[k];
}

/* What the tokens of one example gather: a row of `sums` for each token that occurs, in the order in which they come, of the rows of g at
 * its positions; `held` says which tokens these are. `place` says of every token where its row is, counted over all examples and
 * from 1, so that what an example before has left there is known for that. How many rows there are; less than 0 if a token is none. */
TARGET static long NAME(gather)(const Tokens *s, long example, const int64_t *tokens, const float *g, float *sums, int64_t *held,
                                long *place)
{
    const long first = example * s->positions;
    long rows = 0;
    for (long t = 0; t < s->positions; t++) {
        const int64_t token = tokens[first + t];
        const float *from = g + (first + t) * s->width;
        if (token < 0 || token >= s->rows)
            return -1;
        if (token == s->padding)
            continue;
        if (place[token] <= first || place[token] > first + rows) {
            memcpy(sums + (first + rows) * s->width, from, s->width * sizeof(float));
            held[first + rows] = token;
            place[token] = first + ++rows;
        } else {
            float *to = sums + (place[token] - 1) * s->width;
#pragma omp simd
            for (long k = 0; k < s->width; k++)
                to[k] += from[k];
        }
    }
    for (long k = rows; k < s->positions; k++)
        held[first + k] = -1;
    return rows;
}

/* What `gather` left of one example: the sum of its squares, and its inner product with the weight's rows of the same tokens. */
TARGET static void NAME(held_norms)(const float *sums, const int64_t *held, long rows, long width, const float *weight, double *squares,
                                    double *along)
{
    DOUBLES square[2] = {{0}}, product[2] = {{0}};
    double more_squares = 0, more_products = 0;
    for (long t = 0; t < rows; t++) {
        const float *sum = sums + t * width, *w = weight + held[t] * width;
        long k = 0;
        for (; k + LANES <= width; k += LANES)
            for (int part = 0; part < 2; part++) {
                const DOUBLES value = __builtin_convertvector(*(const HALF *)(sum + k + part * LANES / 2), DOUBLES);
                square[part] += value * value;
                product[part] += value * __builtin_convertvector(*(const HALF *)(w + k + part * LANES / 2), DOUBLES);
            }
        for (; k < width; k++) {
            more_squares += (double)sum[k] * sum[k];
            more_products += (double)sum[k] * w[k];
        }
    }
    for (int lane = 0; lane < LANES / 2; lane++) {
        more_squares += square[0][lane] + square[1][lane];
        more_products += product[0][lane] + product[1][lane];
    }
    *squares = more_squares, *along = more_products;
}

/* Columns from `first` to `end` of the sums of all examples, each with its factor, in the rows of their tokens; then `amount` times the
 * weight, if there is one. */
TARGET static void NAME(scatter)(const Tokens *s, const float *sums, const int64_t *held, const float *factors, const float *weight,
                                 float amount, long first, long end, float *to)
{
    for (long i = 0; i < s->rows; i++)
        memset(to + i * s->width + first, 0, (end - first) * sizeof(float));
    for (long i = 0; i < s->batch; i++)
        for (long t = i * s->positions; t < (i + 1) * s->positions && held[t] >= 0; t++) {
            const float *from = sums + t * s->width;
            float *row = to + held[t] * s->width;
#pragma omp simd
            for (long k = first; k < end; k++)
                row[k] += factors[i] * from[k];
        }
    for (long i = 0; weight && i < s->rows; i++)
#pragma omp simd
        for (long k = i * s->width + first; k < i * s->width + end; k++)
            to[k] += amount * weight[k];
}

#undef VECTOR
#undef HALF
#undef DOUBLES
