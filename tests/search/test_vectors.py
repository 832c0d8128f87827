"""Exact and approximate search compared with all dot products."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bertblocks.search import vectors as vectors_module
from bertblocks.search.index import SearchIndex
from bertblocks.search.vectors import PRECISIONS, pack, unpack
from tests.search.helpers import random_vectors, write


def build(folder: Path, model: Path, vectors: np.ndarray, **settings: object) -> SearchIndex:
    documents = ({"id": number, "text": write(vector)} for number, vector in enumerate(vectors))
    return SearchIndex.build(folder, documents, model=model, settings=settings)


def ids(index: SearchIndex, query: np.ndarray, top_k: int, **options: object) -> list[int]:
    return [int(hit.id) for hit in index.search(write(query), top_k=top_k, **options)]


@pytest.mark.parametrize(("precision", "error"), [("float32", 0), ("float16", 5e-4), ("int8", 1 / 254)])
def test_vectors_come_back_within_half_a_step(precision: str, error: float) -> None:
    vectors = random_vectors(50, 24)
    stored, scales = pack(vectors, precision)
    assert np.abs(unpack(stored, scales, precision, 24) - vectors).max() <= error * np.abs(vectors).max() + 1e-9


def test_binary_vectors_are_signs_of_length_one() -> None:
    vectors = random_vectors(50, 20)
    stored, scales = pack(vectors, "binary")
    assert stored.shape == (50, 3)
    assert unpack(stored, scales, "binary", 20) == pytest.approx(np.where(vectors > 0, 1, -1) / np.sqrt(20))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_exact_search_equals_a_sort_of_all_scores(
    precision: str, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors_module, "BLOCK_ROWS", 7)
    monkeypatch.setattr(vectors_module, "BLOCK_QUERIES", 2)
    monkeypatch.setattr("bertblocks.search.adding.SEGMENT_DOCUMENTS", 30)
    vectors = np.random.default_rng(0).integers(-3, 4, (100, 16)).astype(np.float32)  # many ties
    vectors[0] = 127
    index = build(tmp_path / "index", fake, vectors, precision=precision)
    stored = unpack(*pack(vectors, precision), precision, 16)
    queries = np.random.default_rng(1).integers(-3, 4, (5, 16)).astype(np.float32)
    found = index.search([write(query) for query in queries], top_k=20)
    for query, hits in zip(queries, found, strict=True):
        scores = stored @ query
        expected = np.argsort(-scores, kind="stable")[:20]
        assert [hit.score for hit in hits] == pytest.approx(scores[expected], abs=1e-4)
        if precision in ("float32", "float16"):  # whole numbers, so sums are exact
            assert [int(hit.id) for hit in hits] == expected.tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_approximate_search_finds_the_neighbours_of_random_vectors(precision: str, fake: Path, tmp_path: Path) -> None:
    vectors, queries = random_vectors(2000, 32), random_vectors(40, 32, seed=1)
    index = build(tmp_path / "index", fake, vectors, precision=precision, approximate_from=1000)
    assert index.manifest.graph is not None
    assert index.manifest.graph.documents == 2000
    near = index.rank_vectors(queries, 10)
    exact = index.rank_vectors(queries, 10, exact=True)
    shares = [len(set(a.numbers) & set(b.numbers)) / 10 for a, b in zip(near, exact, strict=True)]
    assert np.mean(shares) >= 0.95
    for approximate, true in zip(near, exact, strict=True):  # hits are scored with the stored vectors
        known = dict(zip(true.numbers.tolist(), true.scores.tolist(), strict=True))
        for number, score in zip(approximate.numbers.tolist(), approximate.scores.tolist(), strict=True):
            assert score == pytest.approx(known.get(number, score), abs=1e-6)


def test_approximate_search_sees_new_documents_and_not_removed_ones(fake: Path, tmp_path: Path) -> None:
    vectors = random_vectors(600, 16)
    index = build(tmp_path / "index", fake, vectors[:550], approximate_from=500)
    assert index.manifest.graph.until == 550
    index.add([{"id": 550 + n, "text": write(vector)} for n, vector in enumerate(vectors[550:])])
    assert index.manifest.graph.until == 550  # a tenth is searched exactly
    order = np.argsort(-(vectors @ vectors[3])).tolist()
    assert ids(index, vectors[3], 10) == order[:10]
    index.remove(str(number) for number in order[:150])  # more than the graph returns for a query
    assert ids(index, vectors[3], 10) == order[150:160]
    assert ids(index, vectors[599], 1) == [599] if 599 not in order[:150] else True
    index.add([{"id": 1000 + n, "text": write(vector)} for n, vector in enumerate(random_vectors(200, 16, seed=2))])
    assert index.manifest.graph.until == 800  # now it is part of the graph
    assert ids(index, vectors[3], 10) == ids(index, vectors[3], 10, exact=True)
    index.remove(str(number) for number in order[150:480])
    index.add([{"id": 2000 + n, "text": write(vector)} for n, vector in enumerate(random_vectors(250, 16, seed=3))])
    assert index.manifest.graph.documents == len(index)  # built again, because half of it was removed


def test_search_does_not_copy_the_vectors(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = random_vectors(2048, 128)  # 1 MiB
    index = build(tmp_path / "index", fake, vectors)
    monkeypatch.setattr(vectors_module, "BLOCK_ROWS", 128)
    tracemalloc.start()
    try:
        index.rank_vectors(vectors[:2], 10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < vectors.nbytes / 10
