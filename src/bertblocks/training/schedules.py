"""Learning-rate schedules: the keys of each, and its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from bertblocks.core.settings import Section, SectionRegistry, Share
from bertblocks.training.amounts import Amount, AmountField, TimeField

#: Schedules by the name that `schedule.kind` can hold.
SCHEDULES = SectionRegistry("schedule.kind", default="wsd")
register_schedule = SCHEDULES.register
#: Converts an amount to the unit in which a schedule advances: steps or tokens.
Measure = Callable[[Amount], float]


class ScheduleSection(Section):
    """The keys that every schedule has. Subclass it for one of your own, with its formula in `factor`."""

    kind: str = ""  # the name under which a subclass is registered
    warmup: AmountField = Amount(0, "steps")
    """The learning rate rises linearly over this amount."""
    budget: TimeField | None = None
    """The learning rate follows the elapsed share of this time, not the steps, and the run ends when it is used up
    (Geiping and Goldstein, 2022). Only the recipe's schedule can have it."""

    def factor(self, position: float, total: float, measure: Measure) -> float:
        """The learning rate relative to the peak, after the warm-up, of a step that starts at `position` of `total`.

        Both are in steps or both in tokens, and `measure` converts amounts to that unit.
        """
        raise NotImplementedError


@register_schedule("constant")
class Constant(ScheduleSection):
    def factor(self, position: float, total: float, measure: Measure) -> float:
        return 1.0


@register_schedule("linear")
class Linear(ScheduleSection):
    final: Share = 0.0
    """The final learning rate, relative to the peak."""
    until: AmountField = Amount(100, "%")
    """Where the final learning rate is reached. It stays constant from there."""

    def factor(self, position: float, total: float, measure: Measure) -> float:
        progress = _progress(position, measure(self.warmup), measure(self.until))
        return self.final + (1 - self.final) * self.remaining(progress)

    def remaining(self, progress: float) -> float:
        return 1 - progress


@register_schedule("cosine")
class Cosine(Linear):
    def remaining(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


@register_schedule("exponential")
class Exponential(ScheduleSection):
    """Falls by the same share in equal times."""

    final: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The final learning rate, relative to the peak."""

    def factor(self, position: float, total: float, measure: Measure) -> float:
        return self.final ** _progress(position, measure(self.warmup), total)


@register_schedule("inverse_sqrt")
class InverseSqrt(ScheduleSection):
    """Falls with the square root of the position after the warm-up (Vaswani et al., 2017), whatever the duration."""

    warmup: AmountField = Amount(5, "%")

    @field_validator("warmup")
    @classmethod
    def _is_positive(cls, warmup: Amount) -> Amount:
        if not warmup.value > 0:
            raise ValueError(f"is {str(warmup)!r}; inverse_sqrt decays relative to its warm-up, so it must be above 0")
        return warmup

    def factor(self, position: float, total: float, measure: Measure) -> float:
        warmup = measure(self.warmup)
        return math.sqrt(warmup / max(position, warmup))


@register_schedule("wsd")
class WSD(ScheduleSection):
    """Warmup, stable, decay (Hu et al., 2024)."""

    warmup: AmountField = Amount(5, "%")
    decay: AmountField = Amount(30, "%")
    """The length of the final part, in which the learning rate decays."""
    shape: Literal["linear", "sqrt"] = "sqrt"
    """The shape of the decay: linear or 1 - sqrt."""
    final: Share = 0.0

    def factor(self, position: float, total: float, measure: Measure) -> float:
        progress = _progress(position, total - measure(self.decay), total)
        remaining = 1 - (math.sqrt(progress) if self.shape == "sqrt" else progress)
        return self.final + (1 - self.final) * remaining


def _progress(position: float, start: float, end: float) -> float:
    """The finished share of the part from `start` to `end`."""
    return min(max(position - start, 0.0) / max(end - start, 1e-9), 1.0)


def counts_tokens(schedule: ScheduleSection) -> bool:
    """Whether a schedule advances by tokens, which it does if any of its amounts is in tokens."""
    amounts = [value for value in dict(schedule).values() if isinstance(value, Amount)]
    return any(amount.unit == "tokens" for amount in amounts)


def lr_factor(schedule: ScheduleSection, before: float, after: float, total: float, measure: Measure) -> float:
    """The learning rate, relative to the peak, of a step that starts at `before` and ends at `after` out of `total`.

    All three are in steps or all in tokens, and `measure` converts amounts to that unit. Neither the first nor the last
    step has a learning rate of 0.

    Example:
        >>> schedule = WSD(warmup=Amount(2, "steps"), decay=Amount(4, "steps"))
        >>> [round(lr_factor(schedule, step, step + 1, 8, lambda amount: amount.value), 2) for step in range(8)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.29, 0.13]
    """
    warmup = measure(schedule.warmup)
    return after / warmup if after < warmup else schedule.factor(before, total, measure)
