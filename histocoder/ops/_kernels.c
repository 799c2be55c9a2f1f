/* What training and prediction on a CPU do between matrix products, each in one pass over memory: see kernels.py.

   An array of type void * holds floats where `wide` is true, else the upper halves of floats (bf16). Work is shared
   among OpenMP's threads, which are torch's. setup.py compiles this once for each kind of processor. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* For functions with an argument `wide`, so that it is a constant in each of their forms. */
#define IN_PLACE static inline __attribute__((always_inline))

/* Raised when what a function takes changes; kernels.py has the same. */
int version(void) { return 15; }

enum { PIECE = 1 << 14 }; /* numbers that one thread works on in turn */

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

/* A step of AdamW without weight decay, for some rows of a table, each named once: `gradient` (num_rows, dim) is theirs.
   `step_size` is the learning rate over 1 - beta1^t, `correction` the root of 1 - beta2^t. */
void adamw_rows(float *weights, float *means, float *squares, const float *gradient, const int64_t *rows,
                int64_t num_rows, int64_t dim, float beta1, float beta2, float eps, float step_size, float correction) {
#pragma omp parallel for schedule(static) if (num_rows * dim > PIECE)
    for (int64_t k = 0; k < num_rows; k++) {
        float *restrict weight = weights + rows[k] * dim, *restrict mean = means + rows[k] * dim;
        float *restrict square = squares + rows[k] * dim;
        const float *restrict g = gradient + k * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) {
            mean[i] += (1 - beta1) * (g[i] - mean[i]);
            square[i] = beta2 * square[i] + (1 - beta2) * g[i] * g[i];
            weight[i] -= step_size * mean[i] / (sqrtf(square[i]) / correction + eps);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- n-grams */

/* Texts of `width` code points, and how their n-grams are hashed; kernels.py has the same. */
struct ngrams {
    const int64_t *ids;
    const uint8_t *kinds;    /* of each code point, the last one that of all further ones */
    const int64_t *mark;     /* what ends the language, `mark_size` code points */
    int64_t *buckets, *words; /* results: (batch, width, num_kinds) and (batch, width) */
    int64_t batch, width, num_code_points, mark_size, max_n, num_buckets, max_words, across, num_kinds;
};

enum { LETTER, MARK, BREAK, END };

static inline int64_t bucket(const struct ngrams *a, uint32_t hash, uint32_t kind) {
    uint32_t x = hash ^ kind * 0x27D4EB2Fu;
    x = (x ^ x >> 13) * 0x5BD1E995u;
    x = (x ^ x >> 15) * 0x2C1B3C6Du;
    return (x ^ x >> 12) % (uint32_t)a->num_buckets;
}

static int kind_of(const struct ngrams *a, const int64_t *ids, int64_t i) {
    return i < 0 || i >= a->width ? END : a->kinds[ids[i] < a->num_code_points ? ids[i] : a->num_code_points - 1];
}

static void hash_row(const struct ngrams *a, int64_t row) {
    const int64_t *ids = a->ids + row * a->width;
    int64_t *words = a->words + row * a->width, start = 0, number = 0, first = 0, has_lang = 0;
    for (int64_t i = 0; !start && i + a->mark_size <= a->width; i++)
        if (!memcmp(ids + i, a->mark, a->mark_size * sizeof *ids)) start = i + a->mark_size;
    uint32_t word = 0;
    int was_char = 0, was_mark = 0;
    for (int64_t i = 0; i < a->width; i++) {
        int64_t *out = a->buckets + (row * a->width + i) * a->num_kinds;
        for (int64_t k = 0; k < a->num_kinds; k++) out[k] = -1;
        const int kind = kind_of(a, ids, i), next = kind_of(a, ids, i + 1);
        const int is_lang = i > 0 && i < start - a->mark_size, next_lang = i + 1 > 0 && i + 1 < start - a->mark_size;
        const int is_char = kind < BREAK && (i >= start || is_lang), is_mark = is_char && !is_lang && kind == MARK;
        const int next_char = next < BREAK && (i + 1 >= start || next_lang);
        const int next_mark = next_char && !next_lang && next == MARK;
        if (is_char && (!was_char || is_mark || was_mark)) number++, first = i, word = 0;
        const int ends = is_char && (!next_char || is_mark || next_mark);
        const int64_t position = i - first;
        has_lang |= is_lang;
        was_char = is_char, was_mark = is_mark;
        words[i] = number;
        if (is_char) {
            uint32_t letter = (uint32_t)ids[i] + 0x9E3779B1u * (uint32_t)(position + 1);
            letter = (letter ^ 0x811C9DC5u) * 16777619u;
            word += (letter ^ letter >> 15) * 0x5BD1E995u;
        }
        uint32_t hash = 0x811C9DC5u;
        int64_t *behind = out + 2 * a->max_n; /* the whole word, then what goes across blanks */
        int crosses = 0;
        if (ends) behind[0] = bucket(a, word, is_lang);
        for (int64_t n = 1; n <= a->max_n && i - n + 1 >= start; n++) {
            const int of = kind_of(a, ids, i - n + 1);
            hash = (hash ^ (uint32_t)ids[i - n + 1]) * 16777619u;
            if (is_char && position >= n - 1) {
                const uint32_t edges = (position == n - 1) + 2 * ends;
                out[2 * n - 2] = bucket(a, hash, 4 * n);
                if (edges) out[2 * n - 1] = bucket(a, hash, edges + 4 * n);
            }
            if (of == END) break;
            crosses |= of == BREAK;
            if (a->across && n > 1 && crosses) behind[n - 1] = bucket(a, hash, 4 * (n + a->max_n));
        }
    }
    for (int64_t i = 0; i < a->width; i++) {
        words[i] -= has_lang;
        words[i] = words[i] < 0 ? 0 : words[i] > a->max_words ? a->max_words : words[i];
    }
}

void hash_ngrams(const struct ngrams *a) {
#pragma omp parallel for schedule(static) if (a->batch * a->width * a->num_kinds > PIECE)
    for (int64_t row = 0; row < a->batch; row++) hash_row(a, row);
}

/* ------------------------------------------------------------------------------------------- nearest rows */

enum { LINES = 16, ROWS = 2 * LINES }; /* rows of a block; kernels.py has the same */

typedef float floats __attribute__((vector_size(4 * LINES)));
typedef uint32_t words __attribute__((vector_size(4 * LINES)));

/* The largest product of query `pairs[k] / num_choices` with a row of the class `choices[pairs[k]]`, and that row, for
   each of `num_pairs` in turn; -1 without any. Pairs of a class follow each other, so that its rows stay in the cache.
   Queries and rows are of `dim` numbers, which is even; the rows of class c are those from `first[c]` on. Row j of a
   block and row LINES + j, in bf16, are the lower and upper halves of words. */
void nearest(const float *queries, const int64_t *choices, const int64_t *pairs, const uint32_t *blocks,
             const int64_t *first, float *products, int64_t *found, int64_t num_pairs, int64_t num_choices,
             int64_t dim) {
#pragma omp parallel for schedule(dynamic, 64) if (num_pairs > 64)
    for (int64_t k = 0; k < num_pairs; k++) {
        const float *query = queries + pairs[k] / num_choices * dim;
        const int64_t begin = first[choices[pairs[k]]], end = first[choices[pairs[k]] + 1];
        float best = -1;
        int64_t best_row = -1;
        for (int64_t start = begin - begin % ROWS; start < end; start += ROWS) {
            const uint32_t *block = blocks + start / ROWS * LINES * dim;
            floats sums[4] = {{0}}; /* of even and odd numbers, which need not wait for each other */
            for (int64_t i = 0; i < dim; i += 2) {
                words word, next;
                memcpy(&word, block + i * LINES, sizeof word);
                memcpy(&next, block + (i + 1) * LINES, sizeof next);
                sums[0] += query[i] * (floats)(word << 16);
                sums[1] += query[i] * (floats)(word & 0xffff0000u);
                sums[2] += query[i + 1] * (floats)(next << 16);
                sums[3] += query[i + 1] * (floats)(next & 0xffff0000u);
            }
            sums[0] += sums[2], sums[1] += sums[3];
            float of_rows[ROWS], most = -1;
            memcpy(of_rows, sums, sizeof of_rows);
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < ROWS; j++) most = of_rows[j] > most ? of_rows[j] : most;
            if (most < best) continue;
            for (int64_t row = start < begin ? begin : start; row < end && row < start + ROWS; row++)
                if (of_rows[row - start] >= best) best = of_rows[row - start], best_row = row;
        }
        products[pairs[k]] = best, found[pairs[k]] = best_row;
    }
}

/* --------------------------------------------------------------------------------------------------- attention */

/* Dropout: drawn for each number from a seed and its index: once more backwards, instead of being kept. */
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
IN_PLACE float factor(struct noise noise, int64_t index) {
    uint32_t x = (uint32_t)index * noise.odd + noise.key;
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    x ^= x >> 16;
    return x >= noise.bound ? noise.scale : 0.0f;
}

/* Dropout of `size` numbers `x`, and of their gradients by the same seed. */
void dropout(const void *x, void *out, int64_t size, uint64_t seed, double p, int wide) {
    const struct noise noise = noise_of(seed, p);
#pragma omp parallel for schedule(static) if (size > PIECE)
    for (int64_t first = 0; first < size; first += PIECE) {
        int64_t end = first + PIECE < size ? first + PIECE : size;
        if (wide) {
#pragma omp simd
            for (int64_t i = first; i < end; i++) put(out, i, get(x, i, 1) * factor(noise, i), 1);
        } else {
#pragma omp simd
            for (int64_t i = first; i < end; i++) put(out, i, get(x, i, 0) * factor(noise, i), 0);
        }
    }
}

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

enum { LANES = 16 }; /* numbers to a multiple of which rows are padded; kernels.py has the same */

/* Numbers in a register, two to the power of TIMES. FIRST_OF two registers are the first halves of both, number by
   number, LAST_OF them the last halves. */
#if defined(__AVX512F__)
enum { WIDTH = 16, TIMES = 4 };
#define FIRST_OF 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LAST_OF 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
enum { WIDTH = 8, TIMES = 3 };
#define FIRST_OF 0, 8, 1, 9, 2, 10, 3, 11
#define LAST_OF 4, 12, 5, 13, 6, 14, 7, 15
#else
enum { WIDTH = 4, TIMES = 2 };
#define FIRST_OF 0, 4, 1, 5
#define LAST_OF 2, 6, 3, 7
#endif

typedef float lanes __attribute__((vector_size(4 * WIDTH), aligned(4)));

static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* For each k below `count`, a multiple of LANES; so many at once, where a loop over bf16 would want twice as many. */
#define FOR_LANES(k, count)                                              \
    for (int64_t first_##k = 0; first_##k < (count); first_##k += LANES) \
        _Pragma("omp simd") for (int64_t k = first_##k; k < first_##k + LANES; k++)

/* 4 rows of `product`, and one or two registers of its columns. */
IN_PLACE void product_part(float *c, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t inner,
                           int64_t columns, int num_lanes) {
    lanes sums[4][2] = {{{0}}};
    for (int64_t k = 0; k < inner; k++) {
        for (int i = 0; i < num_lanes; i++) {
            lanes line = *(const lanes *)(b + k * columns + i * WIDTH);
            for (int row = 0; row < 4; row++) sums[row][i] += a[row * a_row + k * a_inner] * line;
        }
    }
    for (int row = 0; row < 4; row++) {
        for (int i = 0; i < num_lanes; i++) *(lanes *)(c + row * columns + i * WIDTH) = sums[row][i];
    }
}

/* c (rows, columns) = a (rows, inner) b (inner, columns); rows are a multiple of 4, columns of LANES. */
IN_PLACE void product(float *c, const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t rows,
                      int64_t inner, int64_t columns) {
    for (int64_t row = 0; row < rows; row += 4) {
        int64_t i = 0;
        for (; i + 2 * WIDTH <= columns; i += 2 * WIDTH)
            product_part(c + row * columns + i, a + row * a_row, a_row, a_inner, b + i, inner, columns, 2);
        if (i < columns) product_part(c + row * columns + i, a + row * a_row, a_row, a_inner, b + i, inner, columns, 1);
    }
}

/* Rows of a head, times `scale`, and zeros to a multiple of LANES of rows and of columns. */
IN_PLACE void load_rows(float *to, const void *from, int64_t rows, int64_t stride, int64_t dim, float scale, int wide) {
    for (int64_t row = 0; row < rows; row++, to += padded(dim)) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) to[i] = scale * get(from, row * stride + i, wide);
        for (int64_t i = dim; i < padded(dim); i++) to[i] = 0;
    }
    memset(to, 0, (padded(rows) - rows) * padded(dim) * sizeof *to);
}

/* The rows of `load_rows`, transposed. */
IN_PLACE void transpose_rows(float *to, const float *from, int64_t rows, int64_t columns) {
#if __GNUC__ >= 12 || defined(__clang__)
    for (int64_t row = 0; row < rows; row += WIDTH) {
        for (int64_t column = 0; column < columns; column += WIDTH) {
            lanes line[WIDTH], next[WIDTH];
            for (int i = 0; i < WIDTH; i++) line[i] = *(const lanes *)(from + (row + i) * columns + column);
            for (int time = 0; time < TIMES; time++) { /* the first half of the rows go between the others */
                for (int i = 0; i < WIDTH / 2; i++) {
                    next[2 * i] = __builtin_shufflevector(line[i], line[i + WIDTH / 2], FIRST_OF);
                    next[2 * i + 1] = __builtin_shufflevector(line[i], line[i + WIDTH / 2], LAST_OF);
                }
                memcpy(line, next, sizeof line);
            }
            for (int i = 0; i < WIDTH; i++) *(lanes *)(to + (column + i) * rows + row) = line[i];
        }
    }
#else
    for (int64_t i = 0; i < columns; i++)
        for (int64_t row = 0; row < rows; row++) to[i * rows + row] = from[row * columns + i];
#endif
}

IN_PLACE void store_rows(void *to, const float *from, int64_t rows, int64_t stride, int64_t dim, float scale,
                         int wide) {
    for (int64_t row = 0; row < rows; row++, from += padded(dim)) {
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) put(to, row * stride + i, scale * from[i], wide);
    }
}

