"""Results of the predict commands in a file, resumed where an interrupted run ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertblocks.cli.output import to_json_line
from bertblocks.core.log import logger
from bertblocks.core.storage import atomic_file
from bertblocks.text.table_files import TABLE_FORMATS, write_table

ENDINGS = (*TABLE_FORMATS, ".npy")


class ResultFile:
    """Collects results as JSON lines in FILE.partial and converts them to FILE once all are there.

    The first line of the partial file holds the `command` with its options, so that only the same command resumes it.
    Every other line holds the number of an input and its record.
    """

    def __init__(self, path: Path, command: dict[str, Any]) -> None:
        if path.suffix.lower() not in ENDINGS:
            raise ValueError(f"--output is {path}; it must end in one of {', '.join(ENDINGS)}.")
        if path.exists():
            raise FileExistsError(f"{path} already exists; delete it, or choose another --output.")
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        #: Inputs that need not be read again.
        self.done = 0
        self._header = to_json_line({"bertblocks": command}).encode() + b"\n"
        self._open_file: IO[bytes] | None = None
        if self.partial.exists():
            self._resume()

    @property
    def _file(self) -> IO[bytes]:
        """The partial file, created by its first use: a command that fails before leaves nothing behind."""
        if self._open_file is None:
            if not self.partial.exists():
                self.partial.parent.mkdir(parents=True, exist_ok=True)
                self.partial.write_bytes(self._header)
            self._open_file = open(self.partial, "ab")  # noqa: SIM115
        return self._open_file

    def _resume(self) -> None:
        with open(self.partial, "r+b") as file:
            if file.readline() != self._header:
                raise ValueError(f"{self.partial} belongs to another command; delete it, or choose another --output.")
            end = file.tell()
            for line in file:
                if not line.endswith(b"\n"):  # the run was killed while writing it
                    break
                try:
                    self.done = json.loads(line)[0] + 1
                except (ValueError, TypeError, LookupError) as error:
                    raise ValueError(f"{self.partial} is damaged; delete it and run the command again.") from error
                end += len(line)
            file.truncate(end)
        logger.info(f"resuming {self.path} after {self.done:,} inputs")

    def add(self, index: int, record: dict[str, Any]) -> None:
        """Adds the record of input number `index`."""
        self._file.write(to_json_line([index, record]).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._open_file is not None:
            self._open_file.close()

    def finish(self) -> int:
        """Writes the file and returns the number of its records."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        if self.path.suffix.lower() == ".npy":
            with atomic_file(self.path) as file:
                count = _write_npy(self, file)
        else:
            count = write_table(self.path, self.records)
        self.partial.unlink()
        return count

    def records(self) -> Iterator[dict[str, Any]]:
        import numpy as np

        with open(self.partial, encoding="utf-8") as file:
            next(file)
            for line in file:
                record = json.loads(line)[1]
                if "embedding" in record and self.path.suffix.lower() == ".parquet":
                    record["embedding"] = np.asarray(record["embedding"], np.float32)
                yield record


def _write_npy(results: ResultFile, file: IO[bytes]) -> int:
    """The embeddings alone, as float32 `[texts, dimensions]`."""
    import numpy as np

    count, width = 0, 0
    for record in results.records():
        if "embedding" not in record:
            raise ValueError("a .npy file holds embeddings; use .jsonl, .csv or .parquet for other results.")
        count, width = count + 1, len(record["embedding"])
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(file, header)
    for record in results.records():
        file.write(np.asarray(record["embedding"], "<f4").tobytes())
    return count
