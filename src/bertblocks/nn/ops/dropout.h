/* Dropout: factors of 0 or 1 / (1 - rate), which depend on nothing but a key and the place of a number. */

#pragma once

#include "common.h"

typedef struct {
    ints first, second, least;
    floats factor;
} Dropout;

INLINE Dropout dropout_of(uint64_t key, float rate) {
    const Dropout dropout = {i_set((int)key), i_set((int)(key >> 32)),
                             i_set((int)(uint32_t)((double)rate * 4294967296.0)), v_set(1.0f / (1.0f - rate))};
    return dropout;
}

/* The factors of sixteen numbers from a place on. */
INLINE floats dropout_factors(const Dropout *dropout, int64_t place) {
    ints x = i_add(i_add(i_count(), i_set((int)place)), dropout->first);
    x = i_mul(i_xor(x, i_shift_right(x, 16)), i_set(0x7FEB352D));
    x = i_xor(i_xor(x, i_shift_right(x, 15)), dropout->second);
    x = i_mul(x, i_set((int)0x846CA68Bu));
    x = i_xor(x, i_shift_right(x, 16));
    return keep(i_at_least(x, dropout->least), dropout->factor);
}

INLINE uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* All threads of a parallel region call this, to multiply numbers in bf16 or fp32 by their factors. */
static void drop_numbers(const void *from, void *to, int64_t count, int is_bf16, uint64_t seed, float rate) {
    const Dropout dropout = dropout_of(mix(seed), rate);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i += 16) {
        const part left = part_of(count - i);
        store(to, i, v_mul(load(from, i, left, is_bf16), dropout_factors(&dropout, i)), left, is_bf16);
    }
}
