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
from bertblocks.text.table_files import TABLE_FORMATS, NpyRows, write_table

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
        #: The numbers of embeddings, and the ranges of int8 once they are known.
        self.precision: Any = command.get("precision", "float32")
        self.ranges: Any = command.get("ranges")
        self._fits_ranges = self.precision == "int8" and self.ranges is None
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

    @property
    def vector_type(self) -> str:
        """The numpy type of embeddings."""
        from bertblocks.tasks.embed.vectors import TYPES

        return TYPES[self.precision]

    def stream_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of the predictor: ranges of int8 follow from all vectors, so these are collected as float32."""
        return options | {"precision": "float32"} if self._fits_ranges else options

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
        if self._fits_ranges:
            self._fit_ranges()
        if self.path.suffix.lower() == ".npy":
            with atomic_file(self.path) as file:
                count = _write_npy(self, file)
        else:
            count = write_table(self.path, self.records)
        self.partial.unlink()
        return count

    def records(self) -> Iterator[dict[str, Any]]:
        with open(self.partial, encoding="utf-8") as file:
            next(file)
            for line in file:
                record = json.loads(line)[1]
                yield record if self._fits_ranges and self.ranges is None else self._convert(record)

    def _convert(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the numbers that the file will have."""
        import numpy as np

        is_parquet = self.path.suffix.lower() == ".parquet"
        if "vectors" in record and is_parquet:
            return record | {"vectors": [np.asarray(vector, np.float32) for vector in record["vectors"]]}
        if "embedding" not in record:
            return record
        from bertblocks.tasks.embed.vectors import quantize

        vector = record["embedding"]
        if self._fits_ranges:
            vector = quantize(np.array(vector, np.float32), "int8", self.ranges).tolist()
        if is_parquet:
            vector = np.asarray(vector, self.vector_type)
        return record | {"embedding": vector}

    def _fit_ranges(self) -> None:
        """Writes the ranges of all vectors to FILE.ranges.npy, for other vectors that are compared with these."""
        import numpy as np

        from bertblocks.tasks.embed.vectors import fit_ranges

        found = None
        for record in self.records():
            own = fit_ranges(np.array([record["embedding"]], np.float32))
            found = own if found is None else fit_ranges(np.concatenate((found, own)))
        if found is None:
            return
        path = self.path.with_suffix(".ranges.npy")
        with atomic_file(path) as file:
            np.save(file, found)
        self.ranges = found
        logger.info(f"the ranges of int8 are in {path}; --ranges {path} uses them for other texts")


def _write_npy(results: ResultFile, file: IO[bytes]) -> int:
    """The embeddings alone, `[texts, dimensions]`, or `[texts, bytes]` for packed bits."""
    size = next((len(record["embedding"]) for record in results.records()), 0)
    with NpyRows(file, results.vector_type, size) as writer:
        writer.write(record["embedding"] for record in results.records())
    return writer.count
