/* softmax(q k^T) v over ragged sequences, blocks of keys at a time, so that no score leaves the caches.
 *
 * A number of a product is a unit of 32 bits: one fp32 number, or a pair of bf16 numbers where the CPU multiplies
 * those. Queries stay rows of units; keys are packed as [keys / 32][units][32], and values as [size / 32][units][32],
 * where a unit holds a pair of keys. Both products then broadcast a unit of a row and read two vectors. */

#pragma once

#include "common.h"

#define KEYS 256      /* keys of a block, a multiple of PANEL */
#define SLAB 960      /* queries of a task: many, because each task packs its keys again */
#define LARGEST 256   /* units of a head */

typedef struct {
    const void *q, *k, *v; /* [tokens][heads][size], in bf16 or fp32 */
    void *out;
    int64_t q_stride, k_stride, v_stride, out_stride; /* numbers from one token to the next */
    const int64_t *starts;                            /* of the sequences, and the end of the last */
    int64_t sequences, longest;
    int64_t origin; /* the token at which q, k, v and out begin; the tables of the rotation begin at token 0 */
    const float *cos, *sin; /* of the rotation, [tokens][rotary] and [tokens][rotary / 2] */
    int32_t rotary;         /* numbers of a head that are rotated; 0 for none */
    int32_t heads, kv_heads, size;
    int32_t half_window; /* -1 if all keys are seen */
    int32_t is_bf16;     /* the memory of q, k, v and out */
    int32_t in_bf16;     /* the units of the products */
    float scale;
} Attention;

typedef struct {
    float *queries, *keys, *values; /* units */
    float *scores;                  /* [TILE_ROWS][KEYS]; then the weights as units */
    float *sums;                    /* [SLAB][padded size]: weighted values so far */
    float *highest, *totals;        /* [SLAB]: of the scores so far */
    int64_t units, padded;          /* of a row of queries or keys; numbers of a row of sums */
} Scratch;

static int64_t slab_rows(const Attention *call) { return round_up(smaller(call->longest, SLAB), TILE_ROWS); }

static void take_scratch(Memory *memory, Scratch *scratch, const Attention *call) {
    const int64_t padded = round_up(call->size, PANEL), rows = slab_rows(call);
    const int64_t keys = smaller(round_up(call->longest, PANEL), KEYS);
    scratch->queries = take_floats(memory, rows * padded);
    scratch->keys = take_floats(memory, keys * padded);
    scratch->values = take_floats(memory, keys * padded);
    scratch->scores = take_floats(memory, TILE_ROWS * KEYS);
    scratch->sums = take_floats(memory, rows * padded);
    scratch->highest = take_floats(memory, rows);
    scratch->totals = take_floats(memory, rows);
    scratch->units = call->in_bf16 ? (call->size + 1) / 2 : call->size;
    scratch->padded = padded;
}

/* ---------------------------------------------------------------- packing */

