"""Fine-tuning: a model, a task and files in, a model that does the task out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, save_embedder
from bertblocks.core.registry import nearest
from bertblocks.core.settings import read_section
from bertblocks.core.storage import write_json
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, permute
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.tasks.answer.task import AnswerTask
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.tasks.tag.task import TagTask
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from bertblocks.training.amounts import Amount
from bertblocks.training.checkpoints import MARKER
from bertblocks.training.distributed import World, join
from bertblocks.training.finetune_output import report_finetuning, write_model
from bertblocks.training.loop import ModelSelection, Trainer
from bertblocks.training.progress import Progress
from bertblocks.training.run_folder import RunFolder, RunFolderError, relative_files, replace_run
from bertblocks.training.schedules import factor
from bertblocks.training.sections import Checkpoints, Constant, Cosine, Evaluation, Linear, Run
from bertblocks.training.starting_model import add_lora, freeze, layered_optimizer, start_model
from bertblocks.training.state import Snapshot, restore
from bertblocks.training.task import Task
from bertblocks.training.trackers import get_trackers

TASKS: dict[str, type[FineTuneTask]] = {
    "classify": ClassifyTask,
    "tag": TagTask,
    "answer": AnswerTask,
    "embed": EmbedTask,
}
SCHEDULES = {"linear": Linear, "cosine": Cosine, "constant": Constant}
#: What a run was asked for, and how it ended. The second file makes a run complete.
REQUEST, RESULTS = "finetune.json", "results.json"


@dataclass(frozen=True)
class FineTuned:
    """Where the model is, and how good it is on the evaluation examples."""

    folder: Path
    metric: str
    scores: Scores
    #: Of each run, where there were several seeds: `scores` are then their means.
    runs: list[Scores]
    #: Half the width of the 95 % interval of each mean; empty for one run.
    intervals: Scores
    #: What ended the run before its last step, if something did; running it again goes on.
    signal: int | None = None


def finetune(
    task: str,
    model: str | Path,
    train: str | Path,
    eval: str | Path | None = None,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    progress: bool = False,
    **settings: Any,
) -> FineTuned:
    """Fine-tunes `model`, a folder or hub id of any family, to `classify`, `tag`, `answer` or `embed`.

    `train` and `eval` are files as `bertblocks finetune --help` lists them; without `eval` a part of the training
    examples is kept for it. The result is in the folder `output` (by default `runs/TASK-NAME OF THE FILE`): the model,
    `results.json`, `report.html` and `metrics.jsonl`. A run that was interrupted goes on when it is called again.
    `settings` are the keys of `bertblocks.tasks.settings`.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}{nearest(task, TASKS)}.")
    chosen = read_section(TASKS[task].settings_class, settings, f"finetune {task}")
    folder = Path(output) if output is not None else Path("runs") / f"{task}-{Path(str(train)).stem}"
    world = join(chosen.device)
    console = Console(stderr=True, highlight=False, quiet=not (progress and world.is_main))
    request = _request(task, model, train, eval, chosen)
    if task == "embed" and chosen.batch_size % world.size:
        raise ValueError(
            f"batch_size is {chosen.batch_size}; embed compares the texts of all {world.size} processes, each with "
            f"equally many: it must be a multiple of {world.size}."
        )
    place = _choose_place(folder, request, overwrite)
    claim = _run_folder(place, request)
    if place == folder:
        _refuse_finished(folder)
        world.run_on_main(claim.check)
    runs: list[FineTuned] = []
    try:
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            home = place if chosen.seeds == 1 else place / f"seed-{seed}"
            one = _Run(TASKS[task], chosen.model_copy(update={"seed": seed}), home, world, console, folder.name)
            one.prepare(model, train, eval)
            if not runs:  # nothing is written before everything has been read
                world.run_on_main(claim.claim)
            runs.append(one.train())
            if runs[-1].signal is not None:
                return replace(runs[-1], folder=folder)
        result = runs[0] if len(runs) == 1 else _summarize(runs, place, world)
    finally:
        claim.release()
    if place != folder:
        world.run_on_main(lambda: _replace(folder, place))
    return replace(result, folder=folder)


