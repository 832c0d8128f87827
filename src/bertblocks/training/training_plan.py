"""The plan of a run, known before it starts: the phase, batch size and learning rate of every step."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from itertools import accumulate

from bertblocks.core.settings import RecipeError
from bertblocks.training.amounts import Amount
from bertblocks.training.objective_sections import ObjectiveSection
from bertblocks.training.recipe import Recipe
from bertblocks.training.schedules import ScheduleSection, counts_tokens, lr_factor
from bertblocks.training.sections import BatchWarmup, ThetaSchedule

DEFAULT_LENGTH, DEFAULT_BATCH_TOKENS = 128, 4096


class BatchPlan:
    """The number of rows in each step of a phase, which may grow at the start of the phase."""

    def __init__(self, length: int, rows: int, duration: Amount, warmup: BatchWarmup | None) -> None:
        self.length, self.rows = length, rows
        self._growing = [] if warmup is None else _grow(length, rows, duration, warmup)
        self._before = list(accumulate((rows * length for rows in self._growing), initial=0))
        self.steps = int(duration.value) if duration.unit == "steps" else self.step_at(duration.value)
        self.total = self.tokens(self.steps)

    def rows_at(self, step: int) -> int:
        return self._growing[step] if step < len(self._growing) else self.rows

    def tokens(self, step: int) -> int:
        """The tokens of all earlier steps of the phase."""
        rest = step - len(self._growing)
        return self._before[step] if rest <= 0 else self._before[-1] + rest * self.rows * self.length

    def step_at(self, tokens: float) -> int:
        """The first step that starts after at least this many tokens."""
        if tokens <= self._before[-1]:
            return bisect.bisect_left(self._before, tokens)
        size = self.rows * self.length
        return len(self._growing) + -(-int(tokens - self._before[-1]) // size)


def _grow(length: int, rows: int, duration: Amount, warmup: BatchWarmup) -> list[int]:
    """The rows of each step until the batch reaches its full size."""
    over = warmup.over
    if over.unit == "%":
        over = replace(duration, value=duration.value * over.value / 100)
    first = max(warmup.start // length, 1)
    growing: list[int] = []
    done = 0
    while (position := len(growing) if over.unit == "steps" else done) < over.value:
        growing.append(first + int((rows - first) * position / over.value))
        done += growing[-1] * length
    return growing


@dataclass(frozen=True)
class PhasePlan:
    """A phase with every value resolved, including those inherited from earlier phases."""

    index: int
    name: str
    batches: BatchPlan
    length: int
    min_length: int | None
    objective: ObjectiveSection
    rope_theta: float | ThetaSchedule | None
    causal: bool | None
    mixture: dict[str, float]
    curriculum: int | None
    peak: float
    schedule: ScheduleSection | None
    first_step: int
    first_token: int


@dataclass(frozen=True)
class Step:
    """One step of the run."""

    phase: PhasePlan
    step_in_phase: int
    rows: int
    #: The tokens of all earlier steps.
    tokens: int
    learning_rate: float

    @property
    def progress(self) -> float:
        """The finished share of the phase."""
        return self.step_in_phase / self.phase.batches.steps

    @property
    def rope_theta(self) -> float | None:
        """The theta of the global layers. None means that of the model's config."""
        theta = self.phase.rope_theta
        if not isinstance(theta, ThetaSchedule):
            return theta
        share = self.step_in_phase / max(self.phase.batches.steps - 1, 1)
        return theta.start + (theta.end - theta.start) * share


class TrainingPlan:
    """Every step of a recipe.

    Example:
        >>> step = TrainingPlan(Recipe()).at(0)
        >>> step.rows * step.phase.length
        2048
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.phases = _resolve(recipe)
        last = self.phases[-1]
        self.total_steps = last.first_step + last.batches.steps
        self.total_tokens = last.first_token + last.batches.total
        self._starts = [phase.first_step for phase in self.phases]
        # the recipe's schedule spans the phases without one of their own
        self._shared = [phase for phase in self.phases if phase.schedule is None]

    def at(self, step: int, seconds: float = 0.0) -> Step:
        """A step that starts `seconds` after the start, which only a schedule with a budget needs to know."""
        phase = self.phases[bisect.bisect_right(self._starts, step) - 1]
        inside = step - phase.first_step
        batches = phase.batches
        return Step(
            phase=phase,
            step_in_phase=inside,
            rows=batches.rows_at(inside),
            tokens=phase.first_token + batches.tokens(inside),
            learning_rate=phase.peak * self._factor(phase, inside, seconds),
        )

    def _factor(self, phase: PhasePlan, inside: int, seconds: float) -> float:
        spanned = [phase] if phase.schedule is not None else self._shared
        schedule = phase.schedule or self.recipe.schedule
        in_tokens = counts_tokens(schedule)
        earlier = [other for other in spanned if other.index < phase.index]

        def clock(step: int) -> float:
            before = sum(other.batches.total if in_tokens else other.batches.steps for other in earlier)
            return before + (phase.batches.tokens(step) if in_tokens else step)

        total = sum(other.batches.total if in_tokens else other.batches.steps for other in spanned)

        def measure(amount: Amount) -> float:
            if amount.unit == "%":
                return total * amount.value / 100
            if in_tokens and amount.unit == "steps":
                return _tokens_after(spanned, int(amount.value))
            return amount.value

        before, after = clock(inside), clock(inside + 1)
        if schedule.budget is not None:
            elapsed = total * min(seconds / schedule.budget, 1.0)
            before, after = elapsed, elapsed + after - before
        return lr_factor(schedule, before, after, total, measure)


def _tokens_after(phases: list[PhasePlan], steps: int) -> int:
    done = 0
    for phase in phases:
        here = min(steps, phase.batches.steps)
        done += phase.batches.tokens(here)
        steps -= here
    return done


def _resolve(recipe: Recipe) -> list[PhasePlan]:
    plans: list[PhasePlan] = []
    length, batch_tokens, peak = DEFAULT_LENGTH, DEFAULT_BATCH_TOKENS, recipe.optimizer.lr
    objective = recipe.objective
    mixture = {source.name: source.weight for source in recipe.corpus.sources}
    theta: float | ThetaSchedule | None = None
    causal = min_length = None
    step = token = 0
    for index, phase in enumerate(recipe.phases):
        length, batch_tokens = phase.length or length, phase.batch_tokens or batch_tokens
        peak, min_length = phase.lr or peak, phase.min_length or min_length
        theta = phase.rope_theta or (theta.end if isinstance(theta, ThetaSchedule) else theta)
        causal = causal if phase.causal is None else phase.causal
        objective, mixture = phase.objective or objective, phase.mixture or mixture
        if phase.mask_rate is not None:
            objective = objective.model_copy(update={"rate": phase.mask_rate})
        if batch_tokens < length:
            raise RecipeError(
                f"phases.{index}: batch_tokens is {batch_tokens}, less than one row of length {length}; raise it."
            )
        if min_length is not None and min_length > length:
            raise RecipeError(f"phases.{index}: min_length is {min_length}; it must be at most length, {length}.")
        batches = BatchPlan(length, batch_tokens // length, phase.duration, phase.batch_warmup)
        plans.append(
            PhasePlan(
                index=index,
                name=phase.name or f"phase {index + 1}",
                batches=batches,
                length=length,
                min_length=min_length,
                objective=objective,
                rope_theta=theta,
                causal=causal,
                mixture=mixture,
                curriculum=phase.curriculum,
                peak=peak,
                schedule=phase.schedule,
                first_step=step,
                first_token=token,
            )
        )
        step, token = step + batches.steps, token + batches.total
    return plans
