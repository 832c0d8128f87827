"""Segments: folders of documents with their vectors. They are written once; merging writes new ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.core.storage import atomic_file, atomic_folder, list_files
from bertblocks.search.documents import Document, digest_content, digest_id
from bertblocks.search.manifest import SEGMENTS, IndexSettings, SegmentEntry, StoredFile, store
from bertblocks.search.postings import SparseVector as SparseVector
from bertblocks.search.postings import entries, invert, invert_vectors
from bertblocks.search.vectors import pack, unpack

VECTORS, ROWS, DOCUMENTS = "vectors.npy", "rows.npy", "documents.jsonl"
STARTS, POSTINGS, WEIGHTS = "starts.npy", "postings.npy", "weights.npy"
#: A document's number, the bytes of its line, digests of its id and its content, and the factor of its vector.
ROW = np.dtype(
    [
        ("number", "<i8"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("id", "V16"),
        ("content", "<u8"),
        ("scale", "<f4"),
    ]
)
#: Rows that are copied at once when segments are merged.
COPY_ROWS = 4096


class Segment:
    """A segment on disk. Vectors, rows and postings are memory-mapped; documents are read one by one."""

    def __init__(self, folder: Path, entry: SegmentEntry, settings: IndexSettings, dimensions: int) -> None:
        self.entry, self.path = entry, folder / SEGMENTS / entry.name
        self.precision, self.dimensions = settings.precision, dimensions
        self._rows = self._map(ROWS)
        names = {Path(file.path).name for file in entry.files}
        self._vectors = self._map(VECTORS) if VECTORS in names else None
        self._postings = tuple(map(self._map, (STARTS, POSTINGS, WEIGHTS))) if STARTS in names else None
        removed = entry.removed
        self._removed = np.zeros(0, np.int64) if removed is None else np.load(folder / removed.path)

    def _map(self, name: str) -> np.ndarray:
        array = np.load(self.path / name, mmap_mode="r")
        return array.view(np.ndarray)  # plain arrays are faster than memmap objects

    def __len__(self) -> int:
        return len(self._rows)

    def numbers(self, rows: slice | np.ndarray) -> np.ndarray:
        return self._rows["number"][rows]

    def vectors(self, rows: slice | np.ndarray) -> np.ndarray:
        """Vectors as float32; a slice of float32 vectors is not copied."""
        assert self._vectors is not None
        return unpack(self._vectors[rows], self._rows["scale"][rows], self.precision, self.dimensions)

    def stored_vectors(self, rows: slice | np.ndarray) -> np.ndarray:
        assert self._vectors is not None
        return self._vectors[rows]

    def postings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self._postings is not None
        starts, rows, weights = self._postings
        return starts, rows, weights

    def removed_in(self, start: int, stop: int) -> np.ndarray:
        """The removed rows from `start` to `stop`, counted from `start`."""
        first, last = np.searchsorted(self._removed, [start, stop])
        return self._removed[first:last] - start

    def live_rows(self) -> np.ndarray:
        return np.setdiff1d(np.arange(len(self)), self._removed, assume_unique=True)

    def first_row_from(self, number: int) -> int:
        """The first row whose document has this number or a higher one."""
        return int(np.searchsorted(self._rows["number"], number))

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these documents are here and not removed, and their rows."""
        rows = np.searchsorted(self._rows["number"], numbers)
        found = rows < len(self)
        found[found] = self._rows["number"][rows[found]] == numbers[found]
        found[found] = ~np.isin(rows[found], self._removed)
        return np.flatnonzero(found), rows[found]

    def ids(self, rows: np.ndarray) -> Iterator[bytes]:
        """The digests of the ids."""
        data = self._rows["id"][rows].tobytes()
        return (data[start : start + 16] for start in range(0, len(data), 16))

    def content(self, row: int) -> int:
        return int(self._rows["content"][row])

    def lines(self, rows: np.ndarray) -> Iterator[bytes]:
        """The documents of rows as lines of JSON."""
        with (self.path / DOCUMENTS).open("rb") as file:
            for row in rows:
                file.seek(int(self._rows["offset"][row]))
                yield file.read(int(self._rows["length"][row]))

    def documents(self, rows: np.ndarray) -> Iterator[Document]:
        for line in self.lines(rows):
            values: dict[str, Any] = json.loads(line)
            yield Document(values["id"], values["text"], values["columns"])

    def copy_rows(self, rows: np.ndarray) -> np.ndarray:
        return self._rows[rows]


