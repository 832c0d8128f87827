"""The one reader of every file format: records one by one with their location, from a file, a pipe or a slice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

from bertblocks.text.arrow import cut_parquet, read_arrow, read_parquet
from bertblocks.text.delimited import Dialect, detect_dialect, detect_tsv_quote, read_delimited
from bertblocks.text.files import (
    DAMAGE,
    MAX_RECORD_BYTES,
    BoundedLines,
    RecordTooLongError,
    bom_encoding,
    detect_encoding,
    detect_format,
    format_by_name,
    is_compressed,
    open_file,
    peek,
)
from bertblocks.text.headers import is_header
from bertblocks.text.json_files import read_json_lines, read_json_list
from bertblocks.text.records import BadRecord, Format, Location, ReadOptions, Record, Slice
from bertblocks.text.workbooks import read_workbook

#: What one record of a text file is.
TextUnit = Literal["paragraph", "line", "file"]


@dataclass(frozen=True)
class RecordStream:
    """The records of a file as they are read, and how it is read."""

    path: str
    format: Format
    records: Iterator[Record | BadRecord]
    #: The delimiter, quotes and encoding of a csv or tsv file, in words.
    details: str = ""
    has_header: bool = True


def open_records(
    part: Slice,
    options: ReadOptions,
    unit: TextUnit = "line",
    keep_blank: bool = False,
    strict: bool = True,
    expected: Collection[str] = (),
    needed: str | None = None,
) -> RecordStream:
    """Opens a file, a pipe or a slice of a file.

    `unit` says what a record of a text file is, and `keep_blank` whether blank lines are records. `strict` is that of
    `Dialect`. A first row of a table with one of the `expected` names is a header. A parquet file without the column
    `needed` is one bad record for all of its rows.
    """
    file = open_file(part.path)
    sample = peek(file)
    form = options.format or detect_format(Path(part.path), sample) or "text"
    encoding, details, has_header = options.encoding or "utf-8", "", True
    records: Iterator[Record | BadRecord]

    def decide_header(rows: Sequence[Sequence[Any]]) -> bool:
        return is_header(rows, expected) if options.header is None else options.header

    if form in ("csv", "tsv"):
        encoding = options.encoding or detect_encoding(sample)
        dialect = _choose_dialect(form, sample.decode(encoding, "replace").removeprefix("\ufeff"), options, strict)
        details = _describe(form, dialect, encoding)
        has_header, records = read_delimited(BoundedLines(file, encoding), part.path, dialect, decide_header)
    elif form == "xlsx":
        has_header, records = read_workbook(file, part.path, decide_header)
    elif form == "parquet":
        records = read_parquet(file, part, needed)
    elif form == "arrow":
        records = read_arrow(file, part.path)
    elif form == "json":
        records = read_json_list(file, part.path, encoding)
    elif form == "text" and unit == "file":
        records = _read_document(file, part.path, encoding)
    else:
        if part.start:
            file.seek(part.start)
        lines = BoundedLines(file, encoding, part.start, part.stop)
        records = read_json_lines(lines, part) if form == "jsonl" else _read_text(lines, part, unit, keep_blank)
    return RecordStream(part.path, form, _guard(file, part.path, records), details, has_header)


def _choose_dialect(form: Format, sample: str, options: ReadOptions, strict: bool) -> Dialect:
    quote = "" if options.quote == "none" else options.quote
    if form == "tsv":
        delimiter = options.delimiter or "\t"
        return Dialect(delimiter, detect_tsv_quote(sample, delimiter) if quote is None else quote, strict)
    found = detect_dialect(sample, options.delimiter, quote)
    return Dialect(found.delimiter, found.quote, strict)


def _describe(form: Format, dialect: Dialect, encoding: str) -> str:
    """How a csv or tsv file differs from what is usual."""
    is_usual = (dialect.delimiter, dialect.quote) == ((",", '"') if form == "csv" else ("\t", ""))
    return ", ".join(
        [*([] if is_usual else [str(dialect)]), *([] if encoding == "utf-8" else [f"encoding {encoding}"])]
    )


def _guard(file: IO[bytes], source: str, records: Iterator[Record | BadRecord]) -> Iterator[Record | BadRecord]:
    """Closes the file after its records. Where a compressed file breaks off, a bad record names the last good one."""
    location = Location(source, "file")
    with file:
        try:
            for record in records:
                location = record.location
                yield record
        except DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            yield BadRecord(location, f"the file is damaged from here on ({error})")


def _read_text(lines: BoundedLines, part: Slice, unit: TextUnit, keep_blank: bool) -> Iterator[Record | BadRecord]:
    """Lines or paragraphs; a paragraph is named by its first line. Lines lose their ends, and space around them too
    unless blank lines are records."""
    first: Location | None = None
    paragraph: list[str] = []
    size = 0
    while True:
        location = Location(part.path, "line", lines.number + 1, part.start)
        try:
            line = next(lines, None)
        except RecordTooLongError as error:
            yield BadRecord(location, str(error))
            continue
        if line is not None and unit == "line":
            if keep_blank:
                yield Record(location, line.rstrip("\r\n"))
            elif line.strip():
                yield Record(location, line.strip())
        elif line is not None and line.strip():
            first = first or location
            size += len(line)
            if size <= MAX_RECORD_BYTES:
                paragraph.append(line)
        elif first:
            is_whole = size <= MAX_RECORD_BYTES
            too_long = BadRecord(first, str(RecordTooLongError("paragraph")))
            yield Record(first, "".join(paragraph).strip()) if is_whole else too_long
            first, paragraph, size = None, [], 0
        if line is None:
            return


def _read_document(file: IO[bytes], source: str, encoding: str) -> Iterator[Record | BadRecord]:
    data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        yield BadRecord(Location(source, "file"), str(RecordTooLongError("text")))
    else:
        text = data.decode(encoding, errors="surrogateescape").removeprefix("\ufeff")
        yield Record(Location(source, "file"), text)


# ---------------------------------------------------------------------- slices


def cut(path: Path, unit: TextUnit, slice_bytes: int) -> list[Slice]:
    """Slices of about `slice_bytes` that end between records; one slice if a file cannot be read from its middle."""
    size, form = path.stat().st_size, format_by_name(path)
    whole = [Slice(str(path), 0, None, size)]
    if is_compressed(path):
        return whole
    if form == "parquet":
        return cut_parquet(path, slice_bytes) or whole
    if size <= slice_bytes or not (form == "jsonl" or (form == "text" and unit != "file")):
        return whole
    after_blank = form == "text" and unit == "paragraph"
    with path.open("rb") as file:
        if bom_encoding(file.read(4)) in ("utf-16", "utf-32"):
            return whole
        starts = [_next_record(file, start, after_blank) for start in range(slice_bytes, size, slice_bytes)]
    bounds = sorted({0, *starts, size})
    return [Slice(str(path), start, stop, stop - start) for start, stop in pairwise(bounds)]


def _next_record(file: IO[bytes], position: int, after_blank: bool) -> int:
    """Where the first record begins that follows a line end, or a blank line, at `position` or later."""
    file.seek(position)
    _skip_line(file)  # most likely the rest of one
    while after_blank and _skip_line(file):
        pass
    return file.tell()


def _skip_line(file: IO[bytes]) -> bool:
    """Whether the line that was skipped has text."""
    has_text = False
    while chunk := file.readline(2**20):
        has_text = has_text or bool(chunk.strip())
        if chunk.endswith(b"\n"):
            break
    return has_text
