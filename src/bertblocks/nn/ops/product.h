/* int8 products of rows and a packed matrix.
 *
 * Weights are signed bytes with one scale per output; activations become unsigned bytes with a scale and a zero point
 * per row, so that no row depends on another. Sums of products are exact integers, and only their way back to floats
 * rounds. Weights come packed as [outputs / 32][inputs / 4][32][4], filled up with zeros: what `vpdpbusd` reads. */

#pragma once

#include "common.h"

#define BLOCK_ROWS 192 /* rows whose bytes stay in the second cache while a panel of weights passes */

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

/* The threads that share a piece of work: all of them, or one alone. */
typedef struct {
    int64_t rank, size;
} Team;

static void wait_for(Team team) {
    if (team.size > 1) {
#pragma omp barrier
    }
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

INLINE void tile(int count, const Layer *layer, const Rows *rows, int64_t row, int64_t panel, float *out,
                 int64_t out_stride) {
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

/* How many of `count` rows to take at a time: as evenly as `most` allows, because the last tile should not be small. */
INLINE int64_t even(int64_t count, int64_t most) {
    const int64_t parts = (count + most - 1) / most;
    return parts ? (count + parts - 1) / parts : most;
}

/* This thread's share of out = rows x weight: a rectangle of the team's grid, chosen so that the largest is least.
 * Fewer shares of rows come first, because then each thread reads less of the weights. */
static void multiply(const Layer *layer, const Rows *rows, int64_t count, float *out, int64_t out_stride, Team team) {
    const int64_t step = even(count, TILE_ROWS);
    const int64_t tiles = (count + step - 1) / step, panels = round_up(layer->outputs, PANEL) / PANEL;
    int64_t across = team.size, best = INT64_MAX; /* how many threads share the panels */
    for (int64_t candidate = team.size; candidate >= 1; candidate--) {
        if (team.size % candidate) continue;
        int64_t down = team.size / candidate;
        int64_t most = (round_up(panels, candidate) / candidate) * (round_up(tiles, down) / down);
        if (most < best) best = most, across = candidate;
    }
    const int64_t down = team.size / across, x = team.rank % across, y = team.rank / across;
    const int64_t first_panel = panels * x / across, end_panel = panels * (x + 1) / across;
    const int64_t first = tiles * y / down * step, end = smaller(tiles * (y + 1) / down * step, count);
    const int64_t block_rows = BLOCK_ROWS / step * step;
    for (int64_t block = first; block < end; block += block_rows) {
        int64_t block_end = smaller(block + block_rows, end);
        for (int64_t panel = first_panel; panel < end_panel; panel++)
            for (int64_t row = block; row < block_end; row += step)
                tile_of(smaller(step, block_end - row), layer, rows, row, panel, out, out_stride);
    }
}
