"""Lines of a file or of standard input as they arrive."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from bertblocks.text.files import BoundedLines, RecordTooLongError, bad_characters, is_compressed, open_file
from bertblocks.text.records import DataError

_BLOCK = 2**16


class Lines:
    """The lines of a UTF-8 file, without their ends; those of standard input if the path is None.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "two.txt"
        >>> _ = path.write_text("one\\ntwo\\n")
        >>> list(Lines(path)), Lines(path).count()
        (['one', 'two'], 2)
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        name = "standard input" if self.path is None else str(self.path)
        # sys.stdin waits until a whole block has arrived
        file = io.FileIO(sys.stdin.fileno(), closefd=False) if self.path is None else open_file(self.path)
        with file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, _BLOCK) as stream:
            lines = BoundedLines(stream)
            while True:
                try:
                    line = next(lines, None)
                except RecordTooLongError as error:
                    raise DataError(f"{name} line {lines.number}: {error}.") from error
                if line is None:
                    return
                problem = None if line.isascii() else bad_characters(line)
                if problem:
                    raise DataError(f"{name} line {lines.number}: {problem}.")
                yield line.rstrip("\r\n")

    def count(self) -> int | None:
        """The number of lines; None where counting would use them up or mean decompressing the file."""
        if self.path is None or not self.path.is_file() or is_compressed(self.path):
            return None
        lines, last = 0, b"\n"
        with open(self.path, "rb") as file:
            while block := file.read(_BLOCK):
                lines += block.count(b"\n")
                last = block[-1:]
        return lines + (last != b"\n")
