"""Overlapping windows over a text that is longer than the model's maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """The tokens of a text from `start` up to `stop`. Predictions for `core_start` up to `core_stop` are used.

    Cores divide every overlap in the middle, so each token is predicted once, by the window with most context.
    """

    start: int
    stop: int
    core_start: int
    core_stop: int


def cut_windows(length: int, size: int, overlap: int) -> list[Window]:
    """Windows of at most `size` tokens over a text of `length` tokens; neighbours share `overlap` tokens.

    transformers calls the overlap `stride`; SQuAD's scripts measure the stride from start to start instead. A text
    without tokens has one empty window.

    Example:
        >>> cut_windows(7, size=4, overlap=2)[0]
        Window(start=0, stop=4, core_start=0, core_stop=3)
        >>> [(window.start, window.stop) for window in cut_windows(7, size=4, overlap=2)]
        [(0, 4), (2, 6), (4, 7)]
    """
    if not 0 <= overlap < size:
        raise ValueError(f"overlap is {overlap}; it must be at least 0 and less than the window size {size}.")
    starts = range(0, max(length - overlap, 1), size - overlap)
    stops = [min(start + size, length) for start in starts]
    cuts = [0, *((start + stop) // 2 for start, stop in zip(starts[1:], stops, strict=False)), length]
    return [
        Window(start, stop, cuts[index], cuts[index + 1])
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def merge_windows(windows: Sequence[Window], values: Sequence[np.ndarray]) -> np.ndarray:
    """One value per token of the text, from the values that each window has for its tokens.

    Example:
        >>> windows = cut_windows(5, size=3, overlap=1)
        >>> merge_windows(windows, [np.array([0, 1, -2]), np.array([2, 3, 4])])
        array([0, 1, 2, 3, 4])
    """
    cores = [
        own[window.core_start - window.start : window.core_stop - window.start]
        for window, own in zip(windows, values, strict=True)
    ]
    return np.concatenate(cores)


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Truncates two texts to `room` tokens together, the longer text first.

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
