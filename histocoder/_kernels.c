/* What training on a CPU does between matrix products, each in one pass over memory: see histocoder/kernels.py.

   An array of type void * holds floats where `wide` is true, else the upper halves of floats (bf16). Work is shared
   among OpenMP's threads, which are torch's. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
#endif

/* In as many forms as there are kinds of processors; which one is used is chosen when the library is loaded. */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(__clang__)
#define FOR_EACH_CPU
#elif __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

/* For functions with an argument `wide`, so that it is a constant in each of their forms. */
#define IN_PLACE static inline __attribute__((always_inline))

/* Raised when what a function takes changes; kernels.py has the same. */
int version(void) { return 2; }

enum { PIECE = 1 << 14 }; /* numbers that one thread works on in turn */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t num_pieces(int64_t count) { return (count + PIECE - 1) / PIECE; }

IN_PLACE float get(const void *x, int64_t i, int wide) {
    if (wide) return ((const float *)x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Rounds to the nearest, ties to even, as torch does. */
IN_PLACE void put(void *x, int64_t i, float number, int wide) {
    if (wide) {
        ((float *)x)[i] = number;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    ((uint16_t *)x)[i] = number == number ? rounded : 0x7fc0;
}

static inline void *at(const void *x, int64_t i, int wide) { return (char *)x + i * (wide ? 4 : 2); }

/* ------------------------------------------------------------------------------------------------- optimizer */

/* A parameter in an optimizer step; kernels.py has the same. */
struct part {
    float *weight, *mean, *square;
    const void *gradient;
    void *copy; /* in bf16; NULL where none is kept */
    int64_t count;
    int32_t wide;                /* of the gradient */
    float step_size, correction; /* the learning rate over 1 - beta1^t, the root of 1 - beta2^t */
};

IN_PLACE float squares_in(const void *x, int64_t count, int wide) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += get(x, i, wide) * get(x, i, wide);
    return sum;
}

FOR_EACH_CPU static float squares_of(const void *x, int64_t count, int wide) {
    return wide ? squares_in(x, count, 1) : squares_in(x, count, 0);
}

/* The sum of the squares of all gradients; the same for any number of threads. */
double sum_of_squares(const struct part *parts, int64_t num_parts) {
    double sum = 0;
    for (const struct part *part = parts; part < parts + num_parts; part++) {
        int64_t pieces = num_pieces(part->count);
        float *sums = malloc(pieces * sizeof *sums);
#pragma omp parallel for schedule(static) if (pieces > 1)
        for (int64_t k = 0; k < pieces; k++) {
            int64_t start = k * PIECE;
            sums[k] = squares_of(at(part->gradient, start, part->wide), least(PIECE, part->count - start), part->wide);
        }
        for (int64_t k = 0; k < pieces; k++) sum += sums[k];
        free(sums);
    }
    return sum;
}

/* What is common to all parameters. */
struct settings {
    float beta1, beta2, eps, decay, scale;
};

IN_PLACE void step(const struct part *part, int64_t start, int64_t count, struct settings s, int wide) {
    float *restrict weight = part->weight + start, *restrict mean = part->mean + start;
    float *restrict square = part->square + start;
    const void *restrict gradient = at(part->gradient, start, wide);
    const float step_size = part->step_size, correction = part->correction;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float g = get(gradient, i, wide) * s.scale;
        mean[i] += (1 - s.beta1) * (g - mean[i]);
        square[i] = s.beta2 * square[i] + (1 - s.beta2) * g * g;
        weight[i] = s.decay * weight[i] - step_size * mean[i] / (sqrtf(square[i]) / correction + s.eps);
    }
}

FOR_EACH_CPU static void step_piece(const struct part *part, int64_t start, int64_t count, struct settings s) {
    if (part->wide)
        step(part, start, count, s, 1);
    else
        step(part, start, count, s, 0);
    if (!part->copy) return;
    void *restrict copy = at(part->copy, start, 0);
    const float *restrict weight = part->weight + start;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) put(copy, i, weight[i], 0);
}

