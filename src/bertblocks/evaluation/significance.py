"""Whether a difference between two models is more than chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def paired_bootstrap(
    score: Callable[[np.ndarray], tuple[float, float]], examples: int, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Computes the 95 % interval of the difference second - first of two models' scores on the same examples.

    `score` takes the indices of a resample and returns both models' scores on it.
    """
    generator = np.random.default_rng(seed)
    differences = []
    for _ in range(samples):
        first, second = score(generator.integers(0, examples, examples))
        differences.append(second - first)
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)
