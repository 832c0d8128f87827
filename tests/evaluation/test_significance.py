"""The paired bootstrap finds real differences and not chance ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertblocks.evaluation.significance import paired_bootstrap


def test_bootstrap_detects_a_real_difference_and_no_chance_difference() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(500) < 0.70
    better, same = first | (generator.random(500) < 0.3), generator.permutation(first)

    def interval(second: Any) -> Any:
        return paired_bootstrap(lambda i: (first[i].mean(), second[i].mean()), 500)

    low, high = interval(better)
    assert 0 < low < better.mean() - first.mean() < high
    low, high = interval(same)
    assert low < 0 < high
