"""Learning rates over time."""

from __future__ import annotations

import math
from collections.abc import Callable

from bertblocks.training.amounts import Amount
from bertblocks.training.sections import WSD, Constant, Cosine, Linear

ScheduleSection = Constant | Linear | Cosine | WSD


def counts_tokens(schedule: ScheduleSection) -> bool:
    """A schedule runs by tokens if one of its amounts is in tokens, otherwise by steps."""
    amounts = [value for value in dict(schedule).values() if isinstance(value, Amount)]
    return any(amount.unit == "tokens" for amount in amounts)


def factor(
    schedule: ScheduleSection, before: float, after: float, total: float, measure: Callable[[Amount], float]
) -> float:
    """The share of the peak rate for a step that starts at `before` and ends at `after`, of `total`.

    All three are in steps or all in tokens, and `measure` turns amounts into the same unit. The first step is no step
    of rate 0, and neither is the last.

    Example:
        >>> schedule = WSD(warmup=Amount(2, "steps"), decay=Amount(4, "steps"))
        >>> [round(factor(schedule, step, step + 1, 8, lambda amount: amount.value), 2) for step in range(8)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.29, 0.13]
    """
    warmup = measure(schedule.warmup)
    if after < warmup:
        return after / warmup
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, WSD):
        start, end = total - measure(schedule.decay), total
    else:
        start, end = warmup, measure(schedule.until)
    done = min(max(before - start, 0.0) / max(end - start, 1e-9), 1.0)
    if isinstance(schedule, Cosine):
        left = (1 + math.cos(math.pi * done)) / 2
    elif isinstance(schedule, WSD) and schedule.shape == "sqrt":
        left = 1 - math.sqrt(done)
    else:
        left = 1 - done
    return schedule.final + (1 - schedule.final) * left
