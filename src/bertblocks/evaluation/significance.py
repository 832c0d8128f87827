"""Whether a difference between two models is more than chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bertblocks.tasks.bootstrap import bootstrap


def paired_bootstrap(
    score: Callable[[np.ndarray], tuple[float, float]], examples: int, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Computes the 95 % interval of the difference second - first of two models' scores on the same examples.

    `score` takes the indices of a resample and returns both models' scores on it.
    """

    def difference(chosen: np.ndarray) -> float:
        first, second = score(chosen)
        return second - first

    return bootstrap(difference, examples, samples, seed)
