"""One fine-tuning run with one seed: reading files, training, and writing the model and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bertblocks.core.storage import write_json
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.reports.finetuning import write_finetuning_report
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.training.distributed import World
from bertblocks.training.loop import ModelSelection, Trainer
from bertblocks.training.progress import Progress
from bertblocks.training.run_folder import relative_files
from bertblocks.training.sections import Checkpoints, Evaluation, Run
from bertblocks.training.starting_model import add_lora, freeze, layered_optimizer, load_starting_model
from bertblocks.training.state import Snapshot, TrainState, restore
from bertblocks.training.supervised_task import SupervisedTask, split_examples
from bertblocks.training.trackers import get_trackers

#: This file completes a run.
RESULTS = "results.json"


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
    #: What the run chose where the settings leave it open, such as the learning rate and the precision.
    chosen: dict[str, Any] = field(default_factory=dict)
    #: The signal that stopped the run early, if any. The same call continues the run.
    signal: int | None = None


class FinetuneRun:
    """Fine-tunes a model with one seed in one folder."""

    def __init__(
        self, task: FineTuneTask, settings: FineTuneSettings, folder: Path, world: World, console: Console, name: str
    ) -> None:
        self.task, self.settings, self.folder, self.name = task, settings, folder, name
        self.world, self.console = world, console

    def prepare(
        self, source: str | Path, train: str | Path, evaluation: str | Path | None, stratify: bool = True
    ) -> None:
        """Reads the files and the model, and raises an error if any of them or the settings are invalid."""
        settings, task = self.settings, self.task
        examples = task.read(train)
        if evaluation is not None:
            held_out = task.read(evaluation)
        else:
            examples, held_out = self._hold_out(examples, stratify)
        torch.manual_seed(settings.seed)
        start = load_starting_model(source, task)
        model, tokenizer = start.model, start.tokenizer
        task.use_model(model, start.pooling)
        if (settings.max_length or 0) > start.max_length:
            raise ValueError(f"max_length is {settings.max_length}; the model reads at most {start.max_length} tokens.")
        max_length = settings.max_length or min(task.default_length, start.usual_length)
        self.console.print(f"Tokenizing {len(examples):,} examples.")
        features = task.features(examples, TextTokenizer(tokenizer), max_length)
        task.check(held_out, TextTokenizer(tokenizer), max_length)
        for note in task.notes:
            self.console.print(note, soft_wrap=True)
        self.source = source
        self.model = add_lora(model, settings.lora_rank) if settings.lora_rank else model
        freeze(self.model, settings.freeze_layers)
        learning_rate = settings.learning_rate or start.learning_rate
        self.training = SupervisedTask(task, settings, features, held_out, tokenizer, learning_rate, max_length)

    def _hold_out(self, examples: Sequence[Any], stratify: bool) -> tuple[list[Any], list[Any]]:
        settings, task = self.settings, self.task
        groups = [task.group(example) for example in examples]
        strata = [task.stratum(example) if stratify else None for example in examples]
        kept, held_out = split_examples(examples, groups, strata, settings.eval_share, settings.seed)
        task.notes.append(
            f"no evaluation file: {len(held_out):,} of the examples (seed {settings.seed}) are held out for evaluation"
        )
        return kept, held_out

    @flushed_denormals()
    def train(self) -> FinetuneResult:
        settings, task, world, model, training = self.settings, self.task, self.world, self.model, self.training
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
            selection=ModelSelection(task.metric, patience=settings.patience),
            trackers=get_trackers(settings.trackers, self.folder, self.name) if world.is_main else [],
        )
        outcome = trainer.train(settings.model_dump())
        if outcome.signal is not None:
            scores = outcome.evaluation
            return FinetuneResult(self.folder, task.metric, scores, [scores], {}, signal=outcome.signal)
        if outcome.state.best is not None:
            restore(trainer.checkpoints.path / f"step-{outcome.state.best.step:08d}", model, [], trainer.ema)
        with trainer.evaluation_weights():
            evaluated = training.evaluate_fully(model)
            chosen = self._chosen(outcome.state)
            result = FinetuneResult(self.folder, task.metric, evaluated.scores, [evaluated.scores], {}, chosen)
            full_model = self._unsharded_model()
            world.run_on_main(lambda: self._write(full_model, evaluated, result))
        return result

    def _chosen(self, state: TrainState) -> dict[str, Any]:
        return {
            "learning_rate": self.training.peak_learning_rate,
            "max_length": self.training.max_length,
            "planned_steps": self.training.total_steps,
            "steps": state.step,
            "best_step": None if state.best is None else state.best.step,
            "precision": state.precision,
            "device": self.world.device.type,
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
        }

    def _unsharded_model(self) -> nn.Module:
        """The model itself, or a full copy of a sharded model. This is a collective operation."""
        if not isinstance(self.model, FSDPModule):
            return self.model
        weights = Snapshot(self.model, [], None).weights
        fresh = load_starting_model(self.source, self.task).model
        copy = add_lora(fresh, self.settings.lora_rank) if self.settings.lora_rank else fresh
        copy.load_state_dict(weights, strict=False)  # the snapshot holds tied weights once
        return copy

    def _write(self, trained: nn.Module, evaluated: Evaluated, result: FinetuneResult) -> None:
        """Writes the model and the report first, and last the file that completes the run."""
        training = self.training
        training.tokenizer.model_max_length = training.max_length  # users of the model get the length of training
        merge = getattr(trained, "merge_and_unload", None)
        model: Any = merge() if merge is not None else trained
        self.task.save(model, self.folder, training.tokenizer, training.max_length)
        write_finetuning_report(
            self.folder,
            f"Fine-tuning: {self.name}",
            evaluated.scores,
            evaluated.tables,
            evaluated.confusion,
            {**self.settings.model_dump(), "chosen": result.chosen},
            note=". ".join(self.task.notes),
        )
        write_results(result)


def write_results(result: FinetuneResult) -> None:
    values = {key: value for key, value in asdict(result).items() if key != "folder"}
    write_json(result.folder / RESULTS, {**values, "files": relative_files(result.folder)})


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