/* A head of a token as fp32, rotated and scaled, with zeros up to a multiple of 32. */
static void read_head(const Attention *call, const void *from, int64_t at, int64_t token, float scale, float *to) {
    const int64_t half = call->rotary / 2;
    for (int64_t i = 0; i < round_up(call->size, PANEL); i += 16) {
        __m512 x = load(from, at + i, tail_mask(call->size - i), call->is_bf16);
        _mm512_storeu_ps(to + i, _mm512_mul_ps(x, _mm512_set1_ps(scale)));
    }
    if (!half) return;
    token += call->origin;
    const float *cos = call->cos + token * call->rotary, *sin = call->sin + token * half;
    for (int64_t i = 0; i < half; i += 16) {
        __mmask16 mask = tail_mask(half - i);
        __m512 a = _mm512_maskz_loadu_ps(mask, to + i), b = _mm512_maskz_loadu_ps(mask, to + half + i);
        __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
        _mm512_mask_storeu_ps(to + i, mask, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
        _mm512_mask_storeu_ps(to + half + i, mask, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
    }
}

/* sixteen units from 16 fp32 numbers, or from 32 that become pairs of bf16 */
INLINE __m512 to_units(const float *from, int in_bf16) {
#ifdef __AVX512BF16__
    if (in_bf16) return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
#endif
    return _mm512_loadu_ps(from);
}

/* 16 x 16 units, from rows to columns */
static void transpose(__m512 rows[16]) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + j + 2]);
            rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++) {
        __m512 a = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88), b = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xDD);
        __m512 c = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
        __m512 d = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xDD);
        pairs[i] = _mm512_shuffle_f32x4(a, c, 0x88), pairs[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
        pairs[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), pairs[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
    for (int i = 0; i < 16; i++) rows[i] = pairs[i];
}

/* Sixteen keys, beginning with the given one; those after the sequence are zeros. */
static void pack_keys(const Attention *call, const Scratch *scratch, int64_t first, int64_t count, int64_t head,
                      float *to) {
    float row[16][LARGEST];
    const int64_t width = call->in_bf16 ? 32 : 16;
    for (int64_t i = 0; i < smaller(count, 16); i++)
        read_head(call, call->k, (first + i) * call->k_stride + head * call->size, first + i, 1.0f, row[i]);
    for (int64_t unit = 0; unit < scratch->units; unit += 16) {
        __m512 rows[16];
        for (int64_t i = 0; i < 16; i++)
            rows[i] = i < count ? to_units(row[i] + unit / 16 * width, call->in_bf16) : _mm512_setzero_ps();
        transpose(rows);
        for (int64_t i = 0; i < smaller(16, scratch->units - unit); i++)
            _mm512_store_ps(to + (unit + i) * PANEL, rows[i]);
    }
}

/* A unit of every number of the values: one key, or a pair of keys. */
static void pack_values(const Attention *call, int64_t first, int64_t count, int64_t head, float *to,
                        int64_t panel_units) {
    const int64_t at = first * call->v_stride + head * call->size;
    for (int64_t i = 0; i < round_up(call->size, PANEL); i += 16) {
        __mmask16 mask = tail_mask(call->size - i);
        __m512 x = load(call->v, at + i, count > 0 ? mask : 0, call->is_bf16);
        if (call->in_bf16) {
            __m512 next = load(call->v, at + call->v_stride + i, count > 1 ? mask : 0, call->is_bf16);
            x = _mm512_castsi512_ps(_mm512_or_si512(to_bf16(x), _mm512_slli_epi32(to_bf16(next), 16)));
        }
        _mm512_store_ps(to + i / PANEL * panel_units * PANEL + i % PANEL, x);
    }
}

static void pack_block(const Attention *call, const Scratch *scratch, int64_t first, int64_t count, int64_t head) {
    const int64_t step = call->in_bf16 ? 2 : 1, padded = round_up(count, PANEL);
    for (int64_t key = 0; key < padded; key += 16)
        pack_keys(call, scratch, first + key, count - key, head,
                  scratch->keys + key / PANEL * scratch->units * PANEL + key % PANEL);
    for (int64_t key = 0; key < padded; key += step)
        pack_values(call, first + key, count - key, head, scratch->values + key / step * PANEL, padded / step);
}

/* ---------------------------------------------------------------- products */

INLINE __m512 add_unit(__m512 sum, __m512 unit, __m512 column, int in_bf16) {
#ifdef __AVX512BF16__
    if (in_bf16) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(column));
        return sum;
    }
#endif
    return _mm512_fmadd_ps(unit, column, sum);
}

