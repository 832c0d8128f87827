"""The one writer of tables: records as .jsonl, .csv or .parquet, and vectors as .npy."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        import pyarrow as pa  # noqa: F401
    except ImportError as error:
        raise DataError("a .parquet file needs pyarrow: pip install pyarrow, then run the command again.") from error

    def batches() -> Iterator[list[Mapping[str, Any]]]:
        records = iter(source())
        while rows := list(itertools.islice(records, BATCH)):
            yield rows

    types: dict[str, Any] = {}
    for rows in batches():
        types = common_types(rows, types, given)
    with ParquetRows(file, types) as writer:
        for rows in batches():
            writer.write(rows)
        return writer.count


class ParquetRows:
    """Writes records to a parquet file, a row group at each call; equal records give equal bytes.

    `types` are Arrow's, by column. A column of text takes any value: those that are not text become JSON.
    """

    def __init__(self, file: IO[bytes], types: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.types = types
        self.schema = pa.schema([(_to_cell(name), kind) for name, kind in types.items()])
        self.count = 0
        self._writer = parquet.ParquetWriter(file, self.schema)

    def __enter__(self) -> ParquetRows:
        return self

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow as pa

        columns = [to_array([record.get(name) for record in records], kind) for name, kind in self.types.items()]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        self.count += len(records)

    def __exit__(self, *error: object) -> None:
        self._writer.close()


class NpyRows:
    """Writes vectors to an .npy file `[vectors, size]` whose number of rows is known at the end."""

    def __init__(self, file: IO[bytes], dtype: str, size: int) -> None:
        import numpy as np

        self._file, self._dtype, self._size = file, np.dtype(dtype), size
        self.count = 0
        self._write_header()

    def _write_header(self) -> None:
        import numpy as np

        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count, self._size)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> NpyRows:
        return self

    def write(self, vectors: Iterable[Any]) -> None:
        import numpy as np

        for vector in vectors:
            self._file.write(np.asarray(vector, self._dtype).tobytes())
            self.count += 1

    def __exit__(self, *error: object) -> None:
        self._file.seek(0)
        self._write_header()  # numpy leaves room for any number of rows
        self._file.seek(0, io.SEEK_END)


def common_types(
    records: Sequence[Mapping[str, Any]], known: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The Arrow types of the columns of records: those `given`, else the common type of the values and the one `known`.

    Values without a common type are text.
    """
    import pyarrow as pa

    types = dict(known)
    for name in dict.fromkeys(key for record in records for key in record):
        values = [record.get(name) for record in records]
        types[name] = given.get(name) or _common_type(pa, types.get(name, pa.null()), values)
    return types


def _common_type(pa: Any, known: Any, values: list[Any]) -> Any:
    try:
        schemas = [pa.schema([("", known)]), pa.schema([("", pa.array(values).type)])]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowException, ValueError, OverflowError):
        return pa.string()


def to_array(values: Sequence[Any], kind: Any) -> Any:
    """Values as an Arrow array of a type."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind) and values and all(hasattr(value, "dtype") for value in values):
        import numpy as np

        return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(values), kind.value_type), type=kind)
    if kind != pa.string():
        return pa.array(values, kind)
    cells = [_to_cell(value) for value in values]
    return pa.array([cell if cell is None or isinstance(cell, str) else to_json_line(cell) for cell in cells])
