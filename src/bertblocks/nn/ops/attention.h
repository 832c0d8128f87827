/* softmax(q k^T) v over ragged sequences, blocks of keys at a time, so that no score leaves the caches.
 *
 * A number of a product is a unit of 32 bits: one fp32 number, or a pair of bf16 numbers where the CPU multiplies
 * those. Queries stay rows of units; keys are packed as panels [units][PANEL], and values too,
 * where a unit holds a pair of keys. Both products then broadcast a unit of a row and read two vectors. */

#pragma once

#include "common.h"

#define KEYS 256      /* keys of a block, a multiple of PANEL */
#define SLAB 960      /* queries of a task: many, because each task packs its keys again */
#define LARGEST 256   /* units of a head */
#define HEADS_AHEAD 8 /* tokens whose head is on its way: hardware does not foresee such large strides */

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
    int32_t in_bf16;     /* the units of the products, where the CPU multiplies bf16 */
    float scale;
} Attention;

#ifdef HAS_BF16
#define IN_BF16(call) ((call)->in_bf16)
#else
#define IN_BF16(call) 0
#endif

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
    scratch->units = IN_BF16(call) ? (call->size + 1) / 2 : call->size;
    scratch->padded = padded;
}

/* ---------------------------------------------------------------- packing */

/* Asks for the head of a token a few tokens after the one that begins at `at`. */
INLINE void prefetch_head(const Attention *call, const void *from, int64_t at, int64_t stride) {
    const int64_t width = call->is_bf16 ? sizeof(uint16_t) : sizeof(float);
    prefetch(from, (at + HEADS_AHEAD * stride) * width, call->size * width);
}

/* A head of a token as fp32 and scaled, with zeros up to a multiple of 32. */
static void read_head(const Attention *call, const void *from, int64_t at, float scale, float *to) {
    for (int64_t i = 0; i < round_up(call->size, PANEL); i += 16) {
        floats x = load(from, at + i, part_of(call->size - i), call->is_bf16);
        v_store(to + i, v_mul(x, v_set(scale)));
    }
}

/* Rotates a head of a token, or for its gradient rotates back if the sign is -1. */
static void rotate_head(const Attention *call, int64_t token, float sign, float *to) {
    const int64_t half = call->rotary / 2;
    if (!half) return;
    token += call->origin;
    const float *cos = call->cos + token * call->rotary, *sin = call->sin + token * half;
    for (int64_t i = 0; i < half; i += 16) {
        const part left = part_of(half - i);
        floats a = v_load_part(to + i, left), b = v_load_part(to + half + i, left);
        floats c = v_load_part(cos + i, left), s = v_mul(v_load_part(sin + i, left), v_set(sign));
        v_store_part(to + i, v_fnma(b, s, v_mul(a, c)), left);
        v_store_part(to + half + i, v_fma(a, s, v_mul(b, c)), left);
    }
}

/* sixteen units from 16 fp32 numbers, or from 32 that become pairs of bf16 */
INLINE floats to_units(const float *from, int in_bf16) {
#ifdef HAS_BF16
    if (in_bf16) return to_bf16_pairs(v_load(from), v_load(from + 16));
#endif
    return v_load(from);
}

/* sixteen pairs of bf16 from the numbers of two rows */
INLINE floats to_pair(floats x, floats next) { return from_bits(i_or(to_bf16(x), i_shift_left(to_bf16(next), 16))); }

/* Sixteen keys, beginning with the given one; those after the sequence are zeros. */
static void pack_keys(const Attention *call, const Scratch *scratch, int64_t first, int64_t count, int64_t head,
                      float *to) {
    float row[16][LARGEST];
    const int64_t width = IN_BF16(call) ? 32 : 16;
    for (int64_t i = 0; i < smaller(count, 16); i++) {
        const int64_t at = (first + i) * call->k_stride + head * call->size;
        prefetch_head(call, call->k, at, call->k_stride);
        read_head(call, call->k, at, 1.0f, row[i]);
        rotate_head(call, first + i, 1.0f, row[i]);
    }
    for (int64_t unit = 0; unit < scratch->units; unit += 16) {
        floats rows[16];
        for (int64_t i = 0; i < 16; i++)
            rows[i] = i < count ? to_units(row[i] + unit / 16 * width, IN_BF16(call)) : v_zero();
        transpose(rows);
        for (int64_t i = 0; i < smaller(16, scratch->units - unit); i++)
            v_store(to + (unit + i) * PANEL, rows[i]);
    }
}

/* A unit of every number of the values: one key, or a pair of keys. */
static void pack_values(const Attention *call, int64_t first, int64_t count, int64_t head, float *to,
                        int64_t panel_units) {
    const int64_t at = first * call->v_stride + head * call->size;
    prefetch_head(call, call->v, at, call->v_stride);
    for (int64_t i = 0; i < round_up(call->size, PANEL); i += 16) {
        const int64_t left = call->size - i;
        floats x = load(call->v, at + i, part_of(count > 0 ? left : 0), call->is_bf16);
        if (IN_BF16(call)) {
            x = to_pair(x, load(call->v, at + call->v_stride + i, part_of(count > 1 ? left : 0), call->is_bf16));
        }
        v_store(to + i / PANEL * panel_units * PANEL + i % PANEL, x);
    }
}

static void pack_block(const Attention *call, const Scratch *scratch, int64_t first, int64_t count, int64_t head) {
    const int64_t step = IN_BF16(call) ? 2 : 1, padded = round_up(count, PANEL);
    for (int64_t key = 0; key < padded; key += 16)
        pack_keys(call, scratch, first + key, count - key, head,
                  scratch->keys + key / PANEL * scratch->units * PANEL + key % PANEL);
    for (int64_t key = 0; key < padded; key += step)
        pack_values(call, first + key, count - key, head, scratch->values + key / step * PANEL, padded / step);
}

