"""The folder of a job's output, local or at an fsspec address: files that are complete or absent, and locks."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertblocks.core.addresses import is_address, open_filesystem, to_path
from bertblocks.core.messages import InputError
from bertblocks.core.storage import PARTIAL, atomic_file, claim_worker, lock_folder


class BulkError(InputError):
    """The output folder belongs to another job or worker, or is damaged."""


class OutputFolder:
    """Writes whole files. Locks exist only in local folders; elsewhere equal workers waste work but do no harm."""

    def __init__(self, output: str) -> None:
        output = to_path(output)
        self.is_local = not is_address(output)
        self.name = str(Path(output).expanduser().resolve()) if self.is_local else output.rstrip("/")

    def list_names(self) -> set[str]:
        """The names of all complete files."""
        if self.is_local:
            found = [path.name for path in Path(self.name).iterdir()] if Path(self.name).is_dir() else []
        else:
            system, path = open_filesystem(self.name)
            system.invalidate_cache()
            found = [entry.rsplit("/", 1)[-1] for entry in system.ls(path, detail=False)] if system.exists(path) else []
        return {name for name in found if not name.startswith(".")}

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        """A file that appears under its name once all of it is there."""
        if self.is_local:
            with atomic_file(Path(self.name) / name) as file:
                yield file
            return
        system, path = open_filesystem(self.name)
        temporary = f"{path}/.{name}-{os.urandom(4).hex()}{PARTIAL}"
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            system.makedirs(path, exist_ok=True)
            system.put_file(file.name, temporary)
        system.mv(temporary, f"{path}/{name}")

    def write_json(self, name: str, value: Any) -> None:
        with self.write(name) as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""
        try:
            if self.is_local:
                return (Path(self.name) / name).read_bytes()
            system, path = open_filesystem(self.name)
            return system.cat_file(f"{path}/{name}")
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Waits until no other worker plans its work."""
        descriptor = lock_folder(Path(self.name), wait=True) if self.is_local else None
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @contextlib.contextmanager
    def claimed(self, number: int, count: int) -> Iterator[None]:
        """Makes this process worker `number` of `count`; raises an error if another process is."""
        if not self.is_local:
            yield
            return
        try:
            descriptor = claim_worker(Path(self.name), number, count)
        except BlockingIOError as error:
            raise BulkError(f"{self.name}: {error}.") from error
        try:
            yield
        finally:
            os.close(descriptor)
