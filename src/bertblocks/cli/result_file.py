"""Results of the predict commands in a file, resumed where an interrupted run ended."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertblocks.cli.output import to_json_line
from bertblocks.core.log import logger
from bertblocks.core.storage import atomic_file

ENDINGS = (".jsonl", ".csv", ".parquet", ".npy")
#: Records that are converted to parquet at once.
BATCH = 1000


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
        write = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet, ".npy": _write_npy}
        with atomic_file(self.path) as file:
            count = write[self.path.suffix.lower()](self, file)
        self.partial.unlink()
        return count

    def records(self) -> Iterator[dict[str, Any]]:
        with open(self.partial, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)[1]


def _write_jsonl(results: ResultFile, file: IO[bytes]) -> int:
    count = 0
    for record in results.records():
        file.write(to_json_line(record).encode() + b"\n")
        count += 1
    return count


def _write_csv(results: ResultFile, file: IO[bytes]) -> int:
    columns = list(dict.fromkeys(_to_cell(name) for record in results.records() for name in record))
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    count = 0
    for record in results.records():
        writer.writerow({_to_cell(name): _to_cell(value) for name, value in record.items()})
        count += 1
    text.detach()
    return count


def _to_cell(value: Any) -> Any:
    """Text as it is, except halves of surrogate pairs, which cannot be written; lists and objects as JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return to_json_line(value) if isinstance(value, (list, dict)) else value


def _write_parquet(results: ResultFile, file: IO[bytes]) -> int:
    """A column whose values do not have a common type becomes text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install pyarrow, then run the command again.") from error
    import numpy as np

    def batches() -> Iterator[list[dict[str, Any]]]:
        records = results.records()
        while rows := list(itertools.islice(records, BATCH)):
            for row in rows:
                if "embedding" in row:
                    row["embedding"] = np.asarray(row["embedding"], np.float32)
            yield rows

    types: dict[str, Any] = {}
    for rows in batches():
        for name in dict.fromkeys(key for row in rows for key in row):
            types[name] = _common_type(pa, types.get(name, pa.null()), [row.get(name) for row in rows])
    count = 0
    schema = pa.schema([(_to_cell(name), kind) for name, kind in types.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        for rows in batches():
            columns = [_to_array(pa, [row.get(name) for row in rows], kind) for name, kind in types.items()]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            count += len(rows)
    return count


def _common_type(pa: Any, known: Any, values: list[Any]) -> Any:
    try:
        schemas = [pa.schema([("", known)]), pa.schema([("", pa.array(values).type)])]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, ValueError, OverflowError):
        return pa.string()


def _to_array(pa: Any, values: list[Any], kind: Any) -> Any:
    if kind != pa.string():
        return pa.array(values).cast(kind)
    cells = [_to_cell(value) for value in values]
    return pa.array([cell if cell is None or isinstance(cell, str) else to_json_line(cell) for cell in cells])


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
