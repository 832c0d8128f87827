"""Embeddings in fewer bytes: float16, int8 with a range for each dimension, and one bit per dimension.

int8 and bits are those of sentence-transformers (`int8` and `ubinary`), so that indexes can be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from bertblocks.core.registry import nearest

Precision = Literal["float32", "float16", "int8", "binary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: The numpy type of stored vectors.
TYPES: dict[Precision, str] = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "binary": "|u1"}


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}{nearest(precision, PRECISIONS)}."
        )


def fit_ranges(vectors: np.ndarray) -> np.ndarray:
    """Returns the lowest and highest number of each dimension, `[2, dimensions]`, of a sample of vectors for int8.

    Documents and queries must have the same ranges.
    """
    if not len(vectors):
        raise ValueError("int8 needs ranges, which follow from at least one vector.")
    return np.stack((vectors.min(axis=0), vectors.max(axis=0))).astype(np.float32)


def read_ranges(path: str | Path) -> np.ndarray:
    """Reads the ranges that `bertblocks embed --precision int8` has written."""
    ranges = np.load(path, allow_pickle=False)
    if not isinstance(ranges, np.ndarray) or ranges.ndim != 2 or len(ranges) != 2 or ranges.dtype != np.float32:
        raise ValueError(f"{path} does not hold ranges: two rows of float32, with one column per dimension.")
    return ranges


def quantize(vectors: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """Converts float32 vectors `[..., dimensions]`; int8 takes `ranges`, and bits are packed, eight to a byte.

    A dimension's range is cut into 256 steps of equal width; numbers outside of it get the nearest step. A bit is 1 for
    numbers above 0.

    Example:
        >>> vectors = np.array([[255.0, -255.0], [0.0, 255.0]], dtype=np.float32)
        >>> quantize(vectors, "int8", fit_ranges(vectors)).tolist(), quantize(vectors, "binary").tolist()
        ([[127, -128], [-128, 127]], [[128], [64]])
    """
    check_precision(precision)
    if precision == "binary":
        return np.packbits(vectors > 0, axis=-1)
    if precision != "int8":
        return vectors.astype(precision)
    starts, steps = _steps(vectors, ranges)
    return (np.clip(np.floor((vectors - starts) / steps), 0, 255) - 128).astype(np.int8)


def dequantize(
    vectors: np.ndarray, precision: str, ranges: np.ndarray | None = None, dimensions: int | None = None
) -> np.ndarray:
    """Converts stored vectors to float32: int8 to the middle of each step, bits to 1 and -1.

    The cosine of two vectors of bits is 1 - 2 h / d for a Hamming distance of h in d dimensions. `dimensions` is their
    number if it is not a multiple of 8.
    """
    check_precision(precision)
    if precision == "binary":
        return np.unpackbits(vectors, axis=-1, count=dimensions).astype(np.float32) * 2 - 1
    if precision != "int8":
        return vectors.astype(np.float32)
    starts, steps = _steps(vectors, ranges)
    return (starts + (vectors.astype(np.float32) + 128.5) * steps).astype(np.float32)


def restore(vectors: Sequence[np.ndarray], precision: str, ranges: np.ndarray) -> np.ndarray:
    """What is left of float32 vectors after storing them, scaled to length 1: the loss of a precision."""
    stacked = np.stack(vectors)
    found = dequantize(quantize(stacked, precision, ranges), precision, ranges, stacked.shape[-1])
    return found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12)


def _steps(vectors: np.ndarray, ranges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    if ranges is None:
        raise ValueError(
            "precision is 'int8', which needs the ranges of a sample of vectors: ranges=fit_ranges(vectors) in Python, "
            "--ranges FILE or --output FILE on the command line."
        )
    if ranges.shape != (2, vectors.shape[-1]):
        raise ValueError(
            f"ranges have the shape {list(ranges.shape)}; vectors of {vectors.shape[-1]} dimensions need "
            f"[2, {vectors.shape[-1]}]."
        )
    starts, steps = ranges[0], (ranges[1] - ranges[0]) / 255
    return starts, np.where(steps == 0, 1, steps)