def is_finished(
    folder: Path, task: str, model: str | Path, train: str | Path, eval: str | Path | None, **settings: Any
) -> bool:
    """Whether a folder holds the finished run of these arguments of `finetune`; another run there is an error."""
    if not (folder / RESULTS).is_file():
        return False
    chosen = read_section(TASKS[task].settings_class, settings, f"finetune {task}")
    _run_folder(folder, _request(task, model, train, eval, chosen)).check()
    return True


def _request(
    task: str, model: str | Path, train: str | Path, eval: str | Path | None, settings: FineTuneSettings
) -> dict[str, Any]:
    """What a run was asked for, as its folder keeps it."""
    files = {"model": str(model), "train": str(train), "eval": None if eval is None else str(eval)}
    return {"task": task, **files, **settings.model_dump()}


def _run_folder(folder: Path, request: Mapping[str, Any]) -> RunFolder:
    return RunFolder(
        folder,
        REQUEST,
        request,
        has_begun=lambda: any(folder.rglob(MARKER)),
        remedy="choose another output, or --overwrite (overwrite=True)",
    )


def _refuse_finished(folder: Path) -> None:
    if (folder / RESULTS).is_file():
        raise RunFolderError(f"{folder} holds a finished run; --overwrite (overwrite=True) would replace it.")


def _choose_place(folder: Path, request: Mapping[str, Any], overwrite: bool) -> Path:
    """Where a run works: in `folder`, or next to the run there that it is to replace."""
    if not overwrite or not folder.exists() or not any(folder.iterdir()):
        return folder
    if not (folder / REQUEST).is_file():
        raise RunFolderError(f"{folder} holds files that are not of a run; choose another output.")
    for key in ("model", "train", "eval"):
        if request[key] is not None and Path(request[key]).resolve().is_relative_to(folder.resolve()):
            raise RunFolderError(f"{key} is {request[key]}, which is inside {folder}: it would be overwritten.")
    digest = blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=4).hexdigest()
    return folder.with_name(f".{folder.name}.{digest}.new")


def _replace(folder: Path, place: Path) -> None:
    """Puts a finished run into the place of the one before it, and deletes what that one wrote."""
    results = folder / RESULTS
    before = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    replace_run(folder, place, before.get("files", []), last=RESULTS)


def _summarize(runs: Sequence[FineTuned], folder: Path, world: World) -> FineTuned:
    """Means over seeds, with 95 % intervals by Student's t."""
    from scipy import stats

    names = list(runs[0].scores)
    table = np.array([[run.scores[name] for name in names] for run in runs])
    width = stats.t.ppf(0.975, len(runs) - 1) * table.std(axis=0, ddof=1) / math.sqrt(len(runs))
    result = FineTuned(
        folder=folder,
        metric=runs[0].metric,
        scores=dict(zip(names, table.mean(axis=0).tolist(), strict=True)),
        runs=[run.scores for run in runs],
        intervals=dict(zip(names, width.tolist(), strict=True)),
    )
    world.run_on_main(lambda: _write_results(result))
    return result


def _write_results(result: FineTuned) -> None:
    values = {key: value for key, value in asdict(result).items() if key != "folder"}
    write_json(result.folder / RESULTS, {**values, "files": relative_files(result.folder)})


