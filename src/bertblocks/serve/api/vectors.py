"""Vectors on the wire: numbers, base64 or bytes, in full or in fewer bits."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from bertblocks.serve.api.endpoint import Raw
from bertblocks.tasks.embed.vectors import TYPES, Precision, quantize

Encoding = Literal["float", "base64"]


def int8_range(dimensions: int) -> float:
    """The largest number that int8 can tell apart, the same for each dimension.

    It is four standard deviations of a coordinate of a vector of length 1, and never more than 1. It does not follow
    from the vectors of a request, so that the result of a text never depends on the other texts.

    Example:
        >>> int8_range(384), int8_range(4)
        (0.20412414523193154, 1.0)
    """
    return float(min(1.0, 4 / np.sqrt(dimensions)))


def store(vectors: np.ndarray, precision: Precision) -> np.ndarray:
    """Converts float32 vectors of length 1, `[..., dimensions]`, to little-endian numbers of a precision."""
    if precision == "float32":
        return vectors.astype("<f4", copy=False)
    limit = int8_range(vectors.shape[-1])
    ranges = np.array([[-limit], [limit]], np.float32).repeat(vectors.shape[-1], axis=1)
    return quantize(vectors, precision, ranges).astype(TYPES[precision], copy=False)


def encode(vector: np.ndarray, encoding: Encoding) -> Any:
    """A vector as a list of numbers, or as the base64 of its bytes."""
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.astype(np.float32) if vector.dtype == np.float16 else vector


def raw(array: np.ndarray, lengths: list[int] | None = None) -> Raw:
    """The bytes of an array, with what a client needs to read them in the headers."""
    headers = [
        (b"x-shape", ",".join(map(str, array.shape)).encode()),
        (b"x-dtype", array.dtype.name.encode()),
    ]
    if lengths is not None:
        headers.append((b"x-lengths", ",".join(map(str, lengths)).encode()))
    return Raw(np.ascontiguousarray(array).tobytes(), headers)
