/* Vectors of sixteen numbers, with the same functions for every instruction set.
 *
 * `floats` holds fp32 numbers, `ints` 32-bit integers, and `lanes` says for each number whether it counts. Memory may
 * begin anywhere. Where less than a vector may be left, a `part` says how many numbers are read or written. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined __AVX512F__
#include "vector_avx512.h"
#elif defined __AVX2__
#include "vector_avx2.h"
#elif defined __ARM_FEATURE_DOTPROD
#include "vector_neon.h"
#else
#error "The kernels need AVX2 or ARM's dot products."
#endif
