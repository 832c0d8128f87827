"""One trial: an ordinary pretraining run in a folder, and the measures of its model. It can stop and go on anywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.settings import read_section
from bertblocks.core.storage import lock_folder, read_json, write_json
from bertblocks.lab.corpora import digest, open_held_out, prepare_texts
from bertblocks.lab.measures import MEASURES as MEASURE_KINDS
from bertblocks.lab.measures import MeasureSection, StoppedError, TrainedModel
from bertblocks.lab.results import (
    FAILURE_FILE,
    MEASURES,
    TRIAL_FILE,
    TRIALS,
    CurvePoint,
    TrialRecord,
    read_measurements,
    read_record,
    write_measurements,
    write_record,
)
from bertblocks.training.loop import NonFiniteError
from bertblocks.training.pretrain import is_free_key, pretrain
from bertblocks.training.recipe import Recipe
from bertblocks.training.training_plan import TrainingPlan

SPEC, RUN = "spec.json", "run"
#: Exit codes of a trial that cannot be trained, and of one that failed for another reason.
DIVERGED, FAILED = 3, 1


@dataclass(frozen=True)
class Trial:
    """A variant with one seed, at one size, with one learning rate."""

    variant: str
    seed: int
    size: str | None
    #: The recipe of the run, which reads tokens of the study's folder.
    recipe: Recipe
    #: FLOPs of a token in training, the mean over all phases.
    flops: float
    #: What the run is planned to take. One with a budget of seconds ends earlier.
    steps: int
    tokens: int
    #: Whether it is a short run that chooses a learning rate.
    is_search: bool = False

    @property
    def name(self) -> str:
        """The trial's folder. Two trials have the same name if they train the same model."""
        record = {key: value for key, value in _flatten(self.recipe.record()).items() if not is_free_key(key)}
        record |= {"name": "", "spacing": self.recipe.run.checkpoints.average and self.recipe.run.checkpoints.every}
        parts = [self.variant, *([self.size] if self.size else []), "search" if self.is_search else f"seed{self.seed}"]
        return "-".join([*parts, digest(record)])

    @property
    def run_recipe(self) -> Recipe:
        """The recipe with its run folder, relative to the study's folder."""
        run = self.recipe.run.model_copy(update={"folder": str(Path(TRIALS) / self.name / RUN)})
        return self.recipe.model_copy(update={"name": self.name, "run": run})

    def spec(self, shared: Recipe, sections: Sequence[MeasureSection]) -> dict[str, Any]:
        """What the process of a trial has to know. `shared` is the recipe whose texts are held out for all trials."""
        return {
            **{key: value for key, value in asdict(self).items() if key != "recipe"},
            "recipe": self.run_recipe.record(),
            "shared": shared.record(),
            "measures": [section.model_dump(mode="json") for section in sections],
        }


def _flatten(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def is_done(folder: Path, trial: Trial, sections: Sequence[MeasureSection]) -> bool:
    """Whether a trial is trained and measured, or has failed for good."""
    place = folder / TRIALS / trial.name
    if (place / FAILURE_FILE).is_file():
        return True
    return (place / TRIAL_FILE).is_file() and all(is_measured(place, section) for section in sections)


def is_measured(place: Path, section: MeasureSection) -> bool:
    return read_measurements(place / MEASURES / f"{section.label}.json", section.model_dump(mode="json")) is not None


def run_job(folder: str | Path, job: dict[str, Any], console: Console) -> int:
    """Prepares texts (`{"prepare": recipe}`) or runs a trial (`{"trial": name}`) in a study's folder.

    Returns 0, `DIVERGED`, or 128 plus the signal that stopped it.
    """
    with _inside(Path(folder)):
        if "prepare" in job:
            prepare_texts(Recipe.model_validate(job["prepare"]), console)
            return 0
        place = Path(TRIALS) / job["trial"]
        lock = lock_folder(place, wait=True)  # the process of a killed study may still be saving
        try:
            return _run_trial(place, console)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run_trial(place: Path, console: Console) -> int:
    spec = read_json(place / SPEC)
    recipe, shared = Recipe.model_validate(spec["recipe"]), Recipe.model_validate(spec["shared"])
    if not (place / TRIAL_FILE).is_file():
        try:
            result = pretrain(recipe, console)
        except NonFiniteError as error:
            write_json(place / FAILURE_FILE, {"message": str(error)})
            return DIVERGED
        if result.signal is not None:
            return 128 + result.signal
        write_record(place, _record(spec, recipe, result.outcome.state.step))
    record = read_record(place)
    model = recipe.folder / "model"
    for values in spec["measures"]:
        section = read_section(MEASURE_KINDS[values["kind"]], values, f"{place}: measures")
        assert isinstance(section, MeasureSection)
        if is_measured(place, section):
            continue
        console.print(f"Measuring {section.label}.")
        work = place / f"work-{section.label}-{digest(values)}"
        trained = TrainedModel(model, work, record, lambda tokens: open_held_out(recipe, shared, tokens))
        try:
            found = section.run(trained)
        except StoppedError as stopped:
            return 128 + stopped.signal
        write_measurements(place / MEASURES / f"{section.label}.json", values, found)
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _record(spec: dict[str, Any], recipe: Recipe, steps: int) -> TrialRecord:
    """What the files of a finished run say about it."""
    run = recipe.folder
    lines, plan = read_metrics(run / "metrics.jsonl"), TrainingPlan(recipe)
    trained = [line for line in lines if "learning_rate" in line]

    def tokens_at(step: int) -> int:
        return plan.total_tokens if step >= plan.total_steps else plan.at(step).tokens

    def seconds_at(step: int) -> float:
        return max((line["seconds"] for line in trained if line["step"] <= step), default=0.0)

    curve = [
        CurvePoint(step, tokens_at(step), spec["flops"] * tokens_at(step), seconds_at(step), line["held_out_loss"])
        for line in lines
        if "held_out_loss" in line
        for step in [line["step"]]
    ]
    return TrialRecord(
        variant=spec["variant"],
        seed=spec["seed"],
        size=spec["size"],
        learning_rate=recipe.optimizer.lr,
        steps=steps,
        tokens=tokens_at(steps),
        flops=spec["flops"] * tokens_at(steps),
        seconds=seconds_at(steps),
        parameters=read_json(run / "run.json")["parameters"],
        peak_memory=int(max((line.get("memory", 0) for line in trained), default=0)),
        curve=curve,
    )
