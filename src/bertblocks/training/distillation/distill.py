"""`distill`: the entry point of distillation."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.core.console import make_console
from bertblocks.core.registry import nearest
from bertblocks.core.requirements import require_packages
from bertblocks.core.settings import read_section
from bertblocks.training.checkpoints import MARKER
from bertblocks.training.distillation.run import METHODS, RESULTS, DistillResult, DistillRun, Sources
from bertblocks.training.distillation.settings import SETTINGS
from bertblocks.training.distributed import join
from bertblocks.training.run_folder import RunFolder, RunFolderError

#: This file records the arguments of a run.
REQUEST = "distill.json"
#: The folder of teachers' outputs, next to the folders of runs.
CACHE = "teacher-cache"


def distill(
    teacher: str | Path,
    student: str | Path | None = None,
    *,
    train: str | Path | Sequence[str | Path],
    layers: int | None = None,
    method: str = "embeddings",
    eval: str | Path | None = None,
    output: str | Path | None = None,
    cache: str | Path | None = None,
    progress: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> DistillResult:
    """Trains `student` to do what `teacher` does, from plain texts.

    The student is a checkpoint of any family, or a preset or config for new weights, or `layers` of the teacher's own
    layers. `method` is "embeddings", "relations", "hidden" or "scores". `train` are files of texts or, for scores, of
    queries and documents; `eval` is a labelled file on which teacher, start and student are scored. The folder `output`
    (default: `runs/distill-NAME`, after the teacher) receives the student and its card, `results.json`, `report.html`
    and `metrics.jsonl`. Calling the function again continues an interrupted run. The teacher's embeddings and scores
    are kept in the folder `cache` (default: `teacher-cache` next to `output`). `settings` are the keys of
    `bertblocks.training.distillation.settings`.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}{nearest(method, METHODS)}.")
    files = [train] if isinstance(train, (str, Path)) else list(train)
    if not files:
        raise ValueError("train has no files; give at least one.")
    chosen = read_section(SETTINGS[method], settings, f"distill {method}")
    require_packages(list(chosen.trackers), "distill")
    folder = Path(output) if output is not None else Path("runs") / f"distill-{Path(str(teacher)).name}"
    world = join(chosen.device)
    console = make_console(stderr=True, quiet=not (progress and world.is_main))
    sources = Sources(teacher, student, layers, files, eval)
    claim = _run_folder(folder, {"method": method, **_texts(sources), **chosen.model_dump()})
    if (folder / RESULTS).is_file():
        raise RunFolderError(f"{folder} holds a finished run; choose another output.")
    world.run_on_main(claim.check)
    run = DistillRun(method, chosen, folder, Path(cache or folder.parent / CACHE), world, console, on_event)
    run.read(sources)
    try:
        world.run_on_main(claim.claim)  # write only after all input has been read
        return run.train()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(f"{folder}: the disk is full; free some space and run the same command again.") from error
    finally:
        claim.release()


def _texts(sources: Sources) -> dict[str, Any]:
    """The sources as a request records them."""
    values = {key: None if value is None else str(value) for key, value in vars(sources).items()}
    return {**values, "layers": sources.layers, "train": [str(file) for file in sources.train]}


def _run_folder(folder: Path, request: Mapping[str, Any]) -> RunFolder:
    return RunFolder(
        folder,
        REQUEST,
        request,
        is_free=lambda key: key == "keep_checkpoints",
        has_begun=lambda: any(folder.rglob(MARKER)),
        remedy="choose another output",
    )
