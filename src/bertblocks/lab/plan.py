"""The plan of a study: every variant within the budget, and what it costs, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bertblocks.core.settings import RecipeError
from bertblocks.lab.budget import Cost, Solved, count_cost, scale_steps, solve
from bertblocks.lab.corpora import corpus_folder, with_shared_tokenizer, with_shared_tokens
from bertblocks.lab.design import Variant, make_variants
from bertblocks.lab.results import MeasureInfo
from bertblocks.lab.search import searched_recipe
from bertblocks.lab.study import StudySource
from bertblocks.lab.trial import Trial
from bertblocks.training.build import expected_config
from bertblocks.training.recipe import Recipe

#: The seed of the short runs that choose a learning rate. It is not one of those that decide.
SEARCH_SEED = 2**31 - 1


@dataclass(frozen=True)
class Arm:
    """A variant at one size, within the budget."""

    variant: Variant
    size: str | None
    #: The keys that the budget solved.
    solved: dict[str, Any]
    recipe: Recipe
    cost: Cost
    #: The recipe of the short runs that choose its learning rate, before they are shortened.
    searched: Recipe

    @property
    def name(self) -> str:
        return self.variant.name if self.size is None else f"{self.variant.name} at {self.size}"


@dataclass(frozen=True)
class StudyPlan:
    """A study with all its arms, those of the baseline first."""

    source: StudySource
    arms: list[Arm]
    #: The recipe without the changes of any variant, whose held-out texts measure all of them.
    base: Recipe

    @property
    def baseline(self) -> str:
        return self.arms[0].variant.name

    @property
    def infos(self) -> dict[str, MeasureInfo]:
        return {info.name: info for measure in self.source.study.measures for info in measure.infos()}

    def trials(self, rates: dict[tuple[str, str | None], dict[str, Any]]) -> list[Trial]:
        """The trials of all arms, seed by seed. `rates` has the keys that a search has chosen for each arm."""
        return [
            self.trial(arm, seed, rates.get((arm.variant.name, arm.size), {}))
            for seed in self.source.study.seed_list
            for arm in self.arms
        ]

    def trial(self, arm: Arm, seed: int, found: dict[str, Any]) -> Trial:
        recipe = _with_rate(arm.recipe, found)
        if average := self.source.study.average:
            every = max(round(arm.cost.steps * average.over / average.checkpoints), 1)
            changes = {"every": every, "keep": average.checkpoints, "average": average.checkpoints}
            checkpoints = recipe.run.checkpoints.model_copy(update=changes)
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"checkpoints": checkpoints})})
        return self._make_trial(arm, seed, recipe)

    def search_trial(self, arm: Arm, found: dict[str, Any]) -> Trial:
        """A short run with one of the rates that are compared."""
        search = self.source.study.search
        assert search is not None
        recipe = _with_rate(arm.searched, found)
        if recipe.schedule.budget is not None:
            schedule = recipe.schedule.model_copy(update={"budget": recipe.schedule.budget * search.share})
            recipe = recipe.model_copy(update={"schedule": schedule})
        else:
            recipe = scale_steps(recipe, search.share)
        return replace(self._make_trial(arm, SEARCH_SEED, recipe), is_search=True)

    def _make_trial(self, arm: Arm, seed: int, recipe: Recipe) -> Trial:
        cost = count_cost(recipe)
        recipe = with_shared_tokens(recipe)
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})
        flops = cost.flops / cost.tokens
        return Trial(arm.variant.name, seed, arm.size, recipe, flops, cost.steps, cost.tokens)

    def corpora(self) -> list[Recipe]:
        """The recipes whose texts have to be prepared, the base first, because others may use its tokenizer."""
        recipes = {corpus_folder(recipe): recipe for recipe in [self.base, *(arm.recipe for arm in self.arms)]}
        return list(recipes.values())

    @property
    def scale(self) -> str:
        """The scale of the study in one line."""
        study, arms = self.source.study, self.arms
        parameters, tokens = ([getattr(arm.cost, key) for arm in arms] for key in ("parameters", "tokens"))
        data = f"{_range(tokens)} tokens"
        if study.budget.equal == "seconds":
            data = f"{study.budget.value:g} seconds of training"
        count = len(study.seed_list)
        return f"{_range(parameters)} parameters, {data}, {count} {'seed' if count == 1 else 'seeds'}"


def _range(values: list[int]) -> str:
    low, high = _short(min(values)), _short(max(values))
    return low if low == high else f"{low} to {high}"


def _short(value: float) -> str:
    """A number with two digits and a unit.

    Example:
        >>> _short(4_412_000), _short(999)
        ('4.4 M', '999')
    """
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value / size >= 100 else f"{value / size:.2g}{unit}"
    return f"{value:g}"


def _with_rate(recipe: Recipe, found: dict[str, Any]) -> Recipe:
    """The recipe with the rate that a search found, and the rates of its phases in proportion."""
    if not found:
        return recipe
    rate = found["optimizer.lr"]
    factor = rate / recipe.optimizer.lr
    phases = [
        phase if phase.lr is None else phase.model_copy(update={"lr": phase.lr * factor}) for phase in recipe.phases
    ]
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"lr": rate}), "phases": phases})


def make_plan(source: StudySource) -> StudyPlan:
    """Checks all variants of a study, and solves the budget for each."""
    study, origin = source.study, source.origin
    variants = make_variants(study, origin)
    base = source.recipe({}, "changes")
    arms = []
    for size, size_changes in study.sizes.items() or [(None, {})]:
        baseline: Recipe | None = None
        for variant in variants:
            where = f"variants.{variant.name}" if study.variants else f"factors: {variant.name}"
            where += "" if size is None else f", sizes.{size}"
            recipe = source.recipe({**size_changes, **variant.changes}, where)
            baseline = baseline or recipe
            try:
                recipe = with_shared_tokenizer(recipe, base)
                solved: Solved = solve(recipe, study.budget, baseline)
                searched = searched_recipe(solved.recipe, study.search)
            except ValueError as error:
                raise RecipeError(f"{origin}: {where}: {error}") from error
            arms.append(Arm(variant, size, solved.changes, solved.recipe, solved.cost, searched))
            _check_measures(source, arms[-1], base)
    return StudyPlan(source, arms, with_shared_tokenizer(base, base))


def _check_measures(source: StudySource, arm: Arm, base: Recipe) -> None:
    config = expected_config(arm.recipe)
    positions = config.max_position_embeddings - config.position_offset
    for measure in source.study.measures:
        if measure.longest > positions:
            raise RecipeError(
                f"{source.origin}: measures: {measure.label} reads {measure.longest} tokens, but {arm.name} reads at "
                f"most {positions}; shorten it, or raise model.config.max_position_embeddings."
            )
        same = (arm.recipe.tokenizer_origin, arm.recipe.tokenizer) == (base.tokenizer_origin, base.tokenizer)
        shared = arm.recipe.tokenizer.load == with_shared_tokens(base).tokenizer.load
        if measure.counts_tokens and not same and not shared:
            raise RecipeError(
                f"{source.origin}: variants.{arm.variant.name} has another tokenizer, so {measure.label}, which counts "
                "tokens, cannot compare it; measure pseudo_perplexity with data, which counts bytes, or a task."
            )
