"""MTEB's own library runs every kind of model on a small task of retrieval, with the scores of `evaluate_beir`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bertblocks import BertBlocksForSequenceClassification, BertBlocksModel
from bertblocks.evaluation.beir import evaluate_beir
from bertblocks.evaluation.mteb import MTEBCrossEncoder, MTEBEncoder, MTEBRetriever, mteb_model
from bertblocks.evaluation.run_files import write_run
from tests.evaluation.helpers import label_config, save_model
from tests.evaluation.test_beir import (
    DOCUMENTS,
    JUDGMENTS,
    METRICS,
    QUERIES,
    WORDS,
    FakePredictor,
    trec_means,
    write_folder,
)

pytestmark = pytest.mark.slow

CANDIDATES = {"q1": ["d0", "d3", "d5", "d7"], "q2": ["d10", "d1"], "d3": ["d8", "d4", "d3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("beir"))


def make_task(is_reranking: bool) -> Any:
    """The documents and queries of the folder, in memory."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class SmallTask(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="SmallReranking" if is_reranking else "SmallRetrieval",
            description="A few words.",
            type="Reranking" if is_reranking else "Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            dataset={"path": "none/none", "revision": "none"},
        )

        def load_data(self, num_proc: int | None = None, *, timer: Any = None, **options: Any) -> None:
            rows = [{"id": name, "title": "", "text": text} for name, text in DOCUMENTS.items()]
            rows[1] = {"id": "d1", "title": "green", "text": DOCUMENTS["d1"].removeprefix("green ")}
            split: Any = {
                "corpus": Dataset.from_list(rows),
                "queries": Dataset.from_list([{"id": name, "text": QUERIES[name]} for name in JUDGMENTS]),
                "relevant_docs": JUDGMENTS,
                "top_ranked": CANDIDATES if is_reranking else None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return SmallTask()


def run_mteb(model: Any, is_reranking: bool = False) -> dict[str, float]:
    mteb = pytest.importorskip("mteb")
    results = mteb.evaluate(model, make_task(is_reranking), cache=None)
    found = results.task_results[0].scores["test"][0]
    names = {"ndcg@10": "ndcg_at_10", "map@100": "map_at_100", "recall@3": "recall_at_3"}
    return {ours: found[theirs] for ours, theirs in names.items()}


def test_an_embedder_has_the_scores_of_beir(folder: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path, BertBlocksModel, WORDS)
    adapter = mteb_model(model, dtype=torch.float32)
    assert isinstance(adapter, MTEBEncoder)
    (expected,) = evaluate_beir([model], folder, metrics=METRICS)
    assert run_mteb(adapter) == pytest.approx(expected.scores, abs=1e-4)


def test_a_reranker_has_the_scores_of_beir(folder: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", BertBlocksForSequenceClassification, WORDS, **label_config("score"))
    adapter = mteb_model(model, dtype=torch.float32)
    assert isinstance(adapter, MTEBCrossEncoder)
    write_run(tmp_path / "first", {query: dict.fromkeys(names, 1.0) for query, names in CANDIDATES.items()}, "first")
    (expected,) = evaluate_beir([model], folder, metrics=METRICS, first=str(tmp_path / "first"))
    assert run_mteb(adapter, is_reranking=True) == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("is_reranking", [False, True])
@pytest.mark.parametrize("kind", ["sparse-encoder", "multi-vector"])
def test_retrievers_implement_the_interface_of_search(folder: Path, kind: str, is_reranking: bool) -> None:
    texts = {*QUERIES.values(), *DOCUMENTS.values()}
    generator = np.random.default_rng(0)
    vectors: dict[str, Any] = {text: generator.random((2, 8)).astype(np.float32) for text in sorted(texts)}
    if kind == "sparse-encoder":
        vectors = {
            text: SimpleNamespace(indices=np.arange(8, dtype=np.int32), values=rows[0])
            for text, rows in vectors.items()
        }
    predictor = FakePredictor(vectors)
    run = {}
    for query in JUDGMENTS:
        names = CANDIDATES[query] if is_reranking else DOCUMENTS
        run[query] = {name: similarity(kind, vectors[QUERIES[query]], vectors[DOCUMENTS[name]]) for name in names}
    adapter = MTEBRetriever(cast(Any, predictor), kind, "me/model")
    assert run_mteb(adapter, is_reranking) == pytest.approx(trec_means(run, JUDGMENTS), abs=1e-4)


def similarity(kind: str, query: Any, document: Any) -> float:
    if kind == "sparse-encoder":
        return float(query.values @ document.values)
    return float((query @ document.T).max(axis=1).sum())
