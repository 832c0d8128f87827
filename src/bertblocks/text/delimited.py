"""Tables in csv and tsv files, with the delimiter, the quote character and the header detected."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from bertblocks.text.files import MAX_RECORD_BYTES, BoundedLines, RecordTooLongError
from bertblocks.text.headers import HEADER_ROWS
from bertblocks.text.records import BadRecord, DataError, Location, Record

#: In the order in which ties are decided.
DELIMITERS = (",", ";", "\t", "|")
#: Rows that are looked at to detect a dialect.
SAMPLE_ROWS = 50


@dataclass(frozen=True)
class Dialect:
    """How rows are written. An empty `quote` means that quote characters are part of the text.

    A `strict` dialect rejects text next to a quoted cell and a quote that never closes.
    """

    delimiter: str
    quote: str
    strict: bool = True

    def reader(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """Rows of cells; a blank line is an empty row."""
        if not self.quote:
            return map(self._split, lines)
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote, strict=self.strict)

    def _split(self, line: str) -> list[str]:
        line = line.removesuffix("\n").removesuffix("\r")
        return line.split(self.delimiter) if line else []

    def __str__(self) -> str:
        names = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe", '"': "double", "'": "single"}
        quote = f"{names.get(self.quote, self.quote)} quotes" if self.quote else "no quotes"
        return f"delimiter {names.get(self.delimiter, self.delimiter)}, {quote}"


def detect_dialect(sample: str, delimiter: str | None = None, quote: str | None = None) -> Dialect:
    r"""The delimiter and quote under which the sample's rows have the same number of columns, the more the better.

    Example:
        >>> str(detect_dialect("text;label\none, two;a\n")), str(detect_dialect("'a','b'\n'c,d','e'\n"))
        ('delimiter semicolon, double quotes', 'delimiter comma, single quotes')
    """
    best = Dialect(delimiter or ",", '"' if quote is None else quote)
    best_score = (0.0, 0)
    for candidate in [delimiter] if delimiter else DELIMITERS:
        marks = [quote] if quote is not None else ['"', *("'" if _has_single_quotes(sample, candidate) else "")]
        for mark in marks:
            rows, _ = _parse(sample, Dialect(candidate, mark))
            if not rows or len(rows[0]) < 2:
                continue
            score = (sum(len(row) == len(rows[0]) for row in rows) / len(rows), len(rows[0]))
            if score > best_score or (score == best_score and candidate == best.delimiter):
                best, best_score = Dialect(candidate, mark), score
    return best


def detect_tsv_quote(sample: str, delimiter: str) -> str:
    r"""A double quote where cells are certainly quoted, else none: most tab-separated files, GLUE's too, do not quote.

    Cells are quoted if the sample parses under strict rules and a cell spans lines, holds a delimiter or doubles a
    quote inside, or if a whole column is in quotes.

    Example:
        >>> detect_tsv_quote('"so" he said\ta\n', "\t"), detect_tsv_quote('"so ""it"" is"\ta\n', "\t")
        ('', '"')
    """
    plain, _ = _parse(sample, Dialect(delimiter, ""))
    quoted, is_clean = _parse(sample, Dialect(delimiter, '"'))
    if not plain or not is_clean or len({len(row) for row in quoted}) > 1:
        return ""
    has_column = any(all(_is_quoted(row[index]) for row in plain) for index in range(min(map(len, plain))))
    doubles = any(_is_quoted(cell) and '""' in cell[1:-1] for row in plain for cell in row)
    return '"' if has_column or doubles or len({len(row) for row in plain}) > 1 else ""


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _has_single_quotes(sample: str, delimiter: str) -> bool:
    """Whether every line has a cell in single quotes, which apostrophes alone do not give."""
    cell = re.compile(rf"(?:^|{re.escape(delimiter)})'(?:[^']|'')*'(?:{re.escape(delimiter)}|$)")
    lines = [line for line in sample.split("\n")[:SAMPLE_ROWS] if line.strip()]
    return '"' not in sample and all(cell.search(line.removesuffix("\r")) for line in lines)


def _parse(sample: str, dialect: Dialect) -> tuple[list[list[str]], bool]:
    """The first rows of a sample up to an error, and whether there was none."""
    rows: list[list[str]] = []
    try:
        for row in islice(dialect.reader(io.StringIO(sample, newline="\n")), SAMPLE_ROWS):
            if row:
                rows.append(row)
    except csv.Error:
        return rows, False
    return rows, True


def read_delimited(
    lines: BoundedLines, source: str, dialect: Dialect, header: bool | Callable[[Sequence[Sequence[str]]], bool]
) -> tuple[bool, Iterator[Record | BadRecord]]:
    """Whether there is a header, and the rows below it; a row is named by the line on which it begins.

    `header` says whether the first row is one, or decides by the first rows. Columns without a header are `column1`,
    `column2` and so on.
    """
    rows = _rows(lines, source, dialect)
    first = list(islice(rows, HEADER_ROWS + 1))
    cells = [row for _, row in first if isinstance(row, list)]
    if not cells:
        return True, (BadRecord(location, row) for location, row in first if isinstance(row, str))
    has_header = header(cells) if callable(header) else header
    names = cells[0] if has_header else [f"column{number}" for number in range(1, len(cells[0]) + 1)]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None and dialect.strict:
        raise DataError(f"{first[0][0]}: the column {repeated!r} is named twice in the header.")
    return has_header, _named(chain(first, rows), names, has_header)


def _named(
    rows: Iterable[tuple[Location, list[str] | str]], names: list[str], has_header: bool
) -> Iterator[Record | BadRecord]:
    is_first = True
    for location, row in rows:
        if isinstance(row, str):
            yield BadRecord(location, row)
        elif is_first and has_header:
            is_first = False
        elif len(row) != len(names):
            yield BadRecord(
                location, f"the row has {len(row)} columns, the first row has {len(names)}: {str(row)[:200]}"
            )
        else:
            yield Record(location, dict(zip(names, row, strict=True)))


def _rows(lines: BoundedLines, source: str, dialect: Dialect) -> Iterator[tuple[Location, list[str] | str]]:
    """Each row that is not empty, or the reason why it cannot be read."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    reader = dialect.reader(lines)
    while True:
        location = Location(source, "line", lines.number + 1)
        try:
            row = next(reader)
        except StopIteration:
            return
        except RecordTooLongError as error:
            yield location, str(error)
        except csv.Error as error:
            yield location, f"the row cannot be read as csv ({error})"
        else:
            if row:
                yield location, row