/* A step of AdamW, gradients times `scale`; weights decay to `decay` times what they were. */
void adamw(const struct part *parts, int64_t num_parts, float beta1, float beta2, float eps, float decay, float scale) {
    const struct settings settings = {beta1, beta2, eps, decay, scale};
    for (const struct part *part = parts; part < parts + num_parts; part++) {
#pragma omp parallel for schedule(static) if (part->count > PIECE)
        for (int64_t start = 0; start < part->count; start += PIECE)
            step_piece(part, start, least(PIECE, part->count - start), settings);
    }
}

/* --------------------------------------------------------------------------------------------------- dropout */

/* Drawn for each number from a seed and its place: once more backwards, instead of being kept. */
struct noise {
    uint32_t key, odd; /* of the seed */
    uint32_t bound;    /* 2^32 p: what lies below is dropped */
    float scale;       /* 1 / (1 - p), of what is kept */
};

static struct noise noise_of(uint64_t seed, double p) {
    if (p >= 1) return (struct noise){.bound = UINT32_MAX};
    return (struct noise){(uint32_t)seed, (uint32_t)(seed >> 32) | 1, (uint32_t)(p * 4294967296.0), 1 / (1 - p)};
}

/* What a number is to be multiplied by: 0 or the scale. The hash is lowbias32 (Wellons 2018). */
IN_PLACE float factor(struct noise noise, int64_t place) {
    uint32_t x = (uint32_t)place * noise.odd + noise.key;
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    x ^= x >> 16;
    return x >= noise.bound ? noise.scale : 0.0f;
}

IN_PLACE void drop(void *to, const void *from, int64_t start, int64_t count, struct noise noise, int wide) {
#pragma omp simd
    for (int64_t i = start; i < start + count; i++) put(to, i, get(from, i, wide) * factor(noise, i), wide);
}

FOR_EACH_CPU static void drop_piece(void *to, const void *from, int64_t start, int64_t count, struct noise noise,
                                    int wide) {
    if (wide)
        drop(to, from, start, count, noise, 1);
    else
        drop(to, from, start, count, noise, 0);
}

/* Dropout, forwards and backwards alike. */
void dropout(void *to, const void *from, int64_t count, uint64_t seed, double p, int wide) {
    struct noise noise = noise_of(seed, p);
#pragma omp parallel for schedule(static) if (count > PIECE)
    for (int64_t start = 0; start < count; start += PIECE)
        drop_piece(to, from, start, least(PIECE, count - start), noise, wide);
}

/* ------------------------------------------------------------------------------------------------ layer norm */

/* Of a row, for backwards. */
struct moments {
    float mean, inverse; /* 1 / sqrt(variance + eps) */
};

IN_PLACE struct moments norm(void *restrict out, void *restrict sum, const void *restrict x,
                             const void *restrict update, const float *restrict weight, const float *restrict bias,
                             int64_t dim, float eps, int64_t place, struct noise noise, int wide) {
    float total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < dim; i++) {
        put(sum, i, get(x, i, wide) + get(update, i, wide) * factor(noise, place + i), wide);
        total += get(sum, i, wide);
    }
    const float mean = total / dim;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < dim; i++) squares += (get(sum, i, wide) - mean) * (get(sum, i, wide) - mean);
    const float inverse = 1 / sqrtf(squares / dim + eps);
#pragma omp simd
    for (int64_t i = 0; i < dim; i++)
        put(out, i, (get(sum, i, wide) - mean) * inverse * weight[i] + bias[i], wide);
    return (struct moments){mean, inverse};
}

FOR_EACH_CPU static struct moments norm_row(void *out, void *sum, const void *x, const void *update,
                                            const float *weight, const float *bias, int64_t dim, float eps,
                                            int64_t place, struct noise noise, int wide) {
    return wide ? norm(out, sum, x, update, weight, bias, dim, eps, place, noise, 1)
                : norm(out, sum, x, update, weight, bias, dim, eps, place, noise, 0);
}

/* sum = x + dropout(update); out = layer norm of it. All of shape (rows, dim) but weight and bias, of (dim,). */
void add_norm(void *out, void *sum, struct moments *moments, const void *x, const void *update, const float *weight,
              const float *bias, int64_t rows, int64_t dim, float eps, uint64_t seed, double p, int wide) {
    struct noise noise = noise_of(seed, p);
#pragma omp parallel for schedule(static) if (rows * dim > PIECE)
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = row * dim;
        moments[row] = norm_row(at(out, i, wide), at(sum, i, wide), at(x, i, wide), at(update, i, wide), weight, bias,
                                dim, eps, i, noise, wide);
    }
}

