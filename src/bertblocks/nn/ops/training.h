/* Attention for training: dropout on the weights, and gradients. All scores of a head of a sequence are held at once, so
 * sequences must be short. The backward pass computes the weights again. */

#pragma once

#include "attention.h"
#include "dropout.h"

typedef struct {
    const void *gradient;     /* of out, [tokens][heads][size] */
    void *of_q, *of_k, *of_v; /* the results */
    int64_t of_q_stride, of_k_stride, of_v_stride; /* numbers from one token to the next */
    uint64_t seed;            /* of the dropout */
    float rate;
} Training;

/* A head of a sequence: matrices of [length][padded] as rows, as panels of 32 columns, and keys and values also as
 * panels of 32 tokens; and matrices of [length][columns] with a row for each query, or transposed. What enters a
 * product consists of units, as in attention.h; `joined` holds what has just become pairs. */
typedef struct {
    float *q, *k, *v, *gradient;
    float *q_panels, *k_panels, *v_panels, *gradient_panels, *key_columns, *value_columns;
    float *weights, *dropped, *scores, *transposed, *joined;
    float *product, *of_k, *of_v;
    int64_t length, padded, columns;
    int64_t step; /* numbers of a unit */
} Head;

static void take_head(Memory *memory, Head *head, const Attention *call) {
    const int64_t padded = round_up(call->size, PANEL), columns = round_up(call->longest, PANEL);
    float **rows[] = {&head->q,        &head->k,        &head->v,        &head->gradient,        &head->product,
                      &head->q_panels, &head->k_panels, &head->v_panels, &head->gradient_panels, &head->of_k,
                      &head->of_v,     &head->key_columns, &head->value_columns};
    float **squares[] = {&head->weights, &head->dropped, &head->scores, &head->transposed};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = take_floats(memory, columns * padded);
    for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = take_floats(memory, columns * columns);
    head->joined = take_floats(memory, columns * larger(columns, padded) / 2);
    head->padded = padded;
    head->step = IN_BF16(call) ? 2 : 1;
}

/* ---------------------------------------------------------------- packing */

/* Reads a head of all tokens of a sequence, from its first at `at`. */
static void read_rows(const Attention *call, const Head *head, const void *from, int64_t at, int64_t stride, float scale,
                      float *to) {
    for (int64_t i = 0; i < head->length; i++, at += stride) {
        prefetch_head(call, from, at, stride);
        read_head(call, from, at, scale, to + i * head->padded);
    }
}

static void rotate_rows(const Attention *call, const Head *head, int64_t start, float sign, float *rows) {
    for (int64_t i = 0; i < head->length; i++) rotate_head(call, start + i, sign, rows + i * head->padded);
}

/* Units that join neighbours of a row: [length][width of a multiple of 32] -> [length][units] */
static const float *join_columns(const Head *head, const float *rows, int64_t width) {
    if (head->step == 1) return rows;
    for (int64_t i = 0; i < head->length * width; i += 32) v_store(head->joined + i / 2, to_units(rows + i, 1));
    return head->joined;
}

/* Units that join rows: [length][width] -> [units][width] */
static const float *join_rows(const Head *head, const float *rows, int64_t width) {
    if (head->step == 1) return rows;
    for (int64_t i = 0; i < head->length; i += 2)
        for (int64_t j = 0; j < width; j += 16) {
            const float *at = rows + i * width + j;
            v_store(head->joined + i / 2 * width + j,
                    to_pair(v_load(at), i + 1 < head->length ? v_load(at + width) : v_zero()));
        }
    return head->joined;
}

/* What `join_rows` makes of the tokens. */
INLINE int64_t token_units(const Head *head) { return (head->length + head->step - 1) / head->step; }

/* [length][padded] -> [padded / 32][units][32] */
static void to_panels(const Head *head, const float *rows, float *to) {
    const int64_t units = token_units(head);
    rows = join_rows(head, rows, head->padded);
    for (int64_t at = 0; at < head->padded; at += PANEL)
        for (int64_t i = 0; i < units; i++)
            memcpy(to + at * units + i * PANEL, rows + i * head->padded + at, PANEL * sizeof(float));
}

/* [rows][width] -> [width][to_stride] for a multiple of 16 columns; rows beyond the last become zeros */
static void transpose_matrix(const float *from, int64_t rows, int64_t width, int64_t stride, float *to,
                             int64_t to_stride) {
    for (int64_t i = 0; i < rows; i += 16)
        for (int64_t j = 0; j < width; j += 16) {
            floats tile[16];
            for (int64_t r = 0; r < 16; r++)
                tile[r] = i + r < rows ? v_load(from + (i + r) * stride + j) : v_zero();
            transpose(tile);
            for (int64_t r = 0; r < 16; r++) v_store(to + (j + r) * to_stride + i, tile[r]);
        }
}

