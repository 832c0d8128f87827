/* Activations and norms of rows. */

#pragma once

#include "common.h"

enum { RELU, SILU, GELU, GELU_TANH };

INLINE floats times_sigmoid(floats x, floats of) {
    const floats one = v_set(1.0f);
    floats below = v_add(one, exp_vector(v_sub(v_zero(), of)));
    return v_mul(x, v_reciprocal(below));
}

/* e^(-x^2 / 2); `below` becomes 1 - erf(|x| / sqrt 2) by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most */
INLINE floats gelu_tail(floats x, floats *below) {
    const floats one = v_set(1.0f);
    floats size = v_mul(v_abs(x), v_set(0.70710678118654752f));
    floats t = v_reciprocal(v_fma(size, v_set(0.3275911f), one));
    floats sum = v_set(1.061405429f);
    sum = v_fma(sum, t, v_set(-1.453152027f));
    sum = v_fma(sum, t, v_set(1.421413741f));
    sum = v_fma(sum, t, v_set(-0.284496736f));
    sum = v_fma(sum, t, v_set(0.254829592f));
    const floats density = exp_vector(v_sub(v_zero(), v_mul(size, size)));
    *below = v_mul(v_mul(sum, t), density);
    return density;
}

/* x Phi(x) = max(x, 0) - |x| (1 - erf(|x| / sqrt 2)) / 2 */
INLINE floats gelu(floats x) {
    floats below;
    gelu_tail(x, &below);
    floats half = v_mul(v_mul(v_abs(x), v_set(0.5f)), below);
    return v_sub(v_max(x, v_zero()), half);
}

INLINE floats gelu_tanh(floats x) {
    floats cube = v_mul(v_mul(x, x), x);
    floats inner = v_fma(cube, v_set(0.044715f), x);
    return times_sigmoid(x, v_mul(inner, v_set(1.59576912160573071f)));
}

INLINE floats activated(int kind, floats x) {
    if (kind == RELU) return v_max(v_zero(), x); /* in this order nan stays */
    if (kind == SILU) return times_sigmoid(x, x);
    if (kind == GELU) return gelu(x);
    return gelu_tanh(x);
}

INLINE void activate_as(int kind, float *hidden, const float *gated, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        floats x = v_load_part(hidden + i, left);
        x = activated(kind, x);
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

/* the slope of an activation */
INLINE floats slope_of(int kind, floats x) {
    const floats one = v_set(1.0f);
    if (kind == RELU) { /* 0 at 0 and below, whose bits less one are at least those of the largest number */
        const lanes is_off = i_at_least(i_sub(bits_of(x), i_set(1)), i_set(0x7FFFFFFF));
        return v_where(is_off, v_zero(), one);
    }
    if (kind == GELU) { /* Phi(x) + x phi(x) */
        floats below, density = v_mul(v_set(0.39894228040143268f), gelu_tail(x, &below));
        const ints sign = i_and(bits_of(x), i_set((int)0x80000000u));
        const floats erf = from_bits(i_or(sign, bits_of(v_sub(one, below))));
        return v_fma(x, density, v_mul(v_set(0.5f), v_add(one, erf)));
    }
    /* s(y) + x s(y) (1 - s(y)) y' for the sigmoid s; a difference from 1 would lose all digits */
    const floats square = v_mul(x, x), gain = v_set(1.59576912160573071f);
    const floats inner = kind == SILU ? x : v_mul(v_mul(x, gain), v_fma(square, v_set(0.044715f), one));
    const floats slope = kind == SILU ? one : v_mul(gain, v_fma(square, v_set(0.134145f), one));
    const floats power = exp_vector(v_sub(v_zero(), inner)), s = v_reciprocal(v_add(one, power));
    return v_fma(v_mul(v_mul(x, s), v_mul(power, s)), slope, s);
}

/* Activations of rows, or gated units, in bf16 or fp32; or if the gradient of the result is given, that of the rows. */
typedef struct {
    const void *up;       /* [rows][size], or [rows][2 size] of gates and values */
    const void *gradient; /* [rows][size] */
    void *out;            /* like the gradient, or like `up` if the gradient is given */
    int64_t rows, size;
    int32_t activation, gated, is_bf16;
} Units;

INLINE void activate_units_as(const Units *units, int kind, int64_t row, int is_bf16) {
    const int64_t size = units->size, at = row * size, wide = units->gated ? 2 * at : at;
    for (int64_t i = 0; i < size; i += 16) {
        const part left = part_of(size - i);
        const floats x = load(units->up, wide + i, left, is_bf16);
        const floats value = units->gated ? load(units->up, wide + size + i, left, is_bf16) : v_set(1.0f);
        if (!units->gradient) {
            store(units->out, at + i, v_mul(activated(kind, x), value), left, is_bf16);
            continue;
        }
        const floats gradient = load(units->gradient, at + i, left, is_bf16);
        store(units->out, wide + i, v_mul(v_mul(gradient, value), slope_of(kind, x)), left, is_bf16);
        if (units->gated) store(units->out, wide + size + i, v_mul(gradient, activated(kind, x)), left, is_bf16);
    }
}

/* All threads of a parallel region call this. */
static void activate_units(const Units *units) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < units->rows; row++) switch (units->activation * 2 + units->is_bf16) {
#define UNIT_CASE(kind)                                                     \
    case 2 * kind: activate_units_as(units, kind, row, 0); break;           \
    case 2 * kind + 1: activate_units_as(units, kind, row, 1); break;
            UNIT_CASE(RELU)
            UNIT_CASE(SILU)
            UNIT_CASE(GELU)
            UNIT_CASE(GELU_TANH)
        }
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
