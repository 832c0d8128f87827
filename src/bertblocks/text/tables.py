"""Task data: tables in files of every format, or a dataset of the `datasets` library."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertblocks.core.storage import why_unreadable
from bertblocks.text.files import ENDINGS, bad_characters, find_files, format_by_name
from bertblocks.text.hub_datasets import load_dataset
from bertblocks.text.readers import open_records
from bertblocks.text.records import BadRecord, DataError, ReadOptions, Slice, get_value

TABLE_ENDINGS = [ending for ending, name in ENDINGS.items() if name != "text"]


@dataclass(frozen=True)
class Records:
    """The rows of a table, each with its location for error messages."""

    source: str
    columns: list[str]
    rows: list[dict[str, Any]]
    #: The line on which each row begins, or its number where a file has no lines.
    numbers: list[int]
    unit: str = "line"
    has_header: bool = True
    #: By column, the names of labels in the order that the data gives them.
    label_names: dict[str, list[str]] = field(default_factory=dict)
    #: The file of each row, where the table has several.
    files: list[str] = field(default_factory=list)
    #: How the file was read, in words.
    details: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        source = self.files[index] if self.files else self.source
        return f"{source} {self.unit} {self.numbers[index]}"

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    def only(self, columns: list[str]) -> Records:
        """The table as if it had these columns alone."""
        return replace(self, columns=columns)

    def add_nested(self, name: str) -> bool:
        """Adds the column `a.b` with key `b` of the objects in column `a`; False if no row has one."""
        values = [_get_nested(row, name) for row in self.rows]
        if all(value is None for value in values):
            return False
        for row, value in zip(self.rows, values, strict=True):
            row[name] = value
        self.columns.append(name)
        return True


def _get_nested(row: dict[str, Any], name: str) -> Any:
    try:
        return get_value(row, name)
    except KeyError:
        return None


def read_records(source: str | Path, options: ReadOptions | None = None, named: Collection[str] = ()) -> Records:
    """Reads a table from a file or from all files that match a glob pattern.

    A first row with one of the columns `named` is a header. A `source` that is not a file names a dataset, see
    `load_dataset`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.csv"
        ...     _ = path.write_text("text,label\\nfine weather,good\\n")
        ...     records = read_records(path)
        >>> records.columns, records.rows[0]["label"], records.numbers
        (['text', 'label'], 'good', [2])
    """
    path = Path(source).expanduser()
    if path.is_dir() or not (path.exists() or glob.has_magic(str(path))):
        return _read_dataset(str(source))
    tables = [_read_file(file, options or ReadOptions(), named) for file in find_files([path])]
    return tables[0] if len(tables) == 1 else _join(str(source), tables)


def _read_file(path: Path, options: ReadOptions, named: Collection[str]) -> Records:
    stream = open_records(Slice(str(path)), options, expected=named)
    if stream.format == "text":
        raise DataError(f"{path}: the ending {path.suffix!r} is not one of {', '.join(TABLE_ENDINGS)}.")
    rows, numbers, unit = [], [], "line"
    for record in stream.records:
        if isinstance(record, BadRecord):
            raise DataError(f"{record}.")
        if not isinstance(record.values, dict):
            raise DataError(f"{record.location}: {record.values[:100]!r} is not an object with named fields.")
        if problem := _find_bad_characters(record.values.values()):
            raise DataError(f"{record.location}: {problem}; save the file as UTF-8.")
        rows.append(record.values)
        numbers.append(record.location.number)
        unit = record.location.unit
    if not rows:
        is_empty = path.is_file() and path.stat().st_size == 0
        raise DataError(f"{path}: the file {'is empty' if is_empty else 'has no records'}.")
    return _make_records(str(path), rows, numbers, unit, has_header=stream.has_header, details=stream.details)


def _find_bad_characters(values: Iterable[Any]) -> str | None:
    for value in values:
        if isinstance(value, str):
            problem = None if value.isascii() else bad_characters(value)
        elif isinstance(value, (list, dict)):
            problem = _find_bad_characters(value.values() if isinstance(value, dict) else value)
        else:
            continue
        if problem:
            return problem
    return None


def _make_records(source: str, rows: list[dict[str, Any]], numbers: list[int], unit: str, **options: Any) -> Records:
    # a field may be absent from some rows; whoever needs it there names the row
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Records(
        source, columns, [{name: row.get(name) for name in columns} for row in rows], numbers, unit, **options
    )


def _join(source: str, tables: list[Records]) -> Records:
    for table in tables:
        if (table.has_header, table.unit) != (tables[0].has_header, tables[0].unit):
            raise DataError(f"{table.source} and {tables[0].source} differ in format or header; convert one of them.")
    rows = [row for table in tables for row in table.rows]
    numbers = [number for table in tables for number in table.numbers]
    files = [table.source for table in tables for _ in table.rows]
    first = tables[0]
    return _make_records(
        source, rows, numbers, first.unit, has_header=first.has_header, files=files, details=first.details
    )


def _read_dataset(name: str) -> Records:
    path = Path(name.split(":")[0])
    if format_by_name(path) is not None and not path.is_dir():
        raise DataError(f"{name}: {why_unreadable(path) if path.is_symlink() else 'no such file'}.")
    table = load_dataset(name)
    import datasets

    kinds = {column: getattr(kind, "feature", kind) for column, kind in table.features.items()}
    labels = {column: kind.names for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)}
    rows = [row | {column: _label_names(row[column], names) for column, names in labels.items()} for row in table]
    if not rows:
        raise DataError(f"{name}: the dataset has no records.")
    return _make_records(name, rows, list(range(1, len(rows) + 1)), "record", label_names=labels)


def _label_names(value: Any, names: list[str]) -> Any:
    """Labels by name instead of number; -1 is how datasets hide the labels of a test set."""
    if isinstance(value, list):
        return [names[number] for number in value]
    return None if value in (None, -1) else names[value]
