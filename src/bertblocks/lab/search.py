"""Chooses the learning rate of each variant from short runs, of the same number and length for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertblocks.core.requirements import require_packages
from bertblocks.core.settings import RecipeError
from bertblocks.lab.budget import with_sizes
from bertblocks.lab.coordinate_check import sizes_at
from bertblocks.lab.results import LearningRateSearch
from bertblocks.lab.statistics.learning_rate import fit_learning_rate, learning_rates
from bertblocks.lab.study import Search
from bertblocks.training.build import expected_config
from bertblocks.training.recipe import Recipe

Points = Sequence[tuple[float, float]]


def searched_recipe(recipe: Recipe, search: Search | None) -> Recipe:
    """The recipe of the short runs: that of the trials, or a narrower one whose rates transfer by muP."""
    if search is None or search.width is None:
        return recipe
    config, width = expected_config(recipe), search.width
    if given := recipe.model.checkpoint or recipe.model.grow_from:
        raise RecipeError(f"search.width is {width}; a model that starts from {given} cannot be narrower.")
    if config.parametrization != "mup":
        raise RecipeError(
            f"search.width is {width}; rates transfer between widths by muP: set model.config.parametrization to mup "
            f"and model.config.mup_base_hidden_size to {width}, or remove search.width."
        )
    if width >= config.hidden_size:
        raise RecipeError(f"search.width is {width}; it must be less than hidden_size, which is {config.hidden_size}.")
    return with_sizes(recipe, **sizes_at(config, width))


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
