"""Ranks the documents of a corpus by embeddings, sparse vectors, token vectors or a reranker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.evaluation.run_files import Run
from bertblocks.models import BertBlocksForSequenceClassification
from bertblocks.search.ranking import RANK_CONSTANT
from bertblocks.tasks.multi import score_multi
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.retrieval.metrics import rank_documents

Role = Literal["query", "document"]
#: Documents whose vectors are in memory at the same time.
BLOCK = 10_000


def open_model(source: str | Path, **options: Any) -> tuple[Predictor, str | None]:
    """Opens a checkpoint with the options of `Predictor`, and says what kind it is, as `find_kind` does.

    A classifier whose files say nothing is a reranker.
    """
    kind, predictor = find_kind(find_checkpoint(source)), Predictor(source, **options)
    if kind is None and isinstance(predictor.model, BertBlocksForSequenceClassification):
        kind = "cross-encoder"
    return predictor, kind


class Retriever:
    """Searches a corpus exactly with an embedder, a sparse encoder or a multi-vector encoder."""

    def __init__(self, predictor: Predictor, kind: str | None, progress: bool = False) -> None:
        self.predictor, self.kind, self.progress = predictor, kind, progress

    def encode(self, texts: Sequence[str], role: Role) -> Iterator[Any]:
        """Yields the vectors of texts as they are computed."""
        method = {"sparse-encoder": "encode_sparse", "multi-vector": "encode_multi"}.get(self.kind or "")
        if method is None:
            return self.predictor.stream("encode", texts, progress=self.progress, prompt_name=role)
        return self.predictor.stream(method, texts, progress=self.progress, role=role)

    def similarity(self, queries: Sequence[Any], documents: Sequence[Any]) -> np.ndarray:
        """Scores all queries with all documents, `[queries, documents]`."""
        if self.kind == "sparse-encoder":
            return _sparse_dot(queries, documents)
        if self.kind == "multi-vector":
            return score_multi(queries, documents)
        return np.stack(queries) @ np.stack(documents).T

    def search(self, queries: Mapping[str, str], documents: Mapping[str, str], top_k: int) -> Run:
        """Returns the scores of the `top_k` best documents of each query; sparse vectors must share a term."""
        vectors = list(self.encode(list(queries.values()), "query"))
        names = list(documents)
        run: Run = {query: {} for query in queries}
        stream, start = self.encode(list(documents.values()), "document"), 0
        while block := list(islice(stream, BLOCK)):
            own_names = names[start : start + len(block)]
            for query, scores in zip(run, self.similarity(vectors, block), strict=True):
                found = np.flatnonzero(scores) if self.kind == "sparse-encoder" else np.arange(len(block))
                run[query] = _keep_best(run[query], own_names, scores, found, top_k)
            start += len(block)
        return run

    def score(
        self, queries: Mapping[str, str], documents: Mapping[str, str], candidates: Mapping[str, Sequence[str]]
    ) -> Run:
        """Returns the scores of the candidates of each query."""
        vectors = list(self.encode(list(queries.values()), "query"))
        names = list(dict.fromkeys(name for query in queries for name in candidates.get(query, ())))
        targets = dict(zip(names, self.encode([documents[name] for name in names], "document"), strict=True))
        run: Run = {query: {} for query in queries}
        for query, vector in zip(queries, vectors, strict=True):
            if own := candidates.get(query):
                scores = self.similarity([vector], [targets[name] for name in own])[0]
                run[query] = dict(zip(own, scores.tolist(), strict=True))
        return run


def rerank_run(
    predictor: Predictor, queries: Mapping[str, str], documents: Mapping[str, str], run: Run, progress: bool = False
) -> Run:
    """Returns a reranker's scores of the documents in a run."""
    candidates = {query: [name for name in run.get(query, {}) if name in documents] for query in queries}
    asked = [query for query in queries if candidates[query]]
    items = [(queries[query], [documents[name] for name in candidates[query]]) for query in asked]
    reranked: Run = {query: {} for query in queries}
    for query, ranking in zip(asked, predictor.stream("rerank", items, progress=progress), strict=True):
        reranked[query] = {candidates[query][entry.index]: float(entry.score) for entry in ranking}
    return reranked


def fuse_runs(runs: Sequence[Run]) -> Run:
    """Scores each document by the sum of 1 / (60 + rank) over runs (reciprocal rank fusion; Cormack et al., 2009)."""
    fused: Run = {}
    for run in runs:
        for query, scores in run.items():
            own = fused.setdefault(query, {})
            for rank, name in enumerate(rank_documents(scores), start=1):
                own[name] = own.get(name, 0.0) + 1 / (RANK_CONSTANT + rank)
    return fused


def first_documents(run: Run, top_k: int) -> Run:
    """Cuts a run to the `top_k` best documents of each query."""
    return {query: {name: scores[name] for name in rank_documents(scores)[:top_k]} for query, scores in run.items()}


def _keep_best(
    best: dict[str, float], names: Sequence[str], scores: np.ndarray, found: np.ndarray, top_k: int
) -> dict[str, float]:
    """Adds those of the documents `found` in a block that are among the `top_k` best, ties as in `rank_documents`."""
    if len(found) > top_k:
        lowest = np.partition(scores[found], -top_k)[-top_k]
        found = found[scores[found] >= lowest]
    merged = best | {names[i]: float(scores[i]) for i in found}
    return {name: merged[name] for name in rank_documents(merged)[:top_k]}


def _sparse_dot(queries: Sequence[Any], documents: Sequence[Any]) -> np.ndarray:
    terms = np.concatenate([vector.indices for vector in documents])
    weights = np.concatenate([vector.values for vector in documents])
    owners = np.repeat(np.arange(len(documents)), [len(vector.indices) for vector in documents])
    size = 1 + max(int(vector.indices.max(initial=0)) for vector in (*queries, *documents))
    scores = np.zeros((len(queries), len(documents)), np.float32)
    for row, query in zip(scores, queries, strict=True):
        by_term = np.zeros(size, np.float32)
        by_term[query.indices] = query.values
        row[:] = np.bincount(owners, by_term[terms] * weights, minlength=len(documents))
    return scores
