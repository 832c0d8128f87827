/* Cross-entropy of rows of logits, and its gradients in their place. */

#pragma once

#include "common.h"

#define COLUMNS 1024 /* of a block of gradients: their sums stay in the first cache */

typedef struct {
    void *logits;                 /* [rows][size], in bf16 or fp32 */
    const int64_t *labels;
    const float *row_weights;     /* in the sums */
    float *losses, *denominators; /* [rows]: the results, and the softmax's log denominators */
    float *sums;                  /* [size]: of the gradients; NULL if the logits should stay */
    int64_t rows, size;
    float z_loss; /* times a log denominator's square is added to its loss */
    int32_t is_bf16;
} Loss;

static void *at_row(const Loss *loss, int64_t row) {
    return (char *)loss->logits + row * loss->size * (loss->is_bf16 ? sizeof(uint16_t) : sizeof(float));
}

INLINE void measure_row(const Loss *loss, int64_t row, int is_bf16) {
    const void *logits = at_row(loss, row);
    floats most = v_set(-INFINITY), sum = v_zero();
    for (int64_t i = 0; i < loss->size; i += 16)
        most = max_where(lanes_between(0, loss->size - i), most, load(logits, i, part_of(loss->size - i), is_bf16));
    const float highest = v_most(most);
    for (int64_t i = 0; i < loss->size; i += 16) {
        const floats x = load(logits, i, part_of(loss->size - i), is_bf16);
        sum = v_add(sum, keep(lanes_between(0, loss->size - i), exp_vector(v_sub(x, v_set(highest)))));
    }
    float label[16];
    v_store(label, load(logits, loss->labels[row], part_of(1), is_bf16));
    const float log_sum = logf(v_sum(sum)), denominator = highest + log_sum;
    loss->denominators[row] = denominator;
    loss->losses[row] = (highest - label[0]) + log_sum + loss->z_loss * denominator * denominator;
}

/* softmax minus 1 at the label, and 2 z log(D) times the softmax for the z-loss, from column `first` to `end` */
INLINE void differentiate_row(const Loss *loss, int64_t row, int64_t first, int64_t end, int is_bf16) {
    void *logits = at_row(loss, row);
    const float denominator = loss->denominators[row];
    const floats shift = v_set(denominator * LOG2_E), scale = v_set(1.0f + 2.0f * loss->z_loss * denominator);
    const floats weight = v_set(loss->row_weights[row]);
    const int64_t label = loss->labels[row];
    for (int64_t i = first; i < end; i += 16) {
        const part left = part_of(end - i);
        floats x = load(logits, i, left, is_bf16);
        x = v_mul(exp2_vector(v_sub(v_mul(x, v_set(LOG2_E)), shift)), scale);
        if (label >= i && label < i + 16) x = v_sub(x, keep(lanes_between(label - i, label - i + 1), v_set(1.0f)));
        store(logits, i, x, left, is_bf16);
        v_store_part(loss->sums + i, v_fma(x, weight, v_load_part(loss->sums + i, left)), left);
    }
}

/* All threads of a parallel region call this. */
static void cross_entropy(const Loss *loss) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < loss->rows; row++) {
        if (loss->is_bf16)
            measure_row(loss, row, 1);
        else
            measure_row(loss, row, 0);
    }
    if (!loss->sums) return;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < loss->size; first += COLUMNS)
        for (int64_t row = 0; row < loss->rows; row++) {
            const int64_t end = smaller(first + COLUMNS, loss->size);
            if (loss->is_bf16)
                differentiate_row(loss, row, first, end, 1);
            else
                differentiate_row(loss, row, first, end, 0);
        }
}
