/* int8 linear layers for encoders on CPUs with AVX512-VNNI.
 *
 * Weights are signed bytes with one scale per output; activations become unsigned bytes with a scale and a zero point
 * per row, so that no row depends on another. Sums of products are exact integers, and only their way back to floats
 * rounds. Weights come packed as [outputs / 32][inputs / 4][32][4], filled up with zeros: what `vpdpbusd` reads. */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>

#define TILE_ROWS 12
#define PANEL 32       /* outputs of one tile: two vectors */
#define BLOCK_ROWS 192 /* rows whose bytes stay in the second cache while a panel of weights passes */
#define MLP_ROWS 96    /* rows whose hidden units stay in the caches between the two matrices */

typedef struct {
    const int8_t *weight;
    const int32_t *sums;  /* of each output's weights, for the zero points */
    const float *scales;  /* of the outputs */
    const float *bias;    /* zeros if there is none */
    int64_t inputs, outputs;
} Layer;

typedef struct {
    uint8_t *bytes;  /* [rows][stride] */
    float *scales;   /* [rows] */
    int32_t *zeros;  /* [rows] */
    int64_t stride;
} Rows;

enum { RELU, SILU, GELU, GELU_TANH };

static int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static __mmask16 tail_mask(int64_t left) { return left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1); }

/* ---------------------------------------------------------------- activations */

static inline __m512 exp_vector(__m512 x) {
    const __m512 log2_e = _mm512_set1_ps(1.44269504088896341f);
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, log2_e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 120));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 24));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 6));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

static inline __m512 times_sigmoid(__m512 x, __m512 of) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 below = _mm512_add_ps(one, exp_vector(_mm512_sub_ps(_mm512_setzero_ps(), of)));
    return _mm512_div_ps(x, below);
}

/* x Phi(x): the error function by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most */
static inline __m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678118654752f));
    __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
    __m512 sum = _mm512_set1_ps(1.061405429f);
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-1.453152027f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(1.421413741f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(-0.284496736f));
    sum = _mm512_fmadd_ps(sum, t, _mm512_set1_ps(0.254829592f));
    sum = _mm512_mul_ps(sum, t);
    __m512 tail = _mm512_mul_ps(sum, exp_vector(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(size, size))));
    /* tail is 1 - erf(|x| / sqrt 2): x Phi(x) = max(x, 0) - |x| tail / 2 */
    __m512 half = _mm512_mul_ps(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.5f)), tail);
    return _mm512_sub_ps(_mm512_max_ps(x, _mm512_setzero_ps()), half);
}

static inline __m512 gelu_tanh(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return times_sigmoid(x, _mm512_mul_ps(inner, _mm512_set1_ps(1.59576912160573071f)));
}

static inline __attribute__((always_inline)) void activate_as(int kind, float *hidden, const float *gated,
                                                              int64_t size) {
    for (int64_t i = 0; i < size; i += 16) {
        __mmask16 mask = tail_mask(size - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, hidden + i);
        if (kind == RELU) x = _mm512_max_ps(x, _mm512_setzero_ps());
        if (kind == SILU) x = times_sigmoid(x, x);
        if (kind == GELU) x = gelu(x);
        if (kind == GELU_TANH) x = gelu_tanh(x);
        if (gated) x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, gated + i));
        _mm512_mask_storeu_ps(hidden + i, mask, x);
    }
}

/* hidden = activation(hidden) (* gated) */
static void activate(int kind, float *hidden, const float *gated, int64_t size) {
    if (kind == RELU) activate_as(RELU, hidden, gated, size);
    if (kind == SILU) activate_as(SILU, hidden, gated, size);
    if (kind == GELU) activate_as(GELU, hidden, gated, size);
    if (kind == GELU_TANH) activate_as(GELU_TANH, hidden, gated, size);
}

/* ---------------------------------------------------------------- rows to bytes */

/* A row that holds inf or nan gets the scale nan, and so gives nan. */
static void quantize_row(const float *x, int64_t size, const Rows *rows, int64_t row) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps(), guard = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        __m512 value = _mm512_maskz_loadu_ps(tail_mask(size - i), x + i);
        low = _mm512_min_ps(low, value);
        high = _mm512_max_ps(high, value);
        guard = _mm512_fmadd_ps(value, _mm512_setzero_ps(), guard);
    }
    float lowest = _mm512_reduce_min_ps(low), range = _mm512_reduce_max_ps(high) - lowest;
    range = range < 1e-30f ? 1e-30f : range;
    if (!isfinite(range + _mm512_reduce_add_ps(guard))) range = NAN;
    float steps = 255.0f / range;
    int32_t zero = isfinite(steps) ? (int32_t)nearbyintf(-lowest * steps) : 0;
    rows->scales[row] = range / 255.0f;
    rows->zeros[row] = zero;
    uint8_t *bytes = rows->bytes + row * rows->stride;
    for (int64_t i = 0; i < rows->stride; i += 16) {
        __m512 value = _mm512_maskz_loadu_ps(tail_mask(i < size ? size - i : 0), x + i);
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(steps)));
        whole = _mm512_max_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(zero)), _mm512_setzero_si512());
        _mm_store_si128((__m128i *)(bytes + i), _mm512_cvtusepi32_epi8(whole));
    }
}

/* ---------------------------------------------------------------- the product */

/* sum += u8 x s8, four at a time; as assembly, because compilers copy the sums around the intrinsic */
#define add_products(sum, bytes, weights) \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*(sum)) : "v"(bytes), "v"(weights))

