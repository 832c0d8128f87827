"""Random numbers and permutations as pure functions of keys, so that resuming does not replay anything."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

#: 2^64 divided by the golden ratio. Its multiples modulo 2^64 spread more evenly than random numbers.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FEISTEL_ROUNDS = 6


def mix(bits: UInt64) -> UInt64:
    """The finalizer of splitmix64 (Steele et al., 2014): a bijection after which every bit depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def combine(*parts: int | str | NDArray) -> UInt64:
    """Combines several parts into a key. Arrays broadcast, and the order of the parts matters.

    Example:
        >>> combine("order", 0, np.arange(3)).shape
        (3,)
        >>> bool((combine(1, 2) == combine(2, 1)).any())
        False
    """
    bits = np.zeros(1, dtype=np.uint64)
    for part in parts:
        bits = mix(bits ^ (_as_bits(part) + GOLDEN))
    return bits


def _as_bits(part: int | str | NDArray) -> UInt64:
    if isinstance(part, str):
        part = int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "little")
    if isinstance(part, int):
        part = np.array([part % 2**64], dtype=np.uint64)
    return part.astype(np.uint64)


def uniform(bits: UInt64) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits."""
    return (bits >> np.uint64(11)) * np.float64(2.0**-53)


def draw(keys: UInt64, counters: NDArray) -> UInt64:
    """The numbers at positions `counters` of the random sequences that these keys start."""
    return mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def permute(indices: NDArray, size: int, keys: UInt64) -> NDArray[np.int64]:
    """Applies a permutation of `range(size)`, one for each key, to these indices.

    A Feistel network permutes the next power of two; values that land outside go through it again until they are inside
    (cycle walking; Black and Rogaway, 2002). No table is stored, whatever the size.

    Example:
        >>> sorted(permute(np.arange(5), 5, combine("order", 1)).tolist())
        [0, 1, 2, 3, 4]
    """
    indices = indices.astype(np.uint64)
    keys = np.broadcast_to(keys, indices.shape)
    bits = max(size - 1, 1).bit_length()
    result = _feistel(indices, bits, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], bits, keys[outside])
    return result.astype(np.int64)


def _feistel(values: UInt64, bits: int, keys: UInt64) -> UInt64:
    """A permutation of `range(2**bits)`. The two halves, which may differ in width, swap in every round."""
    left_bits, right_bits = bits - bits // 2, bits // 2
    left, right = values >> np.uint64(right_bits), values & _ones(right_bits)
    for number in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (mix(draw(keys, np.array([number])) ^ right) & _ones(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _ones(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