/* out = rows x panel, or out * factors + rows x panel */
INLINE void panel_tile(int count, int in_bf16, const float *rows, int64_t stride, const float *panel, int64_t units,
                       float *out, int64_t out_stride, const float *factors) {
    __m512 sums[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = factors ? _mm512_mul_ps(_mm512_loadu_ps(out + r * out_stride + half * 16),
                                                    _mm512_set1_ps(factors[r]))
                                    : _mm512_setzero_ps();
    for (int64_t k = 0; k < units; k++) {
        __m512 left = _mm512_load_ps(panel + k * PANEL), right = _mm512_load_ps(panel + k * PANEL + 16);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            __m512 unit = _mm512_set1_ps(rows[r * stride + k]);
            sums[r][0] = add_unit(sums[r][0], unit, left, in_bf16);
            sums[r][1] = add_unit(sums[r][1], unit, right, in_bf16);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + r * out_stride + half * 16, sums[r][half]);
}

static void panel_product(int count, int in_bf16, const float *rows, int64_t stride, const float *panel, int64_t units,
                          float *out, int64_t out_stride, const float *factors) {
    switch (count * 2 + in_bf16) {
#define PANEL_CASE(n)                                                                                  \
    case 2 * n: panel_tile(n, 0, rows, stride, panel, units, out, out_stride, factors); break;         \
    case 2 * n + 1: panel_tile(n, 1, rows, stride, panel, units, out, out_stride, factors); break;
        PANEL_CASE(1) PANEL_CASE(2) PANEL_CASE(3) PANEL_CASE(4) PANEL_CASE(5) PANEL_CASE(6)
        PANEL_CASE(7) PANEL_CASE(8) PANEL_CASE(9) PANEL_CASE(10) PANEL_CASE(11) PANEL_CASE(12)
    }
}

/* ---------------------------------------------------------------- softmax */

/* Turns the scores from column `low` to `high` into weights, as units over all columns, and returns the factor on what
 * was summed before. Columns outside get 0. */
static float weigh(float *scores, int64_t columns, int64_t low, int64_t high, float *highest, float *total,
                   int in_bf16) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = larger(0, low) / 16 * 16; i < high; i += 16) {
        __mmask16 mask = tail_mask(high - i) & ~tail_mask(low - i);
        most = _mm512_mask_max_ps(most, mask, most, _mm512_load_ps(scores + i));
    }
    const float before = *highest, now = fmaxf(before, _mm512_reduce_max_ps(most));
    const __m512 shift = _mm512_set1_ps(now);
    for (int64_t i = 0; i < columns; i += 32) { /* in steps of two vectors, which become one of pairs */
        __m512 parts[2];
        for (int half = 0; half < 2; half++) {
            int64_t at = i + half * 16;
            __mmask16 mask = tail_mask(high - at) & ~tail_mask(low - at);
            parts[half] = _mm512_maskz_mov_ps(mask, exp2_vector(_mm512_sub_ps(_mm512_load_ps(scores + at), shift)));
            sum = _mm512_add_ps(sum, parts[half]);
        }
#ifdef __AVX512BF16__
        if (in_bf16) {
            _mm512_store_ps(scores + i / 2, (__m512)_mm512_cvtne2ps_pbh(parts[1], parts[0]));
            continue;
        }
#endif
        _mm512_store_ps(scores + i, parts[0]);
        _mm512_store_ps(scores + i + 16, parts[1]);
    }
    const float factor = before == -INFINITY ? 0.0f : exp2f(before - now);
    *highest = now;
    *total = *total * factor + _mm512_reduce_add_ps(sum);
    return factor;
}

/* ---------------------------------------------------------------- tasks */

typedef struct {
    int64_t start, length; /* the sequence */
    int64_t query, rows;   /* those of the slab, in the sequence */
    int64_t head;
} Task;

INLINE int64_t first_key(const Attention *call, int64_t query) {
    return call->half_window < 0 ? 0 : larger(0, query - call->half_window);
}

INLINE int64_t end_key(const Attention *call, const Task *task, int64_t query) {
    return call->half_window < 0 ? task->length : smaller(task->length, query + call->half_window + 1);
}

