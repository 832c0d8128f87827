/* Activations and norms of rows. */

#pragma once

#include "common.h"

enum { RELU, SILU, GELU, GELU_TANH };

INLINE floats times_sigmoid(floats x, floats of) {
    const floats one = v_set(1.0f);
    floats below = v_add(one, exp_vector(v_sub(v_zero(), of)));
    return v_mul(x, v_reciprocal(below));
}

/* x Phi(x): the error function by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most */
INLINE floats gelu(floats x) {
    const floats one = v_set(1.0f);
    floats size = v_mul(v_abs(x), v_set(0.70710678118654752f));
    floats t = v_reciprocal(v_fma(size, v_set(0.3275911f), one));
    floats sum = v_set(1.061405429f);
    sum = v_fma(sum, t, v_set(-1.453152027f));
    sum = v_fma(sum, t, v_set(1.421413741f));
    sum = v_fma(sum, t, v_set(-0.284496736f));
    sum = v_fma(sum, t, v_set(0.254829592f));
    sum = v_mul(sum, t);
    floats tail = v_mul(sum, exp_vector(v_sub(v_zero(), v_mul(size, size))));
    /* tail is 1 - erf(|x| / sqrt 2): x Phi(x) = max(x, 0) - |x| tail / 2 */
    floats half = v_mul(v_mul(v_abs(x), v_set(0.5f)), tail);
    return v_sub(v_max(x, v_zero()), half);
}

INLINE floats gelu_tanh(floats x) {
    floats cube = v_mul(v_mul(x, x), x);
    floats inner = v_fma(cube, v_set(0.044715f), x);
    return times_sigmoid(x, v_mul(inner, v_set(1.59576912160573071f)));
}

INLINE void activate_as(int kind, float *hidden, const float *gated, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        floats x = v_load_part(hidden + i, left);
        if (kind == RELU) x = v_max(x, v_zero());
        if (kind == SILU) x = times_sigmoid(x, x);
        if (kind == GELU) x = gelu(x);
        if (kind == GELU_TANH) x = gelu_tanh(x);
        if (gated) x = v_mul(x, v_load_part(gated + i, left));
        v_store_part(hidden + i, x, left);
    }
}

/* hidden = activation(hidden) (* gated) */
static void activate(int kind, float *hidden, const float *gated, int64_t size) {
    if (kind == RELU) activate_as(RELU, hidden, gated, size);
    if (kind == SILU) activate_as(SILU, hidden, gated, size);
    if (kind == GELU) activate_as(GELU, hidden, gated, size);
    if (kind == GELU_TANH) activate_as(GELU_TANH, hidden, gated, size);
}

typedef struct {
    const float *weight, *bias; /* NULL for none */
    float epsilon;
    int32_t is_rms; /* without the mean */
} Norm;

/* out = norm(a + b), or norm(a) if b is NULL; a + b if the norm is NULL */
static void normalize(const Norm *norm, const float *a, const float *b, float *out, int64_t size) {
    floats sum = v_zero(), squares = v_zero();
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        floats x = v_load_part(a + i, left);
        if (b) x = v_add(x, v_load_part(b + i, left));
        v_store_part(out + i, x, left);
        sum = v_add(sum, x);
    }
    if (!norm) return;
    const float mean = norm->is_rms ? 0.0f : v_sum(sum) / size;
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        floats x = keep_part(left, v_sub(v_load_part(out + i, left), v_set(mean)));
        squares = v_fma(x, x, squares);
    }
    const float scale = 1.0f / sqrtf(v_sum(squares) / size + norm->epsilon);
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        floats x = v_sub(v_load_part(out + i, left), v_set(mean));
        x = v_mul(x, v_set(scale));
        if (norm->weight) x = v_mul(x, v_load_part(norm->weight + i, left));
        if (norm->bias) x = v_add(x, v_load_part(norm->bias + i, left));
        v_store_part(out + i, x, left);
    }
}
