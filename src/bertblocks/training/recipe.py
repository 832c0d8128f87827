"""Recipes: a strict YAML file that fully defines a pretraining run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from bertblocks.core.plugins import load_plugins
from bertblocks.core.registry import nearest
from bertblocks.core.settings import RecipeError, Section, override, read_section, read_yaml
from bertblocks.core.storage import why_unreadable
from bertblocks.training.amounts import Amount
from bertblocks.training.objective_sections import OBJECTIVES, MaskedLM, ObjectiveSection
from bertblocks.training.optimizer_sections import OPTIMIZERS, AdamW, OptimizerSection
from bertblocks.training.schedules import SCHEDULES, WSD, ScheduleSection
from bertblocks.training.sections import Corpus, CorpusSource, Model, Phase, Run, Tokenizer

#: Keys of a tokenizer that is trained.
TRAINED_TOKENIZER_KEYS = {"kind", "vocab_size"}


class Recipe(Section):
    """A pretraining run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "demo"
    description: str = ""
    model: Model = Model(
        preset="modernbert-base",
        config={
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 384,
            "max_position_embeddings": 128,
        },
    )
    tokenizer: Tokenizer = Tokenizer()
    corpus: Corpus = Corpus(sources=[CorpusSource(builtin="docstrings")])
    objective: Annotated[ObjectiveSection, OBJECTIVES] = MaskedLM()
    optimizer: Annotated[OptimizerSection, OPTIMIZERS] = AdamW(lr=2e-3)
    schedule: Annotated[ScheduleSection, SCHEDULES] = WSD()
    phases: Annotated[list[Phase], Field(min_length=1)] = [
        Phase(duration=Amount(550, "steps"), length=128, batch_tokens=2048)
    ]
    run: Run = Run()

    @model_validator(mode="after")
    def _names_fit(self) -> Recipe:
        if "causal" in self.model.config:
            raise ValueError("model.config.causal follows from the objective of each phase; remove it")
        names, objective = [source.name for source in self.corpus.sources], self.objective
        streamed = [source.name for source in self.corpus.sources if source.stream]
        for index, phase in enumerate(self.phases):
            if phase.curriculum and streamed:
                raise ValueError(
                    f"phases.{index}.curriculum needs the lengths of all texts, but source {streamed[0]!r} is "
                    "streamed; remove curriculum or stream"
                )
            for name in phase.mixture or ():
                if name not in names:
                    raise ValueError(
                        f"phases.{index}.mixture names {name!r}, which is not a source{nearest(name, names)}; "
                        f"the sources are {', '.join(names)}"
                    )
            if phase.schedule is not None and phase.schedule.budget is not None:
                raise ValueError(f"phases.{index}.schedule.budget has no meaning; set schedule.budget, for the run")
            objective = phase.objective or objective
            if phase.mask_rate is not None and "rate" not in type(objective).model_fields:
                raise ValueError(f"phases.{index}.mask_rate has no meaning for objective {objective.kind}")
            if objective.model_task != self.objective.model_task:
                raise ValueError(
                    f"phases.{index}.objective is {objective.kind}, which trains a {objective.model_task} model, but "
                    f"objective {self.objective.kind} trains a {self.objective.model_task} model"
                )
            if objective.added_parts != self.objective.added_parts:
                parts = [section.added_parts or "nothing" for section in (objective, self.objective)]
                raise ValueError(
                    f"phases.{index}.objective is {objective.kind}, which adds {parts[0]} to the model, but objective "
                    f"{self.objective.kind} adds {parts[1]}; use two runs, the second with model.checkpoint"
                )
        return self

    @property
    def tokenizer_origin(self) -> str | None:
        """The folder or Hub id of the tokenizer to load; None if a tokenizer is trained."""
        return self.tokenizer.load or self.model.checkpoint or self.model.grow_from

    def record(self) -> dict[str, Any]:
        """All values, as a run records them. What only a trained tokenizer has is left out for a loaded one."""
        unused = {"tokenizer": TRAINED_TOKENIZER_KEYS} if self.tokenizer_origin else None
        return self.model_dump(mode="json", exclude=unused)

    @property
    def folder(self) -> Path:
        return Path(self.run.folder or f"runs/{self.name}")


def recipe_names() -> list[str]:
    """The recipes that ship with BertBlocks."""
    folder = resources.files("bertblocks.training.recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_recipe(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a shipped recipe by name (None: the demo) or a file, and applies overrides such as `optimizer.lr=2e-3`.

    Shipped names take precedence; write `./name` for a file of the same name.

    Example:
        >>> read_recipe(overrides=["optimizer.lr=2e-3", "phases.0.duration=1M tokens"]).optimizer.lr
        0.002
    """
    load_plugins()
    values, origin = find_recipe("demo" if source is None else str(source))
    for assignment in overrides:
        override(Recipe, values, assignment)
    return read_section(Recipe, values, origin)


def find_recipe(source: str) -> tuple[dict[str, Any], str]:
    """The values of a shipped recipe or a file, which are not checked yet, and the path of the file."""
    path = Path(source)
    if source in recipe_names():
        path = Path(str(resources.files("bertblocks.training.recipes") / f"{source}.yaml"))
    elif path.is_dir() or path.is_symlink():
        if not path.is_file():
            raise RecipeError(f"{source} {why_unreadable(path)}; give a .yaml file or a shipped recipe.")
    elif not path.exists():
        raise RecipeError(
            f"{source} is neither a file nor a shipped recipe{nearest(source, recipe_names())}; "
            f"the shipped recipes are {', '.join(recipe_names())}."
        )
    return {"name": path.stem, **read_yaml(path)}, str(path)
