"""What a study can find: power, the minimum detectable effect, and how many seeds an effect needs.

All of them belong to the test of `Estimate`: a part of the variance that shrinks with seeds and is known from few of
them, and a part of the examples, which does not shrink and is known well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bertblocks.lab.statistics.student import critical_value, special

#: Points at which the distribution of the estimated variance is integrated.
POINTS = 4000
#: More seeds than this are not worth a number.
MOST_SEEDS = 1000


def power(effect: float, deviation: float, seeds: int, alpha: float = 0.05, example_error: float = 0.0) -> float:
    """The probability that a study finds a difference of `effect`.

    `deviation` is the standard deviation of the paired differences between seeds, and `example_error` the part of the
    standard error that comes from the examples. Divide `alpha` by the number of comparisons for the power of the
    smallest effect in a family that Holm corrects.

    Example:
        >>> round(power(1.0, 1.0, 10), 3)
        0.803
    """
    if seeds < 2:
        return 0.0
    freedom = seeds - 1
    seed_variance, example_variance = deviation**2 / seeds, example_error**2
    error = math.sqrt(seed_variance + example_variance)
    if error == 0:
        return 1.0 if effect else 0.0
    variance = critical_value(alpha, freedom) ** 2 * seed_variance * _variance_ratios(freedom)
    limits = np.sqrt(variance + critical_value(alpha, math.inf) ** 2 * example_variance)
    normal = special().ndtr
    return float(np.mean(normal((effect - limits) / error) + normal((-effect - limits) / error)))


def minimum_detectable_effect(
    deviation: float, seeds: int, alpha: float = 0.05, target: float = 0.8, example_error: float = 0.0
) -> float:
    """The smallest difference that a study finds with the power `target`; infinite with one seed.

    Example:
        >>> round(minimum_detectable_effect(1.0, 3), 2), round(minimum_detectable_effect(1.0, 10), 2)
        (3.26, 1.0)
    """
    if seeds < 2:
        return math.inf
    error = math.hypot(deviation / math.sqrt(seeds), example_error)
    if error == 0:
        return 0.0
    return _solve(lambda effect: power(effect, deviation, seeds, alpha, example_error) - target, error)


def seeds_needed(
    effect: float, deviation: float, alpha: float = 0.05, target: float = 0.8, example_error: float = 0.0
) -> int | None:
    """The fewest seeds that find a difference of `effect` with the power `target`; None if more than `MOST_SEEDS`.

    Example:
        >>> seeds_needed(1.0, 1.0), seeds_needed(5.0, 1.0), seeds_needed(0.01, 1.0)
        (10, 3, None)
    """
    low, high = 1, 2
    while power(effect, deviation, high, alpha, example_error) < target:
        low, high = high, 2 * high
        if low >= MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if power(effect, deviation, middle, alpha, example_error) >= target else (middle, high)
        )
    return high


@lru_cache
def _variance_ratios(freedom: int) -> NDArray[np.float64]:
    """Quantiles of estimated over true variance, a chi-square over its degrees of freedom."""
    return 2 * special().gammaincinv(freedom / 2, (np.arange(POINTS) + 0.5) / POINTS) / freedom


def _solve(function: Callable[[float], float], start: float) -> float:
    """Where an increasing function crosses 0, to six digits."""
    low, high = 0.0, start
    while function(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) >= 0 else (middle, high)
    return high
