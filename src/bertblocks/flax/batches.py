"""Batches with few different shapes, because every new shape is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: The shortest length of a row.
SMALLEST_BUCKET = 16


def bucket_length(length: int) -> int:
    """Rounds up to one of 16, 24, 32, 48, 64, 96, ...: two lengths per doubling, so at most a third is padding.

    Example:
        >>> [bucket_length(length) for length in (1, 17, 25, 64, 65, 500)]
        [16, 24, 32, 64, 96, 512]
    """
    bucket = SMALLEST_BUCKET
    while bucket < length:
        half_more = bucket + bucket // 2
        if half_more >= length:
            return half_more
        bucket *= 2
    return bucket


def pad_rows(sequences: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, np.ndarray]:
    """Puts each sequence in a row of a bucket's length; returns `input_ids` and `attention_mask`.

    Example:
        >>> batch = pad_rows([[5, 6, 7], [8]])
        >>> batch["input_ids"].shape, batch["attention_mask"].sum(axis=1).tolist()
        ((2, 16), [3, 1])
    """
    length = bucket_length(max((len(sequence) for sequence in sequences), default=0))
    ids = np.full((len(sequences), length), pad_token_id, np.int32)
    mask = np.zeros(ids.shape, np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return {"input_ids": ids, "attention_mask": mask}


def pack_rows(
    sequences: Sequence[Sequence[int]], length: int, pad_token_id: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Packs sequences into rows of `length`, as full as they get.

    Returns `input_ids` with `segment_ids`, and for every sequence its row and its index in that row, which is where the
    model's output for the whole sequence is.

    Example:
        >>> batch, places = pack_rows([[5, 6], [7, 8, 9], [4]], length=4)
        >>> batch["input_ids"].tolist(), batch["segment_ids"].tolist()
        ([[7, 8, 9, 4], [5, 6, 0, 0]], [[1, 1, 1, 2], [1, 1, 0, 0]])
        >>> places.tolist()
        [[1, 0], [0, 0], [0, 1]]
    """
    places = _fill_rows([len(sequence) for sequence in sequences], length)
    ids = np.full((places[:, 0].max(initial=0) + 1, length), pad_token_id, np.int32)
    segments = np.zeros(ids.shape, np.int32)
    starts = np.zeros(len(ids), np.int32)
    for number in np.argsort(places[:, 1], kind="stable"):  # the first sequence of every row, then the second
        row, place = places[number]
        slots = slice(starts[row], starts[row] + len(sequences[number]))
        ids[row, slots], segments[row, slots] = sequences[number], place + 1
        starts[row] = slots.stop
    return {"input_ids": ids, "segment_ids": segments}, places


def _fill_rows(sizes: list[int], length: int) -> np.ndarray:
    """Returns the row of every sequence and its index in that row: `[sequences, 2]`.

    A row takes the longest sequence that is left, and then those of the others that fill it best: a padded slot costs
    as much as a token.
    """
    for number, size in enumerate(sizes):
        if not 0 < size <= length:
            raise ValueError(f"Sequence {number} has {size} tokens; a row of {length} holds 1 to {length}.")
    places = np.zeros((len(sizes), 2), np.int32)
    left = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    row = 0
    while left:
        chosen = [left[0], *_best_subset(left[1:], sizes, length - sizes[left[0]])]
        for index, number in enumerate(chosen):
            places[number] = row, index
        taken = set(chosen)
        left = [number for number in left if number not in taken]
        row += 1
    return places


def _best_subset(numbers: list[int], sizes: list[int], room: int) -> list[int]:
    """Returns those of the numbers whose sizes add up to the most that fits, preferring early ones."""
    sums = [1]  # bit s of entry n is set if some of the first n sizes add up to s
    for number in numbers:
        if sums[-1] >> room:
            break
        sums.append((sums[-1] | sums[-1] << sizes[number]) & ((2 << room) - 1))
    total = sums[-1].bit_length() - 1
    chosen = []
    for index in range(len(sums) - 1, 0, -1):
        if not sums[index - 1] >> total & 1:
            chosen.append(numbers[index - 1])
            total -= sizes[numbers[index - 1]]
    return chosen[::-1]
