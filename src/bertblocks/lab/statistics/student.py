"""Student's t distribution, from scipy's special functions."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from bertblocks.core.requirements import require_packages


@cache
def special() -> ModuleType:
    """scipy.special, or an error that says how to install it."""
    require_packages(["scipy"], "the statistics of a study")
    from scipy import special as found

    return found


def critical_value(alpha: float, freedom: float) -> float:
    """The value that |t| exceeds with probability `alpha`.

    Example:
        >>> round(critical_value(0.05, 2), 3), round(critical_value(0.05, 1e6), 3)
        (4.303, 1.96)
    """
    return float(-special().stdtrit(freedom, alpha / 2))


def tail_probability(value: float, freedom: float) -> float:
    """The probability that |t| exceeds `value`.

    Example:
        >>> round(tail_probability(4.303, 2), 3)
        0.05
    """
    return float(2 * special().stdtr(freedom, -abs(value)))
