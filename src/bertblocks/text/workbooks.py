"""Records of Excel workbooks."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, Any

from bertblocks.core.messages import first_line
from bertblocks.text.files import MAX_WHOLE_BYTES, read_whole
from bertblocks.text.headers import HEADER_ROWS
from bertblocks.text.records import BadRecord, DataError, Location, Record


def read_workbook(
    file: IO[bytes], source: str, decide_header: Callable[[Sequence[Sequence[Any]]], bool]
) -> tuple[bool, Iterator[Record | BadRecord]]:
    """Whether the first sheet has a header, and its rows below it; empty rows are skipped."""
    try:
        import openpyxl
    except ImportError as error:
        raise DataError(
            f"{source}: reading .xlsx needs openpyxl; install it with `pip install openpyxl`, or save the file as .csv."
        ) from error
    rows = _read_rows(openpyxl, read_whole(file, source), source)
    first = list(islice(rows, HEADER_ROWS + 1))
    if not first:
        return True, iter(())
    has_header = decide_header([["" if cell is None else cell for cell in row] for _, row in first])
    titles = first[0][1] if has_header else [None] * len(first[0][1])
    names = [f"column{number}" if title is None else str(title) for number, title in enumerate(titles, start=1)]
    below = chain(first[1:] if has_header else first, rows)
    return has_header, (
        Record(Location(source, "row", number), dict(zip(names, row, strict=False))) for number, row in below
    )


def _read_rows(openpyxl: Any, content: bytes, source: str) -> Iterator[tuple[int, Sequence[Any]]]:
    """The rows of the first sheet that are not empty, with their numbers."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_WHOLE_BYTES:
                raise DataError(
                    f"{source}: the workbook has more than {MAX_WHOLE_BYTES // 2**20} MiB; save it as .csv."
                )
        book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
        if not book.worksheets:
            raise DataError(f"{source}: the workbook has no sheet with cells.")
        for number, row in enumerate(book.worksheets[0].values, start=1):
            if any(cell is not None for cell in row):
                yield number, row
    except DataError:
        raise
    except Exception as error:  # openpyxl raises errors of every kind for a damaged workbook
        reason = first_line(error)
        raise DataError(f"{source}: the file is not an .xlsx workbook, or it is damaged ({reason}).") from error
