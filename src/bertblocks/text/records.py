"""Records of files with their location, so that every error message can name the file and the line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from bertblocks.core.messages import InputError
from bertblocks.core.registry import nearest

Format = Literal["text", "csv", "tsv", "jsonl", "json", "parquet", "arrow", "xlsx"]


class DataError(InputError):
    """Data that cannot be used. The message names the file and line, what is there, and what would work."""


@dataclass(frozen=True)
class Location:
    """The file and line, row or record of a value.

    Lines are counted from the byte `start` of the file, and from its top only when the location is printed.
    """

    source: str
    unit: Literal["line", "row", "record", "file"]
    number: int = 1
    start: int = 0

    def __str__(self) -> str:
        if self.unit == "file":
            return self.source
        return f"{self.source} {self.unit} {self.number + _count_newlines(self.source, self.start)}"


@lru_cache(maxsize=8)
def _count_newlines(path: str, stop: int) -> int:
    count = 0
    if stop:
        with open(path, "rb") as file:
            while stop and (block := file.read(min(2**20, stop))):
                count += block.count(b"\n")
                stop -= len(block)
    return count


@dataclass(frozen=True)
class Record:
    """The values of a record by column, or a text without a column name."""

    location: Location
    values: dict[str, Any] | str


@dataclass(frozen=True)
class BadRecord:
    """Why a record, or `records` of them from a location on, cannot be used."""

    location: Location
    reason: str
    records: int = 1

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


@dataclass(frozen=True)
class Slice:
    """A part of a file: bytes from `start` to `stop` (row groups in a parquet file), or all of it if `stop` is None."""

    path: str
    start: int = 0
    stop: int | None = None
    size: int = 0


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file. Everything that is None is detected.

    `quote` is a character, or "none" for files that do not quote. `header` says whether the first row of a csv, tsv or
    xlsx file names its columns.
    """

    format: Format | None = None
    delimiter: str | None = None
    quote: str | None = None
    encoding: str | None = None
    header: bool | None = None

    def __post_init__(self) -> None:
        if self.format not in (None, "text", "csv", "tsv", "jsonl", "json", "parquet", "arrow", "xlsx"):
            raise DataError(
                f"format is {self.format!r}; it must be text, csv, tsv, jsonl, json, parquet, arrow or xlsx."
            )
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in "\r\n"):
            raise DataError(f"delimiter is {self.delimiter!r}; it must be one character.")
        if self.quote not in (None, "none") and len(self.quote or "") != 1:
            raise DataError(f"quote is {self.quote!r}; it must be one character, or none.")
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except LookupError as error:
                raise DataError(f"encoding is {self.encoding!r}, which Python does not know.") from error

    @classmethod
    def parse(cls, settings: Iterable[str]) -> ReadOptions:
        r"""Options written as KEY=VALUE, as on a command line; `\t` is a tab.

        Example:
            >>> ReadOptions.parse(["delimiter=\\t", "header=no"])
            ReadOptions(format=None, delimiter='\t', quote=None, encoding=None, header=False)
        """
        names = [entry.name for entry in fields(cls)]
        values: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in names or not value:
                raise DataError(f"{setting!r} must be KEY=VALUE with a key of {', '.join(names)}{nearest(key, names)}.")
            values[key] = value.replace("\\t", "\t") if key == "delimiter" else value
        if "header" in values:
            if values["header"] not in ("yes", "no"):
                raise DataError(f"header is {values['header']!r}; it must be yes or no.")
            values["header"] = values["header"] == "yes"
        return cls(**values)


def find_key(name: str, keys: Iterable[str]) -> str | None:
    """The key with this name, or with this name in another case; None if there is none or several.

    Example:
        >>> find_key("text", ["Text", "label"]), find_key("body", ["text"])
        ('Text', None)
    """
    keys = list(keys)
    if name in keys:
        return name
    similar = [key for key in keys if key.lower() == name.lower()]
    return similar[0] if len(similar) == 1 else None


def get_value(values: Mapping[str, Any], name: str) -> Any:
    """The value of a key. `a.b` also finds key `b` of the object under `a`. Raises KeyError if there is none.

    Example:
        >>> get_value({"Review": {"body": "fine"}}, "review.body")
        'fine'
    """
    key = find_key(name, values)
    if key is not None:
        return values[key]
    outer, _, inner = name.partition(".")
    key = find_key(outer, values)
    if not inner or key is None or not isinstance(values[key], Mapping):
        raise KeyError(name)
    return get_value(values[key], inner)
