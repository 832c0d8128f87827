"""Records of parquet, Arrow and Feather files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertblocks.core.addresses import is_address
from bertblocks.core.messages import first_line
from bertblocks.text.files import is_compressed, peek, read_whole
from bertblocks.text.records import BadRecord, DataError, Location, Record, Slice, find_key

BATCH_ROWS = 1000


def _import_arrow(source: str) -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{source}: this format needs pyarrow; install it with `pip install pyarrow`.") from error
    return pyarrow


def _damage(pyarrow: Any) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises, here or when values become Python's, such as a date in the year 20,000."""
    return (pyarrow.ArrowException, OSError, ValueError, OverflowError)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch. Offsets that point outside it would read foreign memory, so they are checked first."""
    batch.validate(full=True)
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield from batch.slice(start, BATCH_ROWS).to_pylist()


def cut_parquet(path: Path, slice_bytes: int) -> list[Slice]:
    """Slices of whole row groups; none for a file that cannot be opened, which reading will report."""
    pyarrow = _import_arrow(str(path))
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
    except _damage(pyarrow):
        return []
    slices, start = [], 0
    for stop in range(1, len(groups) + 1):
        if stop == len(groups) or sum(groups[start : stop + 1]) > slice_bytes:
            slices.append(Slice(str(path), start, stop, sum(groups[start:stop])))
            start = stop
    return slices


def count_parquet(path: Path) -> int | None:
    """The rows of a parquet file; None for a file that cannot be opened, which reading will report."""
    pyarrow = _import_arrow(str(path))
    try:
        return pyarrow.parquet.read_metadata(path).num_rows
    except _damage(pyarrow):
        return None


def _random_access(file: IO[bytes], source: str) -> Any:
    """The path of a plain file, the file at an address, or all bytes of a compressed one or of a pipe."""
    if not is_compressed(Path(source)) and (is_address(source) or Path(source).is_file()):
        return file if is_address(source) else source
    return io.BytesIO(read_whole(file, source))


def read_parquet(file: IO[bytes], part: Slice, needed: str | None) -> Iterator[Record | BadRecord]:
    pyarrow = _import_arrow(part.path)
    number = 1
    try:
        with pyarrow.parquet.ParquetFile(_random_access(file, part.path)) as table:
            groups = range(part.start, table.num_row_groups if part.stop is None else part.stop)
            rows = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            number += sum(rows[: part.start])
            names = table.schema_arrow.names
            if needed is not None and find_key(needed, names) is None and find_key(needed.split(".")[0], names) is None:
                reason = f"there is no column {needed!r}; the columns are {', '.join(names)}"
                yield BadRecord(Location(part.path, "row", number), reason, sum(rows[group] for group in groups))
                return
            for batch in table.iter_batches(BATCH_ROWS, row_groups=list(groups)):
                for row in _rows(batch):
                    yield Record(Location(part.path, "row", number), row)
                    number += 1
    except _damage(pyarrow) as error:
        reason = f"the file is not parquet, or is damaged from here on ({first_line(error)})"
        yield BadRecord(Location(part.path, "row", number), reason)


def read_arrow(file: IO[bytes], source: str) -> Iterator[Record | BadRecord]:
    """Rows of an Arrow stream, as `datasets` saves it, or of an Arrow or Feather file."""
    pyarrow = _import_arrow(source)
    number = 1
    try:
        for batch in _batches(pyarrow, file, source):
            for row in _rows(batch):
                yield Record(Location(source, "row", number), row)
                number += 1
    except _damage(pyarrow) as error:
        reason = f"the file is not Arrow, or is damaged from here on ({first_line(error)})"
        yield BadRecord(Location(source, "row", number), reason)


def _batches(pyarrow: Any, file: Any, source: str) -> Iterator[Any]:
    start = peek(file, 6)
    if start == b"ARROW1":
        reader = pyarrow.ipc.open_file(_random_access(file, source))
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    elif start.startswith(b"FEA1"):
        from pyarrow import feather

        yield from feather.read_table(_random_access(file, source)).to_batches()
    else:
        yield from pyarrow.ipc.open_stream(file)
