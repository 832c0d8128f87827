"""Packs sequences into rows of a fixed number of slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: Sequence[int] | NDArray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: takes the longest sequence first and puts it into the fullest row with enough room.

    Returns the indices in each row. Among equal lengths the first comes first; among rows with equal room the newest.

    Example:
        >>> best_fit([3, 5, 2, 6], 8)
        [[3, 2], [1, 0]]
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not (sizes.min() >= 1 and sizes.max() <= capacity):
        wrong = int(sizes.min() if sizes.min() < 1 else sizes.max())
        raise ValueError(f"A length is {wrong}; rows of {capacity} slots take lengths of 1 to {capacity}.")
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their number of free slots
    rooms = 0  # bit r is set if with_room[r] has rows, so finding the smallest sufficient room takes one shift
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        sufficient = rooms >> size
        if sufficient:
            room = size + (sufficient & -sufficient).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        with_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows
