/* AVX512: a vector is one register. */

#include <immintrin.h>

#define TILE_ROWS 12 /* rows of a product at a time: their sums fill the registers */
#define PANEL 32     /* columns of a product at a time: two vectors */
#define EACH_TILE(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

typedef __m512 floats;
typedef __m512i ints;
typedef __mmask16 lanes;
typedef __mmask16 part;

/* ---------------------------------------------------------------- lanes */

INLINE part part_of(int64_t count) { return count >= 16 ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
INLINE lanes lanes_between(int64_t first, int64_t end) { return part_of(end) & ~part_of(first); }
INLINE floats v_where(lanes first, floats a, floats b) { return _mm512_mask_blend_ps(first, b, a); }
INLINE lanes is_nan(floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
INLINE floats keep(lanes kept, floats x) { return _mm512_maskz_mov_ps(kept, x); }
INLINE floats keep_part(part kept, floats x) { return keep(kept, x); }
INLINE floats max_where(lanes counted, floats a, floats b) { return _mm512_mask_max_ps(a, counted, a, b); }

/* ---------------------------------------------------------------- memory */

INLINE floats v_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE floats v_load_part(const float *from, part left) { return _mm512_maskz_loadu_ps(left, from); }
INLINE void v_store(float *to, floats x) { _mm512_storeu_ps(to, x); }
INLINE void v_store_part(float *to, floats x, part left) { _mm512_mask_storeu_ps(to, left, x); }
INLINE ints i_load(const int32_t *from) { return _mm512_loadu_si512(from); }

/* sixteen numbers of 16 bits */
INLINE ints i_load_halves(const uint16_t *from, part left) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(left, from));
}
INLINE void i_store_halves(uint16_t *to, ints x, part left) {
    _mm256_mask_storeu_epi16(to, left, _mm512_cvtepi32_epi16(x));
}

/* ---------------------------------------------------------------- floats */

INLINE floats v_set(float x) { return _mm512_set1_ps(x); }
INLINE floats v_zero(void) { return _mm512_setzero_ps(); }
INLINE floats v_add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats v_sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats v_mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats v_fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats v_fnma(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a b */
INLINE floats v_min(floats a, floats b) { return _mm512_min_ps(a, b); } /* b if one of them is nan */
INLINE floats v_max(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats v_abs(floats x) { return _mm512_abs_ps(x); }
INLINE floats v_round(floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#define LEAST_POWER -150.0f
INLINE floats v_scale(floats x, floats whole) { return _mm512_scalef_ps(x, whole); } /* x 2^whole */
/* 1 / x for normal x, off by 1e-7 at most: faster than a division */
INLINE floats v_reciprocal(floats x) {
    __m512 near = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(2.0f)));
}
INLINE float v_sum(floats x) { return _mm512_reduce_add_ps(x); }
INLINE float v_least(floats x) { return _mm512_reduce_min_ps(x); }
INLINE float v_most(floats x) { return _mm512_reduce_max_ps(x); }

/* 16 x 16 numbers, from rows to columns */
INLINE void transpose(floats rows[16]) {
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

/* ---------------------------------------------------------------- integers */

INLINE ints i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ints i_zero(void) { return _mm512_setzero_si512(); }
INLINE ints i_count(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE ints i_add(ints a, ints b) { return _mm512_add_epi32(a, b); }
INLINE ints i_sub(ints a, ints b) { return _mm512_sub_epi32(a, b); }
INLINE ints i_mul(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
INLINE ints i_and(ints a, ints b) { return _mm512_and_si512(a, b); }
INLINE ints i_or(ints a, ints b) { return _mm512_or_si512(a, b); }
INLINE ints i_xor(ints a, ints b) { return _mm512_xor_si512(a, b); }
INLINE ints i_max(ints a, ints b) { return _mm512_max_epi32(a, b); }
#define i_shift_left(x, bits) _mm512_slli_epi32(x, bits)
#define i_shift_right(x, bits) _mm512_srli_epi32(x, bits) /* filled up with zeros */
INLINE lanes i_at_least(ints a, ints b) { return _mm512_cmpge_epu32_mask(a, b); } /* without signs */
INLINE ints to_ints(floats x) { return _mm512_cvtps_epi32(x); }
INLINE floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE ints bits_of(floats x) { return _mm512_castps_si512(x); }
INLINE floats from_bits(ints x) { return _mm512_castsi512_ps(x); }

/* ---------------------------------------------------------------- bf16 */

#ifdef __AVX512BF16__
#define HAS_BF16
INLINE ints to_bf16(floats x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
INLINE floats to_bf16_pairs(floats first, floats second) { return (__m512)_mm512_cvtne2ps_pbh(second, first); }
INLINE floats add_bf16_products(floats sum, floats a, floats b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#endif

/* ---------------------------------------------------------------- bytes */

/* Activations are unsigned bytes; four of them meet four weights of each of sixteen outputs. */
typedef uint8_t byte;
#define GROUP 4
#define BYTE_ZERO 0 /* what is taken from a byte before it is stored */

INLINE void store_bytes(byte *to, ints x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtusepi32_epi8(x)); }
INLINE ints load_weights(const int8_t *from) { return _mm512_load_si512(from); }

/* sum += bytes x weights; as assembly, because compilers copy the sums around the intrinsic */
INLINE ints add_products(ints sum, ints bytes, ints weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(weights));
    return sum;
}
