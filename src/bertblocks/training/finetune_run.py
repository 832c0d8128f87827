"""One fine-tuning run with one seed: reading files, training, and writing the model and its report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.core.environment import hash_files
from bertblocks.core.storage import write_json, write_json_lines
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.reports.model_card import Card, write_card
from bertblocks.reports.page import flatten
from bertblocks.reports.report import write_report_if_possible
from bertblocks.reports.runs import PREDICTIONS, read_run, write_facts
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.bootstrap import bootstrap
from bertblocks.tasks.settings import FineTuneSettings, MixtureSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.training.data_sets import DataSets, Sources, evaluate_sets, name_sources
from bertblocks.training.distributed import World
from bertblocks.training.finetune_defaults import VERSION, choose
from bertblocks.training.loop import ModelSelection, Trainer
from bertblocks.training.progress import Progress
from bertblocks.training.run_folder import relative_files
from bertblocks.training.sections import Checkpoints, Evaluation, Run
from bertblocks.training.starting_model import (
    StartingModel,
    add_lora,
    check_frozen_layers,
    freeze,
    layered_optimizer,
    load_starting_model,
    read_embedder,
    train_used_rows,
)
from bertblocks.training.state import BestEvaluation, Snapshot, TrainState, restore
from bertblocks.training.supervised_task import SupervisedTask, split_examples
from bertblocks.training.trackers import get_trackers

#: This file completes a run.
RESULTS = "results.json"
#: Resamples for the interval of a score.
RESAMPLES = 500


@dataclass(frozen=True)
class Files:
    """What a run reads: a model, and files of examples."""

    model: str | Path
    train: Sources
    eval: Sources | None = None
    test: Sources | None = None

    @property
    def data(self) -> list[str]:
        """All files of examples."""
        given = [sources for sources in (self.train, self.eval, self.test) if sources is not None]
        return [source for sources in given for source in name_sources(sources).values()]


@dataclass(frozen=True)
class FinetuneResult:
    """Where the model is, and its scores on the evaluation examples."""

    folder: Path
    metric: str
    #: The scores of the run, or their means over several seeds.
    scores: Scores
    #: The scores of each seed.
    runs: list[Scores]
    #: Half the width of the 95% confidence interval of each mean; empty for one seed.
    intervals: Scores
    #: The 95% interval of the metric over the evaluation examples, by bootstrap; None for several seeds.
    confidence: tuple[float, float] | None = None
    #: What the run chose where the settings leave it open, such as the learning rate and the precision.
    chosen: dict[str, Any] = field(default_factory=dict)
    #: What can be had without this training, by name: the majority label, a linear probe, the untouched model.
    baselines: dict[str, Scores] = field(default_factory=dict)
    #: The scores on the test file, if there is one. They choose nothing.
    test: Scores = field(default_factory=dict)
    #: What a user should know about the result, such as that it is below a baseline.
    remarks: list[str] = field(default_factory=list)
    #: The signal that stopped the run early, if any. The same call continues the run.
    signal: int | None = None


class FinetuneRun:
    """Fine-tunes a model with one seed in one folder."""

    def __init__(
        self,
        task: FineTuneTask,
        settings: FineTuneSettings,
        folder: Path,
        world: World,
        console: Console,
        name: str,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.task, self.settings, self.folder, self.name = task, settings, folder, name
        self.world, self.console, self.on_event = world, console, on_event

    def prepare(self, files: Files, stratify: bool = True, defaults: int | None = VERSION) -> None:
        """Reads the files and the model, and raises an error if any of them or the settings are invalid."""
        settings, task = self.settings, self.task
        self.source, self.files, self.defaults = files.model, files, defaults
        self.hashes = hash_files(files.data)
        sources = name_sources(files.train)
        if len(sources) > 1 and not isinstance(settings, MixtureSettings):
            raise ValueError(f"train is {', '.join(sources.values())}; {task.name} trains on one data set.")
        train = {name: task.read(source) for name, source in sources.items()}
        if files.eval is not None:
            held_out = self._read_held_out(files.eval)
        else:
            train, held_out = self._hold_out(train, stratify)
        self.test = None if files.test is None else self._read_held_out(files.test)
        examples = [example for own in train.values() for example in own]
        embedder = read_embedder(files.model)
        self.task = task = task.for_examples(examples, embedder.is_sentence_encoder, embedder.pooling)
        torch.manual_seed(settings.seed)
        start = load_starting_model(files.model, task)
        if (settings.max_length or 0) > start.max_length:
            raise ValueError(f"max_length is {settings.max_length}; the model reads at most {start.max_length} tokens.")
        max_length = settings.max_length or min(task.default_length, start.usual_length)
        self.console.print(f"Tokenizing {len(examples):,} examples.")
        tokenizer = TextTokenizer(start.tokenizer)
        sets = DataSets.join({name: task.features(own, tokenizer, max_length) for name, own in train.items()})
        features = sets.items
        task.check([*held_out.items, *(self.test.items if self.test else ())], tokenizer, max_length)
        if task.new_head_note is not None and not start.has_trained_head:
            task.notes.append(task.new_head_note)
        for note in task.notes:
            self.console.print(note, soft_wrap=True)
        is_gentle = (task.starts_from_embeddings and embedder.is_sentence_encoder) or (
            task.starts_from_head and start.has_trained_head
        )
        self.choices = choose(
            settings,
            task.method,
            len(features),
            start.parameters,
            is_gentle,
            embedder.is_sentence_encoder,
            defaults,
        )
        self._check_shares(sets)
        check_frozen_layers(start.model, settings.freeze_layers)
        self.console.print(self.choices.describe(len(features)), soft_wrap=True)
        self.examples, self.start = examples, start
        self.training = SupervisedTask(task, settings, sets, held_out, start.tokenizer, self.choices, max_length)

    def _read_held_out(self, sources: Sources) -> DataSets:
        named = name_sources(sources)
        return DataSets.join({name: self.task.read_held_out(source) for name, source in named.items()})

    def _hold_out(self, sets: Mapping[str, list[Any]], stratify: bool) -> tuple[dict[str, list[Any]], DataSets]:
        """Divides the examples of each data set."""
        settings, task = self.settings, self.task
        kept, held_out = {}, {}
        for name, examples in sets.items():
            groups = [task.group(example) for example in examples]
            strata = [task.stratum(example) if stratify else None for example in examples]
            parts = split_examples(examples, groups, strata, settings.eval_share, settings.seed)
            kept[name], held_out[name] = parts
        joined = DataSets.join(held_out)
        task.notes.append(
            f"no evaluation file: {len(joined.items):,} of the examples (seed {settings.seed}) are held out for "
            "evaluation"
        )
        return kept, joined

    def _check_shares(self, sets: DataSets) -> None:
        """Raises an error if a batch whose texts are compared cannot be shared equally by the processes."""
        for size in sets.sizes if self.task.compares_examples else ():
            batch_size = min(self.choices.batch_size, size)
            if batch_size % self.world.size:
                raise ValueError(
                    f"batch_size is {batch_size}; the texts of all {self.world.size} processes are compared, which "
                    f"need equal shares: it must be a multiple of {self.world.size}."
                )

    @flushed_denormals()
    def train(self) -> FinetuneResult:
        settings, task, world, training = self.settings, self.task, self.world, self.training
        world.run_on_main(self._write_facts)
        start, baselines = self._score_start()
        model = self._trainable(self.start.model)
        trainer = Trainer(
            model=cast(Any, model),
            task=training,
            optimizers=lambda model: [
                layered_optimizer(model, training.peak_learning_rate, settings.weight_decay, settings.layer_decay)
            ],
            run=_run_section(settings, training.steps_per_evaluation),
            folder=self.folder,
            world=world,
            progress=Progress(self.console, is_shown=world.is_main),
            clip=settings.clip,
            selection=ModelSelection(
                training.metric, patience=settings.patience, prefers_later=self.defaults is not None
            ),
            trackers=get_trackers(settings.trackers, self.folder, self.name, self.on_event) if world.is_main else [],
            start=None if start is None else start.scores,
        )
        if start is not None:
            trainer.state.best = BestEvaluation(0, start.scores[training.metric])
        outcome = trainer.train(settings.model_dump())
        if outcome.signal is not None:
            scores = outcome.evaluation
            return FinetuneResult(self.folder, training.metric, scores, [scores], {}, signal=outcome.signal)
        best = outcome.state.best
        with contextlib.ExitStack() as stack:
            if start is not None and best is not None and best.step == 0:
                model, evaluated = self._starting_model(), start
            else:
                if best is not None:
                    restore(trainer.checkpoints.path / f"step-{best.step:08d}", model, [], trainer.ema)
                stack.enter_context(trainer.evaluation_weights())
                evaluated = training.evaluate_fully(model)
            test = {} if self.test is None else evaluate_sets(task, training.predictor(model), self.test).scores
            result = FinetuneResult(
                self.folder,
                training.metric,
                evaluated.scores,
                [evaluated.scores],
                {},
                self._interval(evaluated),
                self._chosen(outcome.state),
                baselines,
                test,
                compare_with_start(training.metric, evaluated.scores, baselines, best is not None and best.step == 0),
            )
            full_model = self._unsharded(model)
            world.run_on_main(lambda: self._write(full_model, evaluated, result))
        return result

    def _write_facts(self) -> None:
        values = {
            "parameters": sum(weight.numel() for weight in self.start.model.parameters()),
            "threads": torch.get_num_threads(),
            "notes": [*self.task.notes, self.choices.describe(len(self.training.features))],
        }
        write_facts(self.folder, self.name, self.hashes, values)

    def _interval(self, evaluated: Evaluated) -> tuple[float, float] | None:
        low, high = bootstrap(evaluated.resample, len(self.training.held_out.items), RESAMPLES)
        return (low, high) if math.isfinite(low + high) else None

    def _score_start(self) -> tuple[Evaluated | None, dict[str, Scores]]:
        """The start as users would get it, if it can do the task at all, and what to compare the result with."""
        self.start.model.to(self.world.device)
        self.console.print("Scoring the start.")
        predictor = self.training.predictor(self.start.model)
        baselines = self.task.baselines(predictor, self.examples, self.training.held_out.items)
        can_do = self._fit_head(self.start)
        if self.defaults is None or not (can_do or self.start.has_trained_head):
            return None, baselines
        evaluated = self.training.evaluate_fully(self.start.model)
        if self.start.has_trained_head:
            baselines = {"untouched": evaluated.scores, **baselines}
        return evaluated, baselines

    def _fit_head(self, start: StartingModel) -> bool:
        is_new = self.defaults is not None and not start.has_trained_head
        return is_new and self.task.fit_head(start.model, self.training.features)

    def _trainable(self, model: BertBlocksPreTrainedModel) -> nn.Module:
        trained = add_lora(model, self.settings.lora_rank) if self.settings.lora_rank else model
        freeze(trained, self.settings.freeze_layers)
        if self.world.size == 1 and self.world.device.type == "cpu":
            train_used_rows(trained)
        return trained

    def _starting_model(self) -> BertBlocksPreTrainedModel:
        """The start once more; the random parts of its head are drawn again."""
        torch.manual_seed(self.settings.seed)
        start = load_starting_model(self.source, self.task)
        start.model.to(self.world.device)
        self._fit_head(start)
        return start.model.eval()

    def _chosen(self, state: TrainState) -> dict[str, Any]:
        return {
            **self.choices.as_dict(),
            "max_length": self.training.max_length,
            "planned_steps": self.training.total_steps,
            "steps": state.step,
            "best_step": None if state.best is None else state.best.step,
            "precision": state.precision,
            "device": self.world.device.type,
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
        }

    def _unsharded(self, model: nn.Module) -> nn.Module:
        """The model itself, or a full copy of a sharded model. This is a collective operation."""
        if not isinstance(model, FSDPModule):
            return model
        weights = Snapshot(model, [], None).weights
        copy = self._trainable(load_starting_model(self.source, self.task).model)
        copy.load_state_dict(weights, strict=False)  # the snapshot holds tied weights once
        return copy

    def _write(self, trained: nn.Module, evaluated: Evaluated, result: FinetuneResult) -> None:
        """Writes the model, its card and the report first, and last the file that completes the run."""
        training = self.training
        training.tokenizer.model_max_length = training.max_length  # users of the model get the length of training
        merge = getattr(trained, "merge_and_unload", None)
        model: Any = merge() if merge is not None else trained
        self.task.save(model, self.folder, training.tokenizer, training.max_length)
        write_json_lines(self.folder / PREDICTIONS, evaluated.predictions)
        write_card(self.folder, self._card(result))
        run = replace(read_run(self.folder), results=_values(result), state="finished")
        write_report_if_possible(run)
        write_results(result)

    def _card(self, result: FinetuneResult) -> Card:
        files = self.files
        data = files.data
        scored_on = name_sources((files.test if result.test else None) or files.eval or files.train).values()
        part = "" if files.eval or result.test else f", of which a share of {self.settings.eval_share:g} was held out"
        limits = [
            *result.remarks,
            f"It reads at most {self.training.max_length:,} tokens of a text at a time.",
        ]
        if not result.test:
            limits.append("The evaluation examples chose the best checkpoint, so their scores are slightly optimistic.")
        return Card(
            self.name,
            f"{self.task.noun} that was fine-tuned with BertBlocks from `{Path(str(self.source)).name}`, on "
            f"{len(self.examples) + len(self.training.held_out.items) * bool(part):,} examples{part}.",
            sources=[find_checkpoint(self.source)],
            relation="finetune",
            data=[Path(name).name for name in data],
            datasets=[name.partition(":")[0] for name in data if name not in self.hashes],
            scores=result.test or result.scores,
            scored_on=", ".join(Path(name).name for name in scored_on),
            limitations=limits,
            settings=flatten({**self.settings.model_dump(), **result.chosen}),
        )


def compare_with_start(
    metric: str, scores: Scores, baselines: Mapping[str, Scores], is_start: bool = False
) -> list[str]:
    """What to say if the returned model is the start, or is worse than a baseline.

    Example:
        >>> compare_with_start("accuracy", {"accuracy": 0.6}, {"majority": {"accuracy": 0.7}})[0][:53]
        'The accuracy of 0.6 is below that of majority (0.7): '
    """
    value, remarks = scores[metric], []
    better = {name: found[metric] for name, found in baselines.items() if found[metric] > value}
    if is_start:
        remarks.append(f"Training did not improve the {metric} of {value:.4g}, so the start was saved")
    if better:
        named = " and ".join(f"{name} ({found:.4g})" for name, found in better.items())
        remarks.append(f"The {metric} of {value:.4g} is below that of {named}")
    return [f"{remark}: try more examples, a lower learning_rate, other seeds or another model." for remark in remarks]


def write_results(result: FinetuneResult) -> None:
    write_json(result.folder / RESULTS, {**_values(result), "files": relative_files(result.folder)})


def _values(result: FinetuneResult) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if key != "folder"}


def _run_section(settings: FineTuneSettings, steps_per_evaluation: int) -> Run:
    """The settings of the training loop."""
    return Run(
        seed=settings.seed,
        device=settings.device,
        precision=settings.precision,
        parallel=settings.parallel,
        gradient_checkpointing=settings.gradient_checkpointing,
        ema=settings.ema,
        trackers=settings.trackers,
        checkpoints=Checkpoints(every=steps_per_evaluation, keep="all" if settings.keep_checkpoints else 1),
        evaluation=Evaluation(every=steps_per_evaluation),
    )
