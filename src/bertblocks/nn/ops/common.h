/* What all kernels share: powers, rows of either precision, and memory. */

#pragma once

#include <omp.h>
#include <stdlib.h>

#include "vector.h"

#define VECTORS (PANEL / 16) /* of a row of a panel */
#define INPUTS 64            /* what inputs of int8 products are filled up to a multiple of, with zeros */

INLINE int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---------------------------------------------------------------- powers */

/* 2^x up to 2^126, off by 2e-7 at most; 0 for what is too small, nan for nan */
INLINE floats exp2_vector(floats x) {
    /* the second operand comes through if one of them is nan */
    x = v_max(v_set(LEAST_POWER), v_min(v_set(126.0f), x));
    floats whole = v_round(x);
    floats rest = v_sub(x, whole);
    floats sum = v_set(1.33908633e-3f);
    sum = v_fma(sum, rest, v_set(9.67603177e-3f));
    sum = v_fma(sum, rest, v_set(5.55035695e-2f));
    sum = v_fma(sum, rest, v_set(2.40221068e-1f));
    sum = v_fma(sum, rest, v_set(6.93147182e-1f));
    sum = v_fma(sum, rest, v_set(1.0f));
    return v_scale(sum, whole);
}

#define LOG2_E 1.44269504088896341f

INLINE floats exp_vector(floats x) { return exp2_vector(v_mul(x, v_set(LOG2_E))); }

/* ---------------------------------------------------------------- rows of either precision */

#ifndef HAS_BF16
/* sixteen bf16 numbers in the lower halves of 32 bits, rounded to nearest even; nan stays nan */
INLINE ints to_bf16(floats x) {
    const ints bits = bits_of(x), odd = i_and(i_shift_right(bits, 16), i_set(1));
    const floats rounded = from_bits(i_add(i_add(bits, i_set(0x7FFF)), odd));
    return i_shift_right(bits_of(v_where(is_nan(x), from_bits(i_set(0x7FC00000)), rounded)), 16);
}
#endif

/* `is_bf16` says what the memory holds; vectors are always fp32 */
INLINE floats load(const void *from, int64_t at, part left, int is_bf16) {
    if (!is_bf16) return v_load_part((const float *)from + at, left);
    return from_bits(i_shift_left(i_load_halves((const uint16_t *)from + at, left), 16));
}

INLINE void store(void *to, int64_t at, floats x, part left, int is_bf16) {
    if (is_bf16)
        i_store_halves((uint16_t *)to + at, to_bf16(x), left);
    else
        v_store_part((float *)to + at, x, left);
}

/* ---------------------------------------------------------------- memory */

/* Asks for `bytes` of memory that will be read soon; it need not be there. */
INLINE void prefetch(const void *from, int64_t at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + at + i);
}

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
