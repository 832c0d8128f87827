"""Early stopping of variants that can no longer win.

Futility only: a stopped variant gets no verdict but "undecided", so stopping can turn a verdict into none and never the
other way round. The level of all tests stays what it was, whenever and however often a study looks. What stopping can
cost is power, and a spending function (Lan and DeMets, 1983) bounds that: over all looks, a variant that is as good as
the margin is stopped with a probability of `error` at most.
"""

from __future__ import annotations

from bertblocks.lab.statistics.estimates import Estimate

#: The probability with which a study may stop a variant that is not worse than the margin.
ERROR = 0.05


def is_hopeless(
    difference: Estimate,
    fraction: float,
    previous: float = 0.0,
    higher_is_better: bool = False,
    margin: float = 0.0,
    error: float = ERROR,
) -> bool:
    """Whether a variant should stop at a look: is even the optimistic end of its interval worse than the margin?

    `difference` is variant - baseline so far, `fraction` the share of the planned seeds (or steps) that it rests on,
    and `previous` the fraction at the look before. Each look spends as much of `error` as the study has progressed
    since. `margin` is the smallest improvement worth finding; 0 stops only what is worse than the baseline.
    """
    if not 0 <= previous <= fraction <= 1:
        raise ValueError(f"A look at {fraction:g} of the study cannot follow one at {previous:g}.")
    spent = error * (fraction - previous)
    if spent == 0:
        return False
    improvement = difference.value if higher_is_better else -difference.value
    return improvement + difference.half_width(2 * spent) < margin