/* [length][padded] -> [columns / 32][units][32] */
static void to_columns(const Head *head, const float *rows, float *to) {
    const int64_t units = head->padded / head->step;
    rows = join_columns(head, rows, head->padded);
    memset(to, 0, head->columns * units * sizeof(float));
    for (int64_t at = 0; at < head->length; at += PANEL)
        transpose_matrix(rows + at * units, smaller(PANEL, head->length - at), units, units, to + at * units, PANEL);
}

/* [length][columns] -> [columns][units], with rows `columns` apart */
static void transpose_square(const Head *head, const float *rows) {
    transpose_matrix(join_rows(head, rows, head->columns), token_units(head), head->columns, head->columns,
                     head->transposed, head->columns);
}

/* ---------------------------------------------------------------- products */

/* out = rows x panels for all tokens, or out + rows x panels; a panel has a row for each of the units */
static void multiply_panels(const Head *head, const float *rows, int64_t stride, const float *panels, int64_t units,
                            float *out, int64_t width, int adds) {
    static const float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}; /* at least TILE_ROWS */
    for (int64_t at = 0; at < width; at += PANEL)
        for (int64_t row = 0; row < head->length; row += TILE_ROWS)
            panel_product(smaller(TILE_ROWS, head->length - row), head->step == 2, rows + row * stride, stride, panels + at * units,
                          units, out + row * width + at, width, adds ? ones : NULL);
}

/* ---------------------------------------------------------------- weights */

static void softmax_row(float *scores, int64_t columns, int64_t low, int64_t high) {
    floats most = v_set(-INFINITY), sum = v_zero();
    for (int64_t i = 0; i < columns; i += 16)
        most = max_where(lanes_between(low - i, high - i), most, v_load(scores + i));
    const floats shift = v_set(v_most(most));
    for (int64_t i = 0; i < columns; i += 16) {
        const lanes seen = lanes_between(low - i, high - i);
        const floats x = keep(seen, exp2_vector(v_sub(v_load(scores + i), shift)));
        sum = v_add(sum, x);
        v_store(scores + i, x);
    }
    const floats share = v_set(1.0f / v_sum(sum));
    for (int64_t i = 0; i < columns; i += 16)
        v_store(scores + i, v_mul(v_load(scores + i), share));
}

/* Multiplies a matrix of a row for each query by the factors of dropout. */
static void drop(const Head *head, const float *from, float *to, uint64_t key, float rate) {
    const Dropout dropout = dropout_of(key, rate);
    for (int64_t i = 0; i < head->length * head->columns; i += 16)
        v_store(to + i, v_mul(v_load(from + i), dropout_factors(&dropout, i)));
}

/* ---------------------------------------------------------------- tasks */

/* Keys and values of a task, which the heads of a group share. */
static void read_keys(const Attention *call, Head *head, int64_t start, int64_t kv_head) {
    read_rows(call, head, call->k, start * call->k_stride + kv_head * call->size, call->k_stride, 1.0f, head->k);
    rotate_rows(call, head, start, 1.0f, head->k);
    read_rows(call, head, call->v, start * call->v_stride + kv_head * call->size, call->v_stride, 1.0f, head->v);
    to_columns(head, head->k, head->key_columns);
}

/* The weights of a head, and what dropout leaves of them. */
static const float *weigh_head(const Attention *call, const Training *training, Head *head, int64_t start,
                               int64_t number, uint64_t key) {
    const Task task = {start, head->length, 0, head->length, number};
    read_rows(call, head, call->q, start * call->q_stride + number * call->size, call->q_stride, call->scale * LOG2_E,
              head->q);
    rotate_rows(call, head, start, 1.0f, head->q);
    const int64_t units = head->padded / head->step;
    multiply_panels(head, join_columns(head, head->q, head->padded), units, head->key_columns, units, head->weights,
                    head->columns, 0);
    for (int64_t i = 0; i < head->length; i++)
        softmax_row(head->weights + i * head->columns, head->columns, first_key(call, i), end_key(call, &task, i));
    if (training->rate == 0.0f) return head->weights;
    drop(head, head->weights, head->dropped, key, training->rate);
    return head->dropped;
}

