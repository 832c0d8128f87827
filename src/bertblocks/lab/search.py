"""Chooses the learning rate of each variant from short runs, of the same number and length for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertblocks.core.requirements import require_packages
from bertblocks.lab.results import LearningRateSearch
from bertblocks.lab.statistics.learning_rate import fit_learning_rate, learning_rates
from bertblocks.lab.study import Search

Points = Sequence[tuple[float, float]]


def next_rates(search: Search, center: float, points: Points) -> list[float]:
    """The rates to try next, given the (rate, loss) pairs so far; none if all short runs are done.

    It is a function of its arguments alone, so a search that was interrupted continues as it would have.
    """
    if len(points) >= search.runs:
        return []
    edge = math.sqrt(search.factor)
    if search.method == "quadratic":
        tried = {rate for rate, _ in points}
        return [rate for rate in learning_rates(center / edge, center * edge, search.runs) if rate not in tried]
    return [_ask_optuna(center / edge, center * edge, points)]


def _ask_optuna(low: float, high: float, points: Points) -> float:
    require_packages(["optuna"], "search.method: optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=3))
    for _, loss in points:  # the sampler is seeded, so it asks for the same rates again
        trial = study.ask()
        trial.suggest_float("lr", low, high, log=True)
        study.tell(trial, loss if math.isfinite(loss) else 1e6)
    return float(f"{study.ask().suggest_float('lr', low, high, log=True):.6g}")


def choose_rate(search: Search, variant: str, size: str | None, points: Points) -> LearningRateSearch:
    """The best rate: by a parabola, or the best that ran. A loss that is not finite stands for a run that diverged."""
    if search.method == "quadratic":
        fit = fit_learning_rate(points)
        return LearningRateSearch(variant, size, list(points), float(f"{fit.chosen:.6g}"), fit.low, fit.high)
    return LearningRateSearch(variant, size, list(points), min(points, key=lambda point: point[1])[0])