IN_PLACE void norm_backward(void *restrict of_x, void *restrict of_update, float *restrict of_weight,
                            float *restrict of_bias, const void *restrict grad, const void *restrict sum,
                            struct moments moments, const float *restrict weight, int64_t dim, int64_t place,
                            struct noise noise, int wide) {
    float total = 0, dot = 0;
#pragma omp simd reduction(+ : total, dot)
    for (int64_t i = 0; i < dim; i++) {
        float g = get(grad, i, wide), normed = (get(sum, i, wide) - moments.mean) * moments.inverse;
        of_weight[i] += g * normed;
        of_bias[i] += g;
        total += g * weight[i];
        dot += g * weight[i] * normed;
    }
    total /= dim;
    dot /= dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) {
        float normed = (get(sum, i, wide) - moments.mean) * moments.inverse;
        float g = moments.inverse * (get(grad, i, wide) * weight[i] - total - normed * dot);
        put(of_x, i, g, wide);
        put(of_update, i, g * factor(noise, place + i), wide);
    }
}

FOR_EACH_CPU static void norm_row_backward(void *of_x, void *of_update, float *of_weight, float *of_bias,
                                           const void *grad, const void *sum, struct moments moments,
                                           const float *weight, int64_t dim, int64_t place, struct noise noise,
                                           int wide) {
    if (wide)
        norm_backward(of_x, of_update, of_weight, of_bias, grad, sum, moments, weight, dim, place, noise, 1);
    else
        norm_backward(of_x, of_update, of_weight, of_bias, grad, sum, moments, weight, dim, place, noise, 0);
}

/* The gradients of `add_norm`. */
void add_norm_backward(void *of_x, void *of_update, float *of_weight, float *of_bias, const void *grad, const void *sum,
                       const struct moments *moments, const float *weight, int64_t rows, int64_t dim, uint64_t seed,
                       double p, int wide) {
    struct noise noise = noise_of(seed, p);
    int num_threads = rows * dim > PIECE ? omp_get_max_threads() : 1;
    float *sums = calloc(2 * dim * num_threads, sizeof *sums); /* each thread's of weight, and of bias */
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = row * dim;
        float *mine = sums + 2 * dim * omp_get_thread_num();
        norm_row_backward(at(of_x, i, wide), at(of_update, i, wide), mine, mine + dim, at(grad, i, wide),
                          at(sum, i, wide), moments[row], weight, dim, i, noise, wide);
    }
    for (int64_t i = 0; i < dim; i++) {
        of_weight[i] = of_bias[i] = 0;
        for (int thread = 0; thread < num_threads; thread++) {
            of_weight[i] += sums[2 * dim * thread + i];
            of_bias[i] += sums[2 * dim * thread + dim + i];
        }
    }
    free(sums);
}

/* ------------------------------------------------------------------------------------------------- transposing */

enum { TILE = 32 }; /* bf16 numbers in a line of the cache */

#if defined(__GNUC__) && (defined(__x86_64__) || defined(__aarch64__))
typedef uint16_t vector __attribute__((vector_size(16), aligned(2)));

#ifdef __clang__
#define INTERLEAVE(a, b, half) \
    ((half) ? __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15) \
            : __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11))
#else
#define INTERLEAVE(a, b, half) \
    __builtin_shuffle(a, b, (half) ? (vector){4, 12, 5, 13, 6, 14, 7, 15} : (vector){0, 8, 1, 9, 2, 10, 3, 11})
#endif

/* 8 times 8 numbers: rows 0 to 3 between rows 4 to 7, three times. */
static inline void transpose_8(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t from_stride) {
    vector row[8], next[8];
    for (int i = 0; i < 8; i++) row[i] = *(const vector *)(from + i * from_stride);
    for (int time = 0; time < 3; time++) {
        for (int i = 0; i < 4; i++) {
            next[2 * i] = INTERLEAVE(row[i], row[i + 4], 0);
            next[2 * i + 1] = INTERLEAVE(row[i], row[i + 4], 1);
        }
        memcpy(row, next, sizeof row);
    }
    for (int i = 0; i < 8; i++) *(vector *)(to + i * to_stride) = row[i];
}
#else
static inline void transpose_8(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t from_stride) {
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) to[i * to_stride + k] = from[k * from_stride + i];
}
#endif

