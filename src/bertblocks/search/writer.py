"""Changes of an index: one writer at a time, each change complete or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.core.log import logger
from bertblocks.core.requirements import MissingPackageError, require_packages
from bertblocks.core.storage import PARTIAL, lock_folder, remove_partial
from bertblocks.search.documents import Document, digest_content, digest_id
from bertblocks.search.graph import build_graph
from bertblocks.search.manifest import MANIFEST, SEGMENTS, GraphEntry, Manifest, SearchIndexError, SegmentEntry, store
from bertblocks.search.segments import Segment, merge_segments, write_removed, write_segment

#: The most documents of a merged segment.
MERGED_DOCUMENTS = 65_536
#: This many segments that are less than half full are merged.
SMALL_SEGMENTS = 16
#: A segment is written again when more than this share of its documents is removed.
REMOVED_SHARE = 0.3
#: Documents that are not in the graph are searched exactly; beyond this share they are added to it.
TAIL_SHARE = 0.2
#: The graph is built again when more than this share of its documents is removed.
STALE_SHARE = 0.5


#: Called with the name of a long step, what is done and, if it is known, how much there is.
OnStep = Callable[[str, int, int | None], None]


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Locks an index for this process and deletes what a killed writer left. A folder that stays empty is deleted."""
    _check_folder(folder)
    is_new = not folder.exists()
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise SearchIndexError(f"Another process is changing {folder}; wait for it to end.") from error
    try:
        remove_partial(folder)
        remove_partial(folder / SEGMENTS)
        yield
    finally:
        if is_new and not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise SearchIndexError(f"{folder} is a file; choose another folder for the index.")
    if folder.exists() and not (folder / MANIFEST).exists():
        names = sorted(entry.name for entry in folder.iterdir())
        foreign = next((name for name in names if name != SEGMENTS and not name.endswith(PARTIAL)), None)
        if foreign is not None:
            raise SearchIndexError(
                f"{folder} holds {foreign}, which does not belong to an index; choose another folder."
            )


