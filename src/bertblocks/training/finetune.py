"""Fine-tuning: turns a model, a task and files into a model that performs the task."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
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
from bertblocks.core.storage import read_json
from bertblocks.tasks.answer.task import AnswerTask
from bertblocks.tasks.base import FineTuneTask
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.tasks.tag.task import TagTask
from bertblocks.training.checkpoints import MARKER, CheckpointFolder, describe_removed
from bertblocks.training.distributed import World, join
from bertblocks.training.finetune_run import RESULTS, FinetuneResult, FinetuneRun, write_results
from bertblocks.training.run_folder import RunFolder, RunFolderError, replace_run

TASKS: dict[str, type[FineTuneTask]] = {
    "classify": ClassifyTask,
    "tag": TagTask,
    "answer": AnswerTask,
    "embed": EmbedTask,
}
#: This file records the arguments of a run.
REQUEST = "finetune.json"
#: How a run chooses the examples that it holds out.
STRATIFIED = "stratified"


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
) -> FinetuneResult:
    """Fine-tunes `model`, a folder or Hub id of any family, to `classify`, `tag`, `answer` or `embed`.

    `train` and `eval` are files in the formats that `bertblocks finetune --help` lists. Without `eval`, some training
    examples are held out for evaluation. The folder `output` (default: `runs/TASK-NAME`, after the training file)
    receives the model, `results.json`, `report.html` and `metrics.jsonl`. Calling the function again continues an
    interrupted run. `settings` are the keys of `bertblocks.tasks.settings`.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASKS)}{nearest(task, TASKS)}.")
    chosen = read_section(TASKS[task].settings_class, settings, f"finetune {task}")
    folder = Path(output) if output is not None else Path("runs") / f"{task}-{Path(str(train)).stem}"
    require_packages(_packages(TASKS[task], chosen), f"finetune {task}")
    world = join(chosen.device)
    console = make_console(stderr=True, quiet=not (progress and world.is_main))
    request = _request(task, model, train, eval, chosen, None if overwrite else folder)
    if TASKS[task].compares_examples and chosen.batch_size % world.size:
        raise ValueError(
            f"batch_size is {chosen.batch_size}; {task} compares the texts of all {world.size} processes, which need "
            f"equal shares: it must be a multiple of {world.size}."
        )
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
            run = FinetuneRun(TASKS[task](own_settings), own_settings, own_folder, world, console, folder.name)
            run.prepare(model, train, eval, stratify=request["held_out"] == STRATIFIED)
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


def _remove_checkpoints(runs: Sequence[FinetuneResult], result: FinetuneResult, console: Console) -> None:
    """Removes the training checkpoints of a finished run, of all seeds at once: a restart needs those of each."""
    sizes = [size for run in runs for size in CheckpointFolder(run.folder / "checkpoints").remove_finished()]
    for changed in {written.folder: written for written in (*runs, result)}.values():
        write_results(changed)  # it lists the files of the run
    console.print(describe_removed(sizes, "keep_checkpoints=true"), soft_wrap=True)


def is_finished(
    folder: Path, task: str, model: str | Path, train: str | Path, eval: str | Path | None, **settings: Any
) -> bool:
    """Whether a folder holds the finished run of these arguments of `finetune`. A different run there is an error."""
    if not (folder / RESULTS).is_file():
        return False
    chosen = read_section(TASKS[task].settings_class, settings, f"finetune {task}")
    _run_folder(folder, _request(task, model, train, eval, chosen, folder)).check()
    return True


def _packages(task: type[FineTuneTask], settings: FineTuneSettings) -> list[str]:
    """The optional packages of a run."""
    packages = [*task.packages, *settings.trackers]
    if settings.lora_rank:
        packages.append("peft")
    if settings.seeds > 1:
        packages.append("scipy")
    return list(dict.fromkeys(packages))


def _request(
    task: str,
    model: str | Path,
    train: str | Path,
    eval: str | Path | None,
    settings: FineTuneSettings,
    folder: Path | None,
) -> dict[str, Any]:
    """The arguments of a run, as its folder records them.

    A run that version 0.1.0 began in `folder` holds out examples at random, and must go on doing so.
    """
    known = folder / REQUEST if folder is not None else None
    held_out = read_json(known).get("held_out") if known is not None and known.is_file() else STRATIFIED
    files = {"model": str(model), "train": str(train), "eval": None if eval is None else str(eval)}
    return {"task": task, **files, "held_out": held_out, **settings.model_dump()}


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
    for key in ("model", "train", "eval"):
        if request[key] is not None and Path(request[key]).resolve().is_relative_to(folder.resolve()):
            raise RunFolderError(f"{key} is {request[key]}, which is inside {folder}: it would be overwritten.")
    _previous_files(folder)  # raises an error now instead of after the training
    digest = blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=4).hexdigest()
    return folder.with_name(f".{folder.name}.{digest}.new")


def _replace_previous(folder: Path, work_folder: Path) -> None:
    """Moves a finished run to its final folder and deletes the files that the previous run there wrote."""
    replace_run(folder, work_folder, _previous_files(folder), last=RESULTS)


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
    result = FinetuneResult(
        folder=folder,
        metric=runs[0].metric,
        scores=dict(zip(names, table.mean(axis=0).tolist(), strict=True)),
        runs=[run.scores for run in runs],
        intervals=dict(zip(names, width.tolist(), strict=True)),
        chosen=runs[0].chosen,
    )
    world.run_on_main(lambda: write_results(result))
    return result
