/* Activations and norms of rows. */

#pragma once

#include "common.h"

enum { RELU, SILU, GELU, GELU_TANH };

INLINE __m512 times_sigmoid(__m512 x, __m512 of) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 below = _mm512_add_ps(one, exp_vector(_mm512_sub_ps(_mm512_setzero_ps(), of)));
    return _mm512_mul_ps(x, reciprocal(below));
}

/* x Phi(x): the error function by Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most */
INLINE __m512 gelu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 size = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678118654752f));
    __m512 t = reciprocal(_mm512_fmadd_ps(size, _mm512_set1_ps(0.3275911f), one));
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

INLINE __m512 gelu_tanh(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
    return times_sigmoid(x, _mm512_mul_ps(inner, _mm512_set1_ps(1.59576912160573071f)));
}

INLINE void activate_as(int kind, float *hidden, const float *gated, int64_t size) {
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

typedef struct {
    const float *weight, *bias; /* NULL for none */
    float epsilon;
    int32_t is_rms; /* without the mean */
} Norm;

/* out = norm(a + b), or norm(a) if b is NULL; a + b if the norm is NULL */
static void normalize(const Norm *norm, const float *a, const float *b, float *out, int64_t size) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        __mmask16 mask = tail_mask(size - i);
        __m512 x = _mm512_maskz_loadu_ps(mask, a + i);
        if (b) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, b + i));
        _mm512_mask_storeu_ps(out + i, mask, x);
        sum = _mm512_add_ps(sum, x);
    }
    if (!norm) return;
    const float mean = norm->is_rms ? 0.0f : _mm512_reduce_add_ps(sum) / size;
    for (int64_t i = 0; i < size; i += 16) {
        __mmask16 mask = tail_mask(size - i);
        __m512 x = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, out + i), _mm512_set1_ps(mean));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / size + norm->epsilon);
    for (int64_t i = 0; i < size; i += 16) {
        __mmask16 mask = tail_mask(size - i);
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, out + i), _mm512_set1_ps(mean));
        x = _mm512_mul_ps(x, _mm512_set1_ps(scale));
        if (norm->weight) x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, norm->weight + i));
        if (norm->bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, norm->bias + i));
        _mm512_mask_storeu_ps(out + i, mask, x);
    }
}