def write_segment(
    folder: Path,
    name: str,
    documents: Sequence[Document],
    first_number: int,
    settings: IndexSettings,
    vectors: np.ndarray | None,
    sparse: Sequence[SparseVector] | None,
) -> SegmentEntry:
    """Writes documents with their vectors as a new segment, and returns what the manifest says about it."""
    lines = [document.line for document in documents]
    rows = np.zeros(len(lines), ROW)
    rows["number"] = first_number + np.arange(len(lines))
    rows["length"] = [len(line) for line in lines]
    rows["offset"] = np.cumsum(rows["length"]) - rows["length"]
    rows["id"] = [digest_id(document.id) for document in documents]
    rows["content"] = digest_content(documents)
    target = folder / SEGMENTS / name
    with atomic_folder(target) as scratch:
        if vectors is not None:
            stored, rows["scale"] = pack(vectors, settings.precision)
            np.save(scratch / VECTORS, stored)
        np.save(scratch / ROWS, rows)
        (scratch / DOCUMENTS).write_bytes(b"".join(lines))
        if sparse is not None:
            _save_postings(scratch, invert_vectors(sparse))
    return _make_entry(folder, target, len(lines))


def _save_postings(folder: Path, postings: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    for name, array in zip((STARTS, POSTINGS, WEIGHTS), postings, strict=True):
        np.save(folder / name, array)


def _make_entry(folder: Path, target: Path, documents: int) -> SegmentEntry:
    files = tuple(store(folder, path) for path in list_files(target))
    return SegmentEntry(target.name, documents, files)


def write_removed(folder: Path, segment: Segment, name: str, rows: np.ndarray) -> SegmentEntry:
    """Marks further rows of a segment as removed, in a new file next to its others."""
    removed = np.union1d(segment._removed, rows).astype(np.int64)
    path = segment.path / f"removed-{name}.npy"
    with atomic_file(path) as file:
        np.save(file, removed)
    entry = segment.entry
    stored: StoredFile = store(folder, path)
    return SegmentEntry(entry.name, entry.documents, entry.files, stored, len(removed))


def merge_segments(folder: Path, segments: Sequence[Segment], name: str, pairs: np.ndarray) -> SegmentEntry:
    """Writes the documents `pairs` `[n, 2]` (segment, row), ordered by number, as a new segment."""
    target = folder / SEGMENTS / name
    rows = np.zeros(len(pairs), ROW)
    first = segments[0]
    with atomic_folder(target) as scratch:
        with (scratch / DOCUMENTS).open("wb") as file:
            for start in range(0, len(pairs), COPY_ROWS):
                offset = file.tell()
                part = pairs[start : start + COPY_ROWS]
                lines: list[bytes] = [b""] * len(part)
                for index, segment in enumerate(segments):
                    where = np.flatnonzero(part[:, 0] == index)
                    rows[start + where] = segment.copy_rows(part[where, 1])
                    for position, line in zip(where, segment.lines(part[where, 1]), strict=True):
                        lines[position] = line
                lengths = rows["length"][start : start + len(part)]
                rows["offset"][start : start + len(part)] = offset + np.cumsum(lengths) - lengths
                file.write(b"".join(lines))
        np.save(scratch / ROWS, rows)
        if first._vectors is not None:
            _copy_vectors(scratch / VECTORS, segments, pairs)
        if first._postings is not None:
            _save_postings(scratch, _merge_postings(segments, pairs))
    return _make_entry(folder, target, len(pairs))


def _copy_vectors(path: Path, segments: Sequence[Segment], pairs: np.ndarray) -> None:
    sample = segments[0].stored_vectors(slice(0, 0))
    merged = np.lib.format.open_memmap(path, "w+", sample.dtype, (len(pairs), sample.shape[1]))
    for start in range(0, len(pairs), COPY_ROWS):
        part = pairs[start : start + COPY_ROWS]
        for index, segment in enumerate(segments):
            where = np.flatnonzero(part[:, 0] == index)
            merged[start + where] = segment.stored_vectors(part[where, 1])
    merged.flush()


def _merge_postings(segments: Sequence[Segment], pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for index, segment in enumerate(segments):
        where = np.flatnonzero(pairs[:, 0] == index)
        new_rows = np.full(len(segment), -1)
        new_rows[pairs[where, 1]] = where
        rows, terms, values = entries(*segment.postings())
        rows = new_rows[rows]
        found.append((rows[rows >= 0], terms[rows >= 0], values[rows >= 0]))
    rows, terms, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return invert(rows, terms, values)