/* Rows from one of a multiple of TILE; adds to the sums. */
FOR_EACH_CPU static void transpose_rows(uint16_t *to, float *sums, const uint16_t *from, int64_t row, int64_t rows,
                                        int64_t dim) {
    int64_t num_rows = least(TILE, rows - row);
    for (int64_t column = 0; column < dim; column += TILE) {
        int64_t num_columns = least(TILE, dim - column);
        for (int64_t k = row; k < row + num_rows; k++) {
#pragma omp simd
            for (int64_t i = column; i < column + num_columns; i++) sums[i] += get(from + k * dim, i, 0);
        }
        if (num_rows == TILE && num_columns == TILE) {
            for (int64_t i = column; i < column + TILE; i += 8)
                for (int64_t k = row; k < row + TILE; k += 8) transpose_8(to + i * rows + k, rows, from + k * dim + i, dim);
        } else {
            for (int64_t i = column; i < column + num_columns; i++)
                for (int64_t k = row; k < row + num_rows; k++) to[i * rows + k] = from[k * dim + i];
        }
    }
}

/* from (rows, dim), in bf16; to (dim, rows), and the sum of each of its rows. */
void transpose(uint16_t *to, float *sums, const uint16_t *from, int64_t rows, int64_t dim) {
    int num_threads = rows * dim > PIECE ? omp_get_max_threads() : 1;
    float *own = calloc(dim * num_threads, sizeof *own);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < rows; row += TILE)
        transpose_rows(to, own + dim * omp_get_thread_num(), from, row, rows, dim);
    for (int64_t i = 0; i < dim; i++) {
        sums[i] = 0;
        for (int thread = 0; thread < num_threads; thread++) sums[i] += own[dim * thread + i];
    }
    free(own);
}

/* --------------------------------------------------------------------------------------------------- attention */

/* Scaled dot-product attention of `num_queries` to `num_keys` positions, by heads of width `dim`; kernels.py has the
   same. A row of an array is the heads' side by side; rows of queries are `query_stride` numbers apart, those of keys
   and of values `key_stride`. */
struct attention {
    void *queries, *keys, *values;
    void *out;                     /* (batch, num_queries, heads, dim); backwards its gradient */
    void *probabilities;           /* before dropout, of shape (batch, heads, num_queries, num_keys to the next multiple
                                      of LANES); NULL where not wanted */
    void *of_queries, *of_keys, *of_values; /* backwards: gradients, laid out as what they are of */
    const uint8_t *mask; /* whether a query attends to a key */
    int64_t mask_batch_stride, mask_query_stride;
    int64_t batch, heads, num_queries, num_keys, dim, query_stride, key_stride;
    uint64_t seed;
    double p;
    int32_t wide;
};

enum { LANES = 16 };

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* c (rows, columns) = a (rows, inner) b (inner, columns); rows are a multiple of 4, columns of LANES. */
IN_PLACE void product(float *c, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t rows,
                      int64_t inner, int64_t columns) {
    for (int64_t row = 0; row < rows; row += 4) {
        const float *a0 = a + row * a_row, *a1 = a0 + a_row, *a2 = a1 + a_row, *a3 = a2 + a_row;
        for (int64_t column = 0; column < columns; column += LANES) {
            lanes sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
            for (int64_t k = 0; k < inner; k++) {
                lanes line = *(const lanes *)(b + k * columns + column);
                sum0 += a0[k * a_inner] * line;
                sum1 += a1[k * a_inner] * line;
                sum2 += a2[k * a_inner] * line;
                sum3 += a3[k * a_inner] * line;
            }
            float *to = c + row * columns + column;
            *(lanes *)to = sum0;
            *(lanes *)(to + columns) = sum1;
            *(lanes *)(to + 2 * columns) = sum2;
            *(lanes *)(to + 3 * columns) = sum3;
        }
    }
}

/* Rows of a head, times `scale`, each padded with zeros. */
IN_PLACE void load_rows(float *to, const void *from, int64_t rows, int64_t stride, int64_t dim, float scale, int wide) {
    for (int64_t row = 0; row < rows; row++, to += padded(dim)) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) to[i] = scale * get(from, row * stride + i, wide);
        for (int64_t i = dim; i < padded(dim); i++) to[i] = 0;
    }
}

