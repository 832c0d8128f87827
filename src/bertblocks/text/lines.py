"""Lines of files and pipes as they come."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK = 1 << 16


class Lines:
    """The lines of a UTF-8 file, without their ends; of standard input where the path is None.

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
        for number, line in enumerate(self._raw_lines(), start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{name}, line {number}, is not UTF-8: {error.reason}.") from error

    def _raw_lines(self) -> Iterator[bytes]:
        if self.path is not None:
            with open(self.path, "rb") as file:
                yield from file
            return
        # not through sys.stdin, which would wait for more than what is there
        rest = b""
        while block := os.read(sys.stdin.fileno(), BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def count(self) -> int | None:
        """How many there are; None for standard input, which cannot be read twice."""
        if self.path is None:
            return None
        lines, last = 0, b"\n"
        with open(self.path, "rb") as file:
            while block := file.read(BLOCK):
                lines += block.count(b"\n")
                last = block[-1:]
        return lines + (last != b"\n")
