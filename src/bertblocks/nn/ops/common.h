/* What all kernels share: sizes, masks, vectors of either precision, and functions of a vector. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE_ROWS 12 /* rows of a product at a time: with two vectors each, their sums fill the registers */
#define PANEL 32     /* columns of a product at a time: two vectors */

INLINE int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* the lanes before `left` */
INLINE __mmask16 tail_mask(int64_t left) {
    return left >= 16 ? 0xFFFF : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

/* ---------------------------------------------------------------- functions */

/* 2^x up to 2^126, off by 2e-7 at most; 0 for what is too small, nan for nan */
INLINE __m512 exp2_vector(__m512 x) {
    /* the second operand comes through if one of them is nan */
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), _mm512_min_ps(_mm512_set1_ps(126.0f), x));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.33908633e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.67603177e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.55035695e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.40221068e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.93147182e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

INLINE __m512 exp_vector(__m512 x) { return exp2_vector(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f))); }

/* 1 / x for normal x, off by 1e-7 at most: faster than a division */
INLINE __m512 reciprocal(__m512 x) {
    __m512 near = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(2.0f)));
}

/* ---------------------------------------------------------------- rows of either precision */

/* `is_bf16` says what the memory holds; vectors are always fp32 */
INLINE __m512 load(const void *from, int64_t at, __mmask16 mask, int is_bf16) {
    if (!is_bf16) return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* sixteen bf16 numbers in the lower halves of 32 bits, rounded to nearest even; nan stays nan */
INLINE __m512i to_bf16(__m512 x) {
#ifdef __AVX512BF16__
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
    return _mm512_srli_epi32(rounded, 16);
#endif
}

INLINE void store(void *to, int64_t at, __mmask16 mask, __m512 x, int is_bf16) {
    if (is_bf16)
        _mm256_mask_storeu_epi16((uint16_t *)to + at, mask, _mm512_cvtepi32_epi16(to_bf16(x)));
    else
        _mm512_mask_storeu_ps((float *)to + at, mask, x);
}

/* ---------------------------------------------------------------- memory */

/* Parts are taken one after the other, aligned to 64 bytes. Without a start this only counts, so the same calls say how
 * much is needed. */
typedef struct {
    char *start;
    int64_t size;
} Memory;

INLINE void *take(Memory *memory, int64_t bytes) {
    char *part = memory->start ? memory->start + memory->size : NULL;
    memory->size += round_up(bytes, 64);
    return part;
}

INLINE float *take_floats(Memory *memory, int64_t count) { return take(memory, count * sizeof(float)); }

/* Gets what was counted, ready to be taken; 0 if memory is short. */
INLINE int allocate(Memory *memory) {
    memory->start = aligned_alloc(64, larger(memory->size, 64));
    memory->size = memory->start ? 0 : memory->size;
    return memory->start != NULL;
}
