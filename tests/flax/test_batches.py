"""Rows of packed sequences."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertblocks.flax import pack_rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 30))
def test_each_sequence_is_in_one_place_and_rows_are_as_full_as_they_get(sizes: list[int], length: int) -> None:
    sequences = [[100 * number + index for index in range(size)] for number, size in enumerate(sizes, start=1)]
    batch, places = pack_rows(sequences, length, pad_token_id=-1)
    ids, segments = batch["input_ids"], batch["segment_ids"]
    assert ids.shape[1] == length
    for sequence, (row, place) in zip(sequences, places, strict=True):
        assert ids[row, segments[row] == place + 1].tolist() == sequence
    assert (segments > 0).sum() == sum(sizes)
    np.testing.assert_array_equal(ids == -1, segments == 0)
    assert all((np.diff(row[row > 0]) >= 0).all() for row in segments)

    left = sorted(sizes, reverse=True)
    for row in segments:
        filled = [int((row == segment).sum()) for segment in range(1, row.max() + 1)]
        others = left[1:]
        sums = [left[0] + sum(some) for count in range(len(others) + 1) for some in combinations(others, count)]
        assert left[0] in filled
        assert sum(filled) == max(total for total in sums if total <= length)
        for size in filled:
            left.remove(size)
    assert not left


def test_no_slot_is_lost_where_best_fit_needs_another_row() -> None:
    batch, _ = pack_rows([[1] * size for size in (6, 5, 4, 3, 2)], length=10)
    assert batch["segment_ids"].astype(bool).tolist() == [[True] * 10, [True] * 10]
    batch, _ = pack_rows([[1] * size for size in (5, 4, 4, 3, 2, 2)], length=10)  # best fit: 5 4, 4 3 2, 2
    assert batch["segment_ids"].astype(bool).all()


@pytest.mark.parametrize("size", [0, 9])
def test_a_sequence_that_fits_no_row_is_named(size: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Sequence 1 has {size} tokens; a row of 8 holds 1 to 8.")):
        pack_rows([[1, 2], [1] * size], length=8)