/* One tile of queries and a block of keys. */
static void attend_tile(const Attention *call, const Scratch *scratch, const Task *task, int64_t row, int64_t block,
                        int64_t block_keys) {
    const int64_t count = smaller(TILE_ROWS, task->rows - row), query = task->query + row, units = scratch->units;
    const int64_t low = larger(first_key(call, query), block) - block;
    const int64_t high = smaller(end_key(call, task, query + count - 1), block + block_keys) - block;
    if (low >= high) return;
    const int64_t skipped = low / PANEL * PANEL, columns = round_up(high, PANEL) - skipped;
    const float *rows = scratch->queries + row * units;
    float *scores = scratch->scores, factors[TILE_ROWS];
    for (int64_t at = 0; at < columns; at += PANEL)
        panel_product(count, call->in_bf16, rows, units, scratch->keys + (skipped + at) * units, units, scores + at,
                      KEYS, NULL);
    for (int64_t r = 0; r < count; r++) {
        const int64_t end = smaller(end_key(call, task, query + r), block + block_keys) - block;
        factors[r] = weigh(scores + r * KEYS, columns, first_key(call, query + r) - block - skipped, end - skipped,
                           scratch->highest + row + r, scratch->totals + row + r, call->in_bf16);
    }
    const int64_t step = call->in_bf16 ? 2 : 1, panel = round_up(block_keys, PANEL) / step * PANEL;
    const int is_first = first_key(call, query) >= block;
    const int is_last = end_key(call, task, query + count - 1) <= block + block_keys;
    float *sums = scratch->sums + row * scratch->padded;
    for (int64_t at = 0; at < scratch->padded; at += PANEL)
        panel_product(count, call->in_bf16, scores, KEYS, scratch->values + at / PANEL * panel + skipped / step * PANEL,
                      columns / step, sums + at, scratch->padded, is_first ? NULL : factors);
    if (!is_last) return;
    for (int64_t r = 0; r < count; r++) {
        const int64_t to = (task->start + query + r) * call->out_stride + task->head * call->size;
        const __m512 share = _mm512_set1_ps(1.0f / scratch->totals[row + r]);
        for (int64_t i = 0; i < call->size; i += 16) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(sums + r * scratch->padded + i), share);
            store(call->out, to + i, tail_mask(call->size - i), x, call->is_bf16);
        }
    }
}

static void run_task(const Attention *call, const Scratch *scratch, const Task *task) {
    const float scale = call->scale * 1.44269504088896341f; /* weights are powers of two */
    for (int64_t row = 0; row < task->rows; row++) {
        float head[LARGEST];
        const int64_t token = task->start + task->query + row, width = call->in_bf16 ? 32 : 16;
        read_head(call, call->q, token * call->q_stride + task->head * call->size, token, scale, head);
        for (int64_t unit = 0; unit < scratch->units; unit += 16)
            _mm512_mask_storeu_ps(scratch->queries + row * scratch->units + unit, tail_mask(scratch->units - unit),
                                  to_units(head + unit / 16 * width, call->in_bf16));
        scratch->highest[row] = -INFINITY;
        scratch->totals[row] = 0.0f;
    }
    const int64_t kv_head = task->head / (call->heads / call->kv_heads);
    const int64_t end = end_key(call, task, task->query + task->rows - 1);
    for (int64_t block = first_key(call, task->query); block < end; block += KEYS) {
        const int64_t keys = smaller(KEYS, end - block);
        pack_block(call, scratch, task->start + block, keys, kv_head);
        for (int64_t row = 0; row < task->rows; row += TILE_ROWS)
            attend_tile(call, scratch, task, row, block, keys);
    }
}

/* All threads of a parallel region call this. Every head of every slab of queries is a task. */
static void attend(const Attention *call, const Scratch *scratch) {
    const int64_t slabs = (call->longest + SLAB - 1) / SLAB;
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t sequence = 0; sequence < call->sequences; sequence++)
        for (int64_t slab = 0; slab < slabs; slab++)
            for (int64_t head = 0; head < call->heads; head++) {
                const int64_t start = call->starts[sequence] - call->origin;
                const int64_t length = call->starts[sequence + 1] - call->starts[sequence];
                const int64_t query = slab * SLAB;
                if (query >= length) continue;
                const Task task = {start, length, query, smaller(SLAB, length - query), head};
                run_task(call, scratch, &task);
            }
}
