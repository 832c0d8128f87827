"""`SearchIndex`: documents on disk that are found by meaning, by terms, or by both."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from bertblocks.core.registry import nearest
from bertblocks.search.adding import Changes, OnBad, add_documents
from bertblocks.search.documents import Document, Hit
from bertblocks.search.graph import Graph, search_graph
from bertblocks.search.manifest import (
    MANIFEST,
    IndexSettings,
    Manifest,
    SearchIndexError,
    Verifier,
    read_manifest,
)
from bertblocks.search.models import IndexModels, check_identity, identify
from bertblocks.search.postings import search_postings
from bertblocks.search.ranking import Ranking, TopK, fuse
from bertblocks.search.rerankers import Reranker, open_reranker
from bertblocks.search.segments import Segment
from bertblocks.search.vectors import search_exactly
from bertblocks.search.writer import IndexWriter, OnStep, writing

Mode = Literal["dense", "sparse", "hybrid"]
MODES: tuple[Mode, ...] = ("dense", "sparse", "hybrid")
#: Documents that are handed on to fusion and to a reranker.
CANDIDATES = 100


class SearchIndex:
    """A folder of documents with their vectors, made by `build` and opened by `open`.

    A change is complete or absent, whatever kills the process, and one process at a time makes changes. Others search
    meanwhile; they see the index as it was when they opened it.

    `model` is the folder or hub id of an embedder, and `sparse` that of a sparse encoder. `options` are those of
    `Predictor`, such as `device` and `threads`.
    """

    def __init__(self, folder: str | Path, manifest: Manifest | None = None, **options: Any) -> None:
        self.folder = Path(folder)
        self._verifier = Verifier(self.folder)
        self._rerankers: dict[str, Reranker] = {}
        self._load(manifest)
        manifest = self.manifest
        self.models = IndexModels(self.folder, manifest.settings, manifest.model, manifest.sparse, options)

    @classmethod
    def open(
        cls, folder: str | Path, *, model: str | Path | None = None, sparse: str | Path | None = None, **options: Any
    ) -> SearchIndex:
        """Opens an index and verifies its files. `model` and `sparse` say where its models are now if they moved."""
        index = cls(folder, **options)
        index.models.use("model", model)
        index.models.use("sparse", sparse)
        return index

    @classmethod
    def build(
        cls,
        folder: str | Path,
        documents: Iterable[str | Mapping[str, Any] | Document] = (),
        *,
        model: str | Path | None = None,
        sparse: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SearchIndex:
        """Makes an index of documents, or adds them to the one in the folder. See `add` and `IndexSettings`.

        The same call continues after an interruption. An index of another model or with other settings is an error.
        """
        index = cls.create(folder, model=model, sparse=sparse, settings=settings, **options)
        index.add(documents)
        return index

    @classmethod
    def create(
        cls,
        folder: str | Path,
        *,
        model: str | Path | None = None,
        sparse: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SearchIndex:
        """Like `build`, but nothing is written before the first documents are added."""
        folder, given = Path(folder), dict(settings or {})
        names = list(asdict(IndexSettings()))
        for name in given:
            if name not in names:
                raise SearchIndexError(f"There is no setting {name!r} of an index{nearest(name, names)}.")
        if not (folder / MANIFEST).is_file():
            if model is None and sparse is None:
                raise SearchIndexError(f"{folder} is not an index yet; name an embedder, a sparse encoder, or both.")
            new = Manifest(
                IndexSettings(**given),
                None if model is None else identify(model, "model"),
                None if sparse is None else identify(sparse, "sparse"),
            )
            return cls(folder, new, **options)
        index = cls(folder, **options)
        known = asdict(index.manifest.settings)
        for name, value in given.items():
            if value != known[name]:
                raise SearchIndexError(
                    f"{folder} has {name} = {known[name]!r}, but {name} is now {value!r}; choose another folder."
                )
        index.models.use("model", model)
        index.models.use("sparse", sparse)
        return index

    def _load(self, manifest: Manifest | None = None) -> None:
        """Opens what the manifest names. If a writer deletes merged segments meanwhile, there is a new manifest."""
        for attempt in range(5):
            self.manifest = manifest or read_manifest(self.folder)
            try:
                self._verifier.verify(self.manifest.files)
                settings, dimensions = self.manifest.settings, self.manifest.dimensions
                self.segments = [Segment(self.folder, entry, settings, dimensions) for entry in self.manifest.segments]
                break
            except FileNotFoundError as error:
                if attempt == 4:
                    raise SearchIndexError(f"{error.filename} is missing; make the index again.") from error
        self._graph: Graph | None = None

    def __len__(self) -> int:
        return self.manifest.documents

    # ------------------------------------------------------------------ changes

    def add(
        self,
        documents: Iterable[str | Mapping[str, Any] | Document],
        *,
        on_bad: OnBad | None = None,
        on_step: OnStep = lambda name, done, total: None,
    ) -> Changes:
        """Adds documents: texts, mappings with a `text`, an `id` and other columns, or `read_documents(files)`.

        A document with the id of another replaces it, and one that is there already is skipped, so repeating an
        interrupted call continues it. A document that cannot be used is passed to `on_bad`, or raises `DataError`.
        `on_step` is called with the name of a step, what is done and, if it is known, how much there is.
        """
        with self._writing(on_step) as writer:
            changes = add_documents(writer, self.models, documents, on_bad, on_step)
            writer.update_graph()
        return changes

    def remove(self, ids: Iterable[str]) -> None:
        """Removes documents by their ids; an id that the index does not have is an error, and nothing is removed."""
        with self._writing() as writer:
            numbers = []
            for identifier in dict.fromkeys(map(str, ids)):
                number = writer.known.number(identifier)
                if number is None:
                    raise SearchIndexError(f"{self.folder} has no document with the id {identifier!r}.")
                numbers.append(number)
            writer.remove(numbers)
            writer.update_graph()

    @contextlib.contextmanager
    def _writing(self, on_step: OnStep = lambda name, done, total: None) -> Iterator[IndexWriter]:
        """Locks the index and reads its state of now; at the end the index has the new state."""
        path, before = self.folder / MANIFEST, self.manifest
        with writing(self.folder):
            if path.is_file():
                self._load()
                for role, known, found in (
                    ("model", self.manifest.model, before.model),
                    ("sparse", self.manifest.sparse, before.sparse),
                ):
                    check_identity(self.folder, role, known, found)
            writer = IndexWriter(self.folder, self.manifest, on_step)
            try:
                yield writer
            finally:
                if path.is_file():
                    self._verifier.done.update(file.path for file in writer.manifest.files)
                    self._load()

    # ------------------------------------------------------------------ search

    @overload
    def search(  # type: ignore[overload-overlap]
        self,
        queries: str,
        *,
        top_k: int = 10,
        mode: Mode | None = None,
        exact: bool = False,
        rerank: str | Path | Any = None,
        candidates: int = CANDIDATES,
    ) -> list[Hit]: ...

    @overload
    def search(
        self,
        queries: Sequence[str],
        *,
        top_k: int = 10,
        mode: Mode | None = None,
        exact: bool = False,
        rerank: str | Path | Any = None,
        candidates: int = CANDIDATES,
    ) -> list[list[Hit]]: ...

    def search(
        self,
        queries: str | Sequence[str],
        *,
        top_k: int = 10,
        mode: Mode | None = None,
        exact: bool = False,
        rerank: str | Path | Any = None,
        candidates: int = CANDIDATES,
    ) -> list[Hit] | list[list[Hit]]:
        """Finds the `top_k` best documents for a query, or for each of several.

        `mode` is "dense" (cosine of embeddings), "sparse" (dot product of terms) or "hybrid" (both, fused by reciprocal
        rank); the default is dense if the index has an embedder. `exact` does not use the graph of a large index.
        `rerank` is a reranker, which orders the best `candidates` again.
        """
        if isinstance(queries, str):
            return self.search([queries], top_k=top_k, mode=mode, exact=exact, rerank=rerank, candidates=candidates)[0]
        for query in queries:
            if not isinstance(query, str) or not query.strip():
                raise SearchIndexError(f"The query {query!r} is empty; write what to search for.")
        if top_k < 1 or candidates < 1:
            raise SearchIndexError(f"top_k is {top_k} and candidates is {candidates}; both must be at least 1.")
        depth = max(top_k, candidates) if rerank is not None else top_k
        rankings = self.rank(queries, depth, mode, exact, candidates)
        found = [self.hits(ranking) for ranking in rankings]
        if rerank is not None:
            found = self.reranker(rerank)(queries, found, top_k)
        return found

    def reranker(self, source: Any) -> Reranker:
        """The reranker in a folder, opened once, or one around a predictor."""
        if not isinstance(source, (str, Path)):
            return Reranker(source)
        if str(source) not in self._rerankers:
            self._rerankers[str(source)] = open_reranker(source, **self.models.options)
        return self._rerankers[str(source)]

    def rank(
        self,
        queries: Sequence[str],
        k: int,
        mode: Mode | None = None,
        exact: bool = False,
        candidates: int = CANDIDATES,
    ) -> list[Ranking]:
        """The numbers and scores of the best `k` documents for each query."""
        mode = mode or ("dense" if self.manifest.model is not None else "sparse")
        if mode not in MODES:
            raise SearchIndexError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}{nearest(mode, MODES)}.")
        depth = max(k, candidates) if mode == "hybrid" else k
        dense = sparse = None
        if mode != "sparse":
            dense = self.rank_vectors(self.models.encode_all(queries, "query"), depth, exact)
        if mode != "dense":
            best = TopK(len(queries), depth)
            search_postings(self.segments, self.models.encode_all(queries, "query", is_sparse=True), best)
            sparse = best.rankings
        if dense is not None and sparse is not None:
            return [fuse(pair, k) for pair in zip(dense, sparse, strict=True)]
        return dense or sparse or []

    def rank_vectors(self, vectors: Sequence[np.ndarray] | np.ndarray, k: int, exact: bool = False) -> list[Ranking]:
        """The numbers and cosines of the best `k` documents for each query vector."""
        queries = np.asarray(vectors, np.float32).reshape(len(vectors), -1)
        best = TopK(len(queries), k)
        graph = self.manifest.graph
        if graph is None or exact:
            search_exactly([(segment, 0) for segment in self.segments], queries, best)
            return best.rankings
        if self._graph is None:
            self._graph = Graph(self.folder / graph.file.path, self.manifest.dimensions)
        return search_graph(self._graph, graph.until, self.segments, queries, k)

    def hits(self, ranking: Ranking) -> list[Hit]:
        """The documents of a ranking."""
        found: dict[int, Document] = {}
        for segment in self.segments:
            where, rows = segment.find(ranking.numbers)
            found.update(zip(where.tolist(), segment.documents(rows), strict=True))
        scores = ranking.scores.tolist()
        documents = (found[position] for position in range(len(ranking)))
        return [
            Hit(document.id, score, document.text, document.columns)
            for document, score in zip(documents, scores, strict=True)
        ]

    def documents(self) -> Iterator[tuple[Document, np.ndarray | None]]:
        """All documents with their vectors, segment by segment."""
        for segment in self.segments:
            rows = segment.live_rows()
            for start in range(0, len(rows), 1024):
                part = rows[start : start + 1024]
                has_vectors = self.manifest.model is not None
                vectors: Any = segment.vectors(part) if has_vectors else itertools.repeat(None)
                yield from zip(segment.documents(part), vectors, strict=False)

    def __repr__(self) -> str:
        return f"SearchIndex({str(self.folder)!r}, documents={len(self):,})"
