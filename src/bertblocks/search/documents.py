"""Documents to search: from files of every format, or from Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.core.registry import nearest
from bertblocks.text.inputs import Inputs, Roles, read_inputs
from bertblocks.text.records import BadRecord, DataError, Location, ReadOptions, find_key

#: Columns that hold the id of a document unless the caller names another; `_id` is BEIR's.
ID_NAMES = ("id", "_id")


@dataclass(frozen=True)
class Document:
    """A text with its id and the other columns of its record.

    `location` is the file and line for error messages. `has_own_id` is false if the id was made from the content.
    """

    id: str
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    location: str = ""
    has_own_id: bool = True

    @property
    def place(self) -> str:
        """Where the document is, for error messages."""
        return self.location or f"The document {self.id!r}"

    @property
    def line(self) -> bytes:
        """The document as one line of JSON."""
        values = {"id": self.id, "text": self.text, "columns": self.columns}
        return json.dumps(values, ensure_ascii=False, default=str).encode(errors="backslashreplace") + b"\n"


@dataclass(frozen=True)
class Hit:
    """A document that was found: its id, score and text, and the other columns of its record."""

    id: str
    score: float
    text: str
    columns: dict[str, Any] = field(default_factory=dict)


def make_document(value: str | Mapping[str, Any] | Document) -> Document:
    """Makes a document of a text, or of a mapping with a `text` and, if there is one, an `id`.

    Example:
        >>> make_document({"id": 7, "text": "fine weather", "year": 1990})
        Document(id='7', text='fine weather', columns={'year': 1990}, location='', has_own_id=True)
    """
    if isinstance(value, Document):
        return value
    if isinstance(value, str):
        return _make(value, {}, "", None)
    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
        raise DataError(f"The document {str(value)[:100]!r} has no text; it must be a text, or a mapping with a text.")
    return _make(value["text"], {name: cell for name, cell in value.items() if name != "text"}, "", None)


def _make(text: str, columns: dict[str, Any], location: str, id_column: str | None) -> Document:
    key = next((key for name in ([id_column] if id_column else ID_NAMES) if (key := find_key(name, columns))), None)
    place = location or f"The document {text[:50]!r}"
    if key is None and id_column:
        names = f"{', '.join(columns)}{nearest(id_column, columns)}"
        raise DataError(f"{place}: there is no column {id_column!r} for id; the other columns are {names}.")
    if not text.strip():
        raise DataError(f"{place}: the text is empty.")
    if key is None:
        content = json.dumps([text, columns], ensure_ascii=False, default=str, sort_keys=True)
        digest = hashlib.blake2b(content.encode(errors="backslashreplace"), digest_size=16).hexdigest()
        return Document(digest, text, columns, location, has_own_id=False)
    own = columns[key]
    if own is None or own == "" or isinstance(own, (list, dict, float)):
        raise DataError(f"{place}: the id is {own!r}; it must be a text or a whole number.")
    return Document(str(own), text, {name: cell for name, cell in columns.items() if name != key}, location)


@dataclass(frozen=True)
class Documents:
    """Documents as they are read; `total` is their number where it is known without reading them."""

    records: Iterator[Document]
    total: int | None
    notes: list[str]

    def __iter__(self) -> Iterator[Document]:
        return self.records


def read_documents(
    files: Sequence[str | Path],
    columns: Mapping[str, str] | None = None,
    options: ReadOptions | None = None,
    on_bad: Callable[[BadRecord], None] | None = None,
) -> Documents:
    """Reads documents from files, folders, glob patterns and pipes, one by one.

    `columns` names the column of the roles "text" and "id" where a guess would be wrong. All other columns stay with
    the document. A record without an id gets one from its content. A bad record is passed to `on_bad` and skipped;
    without `on_bad` it raises `DataError`.
    """
    given = dict(columns or {})
    id_column = given.pop("id", None)
    inputs = read_inputs(files, Roles([("text",), ("document",)]), given, options, on_bad)
    return Documents(_to_documents(inputs, id_column, on_bad), inputs.total, inputs.notes)


def _to_documents(
    inputs: Inputs, id_column: str | None, on_bad: Callable[[BadRecord], None] | None
) -> Iterator[Document]:
    for record in inputs:
        try:
            text = record.value if isinstance(record.value, str) else " ".join(record.value)
            others = _without_text(record.columns, text)
            yield _make(text, others, record.location, id_column)
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(BadRecord(Location(record.location, "file"), str(error).removeprefix(f"{record.location}: ")))


def _without_text(columns: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The columns except the first that holds the text."""
    name = next((name for name, cell in columns.items() if cell == text), None)
    return {key: cell for key, cell in columns.items() if key != name}


def digest_id(identifier: str) -> bytes:
    """16 bytes that stand for an id."""
    return hashlib.blake2b(identifier.encode(errors="backslashreplace"), digest_size=16).digest()


def digest_content(documents: Iterable[Document]) -> np.ndarray:
    """8 bytes for each document that change with its text and its columns."""
    digests = [hashlib.blake2b(document.line, digest_size=8).digest() for document in documents]
    return np.frombuffer(b"".join(digests), "<u8")
