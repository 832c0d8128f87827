"""Files and folders that are complete or absent: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

#: Temporary names end with this. Only this module creates them, so a run may delete those that a killed process left.
PARTIAL = ".partial"
#: The folder with a lock for each worker of those that share the work on a folder.
WORKERS = ".workers"
_CHUNK = 2**20


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name once all of it is on disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", suffix=PARTIAL, dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(target)
        flush_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def why_unreadable(path: Path) -> str:
    """What is wrong with a path that should be a readable file; the words follow the path in a sentence."""
    if path.is_dir():
        return "is a folder, not a file"
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist"
    if not path.exists():
        return "does not exist"
    return "is not a regular file" if os.access(path, os.R_OK) else "cannot be read: permission denied"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} {why_unreadable(path)}.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes a .jsonl file."""
    with atomic_file(path) as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a .jsonl file; none if it does not exist."""
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line:
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is not valid JSON: {error}.") from error
    return records


def require_new_folder(target: Path) -> None:
    """Raises unless `target` does not exist or is an empty folder."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise FileExistsError(f"{target} exists and is not empty; choose another folder.")


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` once all of it is on disk. An error leaves nothing behind.

    `target` must not exist or must be empty, both at the start and at the end.
    """
    require_new_folder(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=PARTIAL, dir=target.parent))
    try:
        yield scratch
        flush_tree(scratch)
        scratch.chmod(0o755)
        require_new_folder(target)
        if target.exists():
            target.rmdir()
        os.replace(scratch, target)
        flush_folder(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def atomic_entries(folder: Path, last: str = "") -> Iterator[Path]:
    """A folder to fill, whose entries move into `folder` once all of them are on disk, the one named `last` at the end.

    Entries of the same name are replaced. A reader may see some new and some old entries for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".", suffix=PARTIAL, dir=folder))
    try:
        yield scratch
        flush_tree(scratch)
        move_entries(scratch, folder, last)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def move_entries(source: Path, target: Path, last: str = "") -> None:
    """Moves all entries of a folder into another, the one named `last` after the others."""
    for entry in sorted(source.iterdir(), key=lambda path: (path.name == last, path.name)):
        destination = target / entry.name
        if destination.is_dir() and not destination.is_symlink():
            shutil.rmtree(destination)
        os.replace(entry, destination)
    flush_folder(target)


def remove_partial(folder: Path) -> None:
    """Deletes the temporary files that killed processes left in a folder."""
    for entry in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def flush_tree(folder: Path) -> None:
    """Waits until a folder and everything in it is on disk."""
    for path in list_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_folder(path)


def lock_folder(folder: Path, wait: bool = False) -> int:
    """Creates a folder and locks it for this process.

    If another process holds the lock, waits for it or raises `BlockingIOError`.

    Returns a descriptor. The lock ends when it is closed, or with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder."""
    try:
        os.close(lock_folder(folder))
    except BlockingIOError:
        return True
    return False


def claim_worker(folder: Path, number: int, count: int, wait: bool = False) -> int:
    """Makes this process worker `number` of `count` on a folder, until the descriptor that it returns is closed.

    Raises `BlockingIOError` if another process is that worker, unless it shall `wait`, or if workers of another count
    are running. The first worker deletes the temporary files of earlier ones.
    """
    own = folder / WORKERS / f"{number}-of-{count}"
    try:
        descriptor = lock_folder(own, wait)
    except BlockingIOError as error:
        raise BlockingIOError(f"another process is running as worker {number}/{count}") from error
    planning = lock_folder(folder, wait=True)
    try:
        others = [path for path in own.parent.iterdir() if path.is_dir() and path != own and is_locked(path)]
        for other in others:
            if not other.name.endswith(f"-of-{count}"):
                os.close(descriptor)
                raise BlockingIOError(f"worker {other.name.replace('-of-', '/')} is running; wait for it")
        if not others:
            remove_partial(folder)
    finally:
        os.close(planning)
    return descriptor


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
