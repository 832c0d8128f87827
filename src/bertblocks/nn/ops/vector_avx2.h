/* AVX2, with AVX-VNNI where the CPU has it: a vector is two registers. */

#include <immintrin.h>

#define TILE_ROWS 6 /* rows of a product at a time: their sums fill the registers */
#define PANEL 16    /* columns of a product at a time: one vector */
#define EACH_TILE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)

typedef struct {
    __m256 low, high;
} floats;
typedef struct {
    __m256i low, high;
} ints;
typedef ints lanes; /* all bits of a number, or none */
typedef int64_t part;

#define BOTH_FLOATS(low, high) ((floats){low, high})
#define BOTH_INTS(low, high) ((ints){low, high})
#define AS_INTS(x) BOTH_INTS(_mm256_castps_si256((x).low), _mm256_castps_si256((x).high))
#define AS_FLOATS(x) BOTH_FLOATS(_mm256_castsi256_ps((x).low), _mm256_castsi256_ps((x).high))

/* ---------------------------------------------------------------- integers */

INLINE ints i_set(int32_t x) { return BOTH_INTS(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE ints i_zero(void) { return i_set(0); }
INLINE ints i_count(void) {
    return BOTH_INTS(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
}
#define PAIRWISE(type, name, operation) \
    INLINE type name(type a, type b) { return (type){operation(a.low, b.low), operation(a.high, b.high)}; }
PAIRWISE(ints, i_add, _mm256_add_epi32)
PAIRWISE(ints, i_sub, _mm256_sub_epi32)
PAIRWISE(ints, i_mul, _mm256_mullo_epi32)
PAIRWISE(ints, i_and, _mm256_and_si256)
PAIRWISE(ints, i_or, _mm256_or_si256)
PAIRWISE(ints, i_xor, _mm256_xor_si256)
PAIRWISE(ints, i_max, _mm256_max_epi32)
PAIRWISE(ints, i_above, _mm256_cmpgt_epi32)
INLINE ints i_shift_left(ints x, int bits) {
    return BOTH_INTS(_mm256_slli_epi32(x.low, bits), _mm256_slli_epi32(x.high, bits));
}
INLINE ints i_shift_right(ints x, int bits) { /* filled up with zeros */
    return BOTH_INTS(_mm256_srli_epi32(x.low, bits), _mm256_srli_epi32(x.high, bits));
}
INLINE lanes i_at_least(ints a, ints b) { /* without signs */
    return BOTH_INTS(_mm256_cmpeq_epi32(_mm256_max_epu32(a.low, b.low), a.low),
                     _mm256_cmpeq_epi32(_mm256_max_epu32(a.high, b.high), a.high));
}
INLINE ints bits_of(floats x) { return AS_INTS(x); }
INLINE floats from_bits(ints x) { return AS_FLOATS(x); }
INLINE ints to_ints(floats x) { return BOTH_INTS(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)); }
INLINE floats to_floats(ints x) { return BOTH_FLOATS(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)); }

/* ---------------------------------------------------------------- floats */

INLINE floats v_set(float x) { return BOTH_FLOATS(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE floats v_zero(void) { return v_set(0.0f); }
PAIRWISE(floats, v_add, _mm256_add_ps)
PAIRWISE(floats, v_sub, _mm256_sub_ps)
PAIRWISE(floats, v_mul, _mm256_mul_ps)
PAIRWISE(floats, v_min, _mm256_min_ps) /* b if one of them is nan */
PAIRWISE(floats, v_max, _mm256_max_ps)
INLINE floats v_fma(floats a, floats b, floats c) {
    return BOTH_FLOATS(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
INLINE floats v_fnma(floats a, floats b, floats c) { /* c - a b */
    return BOTH_FLOATS(_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high));
}
INLINE floats v_abs(floats x) { return from_bits(i_and(bits_of(x), i_set(0x7FFFFFFF))); }
INLINE floats v_round(floats x) {
    const int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return BOTH_FLOATS(_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode));
}
#define LEAST_POWER -127.0f
INLINE floats v_scale(floats x, floats whole) { /* x 2^whole; 0 for 2^-127 */
    return v_mul(x, from_bits(i_shift_left(i_add(to_ints(whole), i_set(127)), 23)));
}
/* 1 / x for normal x, off by 2e-7 at most: faster than a division */
INLINE floats v_reciprocal(floats x) {
    const floats near = BOTH_FLOATS(_mm256_rcp_ps(x.low), _mm256_rcp_ps(x.high));
    return v_mul(near, v_fnma(x, near, v_set(2.0f)));
}
#define REDUCE(name, of_eight, of_four)                                                          \
    INLINE float name(floats x) {                                                                \
        const __m256 eight = of_eight(x.low, x.high);                                            \
        __m128 four = of_four(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));   \
        four = of_four(four, _mm_movehl_ps(four, four));                                         \
        return _mm_cvtss_f32(of_four(four, _mm_movehdup_ps(four)));                              \
    }
REDUCE(v_sum, _mm256_add_ps, _mm_add_ps)
REDUCE(v_least, _mm256_min_ps, _mm_min_ps)
REDUCE(v_most, _mm256_max_ps, _mm_max_ps)

/* 8 x 8 numbers, from rows to columns */
INLINE void transpose_eight(__m256 rows[8]) {
    __m256 pairs[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            rows[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
        pairs[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) rows[i] = pairs[i];
}

/* 16 x 16 numbers, from rows to columns */
INLINE void transpose(floats rows[16]) {
    __m256 parts[4][8]; /* upper left, upper right, lower left, lower right */
    for (int i = 0; i < 8; i++) {
        parts[0][i] = rows[i].low, parts[1][i] = rows[i].high;
        parts[2][i] = rows[i + 8].low, parts[3][i] = rows[i + 8].high;
    }
    for (int i = 0; i < 4; i++) transpose_eight(parts[i]);
    for (int i = 0; i < 8; i++) {
        rows[i] = BOTH_FLOATS(parts[0][i], parts[2][i]);
        rows[i + 8] = BOTH_FLOATS(parts[1][i], parts[3][i]);
    }
}

/* ---------------------------------------------------------------- lanes */

INLINE part part_of(int64_t count) { return count; }
INLINE lanes first_lanes(part count) {
    return i_above(i_set(count >= 16 ? 16 : count <= 0 ? 0 : (int32_t)count), i_count());
}
INLINE lanes lanes_between(int64_t first, int64_t end) {
    const lanes before = first_lanes(first), all = first_lanes(end);
    return BOTH_INTS(_mm256_andnot_si256(before.low, all.low), _mm256_andnot_si256(before.high, all.high));
}
INLINE floats v_where(lanes first, floats a, floats b) {
    const floats mask = AS_FLOATS(first);
    return BOTH_FLOATS(_mm256_blendv_ps(b.low, a.low, mask.low), _mm256_blendv_ps(b.high, a.high, mask.high));
}
INLINE floats keep(lanes kept, floats x) { return from_bits(i_and(kept, bits_of(x))); }
INLINE floats keep_part(part kept, floats x) { return kept >= 16 ? x : keep(first_lanes(kept), x); }
INLINE floats max_where(lanes counted, floats a, floats b) { return v_where(counted, v_max(a, b), a); }
INLINE lanes is_nan(floats x) {
    const floats found = BOTH_FLOATS(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
    return AS_INTS(found);
}

/* ---------------------------------------------------------------- memory */

INLINE floats v_load(const float *from) { return BOTH_FLOATS(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)); }
INLINE floats v_load_part(const float *from, part left) {
    if (left >= 16) return v_load(from);
    const lanes read = first_lanes(left);
    return BOTH_FLOATS(_mm256_maskload_ps(from, read.low), _mm256_maskload_ps(from + 8, read.high));
}
INLINE void v_store(float *to, floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
INLINE void v_store_part(float *to, floats x, part left) {
    if (left >= 16) {
        v_store(to, x);
        return;
    }
    const lanes written = first_lanes(left);
    _mm256_maskstore_ps(to, written.low, x.low);
    _mm256_maskstore_ps(to + 8, written.high, x.high);
}
INLINE ints i_load(const int32_t *from) {
    return BOTH_INTS(_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 8)));
}

/* sixteen numbers of 16 bits */
INLINE ints i_load_halves(const uint16_t *from, part left) {
    uint16_t copy[16] = {0};
    if (left < 16) {
        if (left > 0) memcpy(copy, from, left * sizeof *from);
        from = copy;
    }
    return BOTH_INTS(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)),
                     _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 8))));
}
INLINE __m256i to_halves(ints x) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xD8); }
INLINE void i_store_halves(uint16_t *to, ints x, part left) {
    uint16_t copy[16];
    _mm256_storeu_si256((__m256i *)(left >= 16 ? to : copy), to_halves(x));
    if (left < 16 && left > 0) memcpy(to, copy, left * sizeof *to);
}