class _Run:
    """One run with one seed."""

    def __init__(
        self,
        kind: type[FineTuneTask],
        settings: FineTuneSettings,
        folder: Path,
        world: World,
        console: Console,
        name: str,
    ) -> None:
        self.task, self.settings, self.folder, self.name = kind(settings), settings, folder, name
        self.world, self.console = world, console

    def prepare(self, source: str | Path, train: str | Path, evaluation: str | Path | None) -> None:
        """Reads everything; what is wrong with files, settings and model is found here."""
        settings, task = self.settings, self.task
        examples = task.read(train)
        held_out = task.read(evaluation) if evaluation is not None else None
        if held_out is None:
            examples, held_out = _split(examples, [task.group(one) for one in examples], settings)
            task.notes.append(
                f"no file for evaluation: {len(held_out):,} of the examples (seed {settings.seed}) are kept for it"
            )
        torch.manual_seed(settings.seed)
        started = start_model(source, task)
        model, tokenizer = started.model, started.tokenizer
        if isinstance(task, EmbedTask):
            task.pooling = task.settings.pooling or started.pooling
            if model.pooler is not None:
                model.pooler.requires_grad_(False)  # it has no part in embeddings
        if (settings.max_length or 0) > started.longest:
            raise ValueError(f"max_length is {settings.max_length}; the model reads {started.longest} tokens at most.")
        max_length = settings.max_length or min(task.default_length, started.usual_length)
        features = task.features(examples, TextTokenizer(tokenizer), max_length)
        if isinstance(task, AnswerTask):
            task.features(held_out, TextTokenizer(tokenizer), max_length)  # a question too long is found now
        for note in task.notes:
            self.console.print(note, soft_wrap=True)
        self.source = source
        self.model = add_lora(model, settings.lora_rank) if settings.lora_rank else model
        freeze(self.model, settings.freeze_layers)
        rate = settings.learning_rate or started.learning_rate
        self.plan = _Plan(task, settings, features, held_out, tokenizer, rate, max_length)

    @flushed_denormals()
    def train(self) -> FineTuned:
        settings, task, world, model, plan = self.settings, self.task, self.world, self.model, self.plan
        trainer = Trainer(
            model=model,
            task=plan,
            optimizers=lambda one: [layered_optimizer(one, plan.peak, settings.weight_decay, settings.layer_decay)],
            run=_run_section(settings, plan.steps_per_evaluation),
            folder=self.folder,
            world=world,
            progress=Progress(self.console, is_shown=world.is_main),
            clip=settings.clip,
            selection=ModelSelection(task.metric, patience=settings.patience),
            trackers=get_trackers(settings.trackers, self.folder, self.name) if world.is_main else [],
        )
        outcome = trainer.train(settings.model_dump())
        if outcome.signal is not None:
            return FineTuned(self.folder, task.metric, outcome.evaluation, [outcome.evaluation], {}, outcome.signal)
        if outcome.state.best is not None:
            restore(trainer.checkpoints.path / f"step-{outcome.state.best.step:08d}", model, [], trainer.ema)
        with trainer.weights_in_use():
            evaluated = plan.evaluate_fully(model)
            result = FineTuned(self.folder, task.metric, evaluated.scores, [evaluated.scores], {})
            plain = self._in_one_piece()
            world.run_on_main(lambda: self._write(plain, evaluated, result))
        return result

    def _in_one_piece(self) -> nn.Module:
        """The model itself, or for one that processes hold in parts a whole copy; all of them must ask together."""
        if not isinstance(self.model, FSDPModule):
            return self.model
        weights = Snapshot(self.model, [], None).weights
        fresh = start_model(self.source, self.task).model
        copy = add_lora(fresh, self.settings.lora_rank) if self.settings.lora_rank else fresh
        copy.load_state_dict(weights, strict=False)  # tied weights are there once
        return copy

    def _write(self, trained: nn.Module, evaluated: Evaluated, result: FineTuned) -> None:
        """The model first, and last the file that makes the run complete."""
        plan = self.plan
        plan.tokenizer.model_max_length = plan.max_length  # who uses the model sees texts as long as in training
        merge = getattr(trained, "merge_and_unload", None)
        model: Any = merge() if merge is not None else trained
        if isinstance(self.task, EmbedTask):
            settings = EmbeddingSettings(self.task.pooling, plan.max_length)
            save_embedder(model, self.folder, plan.tokenizer, settings)
        else:
            write_model(self.folder, model, plan.tokenizer)
        title = f"Fine-tuning: {self.name}"
        report_finetuning(self.folder, title, evaluated, self.task.notes, self.settings.model_dump())
        _write_results(result)