/* The same, transposed. */
IN_PLACE void load_columns(float *to, const void *from, int64_t rows, int64_t stride, int64_t dim, int wide) {
    for (int64_t i = 0; i < dim; i++, to += padded(rows)) {
        for (int64_t row = 0; row < rows; row++) to[row] = get(from, row * stride + i, wide);
        for (int64_t row = rows; row < padded(rows); row++) to[row] = 0;
    }
}

IN_PLACE void store_rows(void *to, const float *from, int64_t rows, int64_t stride, int64_t dim, float scale,
                         int wide) {
    for (int64_t row = 0; row < rows; row++, from += padded(dim)) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(to, row * stride + i, scale * from[i], wide);
    }
}

/* exp(x) for x of 0 and less, within 1e-7 of it (as in Cephes: Cody and Waite's reduction, and a polynomial). */
static inline float exp_of_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return y * power;
}

/* 1 where a query may attend to a key, 0 elsewhere and behind `num_keys`. */
IN_PLACE void load_mask(float *to, const struct attention *a, int64_t batch, int64_t query) {
    const uint8_t *from = a->mask + batch * a->mask_batch_stride + query * a->mask_query_stride;
    for (int64_t k = 0; k < a->num_keys; k++) to[k] = from[k];
    for (int64_t k = a->num_keys; k < padded(a->num_keys); k++) to[k] = 0;
}

/* Scores of a query become probabilities, 0 where `mask` is; `count` is a multiple of LANES. */
IN_PLACE void softmax(float *scores, const float *mask, int64_t count) {
    float highest = -1e30f, total = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t k = 0; k < count; k++) {
        float score = mask[k] > 0 ? scores[k] : -1e30f;
        highest = highest > score ? highest : score;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < count; k++) {
        float away = scores[k] - highest;
        scores[k] = mask[k] * exp_of_negative(away > 0 ? 0 : away);
        total += scores[k];
    }
    const float inverse = total > 0 ? 1 / total : 0;
#pragma omp simd
    for (int64_t k = 0; k < count; k++) scores[k] *= inverse;
}

/* Numbers of scratch memory that a head needs. */
static int64_t room_of(const struct attention *a) {
    int64_t queries = padded(a->num_queries), keys = padded(a->num_keys), dim = padded(a->dim);
    return 3 * queries * dim + 4 * keys * dim + 2 * queries * keys + keys;
}

