"""Task data as people have it: tables in csv, tsv, json, jsonl and parquet files, or a `datasets` name."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: What `read_records` opens.
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
#: Names that columns go by in common data sets, best first, by what they hold.
KNOWN_NAMES = {
    "text": [
        *("text", "sentence1", "text1", "premise", "question1", "query", "anchor", "question", "sentence"),
        *("review", "utterance", "comment", "tweet", "content"),
    ],
    "text_pair": ["text_pair", "sentence2", "text2", "hypothesis", "question2", "positive", "passage", "sentence"],
    "negative": ["negative", "hard_negative"],
    "label": ["label", "labels", "category", "class", "intent", "score", "target", "similarity", "sentiment", "stars"],
    "words": ["words", "tokens"],
    "tags": ["tags", "ner_tags", "pos_tags", "labels"],
    "spans": ["spans", "entities"],
    "id": ["id"],
    "question": ["question"],
    "context": ["context", "passage"],
    "answers": ["answers", "answer"],
}
#: One such cell makes a first row a header, whatever the rows below look like; two known names do as well.
HEADER_WORDS = {
    "text",
    "label",
    "labels",
    "category",
    "class",
    "score",
    "target",
    "question",
    "answer",
    "context",
    "id",
}


class DataError(ValueError):
    """Task data that cannot be used; says which file and line, what is there, and what would work."""


@dataclass(frozen=True)
class Records:
    """The rows of a table, each with its place for error messages."""

    source: str
    columns: list[str]
    rows: list[dict[str, Any]]
    #: Where each row begins: a line of the file, or a record number where a file has no lines.
    numbers: list[int]
    unit: str = "line"
    has_header: bool = True
    #: By column, the names of labels in the order that the data gives them.
    label_names: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        return f"{self.source} {self.unit} {self.numbers[index]}"

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    def select(self, indices: Iterable[int]) -> Records:
        """Some of the rows, which keep their places."""
        chosen = list(indices)
        rows, numbers = [self.rows[i] for i in chosen], [self.numbers[i] for i in chosen]
        return replace(self, rows=rows, numbers=numbers)


def read_records(source: str | Path, header: bool | None = None, named: Collection[str] = ()) -> Records:
    """Reads a table; `header` says whether the first row of a csv or tsv file names its columns (None: look).

    A first row that holds one of the columns `named` is a header.
    A `source` that is no file is the name of a dataset for `datasets`, as `NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.csv"
        ...     _ = path.write_text("text,label\\nfine weather,good\\n")
        ...     records = read_records(path)
        >>> records.columns, records.rows[0]["label"], records.numbers
        (['text', 'label'], 'good', [2])
    """
    path = Path(source)
    if not path.is_file():
        return _read_dataset(str(source))
    if path.suffix == ".parquet":
        records = _read_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        records = _read_separated(path, header, named)
    elif path.suffix == ".jsonl":
        records = _from_objects(path, _json_lines(path), "line")
    elif path.suffix == ".json":
        records = _from_objects(path, _json_objects(path), "record")
    else:
        raise DataError(f"{path}: the ending {path.suffix!r} is not one of {', '.join(SUFFIXES)}.")
    if not records.rows:
        raise DataError(f"{path}: the file has no records.")
    return records


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; another encoding is an error that names the line."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8."
        ) from error


# ---------------------------------------------------------------------- csv and tsv


def _read_separated(path: Path, header: bool | None, named: Collection[str]) -> Records:
    numbers: list[int] = []
    cells: list[list[str]] = []
    for number, row in _rows(path, read_text(path)):
        if cells and len(row) != len(cells[0]):
            raise DataError(
                f"{path} line {number}: the row has {len(row)} columns, the first row has {len(cells[0])}: {row!r}."
            )
        numbers.append(number)
        cells.append(row)
    if not cells:
        raise DataError(f"{path}: the file is empty.")
    if header is None:
        header = bool(set(cells[0]) & set(named)) or _looks_like_header(cells)
    if header:
        columns, cells, numbers = cells[0], cells[1:], numbers[1:]
        repeated = sorted({name for name in columns if columns.count(name) > 1})
        if repeated:
            raise DataError(f"{path} line 1: the column {repeated[0]!r} is named twice in the header.")
    else:
        columns = [f"column{index + 1}" for index in range(len(cells[0]))]
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    return Records(str(path), columns, rows, numbers, has_header=header)


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Each row with the line on which it begins; empty lines are passed over."""
    if path.suffix == ".tsv":  # tab-separated files, GLUE's among them, do not quote
        for number, line in enumerate(text.split("\n"), start=1):
            if line := line.removesuffix("\r"):
                yield number, line.split("\t")
        return
    first_line = text.split("\n", 1)[0]
    # spreadsheets of some countries write semicolons
    delimiter = ";" if "," not in first_line and ";" in first_line else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    start = 1
    try:
        for row in reader:
            if row:
                yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path} line {start}: the row cannot be read as csv ({error}).") from error


def _looks_like_header(cells: list[list[str]]) -> bool:
    """A first row of known words, or one of words above a column of numbers."""
    first, rest = cells[0], cells[1:101]
    words = {cell.strip().lower() for cell in first}
    if words & HEADER_WORDS or len(words & {name for names in KNOWN_NAMES.values() for name in names}) > 1:
        return True
    if any(is_number(cell) or not cell.strip() for cell in first) or not rest:
        return False
    return any(all(is_number(row[index]) for row in rest) for index in range(len(first)))


def is_number(value: Any) -> bool:
    """Whether a cell holds a finite number.

    Example:
        >>> is_number("4.5"), is_number("nan"), is_number("four"), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


# ---------------------------------------------------------------------- json, parquet, datasets


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path} line {number}: the line is not JSON ({error}).") from error


def _json_objects(path: Path) -> Iterator[tuple[int, Any]]:
    content = read_json(path)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(
            f"{path}: a .json file must hold a list of objects (or one under 'data'); one a line is .jsonl."
        )
    return enumerate(content, start=1)


def read_json(path: Path) -> Any:
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: the file is empty.")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {error.lineno}: the file is not JSON ({error.msg}).") from error


def _from_objects(path: Path, objects: Iterable[tuple[int, Any]], unit: str) -> Records:
    rows, numbers = [], []
    for number, row in objects:
        if not isinstance(row, dict):
            raise DataError(f"{path} {unit} {number}: {row!r} is not an object with named fields.")
        rows.append(row)
        numbers.append(number)
    # a field may be absent from some rows; whoever needs it there names the row
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Records(str(path), columns, [{name: row.get(name) for name in columns} for row in rows], numbers, unit)


def _read_parquet(path: Path) -> Records:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: the file is not parquet ({error}).") from error
    return _from_objects(path, enumerate(table.to_pylist(), start=1), "record")


def _read_dataset(name: str) -> Records:
    """A dataset by the name that `datasets` knows, or a folder that it saved."""
    if Path(name.split(":")[0]).suffix in SUFFIXES:
        raise DataError(f"{name}: no such file.")
    import datasets

    parts = name.split(":")
    config = parts[1] if len(parts) == 3 else None
    split = parts[-1] if len(parts) > 1 else "train"
    try:
        if Path(parts[0]).is_dir() and (Path(parts[0]) / "state.json").exists():
            table = datasets.load_from_disk(parts[0])
        else:
            table = datasets.load_dataset(parts[0], config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: no such file, and `datasets` does not open it: {reason}") from error
    kinds = {column: getattr(kind, "feature", kind) for column, kind in table.features.items()}
    labels = {column: kind.names for column, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)}
    rows = [row | {column: _label_names(row[column], names) for column, names in labels.items()} for row in table]
    return replace(_from_objects(Path(name), enumerate(rows, start=1), "record"), label_names=labels)


def _label_names(value: Any, names: list[str]) -> Any:
    """Labels by their names in place of their numbers; -1 is how datasets hide the labels of a test set."""
    if isinstance(value, list):
        return [names[one] for one in value]
    return None if value in (None, -1) else names[value]
