"""A study file: the question, as a strict YAML file that is checked as a whole before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bertblocks.core.plugins import load_plugins
from bertblocks.core.registry import nearest
from bertblocks.core.settings import (
    Count,
    Positive,
    RecipeError,
    Section,
    read_section,
    read_yaml,
    set_value,
)
from bertblocks.core.storage import why_unreadable
from bertblocks.lab.measures import MEASURES, HeldOut, MeasureSection
from bertblocks.training.amounts import Amount, read_time
from bertblocks.training.build import check_model
from bertblocks.training.recipe import Recipe, find_recipe
from bertblocks.training.training_plan import TrainingPlan

#: Keys of a recipe and their new values, such as `{"optimizer.lr": 1e-3, "model.config.norm_pos": "pre"}`.
Changes = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^[\w.+-]+$")]
Levels = Annotated[dict[Name, Changes], Field(min_length=2)]
#: What each kind of budget can be solved by; the first is the default.
SOLVERS = {
    "flops": ("steps", "depth", "width", "feed_forward"),
    "tokens": ("steps",),
    "seconds": ("steps",),
    "parameters": ("feed_forward", "depth", "width"),
}
#: Keys that the lab sets itself.
OWN_KEYS = ("name", "run.folder", "run.seed")


class Budget(Section):
    """What all variants have in common, and what changes in a variant so that it has it."""

    equal: Literal["flops", "tokens", "seconds", "parameters"] = "flops"
    """flops: matrix products of training (`bertblocks.analysis`). seconds: time in training steps. Variants
    with equal parameters train on equally many tokens."""
    by: Literal["steps", "depth", "width", "feed_forward"] | None = None
    """What is solved: the number of steps, of layers, the hidden size with its heads, or the intermediate size.
    Default: steps; feed_forward for equal parameters."""
    amount: float | str | None = None
    """How much: a number of FLOPs or parameters, `2M tokens`, `5 minutes`. Default: what the baseline takes."""

    @model_validator(mode="after")
    def _fits(self) -> Budget:
        if self.by is not None and self.by not in SOLVERS[self.equal]:
            raise ValueError(f"has by: {self.by}; equal {self.equal} can be solved by {', '.join(SOLVERS[self.equal])}")
        if self.equal == "seconds" and self.amount is None:
            raise ValueError("has equal: seconds, which needs an amount such as '5 minutes'")
        _ = self.value
        return self

    @property
    def solver(self) -> str:
        return self.by or SOLVERS[self.equal][0]

    @property
    def value(self) -> float | None:
        """The amount as a number of FLOPs, tokens, seconds or parameters."""
        if self.amount is None:
            return None
        if self.equal == "seconds":
            return read_time(self.amount)
        if self.equal == "tokens":
            amount = Amount.read(self.amount)
            if amount.unit != "tokens" or not amount.value:
                raise ValueError(f"has amount {self.amount!r}; equal tokens needs one such as '2M tokens'")
            return amount.value
        if isinstance(self.amount, str) or self.amount <= 0:
            raise ValueError(f"has amount {self.amount!r}; it must be a number of {self.equal} above 0")
        return self.amount


class Search(Section):
    """Short runs that choose the learning rate of each variant, of the same number and length for all."""

    method: Literal["quadratic", "optuna"] = "quadratic"
    """quadratic: rates in equal factors around the recipe's, and the minimum of a parabola through their losses.
    optuna: each rate follows from the losses before it."""
    runs: Annotated[int, Field(ge=3)] = 5
    """The number of short runs per variant."""
    factor: Annotated[float, Field(gt=1)] = 16.0
    """The largest rate divided by the smallest."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The length of a short run, as a share of the steps of a trial."""
    width: Count | None = None
    """The hidden_size of the short runs, with heads and intermediate size in proportion. Their rate transfers to the
    width of the trials by muP, so the model must have `parametrization: mup`. Default: the width of the trials."""


