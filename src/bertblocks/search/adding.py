"""Adding documents to an index: which are new, and their vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertblocks.search.documents import Document, digest_id, make_document
from bertblocks.search.models import IndexModels
from bertblocks.search.writer import IndexWriter, OnStep
from bertblocks.text.records import DataError

#: Documents of a new segment. A killed run loses no more than these.
SEGMENT_DOCUMENTS = 4096

#: Called with what is wrong with a document.
OnBad = Callable[[str], None]


@dataclass
class Changes:
    """What adding documents did."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    duplicates: int = 0


def add_documents(
    writer: IndexWriter,
    models: IndexModels,
    documents: Iterable[str | Mapping[str, Any] | Document],
    on_bad: OnBad | None,
    on_step: OnStep,
) -> Changes:
    """Adds what the index does not have yet, segment by segment. Texts are encoded segment by segment too, so that a
    continued run gives the same vectors as an undisturbed one."""
    total = getattr(documents, "total", None)
    changes = Changes()
    encoded = 0
    new = _select(writer, documents, changes, on_bad)
    while chunk := list(itertools.islice(new, SEGMENT_DOCUMENTS)):
        before = encoded + changes.unchanged + changes.duplicates

        def count(done: int, before: int = before) -> None:
            on_step("documents", before + done, total)

        good, vectors, sparse = _encode(models, chunk, on_bad, count)
        encoded += len(chunk)
        if good:
            updated = sum(writer.known.number(document.id) is not None for document in good)
            writer.add(good, vectors, sparse)
            changes.updated += updated
            changes.added += len(good) - updated
    if not writer.manifest.segments and not changes.unchanged:
        raise DataError("There are no documents; an index needs at least one.")
    return changes


def _select(
    writer: IndexWriter,
    documents: Iterable[str | Mapping[str, Any] | Document],
    changes: Changes,
    on_bad: OnBad | None,
) -> Iterator[Document]:
    """The documents that are new or have changed."""
    seen: set[bytes] = set()
    for value in documents:
        try:
            document = make_document(value)
            digest = digest_id(document.id)
            if digest in seen and document.has_own_id:
                raise DataError(f"{document.place}: the id {document.id!r} occurs twice; ids must differ.")
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(str(error))
            continue
        if digest in seen:
            changes.duplicates += 1
        elif writer.known.has(document):
            changes.unchanged += 1
        else:
            yield document
        seen.add(digest)


def _encode(
    models: IndexModels, chunk: list[Document], on_bad: OnBad | None, on_progress: Callable[[int], None]
) -> tuple[list[Document], np.ndarray | None, list[Any] | None]:
    """The documents that a model accepts, their vectors and their sparse vectors."""
    texts = [document.text for document in chunk]
    dense = sparse = None
    if models.has("model"):
        dense = list(_count(models.encode(texts, "document"), on_progress))
    if models.has("sparse"):
        sparse = list(_count(models.encode_sparse(texts, "document"), on_progress))
    results = [vectors for vectors in (dense, sparse) if vectors is not None]
    good = []
    for index, document in enumerate(chunk):
        error = next((vectors[index] for vectors in results if isinstance(vectors[index], Exception)), None)
        if error is None:
            good.append(index)
        elif on_bad is None:
            raise DataError(f"{document.place}: {error}") from error
        else:
            on_bad(f"{document.place}: {error}")
    return (
        [chunk[index] for index in good],
        np.stack([dense[index] for index in good]) if dense is not None and good else None,
        None if sparse is None else [sparse[index] for index in good],
    )


def _count(results: Iterable[Any], on_progress: Callable[[int], None]) -> Iterator[Any]:
    for done, result in enumerate(results, start=1):
        on_progress(done)
        yield result
