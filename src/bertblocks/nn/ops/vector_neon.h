/* ARM with dot products of bytes: a vector is four registers. */

#include <arm_neon.h>

#define TILE_ROWS 6 /* rows of a product at a time: their sums fill the registers */
#define PANEL 16    /* columns of a product at a time: one vector */
#define EACH_TILE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)

typedef struct {
    float32x4_t a, b, c, d;
} floats;
typedef struct {
    int32x4_t a, b, c, d;
} ints;
typedef struct {
    uint32x4_t a, b, c, d; /* all bits of a number, or none */
} lanes;
typedef int64_t part;

#define EACH(type, operation) ((type){operation(a), operation(b), operation(c), operation(d)})
#define FOURFOLD(type, name, operation)                                                                       \
    INLINE type name(type x, type y) {                                                                        \
        return (type){operation(x.a, y.a), operation(x.b, y.b), operation(x.c, y.c), operation(x.d, y.d)};    \
    }

/* ---------------------------------------------------------------- integers */

INLINE ints i_set(int32_t x) {
    const int32x4_t four = vdupq_n_s32(x);
    return (ints){four, four, four, four};
}
INLINE ints i_zero(void) { return i_set(0); }
FOURFOLD(ints, i_add, vaddq_s32)
FOURFOLD(ints, i_sub, vsubq_s32)
FOURFOLD(ints, i_mul, vmulq_s32)
FOURFOLD(ints, i_and, vandq_s32)
FOURFOLD(ints, i_or, vorrq_s32)
FOURFOLD(ints, i_xor, veorq_s32)
FOURFOLD(ints, i_max, vmaxq_s32)
INLINE ints i_count(void) {
    const int32_t first[4] = {0, 1, 2, 3};
    const int32x4_t four = vld1q_s32(first);
    return (ints){four, vaddq_s32(four, vdupq_n_s32(4)), vaddq_s32(four, vdupq_n_s32(8)), vaddq_s32(four, vdupq_n_s32(12))};
}
INLINE ints i_shift_left(ints x, int bits) {
#define SHIFT(of) vshlq_s32(x.of, vdupq_n_s32(bits))
    return EACH(ints, SHIFT);
#undef SHIFT
}
INLINE ints i_shift_right(ints x, int bits) { /* filled up with zeros */
#define SHIFT(of) vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.of), vdupq_n_s32(-bits)))
    return EACH(ints, SHIFT);
#undef SHIFT
}
INLINE lanes i_at_least(ints x, ints y) { /* without signs */
#define COMPARE(of) vcgeq_u32(vreinterpretq_u32_s32(x.of), vreinterpretq_u32_s32(y.of))
    return EACH(lanes, COMPARE);
#undef COMPARE
}
#define CONVERT(type, name, from, operation) \
    INLINE type name(from x) { return (type){operation(x.a), operation(x.b), operation(x.c), operation(x.d)}; }
CONVERT(ints, bits_of, floats, vreinterpretq_s32_f32)
CONVERT(floats, from_bits, ints, vreinterpretq_f32_s32)
CONVERT(ints, to_ints, floats, vcvtnq_s32_f32)
CONVERT(floats, to_floats, ints, vcvtq_f32_s32)

/* ---------------------------------------------------------------- floats */

