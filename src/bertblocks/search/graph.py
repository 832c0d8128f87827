"""Approximate search: an HNSW graph (Malkov and Yashunin, 2016) of usearch, memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertblocks.core.storage import PARTIAL
from bertblocks.search.ranking import Ranking, TopK
from bertblocks.search.segments import Segment
from bertblocks.search.vectors import search_exactly

#: Neighbours of a document in the graph, and candidates while documents are added and searched. Of the 10 nearest of
#: 23,200 sentences embedded by MiniLM, all are found. Random vectors are harder: 99.8% of the nearest are found in 64
#: dimensions, but 73% in 384.
CONNECTIVITY, EXPANSION_ADD, EXPANSION_SEARCH = 32, 128, 256
#: For every hit that is wanted, this many are taken from the graph and scored again with the stored vectors.
OVERSAMPLE = 4
ADD_ROWS = 4096


def _make(dimensions: int) -> Any:
    """The graph has int8 numbers, whatever the index has: hits are scored again with the stored vectors."""
    from usearch.index import Index

    return Index(
        ndim=dimensions,
        metric="cos",
        dtype="i8",
        connectivity=CONNECTIVITY,
        expansion_add=EXPANSION_ADD,
        expansion_search=EXPANSION_SEARCH,
    )


def build_graph(
    target: Path,
    segments: Sequence[Segment],
    dimensions: int,
    previous: Path | None,
    first: int,
    on_progress: Callable[[int], None],
) -> None:
    """Adds the documents with number `first` or higher to the graph `previous`, or to an empty one."""
    graph = _make(dimensions)
    if previous is not None:
        graph.load(str(previous))
    for segment in segments:
        rows = segment.live_rows()
        rows = rows[segment.numbers(rows) >= first]
        for start in range(0, len(rows), ADD_ROWS):
            part = rows[start : start + ADD_ROWS]
            graph.add(segment.numbers(part).astype(np.uint64), segment.vectors(part))
            on_progress(len(part))
    partial = target.with_name(f".{target.name}{PARTIAL}")
    graph.save(str(partial))
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)


class Graph:
    """A graph on disk that is searched without being loaded."""

    def __init__(self, path: Path, dimensions: int) -> None:
        self._index = _make(dimensions)
        self._index.view(str(path))

    def candidates(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Numbers of documents near each query `[n, dimensions]`, more than `k` if there are more."""
        count = min(k * OVERSAMPLE, len(self._index))
        self._index.expansion_search = max(EXPANSION_SEARCH, 2 * count)
        matches = self._index.search(queries, count)
        keys = np.atleast_2d(matches.keys)
        counts = np.atleast_1d(matches.counts) if len(queries) > 1 else [keys.shape[1]]
        return [row[:found].astype(np.int64) for row, found in zip(keys, counts, strict=True)]


def search_graph(graph: Graph, until: int, segments: Sequence[Segment], queries: np.ndarray, k: int) -> list[Ranking]:
    """Scores the candidates of the graph with the stored vectors, and documents from number `until` on exactly."""
    best = TopK(len(queries), k)
    live = sum(segment.entry.live for segment in segments)
    incomplete = []
    for query, numbers in enumerate(graph.candidates(queries, k)):
        found = 0
        for segment in segments:
            _, rows = segment.find(numbers)
            found += len(rows)
            best.add(query, segment.numbers(rows), segment.vectors(rows) @ queries[query])
        if found < min(k, live):
            incomplete.append(query)
    search_exactly([(segment, segment.first_row_from(until)) for segment in segments], queries, best)
    if incomplete:  # most of their neighbours are removed
        exact = TopK(len(incomplete), k)
        search_exactly([(segment, 0) for segment in segments], queries[incomplete], exact)
        for query, ranking in zip(incomplete, exact.rankings, strict=True):
            best.rankings[query] = ranking
    return best.rankings
