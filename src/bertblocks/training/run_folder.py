"""One folder holds one run: who may write into it, and which settings the run has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bertblocks.core.storage import (
    PARTIAL,
    list_files,
    lock_folder,
    move_entries,
    read_json,
    remove_partial,
    write_json,
)


class RunFolderError(ValueError):
    """The folder belongs to another run, to a running process, or to the user."""


class RunFolder:
    """A folder whose file `request_name` records the settings of its run. Without that file it must be empty.

    Keys for which `is_free` is true may change when a run continues. All keys may change while `has_begun` is false.
    `upgrade` brings settings that an earlier version recorded to the form of this one.
    """

    def __init__(
        self,
        path: Path,
        request_name: str,
        request: Mapping[str, Any],
        is_free: Callable[[str], bool] = lambda key: False,
        has_begun: Callable[[], bool] = lambda: True,
        remedy: str = "choose another folder",
        upgrade: Callable[[dict[str, Any]], dict[str, Any]] = lambda request: request,
    ) -> None:
        self.path, self.request_name, self.request = path, request_name, request
        self.is_free, self.has_begun, self.remedy, self.upgrade = is_free, has_begun, remedy, upgrade
        self._lock: int | None = None

    def check(self) -> None:
        """Raises an error if the folder holds another run or files that no run wrote."""
        if not (self.path / self.request_name).is_file():
            foreign = self._foreign_entry()
            if foreign is not None:
                raise RunFolderError(f"{self.path} holds {foreign}, which does not belong to a run; {self.remedy}.")
            return
        if not self.has_begun():
            return
        for key, old, new in differences(self.upgrade(self._read_request()), dict(self.request), self.is_free):
            raise RunFolderError(
                f"{self.path} holds a run with {key} = {old!r}, but {key} is now {new!r}; {self.remedy}."
            )

    def claim(self) -> None:
        """Checks the folder, locks it for this process and records the settings."""
        self.check()
        try:
            self._lock = lock_folder(self.path)
        except BlockingIOError as error:
            raise RunFolderError(
                f"Another process is running in {self.path}; wait for it to end, or {self.remedy}."
            ) from error
        remove_partial(self.path)
        write_json(self.path / self.request_name, dict(self.request))

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _foreign_entry(self) -> str | None:
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; {self.remedy}.")
        names = sorted(entry.name for entry in self.path.iterdir())
        return next((name for name in names if not name.endswith(PARTIAL)), None)

    def _read_request(self) -> dict[str, Any]:
        try:
            return read_json(self.path / self.request_name)
        except ValueError as error:
            raise RunFolderError(f"{str(error).removesuffix('.')}; {self.remedy}.") from error


def differences(
    before: Any, now: Any, is_free: Callable[[str], bool] = lambda key: False, path: str = ""
) -> list[tuple[str, Any, Any]]:
    """Keys that differ between two requests although they must not, with both values.

    Example:
        >>> before, now = {"run": {"seed": 1, "device": "cpu"}}, {"run": {"seed": 2, "device": "cuda"}}
        >>> differences(before, now, lambda key: key == "run.device")
        [('run.seed', 1, 2)]
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            found
            for key in dict.fromkeys([*before, *now])
            for found in differences(before.get(key), now.get(key), is_free, f"{path}.{key}".removeprefix("."))
        ]
    return [] if before == now or is_free(path) else [(path, before, now)]


def replace_run(old: Path, new: Path, files: list[str], last: str) -> None:
    """Deletes the `files` of the finished run in `old` and moves the entries of `new` there, `last` after the others.

    Other files stay. If the process dies halfway, `new` is still complete, and a second call finishes the work.
    """
    (old / last).unlink(missing_ok=True)
    for name in files:
        path = old / name
        if path.resolve().is_relative_to(old.resolve()):
            path.unlink(missing_ok=True)
    for folder in sorted((path for path in old.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    move_entries(new, old, last)
    new.rmdir()


def relative_files(folder: Path) -> list[str]:
    """The relative paths of all files in a folder, to record what a run wrote."""
    return [path.relative_to(folder).as_posix() for path in list_files(folder)]