static void write_rows(const Attention *call, const Head *head, const float *rows, float scale, void *to, int64_t at,
                       int64_t stride) {
    for (int64_t i = 0; i < head->length; i++)
        for (int64_t j = 0; j < call->size; j += 16)
            store(to, at + i * stride + j, v_mul(v_load(rows + i * head->padded + j), v_set(scale)), part_of(call->size - j),
                  call->is_bf16);
}

static void attend_head(const Attention *call, const Training *training, Head *head, int64_t start, int64_t number,
                        uint64_t key) {
    const float *weights = weigh_head(call, training, head, start, number, key);
    multiply_panels(head, join_columns(head, weights, head->columns), head->columns / head->step, head->v_panels,
                    token_units(head), head->product, head->padded, 0);
    write_rows(call, head, head->product, 1.0f, call->out, start * call->out_stride + number * call->size,
               call->out_stride);
}

/* Adds to the gradients of the keys and values of the group. */
static void gradients_of_head(const Attention *call, const Training *training, Head *head, int64_t start,
                              int64_t number, uint64_t key, int is_first) {
    const int64_t stride = (int64_t)call->heads * call->size, at = start * stride + number * call->size;
    const int64_t columns = head->columns, of_head = head->padded / head->step, of_tokens = token_units(head);
    const float *kept = weigh_head(call, training, head, start, number, key);
    read_rows(call, head, training->gradient, at, stride, 1.0f, head->gradient);
    to_panels(head, head->gradient, head->gradient_panels);
    to_panels(head, head->q, head->q_panels);
    transpose_square(head, kept);
    multiply_panels(head, head->transposed, columns, head->gradient_panels, of_tokens, head->of_v, head->padded,
                    !is_first);
    multiply_panels(head, join_columns(head, head->gradient, head->padded), of_head, head->value_columns, of_head,
                    head->scores, columns, 0);
    if (training->rate != 0.0f) drop(head, head->scores, head->scores, key, training->rate);
    for (int64_t i = 0; i < head->length; i++) {
        float *scores = head->scores + i * columns;
        const float *weights = head->weights + i * columns;
        floats sum = v_zero();
        for (int64_t j = 0; j < columns; j += 16)
            sum = v_fma(v_load(scores + j), v_load(weights + j), sum);
        const floats mean = v_set(v_sum(sum));
        for (int64_t j = 0; j < columns; j += 16)
            v_store(scores + j, v_mul(v_load(weights + j), v_sub(v_load(scores + j), mean)));
    }
    multiply_panels(head, join_columns(head, head->scores, columns), columns / head->step, head->k_panels, of_tokens,
                    head->product, head->padded, 0);
    rotate_rows(call, head, start, -1.0f, head->product);
    write_rows(call, head, head->product, call->scale, training->of_q,
               start * training->of_q_stride + number * call->size, training->of_q_stride);
    transpose_square(head, head->scores);
    multiply_panels(head, head->transposed, columns, head->q_panels, of_tokens, head->of_k, head->padded, !is_first);
}

/* All threads of a parallel region call this. The heads of a sequence that share keys are a task. */
static void train(const Attention *call, const Training *training, Head *head) {
    const int64_t group = call->heads / call->kv_heads;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t sequence = 0; sequence < call->sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < call->kv_heads; kv_head++) {
            const int64_t start = call->starts[sequence];
            head->length = call->starts[sequence + 1] - start;
            head->columns = round_up(head->length, PANEL);
            if (!head->length) continue;
            read_keys(call, head, start, kv_head);
            if (training->gradient) {
                to_panels(head, head->k, head->k_panels);
                to_columns(head, head->v, head->value_columns);
            } else {
                to_panels(head, head->v, head->v_panels);
            }
            for (int64_t i = 0; i < group; i++) {
                const int64_t number = kv_head * group + i;
                const uint64_t key = mix(mix(training->seed + sequence) + number);
                if (training->gradient)
                    gradients_of_head(call, training, head, start, number, key, i == 0);
                else
                    attend_head(call, training, head, start, number, key);
            }
            if (!training->gradient) continue;
            rotate_rows(call, head, start, -1.0f, head->of_k);
            write_rows(call, head, head->of_k, 1.0f / LOG2_E, training->of_k,
                       start * training->of_k_stride + kv_head * call->size, training->of_k_stride);
            write_rows(call, head, head->of_v, 1.0f, training->of_v,
                       start * training->of_v_stride + kv_head * call->size, training->of_v_stride);
        }
}