/* 1 where a query may attend to a key, 0 elsewhere and behind `num_keys`. */
IN_PLACE void load_mask(float *to, const struct attention *a, int64_t batch, int64_t query) {
    const uint8_t *from = a->mask + batch * a->mask_batch_stride + query * a->mask_query_stride;
    for (int64_t k = 0; k < a->num_keys; k++) to[k] = from[k];
    for (int64_t k = a->num_keys; k < padded(a->num_keys); k++) to[k] = 0;
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
    return 3 * queries * dim + 5 * keys * dim + 2 * queries * keys + keys;
}

IN_PLACE void attend(const struct attention *a, int64_t batch, int64_t head, float *room, int wide) {
    const int64_t num_queries = a->num_queries, num_keys = a->num_keys, dim = a->dim;
    const int64_t all_queries = padded(num_queries), all_keys = padded(num_keys), width = padded(dim);
    const struct noise noise = noise_of(a->seed, a->p);
    const int64_t first_query = batch * num_queries * a->query_stride + head * dim;
    const int64_t first_key = batch * num_keys * a->key_stride + head * dim;
    float *queries = room, *rows = queries + all_queries * width, *keys = rows + all_keys * width;
    float *values = keys + all_keys * width, *out = values + all_keys * width, *scores = out + all_queries * width;
    float *mask = scores + all_queries * all_keys;
    const int64_t query_rows = (num_queries + 3) / 4 * 4;

    load_rows(queries, at(a->queries, first_query, wide), num_queries, a->query_stride, dim, 1 / sqrtf(dim), wide);
    load_rows(rows, at(a->keys, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    transpose_rows(keys, rows, all_keys, width);
    load_rows(values, at(a->values, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    product(scores, queries, width, 1, keys, query_rows, dim, all_keys);
    for (int64_t i = 0; i < num_queries; i++) {
        float *row = scores + i * all_keys;
        int64_t index = ((batch * a->heads + head) * num_queries + i) * all_keys;
        if (i == 0 || a->mask_query_stride) load_mask(mask, a, batch, i);
        softmax(row, mask, all_keys);
        if (a->probabilities) FOR_LANES(k, all_keys) put(a->probabilities, index + k, row[k], wide);
        if (noise.bound) FOR_LANES(k, all_keys) row[k] *= factor(noise, index + k);
    }
    product(out, scores, all_keys, 1, values, query_rows, num_keys, width);
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
    float *rows = keys + all_keys * width, *values = rows + all_keys * width, *shares = values + all_keys * width;
    float *of_scores = shares + all_queries * all_keys, *result = of_scores + all_queries * all_keys;

    load_rows(queries, at(a->queries, first_query, wide), num_queries, a->query_stride, dim, 1, wide);
    load_rows(grad, at(a->out, batch * num_queries * stride + head * dim, wide), num_queries, stride, dim, 1, wide);
    load_rows(keys, at(a->keys, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    load_rows(rows, at(a->values, first_key, wide), num_keys, a->key_stride, dim, 1, wide);
    transpose_rows(values, rows, all_keys, width);
    product(of_scores, grad, width, 1, values, query_rows, dim, all_keys);
    for (int64_t i = 0; i < num_queries; i++) {
        float *row = shares + i * all_keys, *of_row = of_scores + i * all_keys, sums[LANES] = {0}, mean = 0;
        int64_t index = ((batch * a->heads + head) * num_queries + i) * all_keys;
        FOR_LANES(k, all_keys) {
            float share = get(a->probabilities, index + k, wide), kept = factor(noise, index + k);
            row[k] = share * kept;
            of_row[k] *= kept;
            sums[k - first_k] += share * of_row[k];
        }
        for (int k = 0; k < LANES; k++) mean += sums[k];
        FOR_LANES(k, all_keys) of_row[k] = get(a->probabilities, index + k, wide) * (of_row[k] - mean);
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

static void attend_head(const struct attention *a, int64_t head, float *room, int backward) {
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

/* `out` and `probabilities`; or `of_queries`, `of_keys` and `of_values`, from `out`'s gradient. Returns 1 if there is no
 * memory. */
int attention(const struct attention *a, int backward) {
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        float *room = malloc(room_of(a) * sizeof *room);
        failed = !room;
#pragma omp for schedule(static)
        for (int64_t head = 0; head < a->batch * a->heads; head++)
            if (room) attend_head(a, head, room, backward);
        free(room);
    }
    return failed;
}

/* ------------------------------------------------------------------------------------------ attention to paths */

/* Attention of the newest nodes of trees to their ancestors and themselves, by heads; kernels.py has the same. `levels`
   are the trees' levels, the newest last: queries, keys and values of each node side by side, each `heads * dim` wide.
   `paths` (depth, num_nodes) has the node of each level that is on the way to each of the newest ones. */
struct paths {
    void **levels, *out; /* out: (num_nodes, heads * dim) */
    const int64_t *paths;
    int64_t num_nodes, depth, heads, dim;
    int32_t wide;
};

IN_PLACE void attend_path(const struct paths *a, int64_t node, int wide) {
    const int64_t width = a->heads * a->dim, depth = a->depth;
    const void *newest = at(a->levels[depth - 1], 3 * width * a->paths[(depth - 1) * a->num_nodes + node], wide);
    for (int64_t head = 0; head < a->heads; head++) {
        float query[a->dim], out[a->dim], scores[depth], highest = -INFINITY, total = 0;
        FOR_LANES(i, a->dim) query[i] = get(newest, head * a->dim + i, wide) / sqrtf(a->dim), out[i] = 0;
        for (int64_t level = 0; level < depth; level++) {
            const int64_t key = 3 * width * a->paths[level * a->num_nodes + node] + width + head * a->dim;
            float sums[LANES] = {0}, score = 0;
            FOR_LANES(i, a->dim) sums[i - first_i] += query[i] * get(a->levels[level], key + i, wide);
            for (int i = 0; i < LANES; i++) score += sums[i];
            scores[level] = score;
            highest = score > highest ? score : highest;
        }
        for (int64_t level = 0; level < depth; level++)
            total += scores[level] = exp_of_negative(scores[level] - highest);
        for (int64_t level = 0; level < depth; level++) {
            const int64_t value = 3 * width * a->paths[level * a->num_nodes + node] + 2 * width + head * a->dim;
            const float share = scores[level] / total;
            FOR_LANES(i, a->dim) out[i] += share * get(a->levels[level], value + i, wide);
        }
        FOR_LANES(i, a->dim) put(a->out, node * width + head * a->dim + i, out[i], wide);
    }
}

void attend_paths(const struct paths *a) {
#pragma omp parallel for schedule(static) if (a->num_nodes * a->heads * a->dim > PIECE)
    for (int64_t node = 0; node < a->num_nodes; node++) {
        if (a->wide)
            attend_path(a, node, 1);
        else
            attend_path(a, node, 0);
    }
}

/* ------------------------------------------------------------------------------------ support vector machines */

enum { PARTS = LANES / WIDTH, LINE = 4 * LANES }; /* LINE: bytes of a cache line */

typedef int32_t masks __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* Rows in CSR, what an error of each costs, and each class's rows: `members` from `bounds[c]` to `bounds[c + 1]`;
   kernels.py has the same. */
struct machines {
    const int64_t *starts, *bounds;
    const int32_t *columns, *members;
    const float *values, *costs;
    float *weights; /* result: (num_columns + 1, num_classes), the intercepts last */
    int64_t num_rows, num_columns, num_classes, passes;
};

/* Fits LANES classes side by side, each against all other rows, for the squared hinge loss, by dual coordinate descent
   (Hsieh et al. 2008, "A Dual Coordinate Descent Method for Large-scale Linear SVM"). */
static void fit_some(const struct machines *a, int64_t first, float *room) {
    const int64_t num_rows = a->num_rows, bias = a->num_columns, *starts = a->starts;
    const int64_t count = a->num_classes - first < LANES ? a->num_classes - first : LANES;
    const int32_t *columns = a->columns;
    const float *values = a->values;
    float *signs = room + (bias + 1 + num_rows) * LANES, *steps = signs + num_rows * LANES;
    lanes(*weights)[PARTS] = (void *)room, (*duals)[PARTS] = weights + bias + 1;
    int32_t *order = (int32_t *)(steps + num_rows);
    memset(room, 0, (bias + 1 + num_rows) * sizeof *weights);
    for (int64_t row = 0; row < num_rows; row++) {
        float norm = 1 + 0.5f / a->costs[row];
        for (int64_t k = starts[row]; k < starts[row + 1]; k++) norm += values[k] * values[k];
        for (int64_t i = 0; i < LANES; i++) signs[row * LANES + i] = -1;
        steps[row] = 1 / norm, order[row] = row;
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = a->bounds[first + i]; k < a->bounds[first + i + 1]; k++) signs[a->members[k] * LANES + i] = 1;
    uint64_t random = 1; /* xorshift (Marsaglia 2003) */
    for (int64_t pass = 0; pass < a->passes; pass++) {
        for (int64_t i = num_rows - 1; i > 0; i--) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            const int64_t other = random % (uint64_t)(i + 1);
            const int32_t row = order[i];
            order[i] = order[other], order[other] = row;
        }
        for (int64_t i = 0; i < num_rows; i++) {
            const int64_t row = order[i], next = order[i + 1 < num_rows ? i + 1 : i];
            for (int64_t k = starts[next]; k < starts[next + 1]; k++) __builtin_prefetch(weights + columns[k], 1);
            const float ridge = 0.5f / a->costs[row];
            lanes sums[PARTS];
            memcpy(sums, weights + bias, sizeof sums);
            for (int64_t k = starts[row]; k < starts[row + 1]; k++)
                for (int j = 0; j < PARTS; j++) sums[j] += values[k] * weights[columns[k]][j];
            for (int j = 0; j < PARTS; j++) {
                const lanes sign = ((lanes *)(signs + row * LANES))[j], was = duals[row][j];
                const lanes now = was - (sign * sums[j] - 1.0f + ridge * was) * steps[row];
                duals[row][j] = (lanes)((masks)now & (now > 0.0f));
                sums[j] = (duals[row][j] - was) * sign;
                weights[bias][j] += sums[j];
            }
            for (int64_t k = starts[row]; k < starts[row + 1]; k++)
                for (int j = 0; j < PARTS; j++) weights[columns[k]][j] += values[k] * sums[j];
        }
    }
    for (int64_t column = 0; column <= bias; column++)
        memcpy(a->weights + column * a->num_classes + first, weights + column, count * sizeof *a->weights);
}

/* Fits the classes from `begin` to `end`. Returns 1 if there is no memory. */
int fit_machines(const struct machines *a, int64_t begin, int64_t end) {
    int failed = 0;
    const int64_t size = (a->num_columns + 1 + 2 * a->num_rows) * LANES + 2 * a->num_rows;
#pragma omp parallel for schedule(dynamic) reduction(| : failed)
    for (int64_t first = begin; first < end; first += LANES) {
        float *room = malloc((size + LANES) * sizeof *room);
        if (room) fit_some(a, first, (float *)(((uintptr_t)room / LINE + 1) * LINE));
        failed |= !room;
        free(room);
    }
    return failed;
}

/* --------------------------------------------------------------------------------------------- linear experts */

/* Adds up the weights of each row's features, times their shares: `pairs` from `first[row]` on are the row's. A feature
   has the weights from `starts[feature]` on, each of one of the classes. `sums` (num_rows, num_classes) begin as 0. */
void sum_weights(const int64_t *first, const int64_t *features, const float *shares, const int64_t *starts,
                 const int32_t *classes, const float *values, float *sums, int64_t num_rows, int64_t num_classes) {
#pragma omp parallel for schedule(static) if (num_rows > 16)
    for (int64_t row = 0; row < num_rows; row++) {
        float *sum = sums + row * num_classes;
        for (int64_t pair = first[row]; pair < first[row + 1]; pair++)
            for (int64_t k = starts[features[pair]]; k < starts[features[pair] + 1]; k++)
                sum[classes[k]] += shares[pair] * values[k];
    }
}