class Average(Section):
    """Measures the mean of the last checkpoints' weights, which is less noisy than the last one."""

    checkpoints: Annotated[int, Field(ge=2)] = 4
    over: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The last share of the steps, over which the checkpoints are spread."""


class Study(Section):
    """A question about variants of one recipe."""

    name: Name = "study"
    description: str = ""
    recipe: str = "demo"
    """The base: a recipe file, relative to the study file, or a shipped recipe."""
    changes: Changes = {}
    """Keys of the recipe that all trials change, such as `phases.0.duration: 200 steps`."""
    variants: Annotated[dict[Name, Changes], Field(min_length=1)] | None = None
    """The keys that each variant changes. The first is the baseline, unless `baseline` names another."""
    factors: Annotated[dict[Name, Levels], Field(min_length=1)] | None = None
    """In place of variants: the levels of each factor, and the keys that a level changes. First levels are the base."""
    design: Literal["one_at_a_time", "factorial", "ladder"] = "one_at_a_time"
    """one_at_a_time: each variant or level alone. factorial: all combinations of levels. ladder: each variant also
    has the changes of those before it."""
    baseline: str | None = None
    """The variant with which the others are compared."""
    sizes: dict[Name, Changes] = {}
    """Every variant is trained at each of these sizes, to see how differences move with scale."""
    seeds: Count | list[Annotated[int, Field(ge=0, lt=2**31)]] = 3
    """How many seeds, or which. Trials with the same seed share data order, masks and, where shapes agree, weights."""
    budget: Budget = Budget()
    search: Search | None = None
    average: Average | None = None
    measures: Annotated[list[Annotated[MeasureSection, MEASURES]], Field(min_length=1)] = [HeldOut()]
    """The first one decides."""
    level: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The rate of false verdicts over the whole family of comparisons."""
    power: Annotated[float, Field(gt=0.5, lt=1)] = 0.8
    """The probability of finding the minimum detectable effect that `lab plan` states."""
    noise: Positive | None = None
    """The standard deviation of paired differences between seeds in the deciding measure, if known, for `lab plan`."""
    early_stopping: bool = False
    """Leaves out the remaining seeds of variants that can no longer be better, with bounds that keep `level`."""

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: Any) -> Any:
        if isinstance(seeds, list) and (not seeds or len(set(seeds)) < len(seeds)):
            raise ValueError(f"is {seeds}; it must be a number or a list of distinct seeds")
        return seeds

    @model_validator(mode="after")
    def _complete(self) -> Study:
        if (self.variants is None) == (self.factors is None):
            raise ValueError("must have either variants or factors")
        if self.design == "factorial" and self.factors is None:
            raise ValueError("has design: factorial, which needs factors")
        if self.design == "ladder" and self.variants is None:
            raise ValueError("has design: ladder, which needs variants")
        if self.average is not None and self.budget.equal == "seconds":
            raise ValueError(
                "has average, which needs to know the last steps, but budget.equal: seconds leaves their number open"
            )
        names = [measure.label for measure in self.measures]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"has the measure {twice[0]!r} twice; give one of them another name")
        return self

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True)
class StudySource:
    """A study with the values of its base recipe."""

    study: Study
    #: The file, for error messages.
    origin: str
    base: dict[str, Any]

    def recipe(self, changes: Mapping[str, Any], origin: str) -> Recipe:
        """The base recipe with changes, checked down to the model's config. `origin` names the changes."""
        values = copy.deepcopy(self.base)
        for key, value in {**self.study.changes, **changes}.items():
            if key in OWN_KEYS:
                raise RecipeError(f"{self.origin}: {origin}.{key} cannot be changed: a study sets it for each trial.")
            try:
                set_value(Recipe, values, key, copy.deepcopy(value), key)
            except RecipeError as error:
                raise RecipeError(f"{self.origin}: {origin}: {error}") from error
        _locate_files(values)
        recipe = read_section(Recipe, values, f"{self.origin}: {origin}")
        if recipe.schedule.budget is not None:
            raise RecipeError(
                f"{self.origin}: {origin}: schedule.budget limits the time of a run; give the study a budget with "
                "equal: seconds instead."
            )
        try:
            check_model(TrainingPlan(recipe))
        except ValueError as error:
            raise RecipeError(f"{self.origin}: {origin}: {error}") from error
        return recipe

    def owned(self, measures: list[MeasureSection]) -> StudySource:
        """The study as its own folder holds it, next to its recipe."""
        base = copy.deepcopy(self.base)
        _locate_files(base)
        update = {"recipe": "recipe.yaml", "measures": measures}
        return StudySource(self.study.model_copy(update=update), self.origin, base)

    def dump(self) -> dict[str, Any]:
        """The values of the study file."""
        return self.study.model_dump(mode="json", exclude_defaults=True)


def study_names() -> list[str]:
    """The studies that ship with BertBlocks."""
    folder = resources.files("bertblocks.lab.studies")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_study(source: str | Path) -> StudySource:
    """Reads a shipped study by name, a study file, or the file in a study folder."""
    load_plugins()
    path = _find(str(source))
    study = read_section(Study, {"name": path.stem, **read_yaml(path)}, str(path))
    measures = [measure.located(path.parent, str(path)) for measure in study.measures]
    study = study.model_copy(update={"measures": measures})
    near = path.parent / study.recipe
    base, _ = find_recipe(str(near) if near.is_file() else study.recipe)
    return StudySource(study, str(path), base)


def _find(source: str) -> Path:
    path = Path(source)
    if source in study_names():
        return Path(str(resources.files("bertblocks.lab.studies") / f"{source}.yaml"))
    if path.is_dir() and (path / "study.yaml").is_file():
        return path / "study.yaml"
    if not path.exists() and not path.is_symlink():
        raise RecipeError(
            f"{source} is neither a file nor a shipped study{nearest(source, study_names())}; "
            f"the shipped studies are {', '.join(study_names())}."
        )
    if not path.is_file():
        raise RecipeError(f"{source} {why_unreadable(path)}; give a .yaml file, a study folder or a shipped study.")
    return path


def _locate_files(values: dict[str, Any]) -> None:
    """Makes the paths of a recipe absolute, because trials run in the study's folder."""

    def locate(place: Any, key: str, must_exist: bool = True) -> None:
        name = place.get(key) if isinstance(place, dict) else None
        if isinstance(name, list):
            place[key] = [str(Path(part).absolute()) if isinstance(part, str) else part for part in name]
        elif isinstance(name, str) and (Path(name).exists() or not must_exist):
            place[key] = str(Path(name).absolute())

    for section, key in (("tokenizer", "load"), ("model", "checkpoint"), ("model", "grow_from")):
        locate(values.get(section), key)
    corpus = values.get("corpus")
    sources = corpus.get("sources") if isinstance(corpus, dict) else None
    for source in sources if isinstance(sources, list) else ():
        locate(source, "files", must_exist=False)
        locate(source, "tokens", must_exist=False)
