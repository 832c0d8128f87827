"""Records of Excel workbooks."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, Any

from bertblocks.text.files import read_whole
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
    try:
        book = openpyxl.load_workbook(io.BytesIO(read_whole(file, source)), read_only=True, data_only=True)
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{source}: the file is not an .xlsx workbook ({error}).") from error
    rows = ((number, row) for number, row in enumerate(book.worksheets[0].values, start=1) if any(row))
    first = list(islice(rows, HEADER_ROWS + 1))
    if not first:
        return True, iter(())
    has_header = decide_header([["" if cell is None else cell for cell in row] for _, row in first])
    width = len(first[0][1])
    names = [str(cell) for cell in first[0][1]] if has_header else [f"column{number + 1}" for number in range(width)]
    below = chain(first[1:] if has_header else first, rows)
    return has_header, (
        Record(Location(source, "row", number), dict(zip(names, row, strict=False))) for number, row in below
    )
