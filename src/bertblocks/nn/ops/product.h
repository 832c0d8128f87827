/* int8 products of rows and a packed matrix.
 *
 * Weights are signed bytes with one scale per output; activations become unsigned bytes with a scale and a zero point
 * per row, so that no row depends on another. Sums of products are exact integers, and only their way back to floats
 * rounds. Weights come packed as [outputs / PANEL][inputs / GROUP][PANEL][GROUP], filled up with
 * zeros: groups of inputs of an output meet groups of bytes of a row. */

#pragma once

#include "amx.h"
#include "common.h"

#define BLOCK_ROWS 192     /* rows whose bytes stay in the second cache while a panel of weights passes */
#define WEIGHTS_AHEAD 2048 /* bytes of weights that are on their way: without, Intel's cores wait for them */

typedef struct {
    const int8_t *weight;
    const int32_t *sums;  /* of each output's weights, for the zero points */
    const float *scales;  /* of the outputs */
    const float *bias;    /* zeros if there is none */
    int64_t inputs, outputs;
} Layer;

typedef struct {
    byte *bytes;  /* [rows][stride] */
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
    floats low = v_zero(), high = v_zero(), guard = v_zero();
    for (int64_t i = 0; i < size; i += 16) {
        floats value = v_load_part(x + i, part_of(size - i));
        low = v_min(low, value);
        high = v_max(high, value);
        guard = v_fma(value, v_zero(), guard);
    }
    float lowest = v_least(low), range = v_most(high) - lowest;
    range = range < 1e-30f ? 1e-30f : range;
    if (!isfinite(range + v_sum(guard))) range = NAN;
    float steps = 255.0f / range;
    int32_t zero = isfinite(steps) ? (int32_t)nearbyintf(-lowest * steps) : 0;
    rows->scales[row] = range / 255.0f;
    rows->zeros[row] = zero - BYTE_ZERO;
    byte *bytes = rows->bytes + row * rows->stride;
    for (int64_t i = 0; i < rows->stride; i += 16) {
        floats value = v_load_part(x + i, part_of(size - i));
        ints whole = to_ints(v_mul(value, v_set(steps)));
        whole = i_max(i_add(whole, i_set(zero)), i_zero());
        store_bytes(bytes + i, whole);
    }
}

/* ---------------------------------------------------------------- the product */

INLINE ints read_group(const byte *bytes) {
    int32_t group;
    memcpy(&group, bytes, sizeof group);
    return i_set(group);
}

/* out = sums as floats, of `count` rows of a panel */
INLINE void write_sums(int count, const Layer *layer, const Rows *rows, int64_t row, int64_t panel,
                       ints sums[][VECTORS], float *out, int64_t out_stride) {
#pragma GCC unroll 2
    for (int i = 0; i < VECTORS; i++) {
        const int64_t at = panel * PANEL + i * 16;
        if (at >= layer->outputs) break;
        const part left = part_of(layer->outputs - at);
        const ints weight_sums = i_load(layer->sums + at);
        const floats scales = v_load(layer->scales + at), bias = v_load(layer->bias + at);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            const floats sum = to_floats(i_sub(sums[r][i], i_mul(weight_sums, i_set(rows->zeros[row + r]))));
            const floats x = v_fma(sum, v_mul(scales, v_set(rows->scales[row + r])), bias);
            v_store_part(out + (row + r) * out_stride + at, x, left);
        }
    }
}

INLINE void tile(int count, const Layer *layer, const Rows *rows, int64_t row, int64_t panel, float *out,
                 int64_t out_stride) {
    const int64_t groups = round_up(layer->inputs, GROUP) / GROUP;
    const int8_t *weight = layer->weight + panel * PANEL * round_up(layer->inputs, INPUTS);
    const byte *bytes = rows->bytes + row * rows->stride;
    ints sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++) sums[r][i] = i_zero();
    for (int64_t k = 0; k < groups; k++) {
        ints columns[VECTORS];
        prefetch(weight, k * PANEL * GROUP + WEIGHTS_AHEAD, PANEL * GROUP);
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++) columns[i] = load_weights(weight + (k * PANEL + i * 16) * GROUP);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            const ints group = read_group(bytes + r * rows->stride + k * GROUP);
#pragma GCC unroll 2
            for (int i = 0; i < VECTORS; i++) sums[r][i] = add_products(sums[r][i], group, columns[i]);
        }
    }
    write_sums(count, layer, rows, row, panel, sums, out, out_stride);
}

static void tile_of(int64_t count, const Layer *layer, const Rows *rows, int64_t row, int64_t panel, float *out,
                    int64_t out_stride) {
#ifdef __AMX_INT8__
    if (count > TILE_ROWS) {
        const int64_t inputs = round_up(layer->inputs, INPUTS);
        ints sums[MOST_ROWS][VECTORS];
        multiply_tiles(rows->bytes + row * rows->stride, rows->stride, layer->weight + panel * PANEL * inputs, inputs,
                       (int32_t *)sums);
        write_sums(count, layer, rows, row, panel, sums, out, out_stride);
        return;
    }
#endif
    switch (count) {
#define TILE_CASE(n) \
    case n: tile(n, layer, rows, row, panel, out, out_stride); break;
        EACH_TILE(TILE_CASE)
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
    const int64_t step = even(count, count > TILE_ROWS ? MOST_ROWS : TILE_ROWS);
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
    if (step > TILE_ROWS) begin_tiles();
    for (int64_t block = first; block < end; block += block_rows) {
        int64_t block_end = smaller(block + block_rows, end);
        for (int64_t panel = first_panel; panel < end_panel; panel++)
            for (int64_t row = block; row < block_end; row += step)
                tile_of(smaller(step, block_end - row), layer, rows, row, panel, out, out_stride);
    }
    if (step > TILE_ROWS) end_tiles();
}
