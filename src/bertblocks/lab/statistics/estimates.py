"""The difference between two variants, with the parts of its uncertainty: seeds and held-out examples.

A score depends on the seed and on the examples that happen to be in the held-out set. Both are samples, and they are
crossed: every seed is measured on every example. The variance of the difference is the sum of the variance between
seeds and the variance between examples, as in the Multi-Bootstrap (Sellam et al., 2022). But a bootstrap of three seeds
gives intervals that are far too narrow. So each part is multiplied by the square of its own critical value of Student's
t. Intervals of this kind contain the true difference at least as often as they say (Banerjee, 1960), and with one part
they are those of the t test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertblocks.lab.statistics.student import critical_value, special, tail_probability

Array = NDArray[np.float64]
#: A spread below this share of the values is rounding: the seeds gave the same difference.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Component:
    """A part of the variance of an estimate, and the degrees of freedom from which it is known."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Estimate:
    """A value with the independent parts of its variance. Without any part, nothing is known about its error."""

    value: float
    components: tuple[Component, ...] = ()

    @property
    def error(self) -> float:
        """The standard error."""
        return math.sqrt(sum(part.variance for part in self.components)) if self.components else math.inf

    def half_width(self, alpha: float = 0.05) -> float:
        """Half the width of the interval that misses the true value with probability `alpha` at most."""
        if not self.components:
            return math.inf
        parts = (part.variance * critical_value(alpha, part.freedom) ** 2 for part in self.components)
        return math.sqrt(sum(parts))

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        width = self.half_width(alpha)
        return self.value - width, self.value + width

    def p_value(self) -> float:
        """The smallest `alpha` whose interval does not contain 0."""
        if not self.components or self.value == 0:
            return 1.0
        ratio = abs(self.value) / self.error
        bounds = sorted(tail_probability(ratio, part.freedom) for part in self.components)
        low, high = max(bounds[0], 1e-300), max(bounds[-1], 1e-300)
        while high > low * (1 + 1e-9):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.half_width(middle) < abs(self.value) else (middle, high)
        return high


def mean_of_seeds(values: Array) -> Estimate:
    """The mean of one value for each seed, with the interval of the one-sample t test.

    Example:
        >>> low, high = mean_of_seeds(np.array([1.0, 2.0, 3.0])).interval()
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    values = np.asarray(values, dtype=float)
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    if spread <= ROUNDING * float(np.abs(values).max()):
        return Estimate(float(values.mean()))
    return Estimate(float(values.mean()), (Component(spread**2 / len(values), len(values) - 1),))


def paired_difference(baseline: Array, variant: Array) -> Estimate:
    """The mean of variant - baseline of the same seeds, `[seeds]` or `[seeds, examples]`.

    Seeds that all give exactly the same difference say nothing about their spread, and neither does a single one. Then
    the error is unknown.
    """
    difference = _with_examples(variant) - _with_examples(baseline)
    # values that differ by rounding only must not look like a spread
    scale = float(max(np.abs(variant).max(), np.abs(baseline).max()))
    by_seed = difference.mean(axis=1)
    if len(by_seed) < 2 or by_seed.std(ddof=1) <= ROUNDING * scale:
        return Estimate(float(by_seed.mean()))
    seeds = Component(float(by_seed.var(ddof=1)) / len(by_seed), len(by_seed) - 1)
    noise = _interaction(difference) / len(difference)
    return Estimate(float(by_seed.mean()), (seeds, *_examples(difference.mean(axis=0), noise)))


def unpaired_difference(baseline: Array, variant: Array) -> Estimate:
    """The same for seeds that the two variants do not share; the examples are still the same."""
    baseline, variant = _with_examples(baseline), _with_examples(variant)
    value = float(variant.mean() - baseline.mean())
    parts, noise = [], 0.0
    for values in (baseline, variant):
        by_seed = values.mean(axis=1)
        if len(by_seed) < 2 or by_seed.std(ddof=1) <= ROUNDING * float(np.abs(values).max()):
            return Estimate(value)
        parts.append(Component(float(by_seed.var(ddof=1)) / len(by_seed), len(by_seed) - 1))
        noise += _interaction(values) / len(values)
    return Estimate(value, (*parts, *_examples(variant.mean(axis=0) - baseline.mean(axis=0), noise)))


def _with_examples(values: Array) -> Array:
    values = np.asarray(values, dtype=float)
    return values[:, None] if values.ndim == 1 else values


def _interaction(values: Array) -> float:
    """The variance that belongs to neither seeds nor examples alone, by analysis of variance of `[seeds, examples]`."""
    seeds, examples = values.shape
    if examples < 2:
        return 0.0
    rest = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    return float((rest**2).sum()) / ((seeds - 1) * (examples - 1))


def _examples(differences: Array, noise: float) -> list[Component]:
    """The part of the examples: the variance of their differences beyond the noise that the seeds' part contains."""
    if len(differences) < 2:
        return []
    variance = float(differences.var(ddof=1)) - noise
    return [Component(variance / len(differences), len(differences) - 1)] if variance > 0 else []


def linearized(examples: Array, weights: Array | None) -> Array:
    """Values of examples whose plain mean is the weighted mean, and whose spread gives its variance.

    Example:
        >>> linearized(np.array([1.0, 4.0]), np.array([3.0, 1.0])).tolist()
        [0.625, 2.875]
    """
    examples = np.asarray(examples, dtype=float)
    if weights is None:
        return examples
    weights = np.asarray(weights, dtype=float)
    mean = float((examples * weights).sum() / weights.sum())
    return mean + weights / weights.mean() * (examples - mean)


def effect_size(differences: Array) -> float | None:
    """Hedges' g of paired differences: mean over standard deviation, without the bias of few seeds.

    The exact correction needs three seeds (Hedges, 1981).

    Example:
        >>> round(effect_size(np.array([1.0, 2.0, 3.0, 4.0])), 3)
        1.401
    """
    freedom = len(differences) - 1
    spread = float(np.std(differences, ddof=1)) if freedom > 0 else 0.0
    if freedom < 2 or spread <= ROUNDING * float(np.abs(differences).max()):
        return None
    gamma = special().gammaln
    correction = math.exp(gamma(freedom / 2) - gamma((freedom - 1) / 2)) / math.sqrt(freedom / 2)
    return float(np.mean(differences)) / spread * correction
