"""Checkpoints: folders that are complete or do not count.

A checkpoint is written under a temporary name, flushed, and renamed; a marker with the checksums of its files comes
last. So a process that dies at any moment leaves the checkpoint before, and one that is damaged later is noticed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bertblocks.core.storage import checksum, flush_folder, flush_tree, list_files, write_json

MARKER = "complete.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(OSError):
    """A checkpoint that could not be written; the one before it is intact."""


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, and what is wrong with newer ones."""

    path: Path | None
    problems: list[str]


class CheckpointFolder:
    """The checkpoints of a run, by step.

    Of the newest, `keep` stay; so do those at multiples of `milestones`, and the one that `protected` names.
    """

    def __init__(self, path: Path, keep: int = 2, milestones: int | None = None) -> None:
        self.path = path
        self.keep = keep
        self.milestones = milestones

    def write(self, step: int, write_files: Callable[[Path], None], protected: int | None = None) -> Path:
        """A checkpoint whose files `write_files` puts into the folder that it is given."""
        target = self.path / f"step-{step:08d}"
        temporary = self.path / f".step-{step:08d}.writing"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear()
            temporary.mkdir()
            write_files(temporary)
            flush_tree(temporary)
            checksums = {file.relative_to(temporary).as_posix(): checksum(file) for file in list_files(temporary)}
            remove(target)  # damaged, or it would have been continued from
            temporary.rename(target)
            flush_folder(self.path)
            write_json(target / MARKER, {"step": step, "sha256": checksums})
            flush_folder(target)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"{target} could not be written: {error}. Earlier checkpoints are intact.") from error
        self._retire(step, protected)
        return target

    def find(self) -> Found:
        """The newest complete checkpoint; newer ones that are not are named with their reason."""
        problems: list[str] = []
        for step in sorted(self.steps(), reverse=True):
            path = self.path / f"step-{step:08d}"
            problem = check(path)
            if problem is None:
                return Found(path, problems)
            problems.append(f"{path} {problem}")
        return Found(None, problems)

    def steps(self) -> list[int]:
        """Steps that have a folder, complete or not."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def _clear(self) -> None:
        """Removes what a process that died has left."""
        for entry in self.path.glob(".step-*.writing"):
            shutil.rmtree(entry)

    def _retire(self, newest: int, protected: int | None) -> None:
        """Removes old checkpoints, what is left of incomplete ones, and damaged ones that the run has gone behind."""
        complete = []
        for step in self.steps():
            path = self.path / f"step-{step:08d}"
            if step <= newest and (path / MARKER).is_file():
                complete.append(step)
            else:
                remove(path)
        for step in complete[: -self.keep]:
            is_milestone = self.milestones is not None and step % self.milestones == 0
            if not is_milestone and step != protected:
                remove(self.path / f"step-{step:08d}")


def check(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        checksums = dict(marker["sha256"])
    except FileNotFoundError:
        return f"is incomplete: it has no {MARKER}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is damaged: {MARKER} cannot be read ({error})"
    for name, expected in checksums.items():
        file = path / name
        if not file.is_file():
            return f"is damaged: {name} is missing"
        if checksum(file) != expected:
            return f"is damaged: {name} is not what was written"
    return None


def remove(path: Path) -> None:
    """Deletes a checkpoint, marker first: half of one never counts."""
    if path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)
