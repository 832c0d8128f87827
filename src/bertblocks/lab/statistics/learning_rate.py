"""The best learning rate of a variant, from a parabola through losses over the logarithm of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertblocks.lab.statistics.student import critical_value

#: A parabola has three numbers; a fourth rate says how well it fits.
FEWEST_POINTS = 4


@dataclass(frozen=True)
class LearningRateFit:
    """A parabola of loss over log10 of the learning rate, and where its minimum lies."""

    #: The rate to use: the minimum of the parabola within the rates that ran, or the best of those.
    chosen: float
    #: The 95% interval of the minimum (Fieller, 1954); None at an end without a bound.
    low: float | None
    high: float | None
    #: Coefficients of 1, x and x^2, with x = log10 of the rate; None if there is no parabola with a minimum.
    coefficients: tuple[float, float, float] | None
    #: "inside" or "outside" the rates that ran, or "unknown".
    optimum: str
    remark: str

    def loss(self, learning_rate: float) -> float:
        """The loss that the parabola gives a learning rate."""
        if self.coefficients is None:
            raise ValueError("There is no parabola: " + self.remark)
        x = math.log10(learning_rate)
        constant, slope, curvature = self.coefficients
        return constant + slope * x + curvature * x * x


def learning_rates(low: float, high: float, points: int) -> list[float]:
    """Learning rates at equal ratios, the same number for each variant, so that searches cost the same.

    Example:
        >>> learning_rates(1e-4, 1e-2, 3)
        [0.0001, 0.001, 0.01]
    """
    if not 0 < low < high or points < FEWEST_POINTS - 1:
        raise ValueError(f"{points} learning rates from {low:g} to {high:g}: need 0 < low < high and 3 points or more.")
    return [float(f"{rate:.6g}") for rate in np.geomspace(low, high, points)]


def fit_learning_rate(points: Sequence[tuple[float, float]], alpha: float = 0.05) -> LearningRateFit:
    """Fits (learning rate, loss) pairs; pairs without a finite loss diverged and do not count.

    Losses grow faster on the side of high rates than a parabola does. The misfit widens the interval, since the error
    is estimated from it.

    Example:
        >>> fit = fit_learning_rate([(1e-4, 4.1), (1e-3, 3.0), (1e-2, 4.0), (10**-2.5, 3.2), (10**-3.5, 3.3)])
        >>> f"{fit.chosen:.2g} from {fit.low:.2g} to {fit.high:.2g}"
        '0.0011 from 0.00099 to 0.0011'
    """
    finite = [(rate, loss) for rate, loss in points if math.isfinite(loss)]
    if not finite:
        raise ValueError(f"No learning rate of {len(points)} gave a finite loss; search lower ones.")
    best = min(finite, key=lambda point: point[1])[0]
    rates = sorted({rate for rate, _ in finite})
    if len(rates) < FEWEST_POINTS:
        remark = f"{len(rates)} learning rates with a finite loss are too few for a fit; the best of them is used"
        return LearningRateFit(best, None, None, None, "unknown", remark)
    x = np.log10([rate for rate, _ in finite])
    center = float(x.mean())
    design = np.stack([np.ones_like(x), x - center, (x - center) ** 2], axis=1)
    losses = np.array([loss for _, loss in finite])
    fitted, *_ = np.linalg.lstsq(design, losses, rcond=None)
    freedom = len(x) - 3
    variance = float(((losses - design @ fitted) ** 2).sum()) / freedom
    covariance = np.linalg.inv(design.T @ design) * variance
    _, slope, curvature = map(float, fitted)
    if curvature <= 0:
        where = "lowest" if best == rates[0] else "highest" if best == rates[-1] else ""
        remark = f"the best loss is at the {where} rate; search further there" if where else "losses have no minimum"
        return LearningRateFit(best, None, None, None, "outside" if where else "unknown", remark)
    low, high = _fieller(slope, curvature, covariance[1:, 1:], critical_value(alpha, freedom))
    shifted = center - slope / (2 * curvature)
    chosen = float(np.clip(shifted, x.min(), x.max()))
    coefficients = (
        float(fitted[0]) - slope * center + curvature * center**2,
        slope - 2 * curvature * center,
        curvature,
    )
    return LearningRateFit(
        float(10**chosen),
        None if low is None else float(10 ** (low + center)),
        None if high is None else float(10 ** (high + center)),
        coefficients,
        "inside" if x.min() <= shifted <= x.max() else "outside",
        _remark(shifted, low, high, center, x),
    )


def _fieller(slope: float, curvature: float, covariance: np.ndarray, limit: float) -> tuple[float | None, float | None]:
    """All places where the parabola may be level: |slope + 2 curvature x| is at most `limit` standard errors there."""
    square = 4 * (curvature**2 - limit**2 * covariance[1, 1])
    linear = 4 * (slope * curvature - limit**2 * covariance[0, 1])
    constant = slope**2 - limit**2 * covariance[0, 0]
    if square <= 0:  # the parabola may be a line
        return None, None
    root = math.sqrt(max(linear**2 - 4 * square * constant, 0.0))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)


def _remark(optimum: float, low: float | None, high: float | None, center: float, x: np.ndarray) -> str:
    if optimum < x.min():
        return "the best rate lies below those that ran; search lower ones"
    if optimum > x.max():
        return "the best rate lies above those that ran; search higher ones"
    if low is None or high is None:
        return "the losses are too noisy to bound the best rate"
    ends = [name for name, is_out in (("below", low + center < x.min()), ("above", high + center > x.max())) if is_out]
    return f"the best rate may lie {' or '.join(ends)} those that ran" if ends else ""