IN_PLACE void attend(const struct attention *a, int64_t batch, int64_t head, float *room, int wide) {
    const int64_t num_queries = a->num_queries, num_keys = a->num_keys, dim = a->dim;
    const int64_t all_queries = padded(num_queries), all_keys = padded(num_keys), width = padded(dim);
    const struct noise noise = noise_of(a->seed, a->p);
    const int64_t first_query = batch * num_queries * a->query_stride + head * dim;
    const int64_t first_key = batch * num_keys * a->key_stride + head * dim;
    float *queries = room, *keys = queries + all_queries * width, *values = keys + all_keys * width;
    float *out = values + all_keys * width, *scores = out + all_queries * width;
    float *mask = scores + all_queries * all_keys;
    const int64_t rows = (num_queries + 3) / 4 * 4;

    load_rows(queries, at(a->queries, first_query, wide), num_queries, a->query_stride, dim, 1 / sqrtf(dim), wide);
    load_columns(keys, at(a->keys, first_key, wide), num_keys, a->key_stride, dim, wide);
    load_rows(values, at(a->values, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    memset(queries + num_queries * width, 0, (rows - num_queries) * width * sizeof *queries);
    product(scores, queries, width, 1, keys, rows, dim, all_keys);
    for (int64_t i = 0; i < num_queries; i++) {
        float *row = scores + i * all_keys;
        int64_t place = ((batch * a->heads + head) * num_queries + i) * all_keys;
        if (i == 0 || a->mask_query_stride) load_mask(mask, a, batch, i);
        softmax(row, mask, all_keys);
        if (a->probabilities) {
#pragma omp simd
            for (int64_t k = 0; k < all_keys; k++) put(a->probabilities, place + k, row[k], wide);
        }
        if (noise.bound) {
#pragma omp simd
            for (int64_t k = 0; k < all_keys; k++) row[k] *= factor(noise, place + k);
        }
    }
    product(out, scores, all_keys, 1, values, rows, num_keys, width);
    int64_t stride = a->heads * dim;
    store_rows(at(a->out, batch * num_queries * stride + head * dim, wide), out, num_queries, stride, dim, 1, wide);
}

IN_PLACE void attend_backward(const struct attention *a, int64_t batch, int64_t head, float *room, int wide) {
    const int64_t num_queries = a->num_queries, num_keys = a->num_keys, dim = a->dim;
    const int64_t all_queries = padded(num_queries), all_keys = padded(num_keys), width = padded(dim);
    const struct noise noise = noise_of(a->seed, a->p);
    const int64_t first_query = batch * num_queries * a->query_stride + head * dim;
    const int64_t first_key = batch * num_keys * a->key_stride + head * dim, stride = a->heads * dim;
    const int64_t query_rows = (num_queries + 3) / 4 * 4, key_rows = (num_keys + 3) / 4 * 4;
    float *queries = room, *grad = queries + all_queries * width, *keys = grad + all_queries * width;
    float *values = keys + all_keys * width, *shares = values + all_keys * width;
    float *of_scores = shares + all_queries * all_keys, *result = of_scores + all_queries * all_keys;

    load_rows(queries, at(a->queries, first_query, wide), num_queries, a->query_stride, dim, 1, wide);
    load_rows(grad, at(a->out, batch * num_queries * stride + head * dim, wide), num_queries, stride, dim, 1, wide);
    memset(grad + num_queries * width, 0, (query_rows - num_queries) * width * sizeof *grad);
    load_rows(keys, at(a->keys, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    load_columns(values, at(a->values, first_key, wide), num_keys, a->key_stride, dim, wide);
    product(of_scores, grad, width, 1, values, query_rows, dim, all_keys);
    for (int64_t i = 0; i < num_queries; i++) {
        float *row = shares + i * all_keys, *of_row = of_scores + i * all_keys, mean = 0;
        int64_t place = ((batch * a->heads + head) * num_queries + i) * all_keys;
#pragma omp simd reduction(+ : mean)
        for (int64_t k = 0; k < all_keys; k++) {
            float share = get(a->probabilities, place + k, wide), kept = factor(noise, place + k);
            row[k] = share * kept;
            of_row[k] *= kept;
            mean += share * of_row[k];
        }
#pragma omp simd
        for (int64_t k = 0; k < all_keys; k++)
            of_row[k] = get(a->probabilities, place + k, wide) * (of_row[k] - mean);
    }
    for (int64_t i = num_queries; i < query_rows; i++)
        memset(of_scores + i * all_keys, 0, all_keys * sizeof *of_scores);
    product(result, shares, 1, all_keys, grad, key_rows, num_queries, width);
    store_rows(at(a->of_values, first_key, wide), result, num_keys, a->key_stride, dim, 1, wide);
    product(result, of_scores, 1, all_keys, queries, key_rows, num_queries, width);
    store_rows(at(a->of_keys, first_key, wide), result, num_keys, a->key_stride, dim, 1 / sqrtf(dim), wide);
    product(result, of_scores, all_keys, 1, keys, query_rows, num_keys, width);
    store_rows(at(a->of_queries, first_query, wide), result, num_queries, a->query_stride, dim, 1 / sqrtf(dim), wide);
}

FOR_EACH_CPU static void attend_head(const struct attention *a, int64_t head, float *room, int backward) {
    int64_t batch = head / a->heads;
    head %= a->heads;
    if (backward && a->wide)
        attend_backward(a, batch, head, room, 1);
    else if (backward)
        attend_backward(a, batch, head, room, 0);
    else if (a->wide)
        attend(a, batch, head, room, 1);
    else
        attend(a, batch, head, room, 0);
}

/* `out` and `probabilities`; or `of_queries`, `of_keys` and `of_values`, from `out`'s gradient. */
void attention(const struct attention *a, int backward) {
#pragma omp parallel
    {
        float *room = malloc(room_of(a) * sizeof *room);
#pragma omp for schedule(static)
        for (int64_t head = 0; head < a->batch * a->heads; head++) attend_head(a, head, room, backward);
        free(room);
    }
}
