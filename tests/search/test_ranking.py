"""The best documents are those of a full sort; fusion is its formula."""

from __future__ import annotations

import numpy as np
import pytest

from bertblocks.search.ranking import Ranking, TopK, fuse


@pytest.mark.parametrize("k", [1, 3, 10, 200])
@pytest.mark.parametrize("block", [1, 7, 100])
def test_the_best_are_those_of_a_stable_sort_with_ties_in_order(k: int, block: int) -> None:
    scores = np.random.default_rng(k).integers(0, 6, (2, 100)).astype(np.float32)
    best = TopK(2, k)
    blocks = list(range(0, 100, block))
    for start in reversed(blocks):  # a tie is won by the lower number, in whatever order blocks come
        rows = slice(start, start + block)
        best.add_block(0, np.arange(100)[rows], scores[:, rows])
    for query in range(2):
        expected = np.argsort(-scores[query], kind="stable")[:k]
        assert best.rankings[query].numbers.tolist() == expected.tolist()
        assert best.rankings[query].scores.tolist() == scores[query, expected].tolist()


def test_scores_that_are_not_numbers_never_count() -> None:
    best = TopK(1, 3)
    best.add_block(0, np.arange(4), np.array([[np.nan, 1.0, np.nan, -np.inf]], np.float32))
    assert best.rankings[0].numbers.tolist() == [1]


def test_fusion_sums_reciprocal_ranks() -> None:
    generator = np.random.default_rng(0)
    rankings = [Ranking(generator.permutation(30)[:20], np.linspace(1, 0, 20)) for _ in range(3)]
    expected: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking.numbers.tolist(), start=1):
            expected[number] = expected.get(number, 0) + 1 / (60 + rank)
    order = sorted(expected, key=lambda number: (-expected[number], number))
    fused = fuse(rankings, 12)
    assert fused.numbers.tolist() == order[:12]
    assert fused.scores == pytest.approx([expected[number] for number in order[:12]], rel=1e-12)
