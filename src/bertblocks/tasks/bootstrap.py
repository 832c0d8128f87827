"""Confidence intervals of scores on the examples that happen to be in a file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def bootstrap(
    score: Callable[[np.ndarray], float], examples: int, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Computes the 95% interval of a score by drawing examples with replacement (Efron, 1979).

    `score` takes the indices of a resample. Resamples without a score, such as the correlation of equal numbers, do
    not count.

    Example:
        >>> correct = np.arange(100) < 80
        >>> [round(float(bound), 2) for bound in bootstrap(lambda chosen: correct[chosen].mean(), 100)]
        [0.72, 0.88]
    """
    generator = np.random.default_rng(seed)
    scores = [score(generator.integers(0, examples, examples)) for _ in range(samples)]
    low, high = np.nanpercentile(scores, [2.5, 97.5])
    return float(low), float(high)