/* ---------------------------------------------------------------- products */

INLINE floats add_unit(floats sum, floats unit, floats column, int in_bf16) {
#ifdef HAS_BF16
    if (in_bf16) return add_bf16_products(sum, unit, column);
#endif
    return v_fma(unit, column, sum);
}

/* out = rows x panel, or out * factors + rows x panel */
INLINE void panel_tile(int count, int in_bf16, const float *rows, int64_t stride, const float *panel, int64_t units,
                       float *out, int64_t out_stride, const float *factors) {
    floats sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++)
            sums[r][i] = factors ? v_mul(v_load(out + r * out_stride + i * 16), v_set(factors[r])) : v_zero();
    for (int64_t k = 0; k < units; k++) {
        floats columns[VECTORS];
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++) columns[i] = v_load(panel + k * PANEL + i * 16);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            const floats unit = v_set(rows[r * stride + k]);
#pragma GCC unroll 2
            for (int i = 0; i < VECTORS; i++) sums[r][i] = add_unit(sums[r][i], unit, columns[i], in_bf16);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++) v_store(out + r * out_stride + i * 16, sums[r][i]);
}

static void panel_product(int count, int in_bf16, const float *rows, int64_t stride, const float *panel, int64_t units,
                          float *out, int64_t out_stride, const float *factors) {
    switch (count * 2 + in_bf16) {
#define PANEL_CASE(n)                                                                                  \
    case 2 * n: panel_tile(n, 0, rows, stride, panel, units, out, out_stride, factors); break;         \
    case 2 * n + 1: panel_tile(n, 1, rows, stride, panel, units, out, out_stride, factors); break;
        EACH_TILE(PANEL_CASE)
    }
}

/* ---------------------------------------------------------------- softmax */

/* Turns the scores from column `low` to `high` into weights, as units over all columns, and returns the factor on what
 * was summed before. Columns outside get 0. */
static float weigh(float *scores, int64_t columns, int64_t low, int64_t high, float *highest, float *total,
                   int in_bf16) {
    floats most = v_set(-INFINITY), sum = v_zero();
    for (int64_t i = larger(0, low) / 16 * 16; i < high; i += 16) {
        most = max_where(lanes_between(low - i, high - i), most, v_load(scores + i));
    }
    const float before = *highest, now = fmaxf(before, v_most(most));
    const floats shift = v_set(now);
    for (int64_t i = 0; i < columns; i += 32) { /* two vectors at a time, which become one of pairs */
        floats parts[2];
        for (int half = 0; half < 2; half++) {
            const int64_t at = i + half * 16;
            const lanes seen = lanes_between(low - at, high - at);
            parts[half] = keep(seen, exp2_vector(v_sub(v_load(scores + at), shift)));
            sum = v_add(sum, parts[half]);
        }
#ifdef HAS_BF16
        if (in_bf16) {
            v_store(scores + i / 2, to_bf16_pairs(parts[0], parts[1]));
            continue;
        }
#endif
        v_store(scores + i, parts[0]);
        v_store(scores + i + 16, parts[1]);
    }
    const float factor = before == -INFINITY ? 0.0f : exp2f(before - now);
    *highest = now;
    *total = *total * factor + v_sum(sum);
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
        panel_product(count, IN_BF16(call), rows, units, scratch->keys + (skipped + at) * units, units, scores + at,
                      KEYS, NULL);
    for (int64_t r = 0; r < count; r++) {
        const int64_t end = smaller(end_key(call, task, query + r), block + block_keys) - block;
        factors[r] = weigh(scores + r * KEYS, columns, first_key(call, query + r) - block - skipped, end - skipped,
                           scratch->highest + row + r, scratch->totals + row + r, IN_BF16(call));
    }
    const int64_t step = IN_BF16(call) ? 2 : 1, panel = round_up(block_keys, PANEL) / step * PANEL;
    const int is_first = first_key(call, query) >= block;
    const int is_last = end_key(call, task, query + count - 1) <= block + block_keys;
    float *sums = scratch->sums + row * scratch->padded;
    for (int64_t at = 0; at < scratch->padded; at += PANEL)
        panel_product(count, IN_BF16(call), scores, KEYS, scratch->values + at / PANEL * panel + skipped / step * PANEL,
                      columns / step, sums + at, scratch->padded, is_first ? NULL : factors);
    if (!is_last) return;
    for (int64_t r = 0; r < count; r++) {
        const int64_t to = (task->start + query + r) * call->out_stride + task->head * call->size;
        const floats share = v_set(1.0f / scratch->totals[row + r]);
        for (int64_t i = 0; i < call->size; i += 16) {
            floats x = v_mul(v_load(sums + r * scratch->padded + i), share);
            store(call->out, to + i, x, part_of(call->size - i), call->is_bf16);
        }
    }
}

static void run_task(const Attention *call, const Scratch *scratch, const Task *task) {
    const float scale = call->scale * LOG2_E; /* weights are powers of two */
    for (int64_t row = 0; row < task->rows; row++) {
        float head[LARGEST];
        const int64_t token = task->start + task->query + row, width = IN_BF16(call) ? 32 : 16;
        const int64_t at = token * call->q_stride + task->head * call->size;
        prefetch_head(call, call->q, at, call->q_stride);
        read_head(call, call->q, at, scale, head);
        rotate_head(call, token, 1.0f, head);
        for (int64_t unit = 0; unit < scratch->units; unit += 16)
            v_store_part(scratch->queries + row * scratch->units + unit,
                          to_units(head + unit / 16 * width, IN_BF16(call)), part_of(scratch->units - unit));
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
