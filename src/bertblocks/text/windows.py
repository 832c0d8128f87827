"""A text that is longer than a model reads, seen through windows that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of a text, of which it decides `core_start` to `core_stop`.

    Cores cut every overlap in the middle: each token is decided once, where the most is seen around it.
    """

    start: int
    stop: int
    core_start: int
    core_stop: int


def cut_windows(length: int, size: int, overlap: int) -> list[Window]:
    """Windows of at most `size` tokens over a text of `length`, each sharing `overlap` tokens with the one before.

    The overlap is what transformers calls `stride` and SQuAD's scripts count the other way, from start to start. A
    text without tokens has one empty window.

    Example:
        >>> cut_windows(7, size=4, overlap=2)[0]
        Window(start=0, stop=4, core_start=0, core_stop=3)
        >>> [(window.start, window.stop) for window in cut_windows(7, size=4, overlap=2)]
        [(0, 4), (2, 6), (4, 7)]
    """
    if not 0 <= overlap < size:
        raise ValueError(f"overlap is {overlap}; it must be at least 0 and less than a window's {size} tokens.")
    starts = range(0, max(length - overlap, 1), size - overlap)
    stops = [min(start + size, length) for start in starts]
    cuts = [0, *((start + stop) // 2 for start, stop in zip(starts[1:], stops, strict=False)), length]
    return [
        Window(start, stop, cuts[index], cuts[index + 1])
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def merge_windows(windows: Sequence[Window], rows: Sequence[np.ndarray]) -> np.ndarray:
    """One row per token of the text, from the rows that each window has for its own tokens.

    Example:
        >>> windows = cut_windows(5, size=3, overlap=1)
        >>> merge_windows(windows, [np.array([0, 1, -2]), np.array([2, 3, 4])])
        array([0, 1, 2, 3, 4])
    """
    cores = [
        row[window.core_start - window.start : window.core_stop - window.start]
        for window, row in zip(windows, rows, strict=True)
    ]
    return np.concatenate(cores)


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Both texts cut to `room` tokens together, the longer one first.

    Example:
        >>> cut_pair([1, 2, 3, 4], [5], 3), cut_pair([1, 2], [3, 4], 3)
        (([1, 2], [5]), ([1], [3, 4]))
    """
    if len(first) + len(second) <= room:
        return first, second
    shorter = min(len(first), len(second), room // 2)
    if len(first) > len(second):
        return first[: room - shorter], second[:shorter]
    return first[:shorter], second[: room - shorter]
