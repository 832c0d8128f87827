"""What all suites share: their results, the choice of tasks, and fine-tuning that is not repeated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertblocks.core.registry import nearest
from bertblocks.tasks.base import Scores
from bertblocks.text.tables import DataError
from bertblocks.training.finetune import finetune, is_finished


@dataclass(frozen=True)
class SuiteResult:
    """The scores of a task by part, such as split, language or subject, and the task's score in percent."""

    task: str
    parts: dict[str, Scores]
    score: float
    #: Whether the suite's own mean includes the task.
    in_mean: bool = True


def mean_score(results: Sequence[SuiteResult]) -> float | None:
    """The mean over the tasks that count for it, or None if there is none."""
    scores = [result.score for result in results if result.in_mean]
    return sum(scores) / len(scores) if scores else None


def choose(kind: str, wanted: Sequence[str], known: Collection[str]) -> list[str]:
    """The wanted names, or all known ones; an unknown name is an error. `kind` is what they are, as `SWAG task`."""
    for name in wanted:
        if name not in known:
            raise DataError(f"{name!r} is not a {kind}{nearest(name, known)}; there are {', '.join(known)}.")
    return list(wanted or known)


def require_file(paths: Iterable[Path], suite: str) -> Path:
    """The first of the paths that is a file."""
    paths = list(paths)
    for path in paths:
        if path.is_file():
            return path
    others = f" (nor does {', nor '.join(map(str, paths[1:]))})" if paths[1:] else ""
    raise DataError(f"{paths[0]} does not exist{others}; --data must be the folder of {suite}'s files.")


def finetune_once(
    kind: str, model: str | Path, train: str, held_out: str, folder: Path, progress: bool, **settings: Any
) -> Path:
    """Fine-tunes a model, unless the folder already holds the finished run. Returns the folder."""
    if not is_finished(folder, kind, model, train, held_out, **settings):
        done = finetune(kind, model, train, held_out, folder, progress=progress, **settings)
        if done.signal is not None:
            raise KeyboardInterrupt
    return folder