INLINE floats v_set(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return (floats){four, four, four, four};
}
INLINE floats v_zero(void) { return v_set(0.0f); }
FOURFOLD(floats, v_add, vaddq_f32)
FOURFOLD(floats, v_sub, vsubq_f32)
FOURFOLD(floats, v_mul, vmulq_f32)
FOURFOLD(floats, v_min, vminq_f32) /* nan if one of them is */
FOURFOLD(floats, v_max, vmaxq_f32)
CONVERT(floats, v_abs, floats, vabsq_f32)
CONVERT(floats, v_round, floats, vrndnq_f32)
INLINE floats v_fma(floats x, floats y, floats z) {
#define PRODUCT(of) vfmaq_f32(z.of, x.of, y.of)
    return EACH(floats, PRODUCT);
#undef PRODUCT
}
INLINE floats v_fnma(floats x, floats y, floats z) { /* z - x y */
#define PRODUCT(of) vfmsq_f32(z.of, x.of, y.of)
    return EACH(floats, PRODUCT);
#undef PRODUCT
}
#define LEAST_POWER -127.0f
INLINE floats v_scale(floats x, floats whole) { /* x 2^whole; 0 for 2^-127 */
    return v_mul(x, from_bits(i_shift_left(i_add(to_ints(whole), i_set(127)), 23)));
}
INLINE floats v_reciprocal(floats x) {
#define DIVIDE(of) vdivq_f32(vdupq_n_f32(1.0f), x.of)
    return EACH(floats, DIVIDE);
#undef DIVIDE
}
INLINE float v_sum(floats x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
INLINE float v_least(floats x) { return vminvq_f32(vminq_f32(vminq_f32(x.a, x.b), vminq_f32(x.c, x.d))); }
INLINE float v_most(floats x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }

/* ---------------------------------------------------------------- lanes */

INLINE part part_of(int64_t count) { return count; }
INLINE lanes first_lanes(part count) {
    const ints last = i_set(count >= 16 ? 16 : count <= 0 ? 0 : (int32_t)count), number = i_count();
#define COMPARE(of) vcgtq_s32(last.of, number.of)
    return EACH(lanes, COMPARE);
#undef COMPARE
}
INLINE lanes lanes_between(int64_t first, int64_t end) {
    const lanes before = first_lanes(first), all = first_lanes(end);
#define WITHOUT(of) vbicq_u32(all.of, before.of)
    return EACH(lanes, WITHOUT);
#undef WITHOUT
}
INLINE floats v_where(lanes first, floats x, floats y) {
#define SELECT(of) vbslq_f32(first.of, x.of, y.of)
    return EACH(floats, SELECT);
#undef SELECT
}
INLINE floats keep(lanes kept, floats x) { return v_where(kept, x, v_zero()); }
INLINE floats keep_part(part kept, floats x) { return kept >= 16 ? x : keep(first_lanes(kept), x); }
INLINE floats max_where(lanes counted, floats x, floats y) { return v_where(counted, v_max(x, y), x); }
INLINE lanes is_nan(floats x) {
#define COMPARE(of) vmvnq_u32(vceqq_f32(x.of, x.of))
    return EACH(lanes, COMPARE);
#undef COMPARE
}

/* ---------------------------------------------------------------- memory */

INLINE floats v_load(const float *from) {
    return (floats){vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
INLINE floats v_load_part(const float *from, part left) {
    float copy[16] = {0};
    if (left >= 16) return v_load(from);
    if (left > 0) memcpy(copy, from, left * sizeof *from);
    return v_load(copy);
}
INLINE void v_store(float *to, floats x) {
    vst1q_f32(to, x.a);
    vst1q_f32(to + 4, x.b);
    vst1q_f32(to + 8, x.c);
    vst1q_f32(to + 12, x.d);
}
INLINE void v_store_part(float *to, floats x, part left) {
    float copy[16];
    v_store(left >= 16 ? to : copy, x);
    if (left < 16 && left > 0) memcpy(to, copy, left * sizeof *to);
}
INLINE ints i_load(const int32_t *from) {
    return (ints){vld1q_s32(from), vld1q_s32(from + 4), vld1q_s32(from + 8), vld1q_s32(from + 12)};
}

/* sixteen numbers of 16 bits */
INLINE ints i_load_halves(const uint16_t *from, part left) {
    uint16_t copy[16] = {0};
    if (left < 16) {
        if (left > 0) memcpy(copy, from, left * sizeof *from);
        from = copy;
    }
#define WIDEN(at) vreinterpretq_s32_u32(vmovl_u16(vld1_u16(from + at)))
    return (ints){WIDEN(0), WIDEN(4), WIDEN(8), WIDEN(12)};
#undef WIDEN
}
INLINE uint16x8_t to_halves(int32x4_t x, int32x4_t y) { return vcombine_u16(vqmovun_s32(x), vqmovun_s32(y)); }
INLINE void i_store_halves(uint16_t *to, ints x, part left) {
    uint16_t copy[16], *target = left >= 16 ? to : copy;
    vst1q_u16(target, to_halves(x.a, x.b));
    vst1q_u16(target + 8, to_halves(x.c, x.d));
    if (left < 16 && left > 0) memcpy(to, copy, left * sizeof *to);
}

/* 4 x 4 numbers, from rows to columns */
INLINE void transpose_four(float32x4_t *w, float32x4_t *x, float32x4_t *y, float32x4_t *z) {
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(*w, *x)), b = vreinterpretq_f64_f32(vtrn2q_f32(*w, *x));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(*y, *z)), d = vreinterpretq_f64_f32(vtrn2q_f32(*y, *z));
    *w = vreinterpretq_f32_f64(vtrn1q_f64(a, c)), *x = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    *y = vreinterpretq_f32_f64(vtrn2q_f64(a, c)), *z = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

/* 16 x 16 numbers, from rows to columns */
INLINE void transpose(floats rows[16]) {
    floats columns[16];
#define BLOCK(of)                   \
    for (int i = 0; i < 16; i += 4) \
        transpose_four(&rows[i].of, &rows[i + 1].of, &rows[i + 2].of, &rows[i + 3].of);
    BLOCK(a) BLOCK(b) BLOCK(c) BLOCK(d)
#undef BLOCK
    for (int i = 0; i < 4; i++) {
        columns[i] = (floats){rows[i].a, rows[i + 4].a, rows[i + 8].a, rows[i + 12].a};
        columns[i + 4] = (floats){rows[i].b, rows[i + 4].b, rows[i + 8].b, rows[i + 12].b};
        columns[i + 8] = (floats){rows[i].c, rows[i + 4].c, rows[i + 8].c, rows[i + 12].c};
        columns[i + 12] = (floats){rows[i].d, rows[i + 4].d, rows[i + 8].d, rows[i + 12].d};
    }
    memcpy(rows, columns, sizeof columns);
}

/* ---------------------------------------------------------------- bytes */

/* Activations are signed bytes; four of them meet four weights of each of sixteen outputs. */
typedef int8_t byte;
#define GROUP 4
#define BYTE_ZERO 128 /* what is taken from a byte before it is stored */

INLINE void store_bytes(byte *to, ints x) {
    const uint8x8_t low = vqmovn_u16(to_halves(x.a, x.b)), high = vqmovn_u16(to_halves(x.c, x.d));
    vst1q_s8(to, vreinterpretq_s8_u8(veorq_u8(vcombine_u8(low, high), vdupq_n_u8(0x80))));
}
INLINE ints load_weights(const int8_t *from) { return i_load((const int32_t *)from); }

/* sum += bytes x weights */
INLINE ints add_products(ints sum, ints bytes, ints weights) {
#define PRODUCT(of) vdotq_s32(sum.of, vreinterpretq_s8_s32(bytes.of), vreinterpretq_s8_s32(weights.of))
    return EACH(ints, PRODUCT);
#undef PRODUCT
}
