"""One distillation: from files and two models to a student, its scores and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from bertblocks.core.environment import hash_files
from bertblocks.core.storage import write_json
from bertblocks.data.hashing import combine, permute
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.reports.model_card import Card, write_card
from bertblocks.reports.page import flatten
from bertblocks.reports.report import write_report_if_possible
from bertblocks.reports.runs import read_run, write_facts
from bertblocks.tasks.base import Scores
from bertblocks.training.checkpoints import CheckpointFolder, describe_removed
from bertblocks.training.distillation.embeddings import EmbeddingMethod
from bertblocks.training.distillation.hidden import HiddenMethod
from bertblocks.training.distillation.method import Method
from bertblocks.training.distillation.models import load_teacher, make_student
from bertblocks.training.distillation.relations import RelationMethod
from bertblocks.training.distillation.scores import ScoreMethod
from bertblocks.training.distillation.settings import DistillSettings
from bertblocks.training.distillation.task import DistillationTask
from bertblocks.training.distributed import World
from bertblocks.training.loop import ModelSelection, Outcome, Trainer
from bertblocks.training.optimizers import build_adamw, trainable
from bertblocks.training.progress import Progress
from bertblocks.training.run_folder import relative_files
from bertblocks.training.sections import Checkpoints, Evaluation, Run
from bertblocks.training.state import restore
from bertblocks.training.trackers import get_trackers

METHODS: dict[str, type[Method]] = {
    "embeddings": EmbeddingMethod,
    "relations": RelationMethod,
    "hidden": HiddenMethod,
    "scores": ScoreMethod,
}
#: This file completes a run.
RESULTS = "results.json"
METRIC = "held_out_loss"
MAX_HELD_OUT = 1000
#: Texts and rounds with which the speed of both models is measured, in turn.
SPEED_TEXTS, SPEED_ROUNDS = 256, 3


@dataclass(frozen=True)
class Sources:
    """What a run reads."""

    teacher: str | Path
    student: str | Path | None
    layers: int | None
    train: Sequence[str | Path]
    eval: str | Path | None


@dataclass(frozen=True)
class DistillResult:
    """Where the student is, and how it compares with its teacher and with its start."""

    folder: Path
    metric: str = METRIC
    #: The student's scores: its loss on held-out examples and, with an evaluation file, its scores there.
    scores: Scores = field(default_factory=dict)
    #: The same of the student before training, and what the teacher scores on the evaluation file.
    start: Scores = field(default_factory=dict)
    teacher: Scores = field(default_factory=dict)
    #: Parameters and texts per second, of the teacher and the student.
    parameters: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    #: What the run chose where the settings leave it open.
    chosen: dict[str, Any] = field(default_factory=dict)
    #: What a user should know about the result.
    remarks: list[str] = field(default_factory=list)
    #: The signal that stopped the run early, if any. The same call continues the run.
    signal: int | None = None

    @property
    def speedup(self) -> float:
        """How many times as fast as the teacher the student is."""
        return self.speeds["student"] / self.speeds["teacher"]


class DistillRun:
    """Distills a teacher into a student in one folder."""

    def __init__(
        self,
        method: str,
        settings: DistillSettings,
        folder: Path,
        cache: Path,
        world: World,
        console: Console,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.settings, self.folder, self.cache = method, settings, folder, cache
        self.world, self.console, self.on_event = world, console, on_event

    def read(self, sources: Sources) -> None:
        """Reads the files and the models, and raises an error if any of them or the settings are invalid."""
        self.sources = sources
        kind = METHODS[self.name]
        teacher = load_teacher(sources.teacher, kind.task)
        torch.manual_seed(self.settings.seed)
        student = make_student(sources.student, sources.layers, teacher, kind.task)
        self.method = kind(self.settings, teacher, student, self.world.device)
        self.examples = self.method.read(sources.train)
        self.labelled = None if sources.eval is None else self.method.read_evaluation(sources.eval)
        self.hashes = hash_files([*sources.train, sources.eval])

    @flushed_denormals()
    def train(self) -> DistillResult:
        method, settings, world = self.method, self.settings, self.world
        world.run_on_main(lambda: method.prepare(self.examples, self.cache, self.console))
        if not world.is_main:
            method.prepare(self.examples, self.cache, self.console)  # everything is cached by now
        train, held_out = self._split()
        task = DistillationTask(method, train, held_out)
        method.notes.append(
            f"{task.total_steps:,} steps: {settings.epochs:g} epochs of {len(train):,} {method.noun} in batches of "
            f"{task.batch_size}, learning rate {settings.learning_rate:g}; {len(held_out):,} are held out"
        )
        for note in method.notes:
            self.console.print(note, soft_wrap=True)
        world.run_on_main(self._write_facts)
        model: Any = method.model.to(world.device)
        start, teacher = self._score_start(task, model)
        trainer = self._trainer(task, model, start)
        outcome = trainer.train(settings.model_dump())
        if outcome.signal is not None:
            return DistillResult(self.folder, scores=outcome.evaluation, signal=outcome.signal)
        best = outcome.state.best
        assert best is not None
        restore(trainer.checkpoints.path / f"step-{best.step:08d}", model, [], None)
        with trainer.evaluation_weights():
            scores = {**task.evaluate(model), **self._score(method.student_predictor)}
        result = DistillResult(
            self.folder,
            scores=scores,
            start=start,
            teacher=teacher,
            parameters=self._parameters(),
            speeds=self._measure_speeds(held_out),
            chosen=self._chosen(outcome, task),
            remarks=_remarks(scores, start),
        )
        world.run_on_main(lambda: self._write(result))
        return result

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of training and held-out examples. All variants of an example are on the same side."""
        count, variants = len(self.examples), self.method.variants
        held = min(max(1, round(self.settings.held_out * count)), MAX_HELD_OUT, count - 1)
        order = permute(np.arange(count), count, combine("split", self.settings.seed))
        expanded = order[:, None] * variants + np.arange(variants)
        return expanded[held:].ravel(), expanded[:held].ravel()

    def _trainer(self, task: DistillationTask, model: Any, start: Scores) -> Trainer:
        settings, world = self.settings, self.world
        run = Run(
            seed=settings.seed,
            device=settings.device,
            precision=settings.precision,
            gradient_checkpointing=settings.gradient_checkpointing,
            trackers=settings.trackers,
            checkpoints=Checkpoints(every=task.steps_per_evaluation, keep="all" if settings.keep_checkpoints else 1),
            evaluation=Evaluation(every=task.steps_per_evaluation),
        )
        return Trainer(
            model=cast(Any, model),
            task=task,
            optimizers=lambda model: [
                build_adamw(model, trainable(model), settings.learning_rate, weight_decay=settings.weight_decay)
            ],
            run=run,
            folder=self.folder,
            world=world,
            progress=Progress(self.console, is_shown=world.is_main),
            clip=settings.clip,
            selection=ModelSelection(METRIC, higher_is_better=False),
            trackers=get_trackers(settings.trackers, self.folder, self.folder.name, self.on_event)
            if world.is_main
            else [],
            start=start,
        )

    # ------------------------------------------------------------------ scores

    def _score_start(self, task: DistillationTask, model: Any) -> tuple[Scores, Scores]:
        """The scores of the student before training, and those of the teacher."""
        self.console.print("Scoring the start.")
        with torch.no_grad():
            start = {**task.evaluate(model.eval()), **self._score(self.method.student_predictor)}
        return start, self._score(lambda: self.method.teacher_predictor)

    def _score(self, make_predictor: Callable[[], Any]) -> Scores:
        """Scores on the evaluation file, if there is one."""
        return {} if self.labelled is None else self.method.score(make_predictor(), self.labelled)

    def _parameters(self) -> dict[str, int]:
        models = {"teacher": self.method.teacher.model, "student": self.method.student.model}
        return {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}

    def _measure_speeds(self, held_out: np.ndarray) -> dict[str, float]:
        """Texts per second of both models: the best of a few rounds in turn, so that other work disturbs both alike."""
        texts = self.method.inputs([self.examples[index // self.method.variants] for index in held_out])
        texts = (texts * SPEED_TEXTS)[:SPEED_TEXTS]
        predictors = {"teacher": self.method.teacher_predictor, "student": self.method.student_predictor()}
        seconds = dict.fromkeys(predictors, float("inf"))
        for _ in range(SPEED_ROUNDS):
            for name, predictor in predictors.items():
                started = time.perf_counter()
                self.method.run(predictor, texts)
                seconds[name] = min(seconds[name], time.perf_counter() - started)
        return {name: len(texts) / best for name, best in seconds.items()}

    def _chosen(self, outcome: Outcome, task: DistillationTask) -> dict[str, Any]:
        state = outcome.state
        return {
            "method": self.name,
            "student": self.method.student.origin,
            "learning_rate": self.settings.learning_rate,
            "max_length": self.method.max_length,
            "batch_size": task.batch_size,
            "steps": state.step,
            "best_step": None if state.best is None else state.best.step,
            "precision": state.precision,
            "device": self.world.device.type,
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
        }

    # ------------------------------------------------------------------ files

    def _write_facts(self) -> None:
        values = {
            "parameters": self._parameters()["student"],
            "threads": torch.get_num_threads(),
            "notes": self.method.notes,
        }
        write_facts(self.folder, self.folder.name, self.hashes, values)

    def _write(self, result: DistillResult) -> None:
        """Writes the student, its card and the report first, and last the file that completes the run."""
        self.method.save(self.folder)
        write_card(self.folder, self._card(result))
        values = {key: value for key, value in asdict(result).items() if key != "folder"}
        values["baselines"] = {"teacher": result.teacher, "start": result.start}
        write_report_if_possible(replace(read_run(self.folder), results=values, state="finished"))
        write_json(self.folder / RESULTS, {**values, "files": relative_files(self.folder)})
        if not self.settings.keep_checkpoints:
            sizes = CheckpointFolder(self.folder / "checkpoints").remove_finished()
            self.console.print(describe_removed(sizes, "keep_checkpoints=true"), soft_wrap=True)
            write_json(self.folder / RESULTS, {**values, "files": relative_files(self.folder)})

    def _card(self, result: DistillResult) -> Card:
        sources = self.sources
        teacher = Path(str(sources.teacher)).name
        limits = [
            *result.remarks,
            f"It imitates {teacher}, including its errors, and reads at most {self.method.max_length:,} tokens of a "
            "text.",
        ]
        return Card(
            self.folder.name,
            f"A student that was distilled with BertBlocks from `{teacher}` by its {self.name}, on "
            f"{len(self.examples):,} {self.method.noun}. It has {result.parameters['student']:,} parameters (the "
            f"teacher {result.parameters['teacher']:,}) and was {result.speedup:.2f} times as fast.",
            sources=[self.method.teacher.folder],
            relation="finetune",
            data=[Path(str(file)).name for file in (*sources.train, sources.eval) if file is not None],
            scores=result.scores,
            scored_on=Path(str(sources.eval or sources.train[0])).name,
            limitations=limits,
            settings=flatten({**self.settings.model_dump(), **result.chosen}),
        )


def _remarks(scores: Scores, start: Scores) -> list[str]:
    if scores[METRIC] < start[METRIC]:
        return []
    return [
        f"Training did not lower the loss on held-out examples ({start[METRIC]:.4g} before, {scores[METRIC]:.4g} "
        "after): try a lower learning_rate or more texts."
    ]
