"""Fine-tuning: turns a model, a task and files into a model that performs the task."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bertblocks.core.console import make_console
from bertblocks.core.registry import nearest
from bertblocks.core.requirements import require_packages
from bertblocks.core.settings import read_section
from bertblocks.core.storage import read_json, write_json
from bertblocks.reports.model_card import CARD, is_written_by_user
from bertblocks.reports.report import write_report_if_possible
from bertblocks.reports.runs import FACTS, read_run
from bertblocks.tasks.answer.task import AnswerTask
from bertblocks.tasks.base import FineTuneTask, Scores
from bertblocks.tasks.classify.methods import AnyMethodTask
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.multi.task import MultiTask
from bertblocks.tasks.rerank.task import RerankTask
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.tasks.sparse.task import SparseTask
from bertblocks.tasks.tag.task import TagTask
from bertblocks.training.checkpoints import MARKER, CheckpointFolder, describe_removed
from bertblocks.training.data_sets import Sources, name_sources, record_sources
from bertblocks.training.distributed import World, join
from bertblocks.training.finetune_defaults import VERSION
from bertblocks.training.finetune_run import (
    RESULTS,
    Files,
    FinetuneResult,
    FinetuneRun,
    compare_with_start,
    write_results,
)
from bertblocks.training.run_folder import RunFolder, RunFolderError, replace_run

TASKS: dict[str, type[FineTuneTask]] = {
    task.name: task for task in (AnyMethodTask, TagTask, AnswerTask, EmbedTask, RerankTask, SparseTask, MultiTask)
}
#: This file records the arguments of a run.
REQUEST = "finetune.json"
#: The defaults of version 0.1.0 that have changed since.
OLD_DEFAULTS = {"batch_size": 32, "evaluations_per_epoch": 1, "patience": None, "method": "full", "head": "random"}
#: How a run chooses the examples that it holds out.
STRATIFIED = "stratified"


def finetune(
    task: str,
    model: str | Path,
    train: Sources,
    eval: Sources | None = None,
    output: str | Path | None = None,
    *,
    test: Sources | None = None,
    overwrite: bool = False,
    progress: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> FinetuneResult:
    """Fine-tunes `model`, a folder or Hub id of any family, for a task, such as `classify` or `rerank`.

    `train` and `eval` are files in the formats that `bertblocks finetune --help` lists. Without `eval`, some training
    examples are held out for evaluation. `embed` also takes several data sets, as a list of files or as files by name:
    each batch comes from one of them, and the scores are those of each and their mean. The returned model is scored on
    `test`, if given, once and at the end. The folder `output` (default: `runs/TASK-NAME`, after the training file)
    receives the model and its card, `results.json`, `report.html`, `metrics.jsonl` and `predictions.jsonl`. Calling the
    function again continues an interrupted run. `on_event` receives the lines of `metrics.jsonl` as they are written.
    `settings` are the keys of `bertblocks.tasks.settings`.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}{nearest(task, TASKS)}.")
    folder = Path(output) if output is not None else Path("runs") / f"{task}-{_name(train)}"
    known = {} if overwrite else _known_request(folder)
    chosen = _read_settings(task, settings, known)
    require_packages(_packages(TASKS[task], chosen), f"finetune {task}")
    world = join(chosen.device)
    console = make_console(stderr=True, quiet=not (progress and world.is_main))
    files = Files(model, train, eval, test)
    request = _request(task, files, chosen, known)
    work_folder = _work_folder(folder, request, overwrite)
    claim = _run_folder(work_folder, request)
    if work_folder == folder:
        _require_unfinished(folder)
        world.run_on_main(claim.check)
    runs: list[FinetuneResult] = []
    try:
        for seed in range(chosen.seed, chosen.seed + chosen.seeds):
            own_folder = work_folder if chosen.seeds == 1 else work_folder / f"seed-{seed}"
            own_settings = chosen.model_copy(update={"seed": seed})
            run = FinetuneRun(
                TASKS[task](own_settings), own_settings, own_folder, world, console, folder.name, on_event
            )
            run.prepare(files, request["held_out"] == STRATIFIED, request.get("defaults"))
            if not runs:  # write only after all input has been read
                world.run_on_main(claim.claim)
            runs.append(run.train())
            if runs[-1].signal is not None:
                return replace(runs[-1], folder=folder)
        result = runs[0] if len(runs) == 1 else _summarize(runs, work_folder, world)
        if not chosen.keep_checkpoints:
            world.run_on_main(lambda: _remove_checkpoints(runs, result, console))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(f"{work_folder}: the disk is full; free some space and run the same command again.") from error
    finally:
        claim.release()
    if work_folder != folder:
        world.run_on_main(lambda: _replace_previous(folder, work_folder))
    return replace(result, folder=folder)


def _name(train: Sources) -> str:
    """What the folder of a run is named after."""
    return Path(str(train)).stem if isinstance(train, (str, Path)) else "-".join(name_sources(train)).replace("/", "-")


def _remove_checkpoints(runs: Sequence[FinetuneResult], result: FinetuneResult, console: Console) -> None:
    """Removes the training checkpoints of a finished run, of all seeds at once: a restart needs those of each."""
    sizes = [size for run in runs for size in CheckpointFolder(run.folder / "checkpoints").remove_finished()]
    for changed in {written.folder: written for written in (*runs, result)}.values():
        write_results(changed)  # it lists the files of the run
    console.print(describe_removed(sizes, "keep_checkpoints=true"), soft_wrap=True)


