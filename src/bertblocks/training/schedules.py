"""Learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable

from bertblocks.training.amounts import Amount
from bertblocks.training.sections import WSD, Constant, Cosine, Linear

ScheduleSection = Constant | Linear | Cosine | WSD


def counts_tokens(schedule: ScheduleSection) -> bool:
    """Whether a schedule advances by tokens, which it does if any of its amounts is in tokens."""
    amounts = [value for value in dict(schedule).values() if isinstance(value, Amount)]
    return any(amount.unit == "tokens" for amount in amounts)


def lr_factor(
    schedule: ScheduleSection, before: float, after: float, total: float, measure: Callable[[Amount], float]
) -> float:
    """The learning rate, relative to the peak, of a step that starts at `before` and ends at `after` out of `total`.

    All three are in steps or all in tokens, and `measure` converts amounts to that unit. Neither the first nor the last
    step has a learning rate of 0.

    Example:
        >>> schedule = WSD(warmup=Amount(2, "steps"), decay=Amount(4, "steps"))
        >>> [round(lr_factor(schedule, step, step + 1, 8, lambda amount: amount.value), 2) for step in range(8)]
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
    progress = min(max(before - start, 0.0) / max(end - start, 1e-9), 1.0)
    if isinstance(schedule, Cosine):
        remaining = (1 + math.cos(math.pi * progress)) / 2
    elif isinstance(schedule, WSD) and schedule.shape == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        remaining = 1 - progress
    return schedule.final + (1 - schedule.final) * remaining