/* ---------------------------------------------------------------- bytes */

#define BYTE_ZERO 0 /* what is taken from a byte before it is stored */

#ifdef __AVXVNNI__

/* Activations are unsigned bytes; four of them meet four weights of each of sixteen outputs. */
typedef uint8_t byte;
#define GROUP 4

INLINE void store_bytes(byte *to, ints x) {
    const __m256i halves = to_halves(x);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128((__m128i *)to, bytes);
}
INLINE ints load_weights(const int8_t *from) { return i_load((const int32_t *)from); }

/* sum += bytes x weights; as assembly, because compilers copy the sums around the intrinsic */
INLINE ints add_products(ints sum, ints bytes, ints weights) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.low) : "x"(bytes.low), "x"(weights.low));
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.high) : "x"(bytes.high), "x"(weights.high));
    return sum;
}

#else

/* Products of bytes could overflow, so bytes take 16 bits each; two of them meet two weights of each of sixteen outputs.
 * This takes as many instructions as products of bytes would, because those need one more to widen their sums. */
typedef uint16_t byte;
#define GROUP 2

INLINE void store_bytes(byte *to, ints x) {
    _mm256_storeu_si256((__m256i *)to, _mm256_min_epu16(to_halves(x), _mm256_set1_epi16(255)));
}
INLINE ints load_weights(const int8_t *from) {
    return BOTH_INTS(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)),
                     _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(from + 16))));
}

/* sum += bytes x weights; as assembly, because compilers copy the sums around the intrinsics */
INLINE __m256i add_eight_products(__m256i sum, __m256i bytes, __m256i weights) {
    __m256i product;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(bytes), "x"(weights));
    return sum;
}
INLINE ints add_products(ints sum, ints bytes, ints weights) {
    return BOTH_INTS(add_eight_products(sum.low, bytes.low, weights.low),
                     add_eight_products(sum.high, bytes.high, weights.high));
}

#endif