class KnownDocuments:
    """The number and the content of every document, by its id."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._positions: dict[bytes, int] = {}
        self._numbers, self._contents = array("q"), array("Q")
        for segment in segments:
            rows = segment.live_rows()
            contents = segment.copy_rows(rows)["content"]
            self.add(list(segment.ids(rows)), segment.numbers(rows), contents)

    def add(self, ids: Sequence[bytes], numbers: np.ndarray, contents: np.ndarray) -> None:
        start = len(self._numbers)
        self._numbers.extend(numbers.tolist())
        self._contents.extend(contents.tolist())
        self._positions.update(zip(ids, range(start, start + len(ids)), strict=True))

    def number(self, identifier: str) -> int | None:
        position = self._positions.get(digest_id(identifier))
        return None if position is None else self._numbers[position]

    def has(self, document: Document) -> bool:
        """Whether the document is there with the same text and columns."""
        position = self._positions.get(digest_id(document.id))
        return position is not None and self._contents[position] == int(digest_content([document])[0])


def _count_from(segments: Sequence[Segment], number: int) -> int:
    """Documents with this number or a higher one that are not removed."""
    return sum(int((segment.numbers(segment.live_rows()) >= number).sum()) for segment in segments)


class IndexWriter:
    """Changes the index in a locked folder. Every method leaves a complete index on disk."""

    def __init__(self, folder: Path, manifest: Manifest, on_step: OnStep) -> None:
        self.folder, self.manifest, self.on_step = folder, manifest, on_step
        self._delete_unnamed()
        self._merge()
        self.known = KnownDocuments(self.segments())

    def segments(self) -> list[Segment]:
        manifest = self.manifest
        return [Segment(self.folder, entry, manifest.settings, manifest.dimensions) for entry in manifest.segments]

    def add(self, documents: Sequence[Document], vectors: np.ndarray | None, sparse: Sequence[Any] | None) -> None:
        """Adds a segment. Documents whose id is there already replace the older ones."""
        old = [number for document in documents if (number := self.known.number(document.id)) is not None]
        name, manifest = self.manifest.next_file()
        first = manifest.next_number
        entry = write_segment(self.folder, name, documents, first, manifest.settings, vectors, sparse)
        manifest = replace(
            manifest,
            next_number=first + len(documents),
            dimensions=0 if vectors is None else vectors.shape[1],
            segments=(*self._mark_removed(manifest, old), entry),
        )
        self._commit(manifest)
        numbers = first + np.arange(len(documents))
        self.known.add([digest_id(document.id) for document in documents], numbers, digest_content(documents))
        self._merge()

    def remove(self, numbers: Sequence[int]) -> None:
        self._commit(replace(self.manifest, segments=self._mark_removed(self.manifest, numbers)))
        self._merge()

    def _mark_removed(self, manifest: Manifest, numbers: Sequence[int]) -> tuple[SegmentEntry, ...]:
        entries = []
        for segment in self.segments():
            _, rows = segment.find(np.asarray(numbers, np.int64))
            # the file is new in its folder, because a segment loses a given number of documents only once
            name = f"{segment.entry.num_removed + len(rows):06d}"
            entries.append(write_removed(self.folder, segment, name, rows) if len(rows) else segment.entry)
        return tuple(entries)

    def _commit(self, manifest: Manifest) -> None:
        manifest.write(self.folder)
        self.manifest = manifest

    # ------------------------------------------------------------------ merging

    def _merge(self) -> None:
        """Writes small segments, and those of which much is removed, again as few large ones."""
        entries = self.manifest.segments
        small = [entry for entry in entries if entry.live < MERGED_DOCUMENTS // 2]
        chosen = {entry.name for entry in small} if len(small) >= SMALL_SEGMENTS else set()
        chosen |= {entry.name for entry in entries if entry.num_removed > REMOVED_SHARE * entry.documents}
        if not chosen:
            return
        segments = [segment for segment in self.segments() if segment.entry.name in chosen]
        live = [segment.live_rows() for segment in segments]
        pairs = np.concatenate(
            [np.stack([np.full(len(rows), index), rows], axis=1) for index, rows in enumerate(live)]
        )  # [n, 2]
        numbers = np.concatenate([segment.numbers(rows) for segment, rows in zip(segments, live, strict=True)])
        pairs = pairs[np.argsort(numbers)]
        manifest, merged = self.manifest, []
        for start in range(0, len(pairs), MERGED_DOCUMENTS):
            name, manifest = manifest.next_file()
            merged.append(merge_segments(self.folder, segments, name, pairs[start : start + MERGED_DOCUMENTS]))
        kept = [entry for entry in entries if entry.name not in chosen]
        self._commit(replace(manifest, segments=(*kept, *merged)))
        self._delete_unnamed()

    def _delete_unnamed(self) -> None:
        """Deletes files and segments that the manifest does not name."""
        names = {file.path for file in self.manifest.files}
        for path in [*self.folder.glob(f"{SEGMENTS}/*/*"), *self.folder.glob("*.usearch")]:
            if path.relative_to(self.folder).as_posix() not in names:
                path.unlink()
        for path in self.folder.glob(f"{SEGMENTS}/*"):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    # ------------------------------------------------------------------ graph

    def update_graph(self) -> None:
        """Builds the graph of an index that is large enough, or adds documents to it if it lacks many."""
        manifest, old = self.manifest, self.manifest.graph
        if manifest.model is None or manifest.documents < manifest.settings.approximate_from:
            return
        segments = self.segments()
        if old is not None:
            missing = _count_from(segments, old.until)
            if manifest.documents - missing < (1 - STALE_SHARE) * old.documents:
                old = None
            elif missing <= TAIL_SHARE * manifest.documents:
                return
        until = 0 if old is None else old.until
        total = _count_from(segments, until)
        try:
            require_packages(["usearch"], f"Approximate search in {self.folder}")
        except MissingPackageError as error:
            logger.warning(f"{error}; until then, search is exact")
            return
        name, manifest = manifest.next_file()
        target = self.folder / f"graph-{name}.usearch"
        done = 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            self.on_step("graph", done, total)

        build_graph(
            target,
            segments,
            manifest.dimensions,
            None if old is None else self.folder / old.file.path,
            until,
            count,
        )
        documents = total + (0 if old is None else old.documents)
        graph = GraphEntry(store(self.folder, target), manifest.next_number, documents)
        self._commit(replace(manifest, graph=graph))
        self._delete_unnamed()
