"""How losses, and differences between variants, move with compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertblocks.lab.statistics.estimates import Estimate, mean_of_seeds

Array = NDArray[np.float64]
#: A power law has three numbers; a fourth size says how well it fits.
FEWEST_SIZES = 4
#: Exponents that are tried before the best is refined.
EXPONENTS = np.geomspace(0.005, 3.0, 400)
#: Relative residuals above this many standard deviations count with their absolute value, not their square (Huber).
HUBER = 2.5
#: Fewer points do not tell an outlier from the rest.
ROBUST_FREEDOM = 5


@dataclass(frozen=True)
class PowerLaw:
    """loss = floor + factor * (compute / unit) ** -exponent, with draws of the three numbers for intervals."""

    floor: float
    factor: float
    exponent: float
    unit: float
    draws: Array  # [draws, 3]

    def loss(self, compute: float) -> float:
        return self.floor + self.factor * (compute / self.unit) ** -self.exponent

    def loss_interval(self, compute: float) -> tuple[float, float]:
        """The 95% interval of the curve at a compute, also beyond the sizes that ran."""
        floors, factors, exponents = self.draws.T
        return _middle(floors + factors * (compute / self.unit) ** -exponents)

    @property
    def exponent_interval(self) -> tuple[float, float]:
        return _middle(self.draws[:, 2])

    @property
    def floor_interval(self) -> tuple[float, float]:
        return _middle(self.draws[:, 0])


def fit_power_law(
    compute: Sequence[float], losses: Sequence[float], draws: int = 400, seed: int = 0
) -> PowerLaw | None:
    """Fits a power law robustly, by relative residuals; None with too few sizes or losses that do not fall.

    For a given exponent the other two numbers are linear, so that the search has one dimension. Intervals come from
    refits to losses drawn around the curve, with a spread that is itself drawn, which widens them as few sizes demand.
    """
    sizes, values = np.asarray(compute, dtype=float), np.asarray(losses, dtype=float)
    if len(set(sizes.tolist())) < FEWEST_SIZES or np.corrcoef(np.log(sizes), values)[0, 1] >= 0:
        return None
    unit = float(np.exp(np.log(sizes).mean()))
    x, weights, freedom = sizes / unit, np.ones(len(sizes)), len(sizes) - 3
    found = _fit(x, values[None], weights)[0]
    for _ in range(20 if freedom >= ROBUST_FREEDOM else 0):
        residuals = (values - _curve(found, x)) / values
        deviation = math.sqrt(len(x) / freedom) * float(np.median(np.abs(residuals))) / 0.6745
        weights = np.clip(HUBER * deviation / np.maximum(np.abs(residuals), 1e-12), 1e-3, 1.0)
        found = _fit(x, values[None], weights)[0]
    residuals = (values - _curve(found, x)) / values
    deviation = math.sqrt(float((weights * residuals**2).sum()) / freedom)
    generator = np.random.default_rng(seed)
    deviations = deviation * np.sqrt(freedom / generator.chisquare(freedom, draws))
    noise = deviations[:, None] * generator.standard_normal((draws, len(x))) / np.sqrt(weights)
    refits = _fit(x, _curve(found, x) * (1 + noise), weights)
    floor, factor, exponent = map(float, found)
    return PowerLaw(floor, factor, exponent, unit, refits)


def _curve(found: Array, x: Array) -> Array:
    return found[0] + found[1] * x ** -found[2]


def _fit(x: Array, losses: Array, weights: Array) -> Array:
    """The (floor, factor, exponent) of each row of `losses`, by weighted least squares of relative residuals."""
    found = _search(x, losses, weights, np.broadcast_to(EXPONENTS, (len(losses), len(EXPONENTS))))
    step = EXPONENTS[1] / EXPONENTS[0]
    for _ in range(4):  # each round narrows the exponent 20 times
        nearby = found[:, 2:] * step ** np.linspace(-1, 1, 41)
        found = _search(x, losses, weights, nearby)
        step = step**0.05
    return found


def _search(x: Array, losses: Array, weights: Array, exponents: Array) -> Array:
    """The best of `exponents` `[rows, exponents]` for each row."""
    scale = (weights / losses**2)[:, None]  # [rows, 1, points]
    powers = x ** -exponents[..., None]  # [rows, exponents, points]
    targets = losses[:, None]
    total, first, second = scale.sum(-1), (scale * powers).sum(-1), (scale * powers**2).sum(-1)
    left, right = (scale * targets).sum(-1), (scale * powers * targets).sum(-1)
    determinant = np.maximum(total * second - first**2, 1e-300)
    floors = np.maximum((second * left - first * right) / determinant, 0.0)
    factors = np.maximum((right - first * floors) / second, 0.0)
    misfit = (scale * (targets - floors[..., None] - factors[..., None] * powers) ** 2).sum(-1)
    best = np.argmin(misfit, axis=1)[:, None]
    parts = [np.take_along_axis(part, best, axis=1) for part in (floors, factors, exponents)]
    return np.concatenate(parts, axis=1)


def _middle(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def difference_trend(differences: Mapping[int, Mapping[float, float]]) -> Estimate | None:
    """By how much a difference between variants changes per tenfold compute: the mean slope of the seeds.

    `differences` has, for each seed, the difference at each compute. A slope for each seed makes no assumption about
    how the sizes of a seed vary together. None unless some seed has two sizes.

    Example:
        >>> round(difference_trend({0: {1e9: 0.5, 1e10: 0.3}, 1: {1e9: 0.4, 1e10: 0.3}}).value, 3)
        -0.15
    """
    slopes = []
    for points in differences.values():
        if len(points) < 2:
            continue
        x = np.log10(list(points))
        x -= x.mean()
        slopes.append(float(x @ np.array(list(points.values())) / (x @ x)))
    return mean_of_seeds(np.array(slopes)) if slopes else None
