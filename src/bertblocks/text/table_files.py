"""The one writer of tables: records as .jsonl, .csv or .parquet."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bertblocks.core.console import to_json_line
from bertblocks.core.storage import atomic_file
from bertblocks.text.records import DataError

#: Endings of files that `write_table` writes.
TABLE_FORMATS = (".jsonl", ".csv", ".parquet")
#: Records that are converted to parquet at once.
BATCH = 1000

#: Returns the records from the first on, each time it is called: some formats need to see them twice.
Source = Callable[[], Iterable[Mapping[str, Any]]]


def write_table(path: Path, source: Source, types: Mapping[str, Any] | None = None) -> int:
    """Writes records to a file in the format of its ending, and returns their number.

    `types` names the Arrow types of columns in a parquet file; the others have the common type of their values. The
    file appears once all of it is on disk.
    """
    check_ending(path)
    with atomic_file(path) as file:
        ending = path.suffix.lower()
        if ending == ".parquet":
            return _write_parquet(source, file, types or {})
        return _write_jsonl(source, file) if ending == ".jsonl" else _write_csv(source, file)


def check_ending(path: Path, endings: Iterable[str] = TABLE_FORMATS) -> None:
    """Raises an error unless a file's ending names a format that can be written."""
    if path.suffix.lower() not in endings:
        raise DataError(f"{path} must end in one of {', '.join(endings)}.")


def _write_jsonl(source: Source, file: IO[bytes]) -> int:
    count = 0
    for record in source():
        file.write(to_json_line(record).encode() + b"\n")
        count += 1
    return count


def _write_csv(source: Source, file: IO[bytes]) -> int:
    columns = list(dict.fromkeys(_to_cell(name) for record in source() for name in record))
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    count = 0
    for record in source():
        writer.writerow({_to_cell(name): _to_cell(value) for name, value in record.items()})
        count += 1
    text.detach()
    return count


def _to_cell(value: Any) -> Any:
    """Text as it is, except halves of surrogate pairs, which cannot be written; lists and objects as JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return to_json_line(value) if isinstance(value, (list, dict)) else value


def _write_parquet(source: Source, file: IO[bytes], given: Mapping[str, Any]) -> int:
    """A column whose values do not have a common type becomes text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("a .parquet file needs pyarrow: pip install pyarrow, then run the command again.") from error

    def batches() -> Iterator[list[Mapping[str, Any]]]:
        records = iter(source())
        while rows := list(itertools.islice(records, BATCH)):
            yield rows

    types: dict[str, Any] = {}
    for rows in batches():
        for name in dict.fromkeys(key for row in rows for key in row):
            known = types.get(name, pa.null())
            types[name] = given.get(name) or _common_type(pa, known, [row.get(name) for row in rows])
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