static inline __attribute__((always_inline)) void tile(int count, const Layer *layer, const Rows *rows, int64_t row,
                                                       int64_t panel, float *out, int64_t out_stride) {
    const int64_t quads = round_up(layer->inputs, 4) / 4;
    const int8_t *weight = layer->weight + panel * quads * PANEL * 4;
    const uint8_t *bytes = rows->bytes + row * rows->stride;
    __m512i sums[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < quads; k++) {
        __m512i left = _mm512_load_si512(weight + k * 128), right = _mm512_load_si512(weight + k * 128 + 64);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            __m512i value = _mm512_set1_epi32(*(const int32_t *)(bytes + r * rows->stride + k * 4));
            add_products(&sums[r][0], value, left);
            add_products(&sums[r][1], value, right);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        int64_t at = panel * PANEL + half * 16;
        if (at >= layer->outputs) break;
        __mmask16 mask = tail_mask(layer->outputs - at);
        __m512i weight_sums = _mm512_loadu_si512(layer->sums + at);
        __m512 scales = _mm512_loadu_ps(layer->scales + at), bias = _mm512_loadu_ps(layer->bias + at);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            __m512i shift = _mm512_mullo_epi32(weight_sums, _mm512_set1_epi32(rows->zeros[row + r]));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][half], shift));
            __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(rows->scales[row + r]));
            _mm512_mask_storeu_ps(out + (row + r) * out_stride + at, mask, _mm512_fmadd_ps(sum, scale, bias));
        }
    }
}

static void tile_of(int64_t count, const Layer *layer, const Rows *rows, int64_t row, int64_t panel, float *out,
                    int64_t out_stride) {
    switch (count) {
#define CASE(n) \
    case n: tile(n, layer, rows, row, panel, out, out_stride); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
        default: tile(TILE_ROWS, layer, rows, row, panel, out, out_stride);
    }
}

/* This thread's share of out = rows x weight: a rectangle of a grid of all threads, chosen so that the largest is least.
 * Fewer shares of rows come first, because then each thread reads less of the weights. */
static void multiply(const Layer *layer, const Rows *rows, int64_t count, float *out, int64_t out_stride) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t tiles = round_up(count, TILE_ROWS) / TILE_ROWS, panels = round_up(layer->outputs, PANEL) / PANEL;
    int64_t across = threads, best = INT64_MAX; /* how many threads share the panels */
    for (int64_t candidate = threads; candidate >= 1; candidate--) {
        if (threads % candidate) continue;
        int64_t down = threads / candidate;
        int64_t most = (round_up(panels, candidate) / candidate) * (round_up(tiles, down) / down);
        if (most < best) best = most, across = candidate;
    }
    const int64_t down = threads / across, x = thread % across, y = thread / across;
    const int64_t first_panel = panels * x / across, end_panel = panels * (x + 1) / across;
    const int64_t first = tiles * y / down * TILE_ROWS, end = smaller(tiles * (y + 1) / down * TILE_ROWS, count);
    for (int64_t block = first; block < end; block += BLOCK_ROWS) {
        int64_t block_end = smaller(block + BLOCK_ROWS, end);
        for (int64_t panel = first_panel; panel < end_panel; panel++)
            for (int64_t row = block; row < block_end; row += TILE_ROWS)
                tile_of(smaller(TILE_ROWS, block_end - row), layer, rows, row, panel, out, out_stride);
    }
}

/* ---------------------------------------------------------------- what is called */

static int make_rows(Rows *rows, int64_t count, int64_t size) {
    rows->stride = round_up(size, 64);
    rows->bytes = aligned_alloc(64, count * rows->stride);
    rows->scales = malloc(count * sizeof(float));
    rows->zeros = malloc(count * sizeof(int32_t));
    return rows->bytes && rows->scales && rows->zeros;
}

static void free_rows(Rows *rows) {
    free(rows->bytes);
    free(rows->scales);
    free(rows->zeros);
}

/* out = x W^T + bias; 0 if memory is short */
int bertblocks_linear(const Layer *layer, const float *x, int64_t count, float *out, int threads) {
    Rows rows;
    int made = make_rows(&rows, count, layer->inputs);
    if (made) {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < count; row++) quantize_row(x + row * layer->inputs, layer->inputs, &rows, row);
            multiply(layer, &rows, count, out, layer->outputs);
        }
    }
    free_rows(&rows);
    return made;
}

/* out = down(activation(up(x))), or down(activation(first half of up(x)) * second half); 0 if memory is short */
int bertblocks_mlp(const Layer *up, const Layer *down, int activation, int gated, const float *x, int64_t count,
                   float *out, int threads) {
    Rows inputs, middle;
    const int64_t most = smaller(count, MLP_ROWS), width = up->outputs;
    float *hidden = aligned_alloc(64, round_up(most * width * sizeof(float), 64));
    int made = make_rows(&inputs, most, up->inputs) & make_rows(&middle, most, down->inputs) & (hidden != NULL);
    if (made) {
#pragma omp parallel num_threads(threads)
        for (int64_t start = 0; start < count; start += MLP_ROWS) {
            const int64_t rows = smaller(MLP_ROWS, count - start);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                quantize_row(x + (start + row) * up->inputs, up->inputs, &inputs, row);
            multiply(up, &inputs, rows, hidden, width);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                float *unit = hidden + row * width;
                activate(activation, unit, gated ? unit + down->inputs : NULL, down->inputs);
                quantize_row(unit, down->inputs, &middle, row);
            }
            multiply(down, &middle, rows, out + start * down->outputs, down->outputs);
        }
    }
    free(hidden);
    free_rows(&inputs);
    free_rows(&middle);
    return made;
}
