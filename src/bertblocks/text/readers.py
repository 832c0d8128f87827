"""Reading records out of files of any supported kind, a slice at a time."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

#: What is one document in a text file.
OnePer = Literal["paragraph", "line", "file"]

COMPRESSIONS = (".gz", ".zst")
KINDS = (".txt", ".jsonl", ".csv", ".parquet")
PARQUET_ROWS = 1000
BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class Place:
    """Where a record stands. Lines are counted from `start`, and from the top of the file only when they are named."""

    source: str
    unit: Literal["line", "row", "file"]
    number: int = 1
    start: int = 0

    def __str__(self) -> str:
        if self.unit == "file":
            return self.source
        return f"{self.source} {self.unit} {self.number + _line_ends(self.source, self.start)}"


@lru_cache(maxsize=8)
def _line_ends(path: str, stop: int) -> int:
    """Line ends among the first bytes of a file."""
    count = 0
    if stop:
        with open(path, "rb") as file:
            while stop and (block := file.read(min(2**20, stop))):
                count += block.count(b"\n")
                stop -= len(block)
    return count


@dataclass(frozen=True)
class Record:
    """What stands at a place: named values, or a text by itself."""

    place: Place
    values: dict[str, Any] | str


@dataclass(frozen=True)
class Problem:
    """Why nothing can be made of one record, or of several from a place on."""

    place: Place
    reason: str
    records: int = 1

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Slice:
    """A part of a file: bytes from `start` to `stop` (row groups in a parquet file), or all of it if `stop` is None."""

    path: str
    start: int
    stop: int | None
    size: int


def readable_kind(path: Path) -> str | None:
    """The ending that says what a file is, without that of its compression; None for other files.

    Example:
        >>> readable_kind(Path("a.jsonl.zst")), readable_kind(Path("a.md"))
        ('.jsonl', None)
    """
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in KINDS else None


# ---------------------------------------------------------------------- slices


def cut(path: Path, one_per: OnePer, slice_bytes: int) -> list[Slice]:
    """Slices of about `slice_bytes` between whole records, where a file can be read from its middle; else one slice."""
    size = path.stat().st_size
    if path.suffix == ".parquet":
        return _cut_parquet(path, size, slice_bytes)
    if size <= slice_bytes or not (path.suffix == ".jsonl" or (path.suffix == ".txt" and one_per != "file")):
        return [Slice(str(path), 0, None, size)]
    after_blank = path.suffix == ".txt" and one_per == "paragraph"
    with path.open("rb") as file:
        starts = [_next_record(file, start, after_blank) for start in range(slice_bytes, size, slice_bytes)]
    bounds = sorted({0, *starts, size})
    return [Slice(str(path), start, stop, stop - start) for start, stop in pairwise(bounds)]


def _next_record(file: IO[bytes], position: int, after_blank: bool) -> int:
    """Where the first record begins that follows a line end, or a blank line, at `position` or later."""
    file.seek(position)
    file.readline()  # most likely the rest of one
    while after_blank and file.readline().strip():
        pass
    return file.tell()


def _cut_parquet(path: Path, size: int, slice_bytes: int) -> list[Slice]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            groups = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
    except ArrowInvalid:
        return [Slice(str(path), 0, None, size)]  # reading it will name the problem
    slices, start = [], 0
    for stop in range(1, len(groups) + 1):
        if stop == len(groups) or sum(groups[start : stop + 1]) > slice_bytes:
            slices.append(Slice(str(path), start, stop, sum(groups[start:stop])))
            start = stop
    return slices


# ---------------------------------------------------------------------- reading


def read_slice(one: Slice, column: str, one_per: OnePer) -> Iterator[Record | Problem]:
    """The records of a slice in order. Where a file breaks off is a problem that names the last record before."""
    path = Path(one.path)
    kind = readable_kind(path)
    if kind == ".parquet":
        yield from _read_parquet(path, one, column)
        return
    place = Place(one.path, "file")
    try:
        with _open(path) as file:
            if one.start:
                file.seek(one.start)
            if kind == ".csv":
                records = _read_csv(file, one.path)
            elif kind == ".jsonl":
                records = _read_json_lines(file, one)
            elif one_per == "file":
                records = iter([Record(place, _decode(file.read()))])
            else:
                records = _read_text(file, one, one_per)
            for record in records:
                place = record.place
                yield record
    except OSError as error:
        if path.suffix not in COMPRESSIONS:
            raise
        yield Problem(place, f"the file is damaged from here on ({error})")


def _open(path: Path) -> IO[bytes]:
    if path.suffix not in COMPRESSIONS:
        return path.open("rb")
    import pyarrow

    # unlike Python's own readers it notices a stream that breaks off
    return io.BufferedReader(pyarrow.input_stream(str(path)), BUFFER_BYTES)


def _decode(data: bytes) -> str:
    """Text in which bytes that are no UTF-8 stay visible as surrogates, for the check that all texts go through."""
    return data.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")


def _lines(file: IO[bytes], one: Slice) -> Iterator[tuple[Place, str]]:
    position = one.start
    for number, line in enumerate(file, start=1):
        if one.stop is not None and position >= one.stop:
            return
        position += len(line)
        yield Place(one.path, "line", number, one.start), _decode(line)


def _read_text(file: IO[bytes], one: Slice, one_per: OnePer) -> Iterator[Record]:
    """Blank lines are no records; a paragraph is named by its first line."""
    first: Place | None = None
    paragraph: list[str] = []
    for place, line in _lines(file, one):
        if line.strip() and one_per == "line":
            yield Record(place, line.strip())
        elif line.strip():
            first = first or place
            paragraph.append(line)
        elif first:
            yield Record(first, "".join(paragraph).strip())
            first, paragraph = None, []
    if first:
        yield Record(first, "".join(paragraph).strip())


def _read_json_lines(file: IO[bytes], one: Slice) -> Iterator[Record | Problem]:
    for place, line in _lines(file, one):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Problem(place, f"the line is not JSON ({error})")
            continue
        if isinstance(values, dict):
            yield Record(place, values)
        else:
            yield Problem(place, f"the line holds {type(values).__name__}, not an object with named values")


def _read_csv(file: IO[bytes], path: str) -> Iterator[Record | Problem]:
    """Rows under a header; a row is named by the line on which it ends."""
    csv.field_size_limit(2**31 - 1)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text)
    header: list[str] | None = None
    while True:
        place = Place(path, "line", reader.line_num + 1)
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Problem(place, f"the row cannot be read as csv ({error})")
            continue
        if header is None:
            header = row
        elif row and len(row) != len(header):
            yield Problem(place, f"the row has {len(row)} values, the header {len(header)}")
        elif row:
            yield Record(place, dict(zip(header, row, strict=True)))


def _seekable(file: IO[bytes], path: Path) -> IO[bytes]:
    return io.BytesIO(file.read()) if path.suffix in COMPRESSIONS else file


def _read_parquet(path: Path, one: Slice, column: str) -> Iterator[Record | Problem]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 1
    try:
        with _open(path) as stream, ParquetFile(_seekable(stream, path)) as file:
            groups = range(one.start, file.num_row_groups if one.stop is None else one.stop)
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            number += sum(rows[: one.start])
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                reason = f"there is no column {column!r}, but {names}"
                yield Problem(Place(one.path, "row", number), reason, sum(rows[group] for group in groups))
                return
            for batch in file.iter_batches(PARQUET_ROWS, row_groups=list(groups)):
                for row in batch.to_pylist():
                    yield Record(Place(one.path, "row", number), row)
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        yield Problem(Place(one.path, "row", number), f"the file is damaged from here on ({reason})")
