"""Sparse and hybrid search compared with dot products of whole vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertblocks.search.index import SearchIndex
from tests.search.helpers import make_model, random_vectors, write


def sparse_vectors(count: int, terms: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.integers(1, 5, (count, terms)) * (generator.random((count, terms)) < 0.2)).astype(np.float32)


def test_the_inverted_index_gives_the_dot_products(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through additions, removals and merges."""
    monkeypatch.setattr("bertblocks.search.adding.SEGMENT_DOCUMENTS", 16)
    monkeypatch.setattr("bertblocks.search.writer.SMALL_SEGMENTS", 4)
    vectors, queries = sparse_vectors(150, 40, 0), sparse_vectors(8, 50, 1)
    vectors[:, 39] = 0
    index = SearchIndex.build(
        tmp_path / "index", ({"id": n, "text": f"{write(row)}|{n}"} for n, row in enumerate(vectors)), sparse=fake
    )
    removed = [3, 17, 90]
    index.remove(map(str, removed))
    for query, hits in zip(queries, index.search([write(query) for query in queries], top_k=200), strict=True):
        scores = vectors @ query[:40]
        scores[removed] = 0
        expected = [n for n in np.argsort(-scores, kind="stable").tolist() if scores[n] > 0]
        assert [int(hit.id) for hit in hits] == expected
        assert [hit.score for hit in hits] == pytest.approx(scores[expected])


def test_a_query_without_known_terms_finds_nothing(fake: Path, tmp_path: Path) -> None:
    index = SearchIndex.build(tmp_path / "index", ["1 0", "0 1"], sparse=fake)
    assert index.search("0 0 0 1") == []


def test_hybrid_search_fuses_both_rankings(fake: Path, tmp_path: Path) -> None:
    vectors = random_vectors(40, 6)
    documents = [{"id": n, "text": write(row)} for n, row in enumerate(vectors)]
    index = SearchIndex.build(tmp_path / "index", documents, model=fake, sparse=make_model(tmp_path / "other"))
    query = write(random_vectors(1, 6, seed=5)[0])
    expected: dict[str, float] = {}
    for mode in ("dense", "sparse"):
        for rank, hit in enumerate(index.search(query, mode=mode, top_k=15), start=1):
            expected[hit.id] = expected.get(hit.id, 0) + 1 / (60 + rank)
    hits = index.search(query, mode="hybrid", top_k=5, candidates=15)
    assert [hit.score for hit in hits] == pytest.approx(sorted(expected.values(), reverse=True)[:5])
    assert all(expected[hit.id] == pytest.approx(hit.score) for hit in hits)


def test_a_reranker_orders_the_candidates_again(fake: Path, tmp_path: Path) -> None:
    index = SearchIndex.build(tmp_path / "index", ["3 1", "2 9", "1 5"], model=fake)
    assert [hit.text for hit in index.search("1 0")] == ["3 1", "2 9", "1 5"]
    hits = index.search("1 0", rerank=fake, top_k=2)
    assert [(hit.text, hit.score) for hit in hits] == [("2 9", 9.0), ("1 5", 5.0)]
    assert [hit.text for hit in index.search("1 0", rerank=fake, top_k=1, candidates=1)] == ["3 1"]
