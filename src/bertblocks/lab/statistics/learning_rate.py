"""The best learning rate of a variant, from a parabola through losses over the logarithm of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bertblocks.lab.statistics.student import critical_value

Array = NDArray[np.float64]
#: A parabola has three numbers; a fourth rate says how well it fits.
FEWEST_POINTS = 4
#: A loss this many times as far from the best as the next lower one belongs to a run that went wrong.
JUMP = 4


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
    is estimated from it. Rates whose losses no parabola could have are left out.

    Example:
        >>> fit = fit_learning_rate([(1e-4, 4.1), (1e-3, 3.0), (1e-2, 4.0), (10**-2.5, 3.2), (10**-3.5, 3.3)])
        >>> f"{fit.chosen:.2g} from {fit.low:.2g} to {fit.high:.2g}"
        '0.0011 from 0.00099 to 0.0011'
    """
    finite = sorted((rate, loss) for rate, loss in points if math.isfinite(loss))
    if not finite:
        raise ValueError(f"No learning rate of {len(points)} gave a finite loss; search lower ones.")
    best = min(finite, key=lambda point: point[1])[0]
    rates = sorted({rate for rate, _ in finite})
    if len(rates) < FEWEST_POINTS:
        remark = f"{len(rates)} learning rates with a finite loss are too few for a fit; the best of them is used"
        return LearningRateFit(best, None, None, None, "unknown", remark)
    near = _near_minimum(finite)
    fit = _locate(near, alpha)
    if fit is None:
        where = {rates[0]: "lowest", rates[-1]: "highest"}.get(best)
        remark = f"the best loss is at the {where} rate; search further there" if where else "losses have no minimum"
        return LearningRateFit(best, None, None, None, "outside" if where else "unknown", remark)
    left_out = ", ".join(f"{rate:.3g}" for rate in rates if rate not in {rate for rate, _ in near})
    remarks = [fit.remark, f"without {left_out}, whose loss is too high for a parabola" if left_out else ""]
    return replace(fit, remark="; ".join(filter(None, remarks)))


def _near_minimum(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The points up to a jump in the loss that no parabola over equal ratios has, but four rates at least.

    Sort the rates by their loss above the best. After the fourth, a parabola's next one is at most thrice as far.
    """
    losses: dict[float, list[float]] = {}
    for rate, loss in points:
        losses.setdefault(rate, []).append(loss)
    means = {rate: sum(values) / len(values) for rate, values in losses.items()}
    order = sorted(means, key=lambda rate: means[rate])
    for place in range(FEWEST_POINTS, len(order)):
        before, after = (means[order[index]] - means[order[0]] for index in (place - 1, place))
        if after > JUMP * before:
            return [point for point in points if point[0] in order[:place]]
    return points


def _locate(points: Sequence[tuple[float, float]], alpha: float) -> LearningRateFit | None:
    """The minimum of the parabola through points, by least squares; None if it has a maximum instead."""
    x = np.log10([rate for rate, _ in points])
    center, lowest, highest = float(x.mean()), float(x.min()), float(x.max())
    design = np.stack([np.ones_like(x), x - center, (x - center) ** 2], axis=1)
    losses = np.array([loss for _, loss in points])
    fitted, *_ = np.linalg.lstsq(design, losses, rcond=None)
    constant, slope, curvature = map(float, fitted)
    if curvature <= 0:
        return None
    freedom = len(x) - 3
    variance = float(((losses - design @ fitted) ** 2).sum()) / freedom
    covariance = np.linalg.inv(design.T @ design) * variance
    minimum = center - slope / (2 * curvature)
    low, high = _fieller(slope, curvature, covariance[1:, 1:], critical_value(alpha, freedom))
    low, high = (None if end is None else end + center for end in (low, high))
    return LearningRateFit(
        chosen=10 ** min(max(minimum, lowest), highest),
        low=None if low is None else 10**low,
        high=None if high is None else 10**high,
        coefficients=(constant - slope * center + curvature * center**2, slope - 2 * curvature * center, curvature),
        optimum="inside" if lowest <= minimum <= highest else "outside",
        remark=_remark(minimum, low, high, lowest, highest),
    )


def _fieller(slope: float, curvature: float, covariance: Array, limit: float) -> tuple[float | None, float | None]:
    """All places where the parabola may be level: |slope + 2 curvature x| is at most `limit` standard errors there."""
    square = 4 * (curvature**2 - limit**2 * covariance[1, 1])
    linear = 4 * (slope * curvature - limit**2 * covariance[0, 1])
    constant = slope**2 - limit**2 * covariance[0, 0]
    if square <= 0:  # the parabola may be a line
        return None, None
    root = math.sqrt(max(linear**2 - 4 * square * constant, 0.0))
    return (-linear - root) / (2 * square), (-linear + root) / (2 * square)


def _remark(minimum: float, low: float | None, high: float | None, lowest: float, highest: float) -> str:
    if minimum < lowest:
        return "the best rate lies below those that ran; search lower ones"
    if minimum > highest:
        return "the best rate lies above those that ran; search higher ones"
    if low is None or high is None:
        return "the losses are too noisy to bound the best rate"
    ends = [name for name, is_out in (("below", low < lowest), ("above", high > highest)) if is_out]
    return f"the best rate may lie {' or '.join(ends)} those that ran" if ends else ""