def is_finished(
    folder: Path, task: str, model: str | Path, train: Sources, eval: Sources | None, **settings: Any
) -> bool:
    """Whether a folder holds the finished run of these arguments of `finetune`. A different run there is an error."""
    if not (folder / RESULTS).is_file():
        return False
    known = _known_request(folder)
    _run_folder(folder, _request(task, Files(model, train, eval), _read_settings(task, settings, known), known)).check()
    return True


def _known_request(folder: Path) -> dict[str, Any]:
    """The arguments that the run in a folder recorded, if there is one."""
    return read_json(folder / REQUEST) if (folder / REQUEST).is_file() else {}


def _read_settings(task: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> FineTuneSettings:
    """Validates settings. A run that began with the defaults of 0.1.0 goes on with them."""
    schema = TASKS[task].settings_class
    is_old = bool(known) and "defaults" not in known
    before = {key: value for key, value in OLD_DEFAULTS.items() if is_old and key in schema.model_fields}
    return read_section(schema, {**before, **settings}, f"finetune {task}")


def _packages(task: type[FineTuneTask], settings: FineTuneSettings) -> list[str]:
    """The optional packages of a run."""
    packages = [*task.packages, *settings.trackers]
    if settings.lora_rank:
        packages.append("peft")
    if settings.seeds > 1:
        packages.append("scipy")
    return list(dict.fromkeys(packages))


def _request(task: str, files: Files, settings: FineTuneSettings, known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run, as its folder records them.

    A run goes on with the defaults that it began with. A `known` request of version 0.1.0 has fewer keys, and its run
    holds out examples at random.
    """
    sources = {key: None if value is None else record_sources(value) for key, value in vars(files).items()}
    defaults = known.get("defaults", VERSION)
    request = {"task": task, **sources, "held_out": STRATIFIED, "defaults": defaults, **settings.model_dump()}
    if known and "defaults" not in known:
        request = {key: value for key, value in request.items() if key in known or key == "held_out"}
        request["held_out"] = known.get("held_out")
    return request


def _run_folder(folder: Path, request: Mapping[str, Any]) -> RunFolder:
    return RunFolder(
        folder,
        REQUEST,
        request,
        is_free=lambda key: key == "keep_checkpoints",
        has_begun=lambda: (folder / RESULTS).is_file() or any(folder.rglob(MARKER)),
        remedy="choose another output, or use --overwrite (overwrite=True)",
    )


def _require_unfinished(folder: Path) -> None:
    if (folder / RESULTS).is_file():
        raise RunFolderError(f"{folder} holds a finished run; use --overwrite (overwrite=True) to replace it.")


def _work_folder(folder: Path, request: Mapping[str, Any], overwrite: bool) -> Path:
    """Where a run writes: into `folder`, or next to it while the run there has not been replaced yet."""
    if not overwrite or not folder.exists() or not any(folder.iterdir()):
        return folder
    if not (folder / REQUEST).is_file():
        raise RunFolderError(f"{folder} holds files that do not belong to a run; choose another output.")
    for key in ("model", "train", "eval", "test"):
        for source in [] if request[key] is None else name_sources(request[key]).values():
            if Path(source).resolve().is_relative_to(folder.resolve()):
                raise RunFolderError(f"{key} is {source}, which is inside {folder}: it would be overwritten.")
    _previous_files(folder)  # raises an error now instead of after the training
    digest = blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=4).hexdigest()
    return folder.with_name(f".{folder.name}.{digest}.new")


def _replace_previous(folder: Path, work_folder: Path) -> None:
    """Moves a finished run to its final folder and deletes the files that the previous run there wrote.

    A model card that someone wrote or changed stays.
    """
    files = _previous_files(folder)
    cards = {name for name in files if Path(name).name == CARD and is_written_by_user(folder / name)}
    for name in cards:
        (work_folder / name).unlink(missing_ok=True)
    replace_run(folder, work_folder, [name for name in files if name not in cards], last=RESULTS)


def _previous_files(folder: Path) -> list[str]:
    """The files that the finished run in a folder recorded as its own."""
    results = folder / RESULTS
    files = read_json(results).get("files", []) if results.is_file() else []
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise ValueError(f"{results}: files must be a list of names.")
    return files


def _summarize(runs: Sequence[FinetuneResult], folder: Path, world: World) -> FinetuneResult:
    """Means over seeds with 95% confidence intervals (Student's t)."""
    from scipy import stats

    names = list(runs[0].scores)
    table = np.array([[run.scores[name] for name in names] for run in runs])
    width = stats.t.ppf(0.975, len(runs) - 1) * table.std(axis=0, ddof=1) / math.sqrt(len(runs))
    scores = _means([run.scores for run in runs])
    baselines = {name: _means([run.baselines[name] for run in runs]) for name in runs[0].baselines}
    result = FinetuneResult(
        folder=folder,
        metric=runs[0].metric,
        scores=scores,
        runs=[run.scores for run in runs],
        intervals=dict(zip(names, width.tolist(), strict=True)),
        chosen=runs[0].chosen,
        baselines=baselines,
        test=_means([run.test for run in runs]),
        remarks=compare_with_start(runs[0].metric, scores, baselines),
    )

    def write() -> None:
        write_json(folder / FACTS, read_json(runs[0].folder / FACTS))
        write_report_if_possible(replace(read_run(folder), results={"scores": scores}, state="finished"))
        write_results(result)

    world.run_on_main(write)
    return result


def _means(scores: Sequence[Scores]) -> Scores:
    return {name: float(np.mean([found[name] for found in scores])) for name in scores[0]}
