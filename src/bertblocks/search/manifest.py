"""`index.json`: what an index consists of. It is written last, so a file that it does not name does not count."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bertblocks.core.messages import InputError
from bertblocks.core.storage import checksum, read_json, write_json
from bertblocks.core.tensor_files import VERIFY
from bertblocks.search.vectors import PRECISIONS, Precision

MANIFEST, SEGMENTS = "index.json", "segments"
FORMAT = 1
#: From this many documents on, an index has a graph for approximate search.
APPROXIMATE_FROM = 200_000


class SearchIndexError(InputError):
    """The index is damaged, belongs to another model or process, or cannot do what is asked."""


@dataclass(frozen=True)
class ModelIdentity:
    """Where a model was and the SHA-256 of its files."""

    source: str
    sha256: str


@dataclass(frozen=True)
class IndexSettings:
    """What all documents of an index have in common. `dimensions` None keeps all dimensions of the model.

    `query_prompt` and `document_prompt` replace the prompts of the model if they are not None.
    """

    precision: Precision = "float32"
    dimensions: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    too_long: str = "window"
    sparse_terms: int | None = None
    approximate_from: int = APPROXIMATE_FROM

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise SearchIndexError(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}.")


@dataclass(frozen=True)
class StoredFile:
    """A file of the index, by its path in the folder."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SegmentEntry:
    """A folder of documents that never changes; `removed` lists the rows that no longer count."""

    name: str
    documents: int
    files: tuple[StoredFile, ...]
    removed: StoredFile | None = None
    num_removed: int = 0

    @property
    def live(self) -> int:
        return self.documents - self.num_removed


@dataclass(frozen=True)
class GraphEntry:
    """The graph for approximate search.

    It has the documents with numbers below `until`, and those removed since: `documents` in all.
    """

    file: StoredFile
    until: int
    documents: int


@dataclass(frozen=True)
class Manifest:
    """The state of an index between two changes."""

    settings: IndexSettings
    model: ModelIdentity | None
    sparse: ModelIdentity | None
    #: The dimensions of the stored vectors; 0 until there are some.
    dimensions: int = 0
    #: The number that the next document gets, and the name of the next file or folder.
    next_number: int = 0
    next_name: int = 1
    segments: tuple[SegmentEntry, ...] = ()
    graph: GraphEntry | None = None

    @property
    def documents(self) -> int:
        return sum(segment.live for segment in self.segments)

    @property
    def files(self) -> list[StoredFile]:
        found = [file for segment in self.segments for file in (*segment.files, segment.removed) if file]
        return [*found, *([self.graph.file] if self.graph else [])]

    def next_file(self) -> tuple[str, Manifest]:
        """A name that no other file has, and the manifest that will not give it again."""
        return f"{self.next_name:06d}", replace(self, next_name=self.next_name + 1)

    def write(self, folder: Path) -> None:
        values = {"format": FORMAT, **asdict(self)}
        write_json(folder / MANIFEST, {**values, "sha256": _digest(values)})


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `index.json`."""
    path = folder / MANIFEST
    if not path.is_file():
        raise SearchIndexError(f"{folder} is not an index: it has no {MANIFEST}; `bertblocks index` makes one.")
    try:
        values = read_json(path)
    except ValueError as error:
        raise SearchIndexError(f"{str(error).removesuffix('.')}; make the index again.") from error
    expected = values.pop("sha256", None)
    if values.get("format") != FORMAT and expected == _digest(values):
        raise SearchIndexError(f"{path} has format {values.get('format')!r}; this version reads format {FORMAT}.")
    if expected != _digest(values):
        raise SearchIndexError(f"{path} is damaged: its checksum is wrong; make the index again.")
    del values["format"]
    try:
        manifest = _build(values)
        names = [file.path for file in manifest.files]
    except (TypeError, KeyError, AttributeError) as error:
        raise SearchIndexError(f"{path} is damaged: {error}; make the index again.") from error
    for name in names:
        if not re.fullmatch(r"(segments/\d{6,}/)?[a-z]+(-\d{6,})?\.(npy|jsonl|usearch)", name):
            raise SearchIndexError(f"{path} names {name!r}, which is not a file of an index.")
    return manifest


def _build(values: dict[str, Any]) -> Manifest:
    def identity(entry: dict[str, Any] | None) -> ModelIdentity | None:
        return None if entry is None else ModelIdentity(**entry)

    def file(entry: dict[str, Any] | None) -> StoredFile | None:
        return None if entry is None else StoredFile(**entry)

    segments = [
        SegmentEntry(**{**entry, "files": tuple(map(file, entry["files"])), "removed": file(entry["removed"])})
        for entry in values["segments"]
    ]
    graph = values["graph"]
    return Manifest(
        **{
            **values,
            "settings": IndexSettings(**values["settings"]),
            "model": identity(values["model"]),
            "sparse": identity(values["sparse"]),
            "segments": tuple(segments),
            "graph": None if graph is None else GraphEntry(**{**graph, "file": StoredFile(**graph["file"])}),
        }
    )


def store(folder: Path, path: Path) -> StoredFile:
    """Describes a file in the folder of an index."""
    return StoredFile(path.relative_to(folder).as_posix(), path.stat().st_size, checksum(path))


@dataclass
class Verifier:
    """Compares files with their checksums, each once. `BERTBLOCKS_VERIFY=0` compares only their sizes."""

    folder: Path
    done: set[str] = field(default_factory=set)

    def verify(self, files: Iterable[StoredFile]) -> None:
        new = [file for file in files if file.path not in self.done]
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            list(pool.map(self._verify, new))
        self.done.update(file.path for file in new)

    def _verify(self, file: StoredFile) -> None:
        path = self.folder / file.path
        size = path.stat().st_size  # FileNotFoundError: see SearchIndex._load
        if size != file.bytes:
            raise SearchIndexError(f"{path} is damaged: it has {size:,} bytes instead of {file.bytes:,}.")
        if os.environ.get(VERIFY) != "0" and checksum(path) != file.sha256:
            raise SearchIndexError(
                f"{path} is damaged: its checksum is wrong. Make the index again, or set {VERIFY}=0 to use it anyway."
            )
