"""Training checkpoints: folders that are either complete or ignored.

A checkpoint is written under a temporary name, flushed and renamed. A marker with the checksums of its files comes
last. A process that dies at any moment leaves the previous checkpoint intact, and later damage is detected.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bertblocks.core.console import write_bytes
from bertblocks.core.storage import atomic_folder, checksum, list_files, read_json, remove_partial, write_json

MARKER = "complete.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(OSError):
    """A checkpoint could not be written. The previous one is intact."""


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest complete checkpoint, if any, and what is wrong with the newer ones."""

    path: Path | None
    problems: list[str]


class CheckpointFolder:
    """The checkpoints of a run, named by step.

    The newest `keep` stay (None: all), and so do those at multiples of `milestones` and the one at step `protected`.
    """

    def __init__(self, path: Path, keep: int | None = 2, milestones: int | None = None) -> None:
        self.path = path
        self.keep = keep
        self.milestones = milestones

    def write(
        self, step: int, write_files: Callable[[Path], dict[str, str] | None], protected: int | None = None
    ) -> Path:
        """Writes a checkpoint. `write_files` fills the folder that it is given, and returns checksums that it knows."""
        target = self.path / f"step-{step:08d}"
        try:
            self._remove_unfinished()
            remove_checkpoint(target)  # it is damaged, or the run would have resumed from it
            with atomic_folder(target) as scratch:
                checksums = write_files(scratch) or {}
                names = [file.relative_to(scratch).as_posix() for file in list_files(scratch)]
                checksums |= {name: checksum(scratch / name) for name in names if name not in checksums}
            write_json(target / MARKER, {"step": step, "sha256": checksums})
        except OSError as error:
            raise CheckpointError(f"{target} could not be written: {error}. Earlier checkpoints are intact.") from error
        self._remove_old(step, protected)
        return target

    def find_latest(self, is_wanted: Callable[[int], bool] = lambda step: True) -> LatestCheckpoint:
        """The newest complete checkpoint at a wanted step, and the reason why each newer one does not count."""
        problems: list[str] = []
        for step in sorted(filter(is_wanted, self.steps()), reverse=True):
            path = self.path / f"step-{step:08d}"
            problem = verify_checkpoint(path)
            if problem is None:
                return LatestCheckpoint(path, problems)
            problems.append(f"{path} {problem}")
        return LatestCheckpoint(None, problems)

    def steps(self) -> list[int]:
        """The steps that have a folder, complete or not."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def _remove_unfinished(self) -> None:
        """Removes folders that a killed process left behind while writing."""
        remove_partial(self.path)
        for entry in self.path.glob(".step-*.writing"):  # version 0.1.0 wrote these
            shutil.rmtree(entry)

    def _remove_old(self, newest: int, protected: int | None) -> None:
        """Removes old and incomplete checkpoints, and damaged ones from after the step that the run resumed at."""
        complete = []
        for step in self.steps():
            path = self.path / f"step-{step:08d}"
            if step <= newest and (path / MARKER).is_file():
                complete.append(step)
            else:
                remove_checkpoint(path)
        old = complete[: -self.keep] if self.keep is not None else []
        for step in old:
            if not self._is_milestone(step) and step != protected:
                remove_checkpoint(self.path / f"step-{step:08d}")

    def remove_finished(self) -> list[int]:
        """Removes what only a resume needs, all but milestones, unless all are kept. Returns the size of each in bytes.

        Call it when the model is written and the run counts as finished.
        """
        if self.keep is None or not self.path.is_dir():
            return []
        self._remove_unfinished()
        removed = [self.path / f"step-{step:08d}" for step in self.steps() if not self._is_milestone(step)]
        sizes = [sum(file.stat().st_size for file in list_files(path)) for path in removed]
        for path in removed:
            remove_checkpoint(path)
        if not any(self.path.iterdir()):
            self.path.rmdir()
        return sizes

    def _is_milestone(self, step: int) -> bool:
        return self.milestones is not None and step % self.milestones == 0


def describe_removed(sizes: Sequence[int], remedy: str) -> str:
    """Says which checkpoints a finished run has removed, and how to keep them.

    Example:
        >>> describe_removed([2**20, 2**20], "keep=all")
        'Removed 2 training checkpoints (2.0 MiB), which a finished run does not need; keep=all keeps them.'
    """
    what = "1 training checkpoint" if len(sizes) == 1 else f"{len(sizes)} training checkpoints"
    return f"Removed {what} ({write_bytes(sum(sizes))}), which a finished run does not need; {remedy} keeps them."


def verify_checkpoint(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        marker = read_json(path / MARKER)
        checksums = dict(marker["sha256"])
    except FileNotFoundError:
        return f"is incomplete: it has no {MARKER}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is damaged: {MARKER} cannot be read ({error})"
    for name in checksums:
        if not (path / name).is_file():
            return f"is damaged: {name} is missing"
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        found = pool.map(lambda name: checksum(path / name), checksums)
        for (name, expected), actual in zip(checksums.items(), found, strict=True):
            if actual != expected:
                return f"is damaged: {name} has changed since it was written"
    return None


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint, its marker first, so that a partly deleted checkpoint never counts."""
    if path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