def _run_section(settings: FineTuneSettings, steps_per_evaluation: int) -> Run:
    """What the training loop is told."""
    return Run(
        seed=settings.seed,
        device=settings.device,
        precision=settings.precision,
        parallel=settings.parallel,
        gradient_checkpointing=settings.gradient_checkpointing,
        ema=settings.ema,
        trackers=settings.trackers,
        checkpoints=Checkpoints(every=steps_per_evaluation, keep=1),
        evaluation=Evaluation(every=steps_per_evaluation),
    )


def _split(examples: Sequence[Any], groups: Sequence[str], settings: FineTuneSettings) -> tuple[list[Any], list[Any]]:
    """Examples to train on and to evaluate on; those of one group stay together."""
    names = list(dict.fromkeys(groups))
    order = permute(np.arange(len(names)), len(names), combine("split", settings.seed))
    count = max(1, round(settings.eval_share * len(names)))
    if count >= len(names):
        raise DataError(f"There are {len(names)} examples, too few to keep some for evaluation; give a file for it.")
    chosen = {names[index] for index in order[:count].tolist()}
    kept = [one for one, group in zip(examples, groups, strict=True) if group not in chosen]
    return kept, [one for one, group in zip(examples, groups, strict=True) if group in chosen]


class _Plan(Task):
    """The task as the training loop sees it: items are features, in an order of each epoch's own."""

    def __init__(
        self,
        task: FineTuneTask,
        settings: FineTuneSettings,
        features: Sequence[Any],
        held_out: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        learning_rate: float,
        max_length: int,
    ) -> None:
        self.task, self.settings, self.items, self.held_out = task, settings, features, held_out
        self.tokenizer, self.max_length = tokenizer, max_length
        self.peak = learning_rate
        epochs = settings.epochs or _default_epochs(len(features))
        # batches are full, whatever the number of processes; texts of embeddings are each other's negatives
        self.size = size = min(settings.batch_size, len(features))
        steps = epochs * len(features) / size
        self.total_steps = max(1, math.floor(steps) if isinstance(task, EmbedTask) else math.ceil(steps - 1e-9))
        self.steps_per_evaluation = max(1, round(len(features) / size) // settings.evaluations_per_epoch)
        kind = SCHEDULES[settings.schedule]
        self.schedule = kind(kind=settings.schedule, warmup=Amount(100 * settings.warmup, "%"))  # type: ignore[arg-type]

    def start(self) -> dict[str, Any]:
        return {"example": 0}

    def take(self, step: int, position: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        first = position["example"]
        last = first + self.size
        epochs, ranks = np.divmod(np.arange(first, last), len(self.items))
        chosen = permute(ranks, len(self.items), combine("examples", self.settings.seed, epochs))
        return [self.items[index] for index in chosen.tolist()], {"example": last}

    def batch(self, step: int, items: Sequence[Any]) -> FlatBatch:
        return self.task.batch(items)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return self.task.losses(model, batch)

    def learning_rate(self, step: int) -> float:
        def measure(amount: Amount) -> float:
            return self.total_steps * amount.value / 100

        return self.peak * factor(self.schedule, step, step + 1, self.total_steps, measure)  # type: ignore[arg-type]

    def micro_batch(self, step: int) -> int | None:
        return self.settings.micro_batch_size

    def describe(self, step: int) -> dict[str, Any]:
        return {"epoch": step * self.size / len(self.items)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.evaluate_fully(model).scores

    def evaluate_fully(self, model: nn.Module) -> Evaluated:
        return self.task.evaluate(self.predictor(model), self.held_out)

    def predictor(self, model: nn.Module) -> Predictor:
        """What users would get, of the model as it is now."""
        inner: Any = model.module if hasattr(model, "module") else model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        return Predictor(inner, self.tokenizer, pooling=self.task.pooling, max_length=self.max_length)


def _default_epochs(examples: int) -> int:
    return 3 if examples >= 50_000 else 4 if examples >= 5_000 else 10
