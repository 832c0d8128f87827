"""BEIR folders: rankings of every kind of model, run files, metrics, comparisons and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import pytrec_eval
import torch
from typer.testing import CliRunner

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, BertBlocksModel, Predictor
from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings, save_multi_vector
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import SparseEncoderSettings, save_sparse_encoder
from bertblocks.cli.main import app
from bertblocks.evaluation import retrievers
from bertblocks.evaluation.beir import evaluate_beir, read_beir
from bertblocks.evaluation.evaluate import compare
from bertblocks.evaluation.retrievers import Retriever, fuse_runs, rerank_run
from bertblocks.evaluation.run_files import read_run, write_run
from bertblocks.text.tables import DataError
from tests.evaluation.helpers import label_config, save_model, write_lines

WORDS = ["red", "green", "blue", "river", "house", "stone", "music", "horse", "water", "light", "paper", "silver"]
#: Twelve documents, one with a title, and two that are equal.
DOCUMENTS = {f"d{number}": f"{WORDS[number]} {WORDS[(number * 5 + 1) % 12]}" for number in range(12)}
DOCUMENTS["d9"] = DOCUMENTS["d10"]
QUERIES = {"q1": "red river", "q2": "stone", "d3": DOCUMENTS["d3"], "unjudged": "music"}
JUDGMENTS = {"q1": {"d0": 2, "d3": 1, "d5": 0}, "q2": {"d10": 1, "gone": 1}, "d3": {"d4": 1}}


def write_folder(folder: Path, judgments: dict[str, dict[str, int]] = JUDGMENTS) -> Path:
    rows = [{"_id": name, "title": "", "text": text} for name, text in DOCUMENTS.items()]
    rows[1] = {"_id": "d1", "title": "green", "text": DOCUMENTS["d1"].removeprefix("green ")}
    write_lines(folder / "corpus.jsonl", rows)
    write_lines(folder / "queries.jsonl", [{"_id": name, "text": text} for name, text in QUERIES.items()])
    (folder / "qrels").mkdir(exist_ok=True)
    lines = [f"{query}\t{name}\t{grade}\n" for query, own in judgments.items() for name, grade in own.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("beir"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("embedder"), BertBlocksModel, WORDS)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("r"), BertBlocksForSequenceClassification, WORDS, **label_config("score"))


def trec_means(run: dict[str, dict[str, float]], judgments: dict[str, dict[str, int]]) -> dict[str, float]:
    found = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut.10", "map_cut.100", "recall.3"}).evaluate(run)
    names = {"ndcg@10": "ndcg_cut_10", "map@100": "map_cut_100", "recall@3": "recall_3"}
    return {ours: float(np.mean([own[theirs] for own in found.values()])) for ours, theirs in names.items()}


METRICS = ["ndcg@10", "map@100", "recall@3"]


def test_reading_joins_titles_and_leaves_out_queries_without_judgments(folder: Path) -> None:
    found = read_beir(folder)
    assert found.documents == DOCUMENTS
    assert found.queries == {name: QUERIES[name] for name in JUDGMENTS}
    assert found.judgments == JUDGMENTS


def test_embedders_score_as_cosines_ranked_by_pytrec_eval(folder: Path, embedder: Path, tmp_path: Path) -> None:
    predictor = Predictor(embedder, dtype=torch.float32)
    queries = predictor.encode([QUERIES[name] for name in JUDGMENTS])
    cosines = queries @ predictor.encode(list(DOCUMENTS.values())).T
    run = {
        query: dict(zip(DOCUMENTS, row.tolist(), strict=True)) for query, row in zip(JUDGMENTS, cosines, strict=True)
    }
    done = evaluate_beir([embedder], folder, metrics=METRICS, output=tmp_path)[0]
    assert done.scores == pytest.approx(trec_means(run, JUDGMENTS))
    assert (done.examples, done.metric) == (3, "ndcg@10")
    assert done.resample(np.arange(3)) == pytest.approx(done.scores["ndcg@10"])
    (file,) = tmp_path.iterdir()
    assert read_run(file) == {query: pytest.approx(scores, abs=1e-6) for query, scores in run.items()}
    without = {query: {name: score for name, score in own.items() if name != query} for query, own in run.items()}
    done = evaluate_beir([embedder], folder, metrics=METRICS, ignore_identical_ids=True)[0]
    assert done.scores == pytest.approx(trec_means(without, JUDGMENTS))


def test_blocks_of_documents_do_not_change_a_ranking(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = Retriever(Predictor(embedder, dtype=torch.float32), "embedder")
    whole = retriever.search(QUERIES, DOCUMENTS, 4)
    assert all(len(scores) == 4 for scores in whole.values())
    monkeypatch.setattr(retrievers, "BLOCK", 5)
    assert retriever.search(QUERIES, DOCUMENTS, 4) == {q: pytest.approx(s, abs=1e-6) for q, s in whole.items()}
    everything = retriever.search(QUERIES, DOCUMENTS, 12)
    scored = retriever.score(QUERIES, DOCUMENTS, {"q1": ["d2", "d7"]})
    assert scored["q1"] == pytest.approx({name: everything["q1"][name] for name in ("d2", "d7")}, abs=1e-6)
    assert scored["q2"] == {}


def test_rerankers_order_what_the_first_stage_found(folder: Path, reranker: Path, tmp_path: Path) -> None:
    first = {"q1": {"d7": 3.0, "d2": 2.0, "d3": 1.0}, "q2": {"d10": 1.0}, "d3": {"d4": 1.0, "d8": 0.5}}
    write_run(tmp_path / "first.run", first, "first")
    predictor = Predictor(reranker, dtype=torch.float32)
    run = {}
    for query, scores in first.items():
        names = list(scores)[:2]  # candidates=2
        ranked = predictor.rerank(QUERIES[query], [DOCUMENTS[name] for name in names])
        run[query] = {names[entry.index]: entry.score for entry in ranked}
    settings: dict[str, Any] = {"first": tmp_path / "first.run", "candidates": 2, "metrics": METRICS}
    (done,) = evaluate_beir([reranker], folder, output=tmp_path / "out", **settings)
    assert done.scores == pytest.approx(trec_means(run, JUDGMENTS))
    (file,) = (tmp_path / "out").iterdir()
    assert read_run(file) == {query: pytest.approx(scores, abs=1e-6) for query, scores in run.items()}
    with pytest.raises(DataError, match=r"is a reranker; first=MODEL or first=RUN_FILE must name"):
        evaluate_beir([reranker], folder)


class FakePredictor:
    """Yields given vectors for texts, and a reranker's scores for documents."""

    max_length = 64
    model = SimpleNamespace(num_parameters=lambda: 0)

    def __init__(self, vectors: dict[str, Any]) -> None:
        self.vectors = vectors

    def stream(self, method: str, items: list[Any], progress: bool = False, role: str = "") -> Iterator[Any]:
        if method == "rerank":
            for _, documents in items:
                order = sorted(range(len(documents)), key=lambda i: -self.vectors[documents[i]])
                yield [SimpleNamespace(index=i, score=self.vectors[documents[i]]) for i in order]
            return
        assert method in ("encode_sparse", "encode_multi")
        assert role in ("query", "document")
        yield from (self.vectors[text] for text in items)


def test_sparse_vectors_score_as_dot_products_and_must_share_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    dense = {
        text: generator.random(9) * (generator.random(9) < 0.3) for text in {*QUERIES.values(), *DOCUMENTS.values()}
    }
    dense[QUERIES["q2"]] = np.zeros(9)
    vectors = {
        text: SimpleNamespace(indices=np.flatnonzero(row).astype(np.int32), values=row[row > 0].astype(np.float32))
        for text, row in dense.items()
    }
    monkeypatch.setattr(retrievers, "BLOCK", 5)
    retriever = Retriever(cast(Any, FakePredictor(vectors)), "sparse-encoder")
    for query, scores in retriever.search(QUERIES, DOCUMENTS, 12).items():
        products = {name: float(dense[QUERIES[query]] @ dense[text]) for name, text in DOCUMENTS.items()}
        assert scores == pytest.approx({name: score for name, score in products.items() if score > 0})
    assert retriever.score(QUERIES, DOCUMENTS, {"q2": ["d1"]})["q2"] == {"d1": 0.0}


def test_token_vectors_score_as_maxsim() -> None:
    generator = np.random.default_rng(0)
    vectors = {
        text: generator.normal(size=(generator.integers(1, 5), 4)).astype(np.float32)
        for text in {*QUERIES.values(), *DOCUMENTS.values()}
    }
    retriever = Retriever(cast(Any, FakePredictor(vectors)), "multi-vector")
    for query, scores in retriever.search(QUERIES, DOCUMENTS, 12).items():
        own = vectors[QUERIES[query]]
        assert scores == pytest.approx(
            {name: sum(max(row @ other for other in vectors[text]) for row in own) for name, text in DOCUMENTS.items()},
            abs=1e-5,
        )


def save_sparse(folder: Path) -> None:
    start = Predictor(save_model(folder / "start", BertBlocksForMaskedLM, WORDS), dtype=torch.float32)
    save_sparse_encoder(start.model, folder / "model", start.tokenizer, SparseEncoderSettings())


def save_multi(folder: Path) -> None:
    start = Predictor(save_model(folder / "start", BertBlocksModel, WORDS), dtype=torch.float32)
    prompts = {"query": "red ", "document": "blue "}
    save_multi_vector(start.model, folder / "model", start.tokenizer, MultiVectorSettings(prompts=prompts))


@pytest.mark.parametrize("kind", ["sparse", "multi"])
def test_the_kind_of_a_model_follows_from_its_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    {"sparse": save_sparse, "multi": save_multi}[kind](tmp_path)
    predictor = Predictor(tmp_path / "model", dtype=torch.float32)
    encode: Any = predictor.encode_sparse if kind == "sparse" else predictor.encode_multi
    queries = encode([QUERIES[name] for name in JUDGMENTS], role="query")
    documents = encode(list(DOCUMENTS.values()), role="document")
    run: dict[str, dict[str, float]] = {name: {} for name in JUDGMENTS}
    for query, own in zip(run, queries, strict=True):
        for name, other in zip(DOCUMENTS, documents, strict=True):
            score = own.dot(other) if kind == "sparse" else (own @ other.T).max(axis=1).sum()
            run[query][name] = float(score)
    evaluate_beir([tmp_path / "model"], folder, output=tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    assert read_run(file) == {query: pytest.approx(scores, rel=1e-5) for query, scores in run.items()}


def test_rerankers_score_the_candidates_that_the_corpus_has() -> None:
    scores = {text: float(number) for number, text in enumerate(dict.fromkeys(DOCUMENTS.values()))}
    run = {"q1": {"d1": 9.0, "d4": 8.0, "gone": 7.0}, "q2": {}}
    reranked = rerank_run(cast(Any, FakePredictor(scores)), QUERIES, DOCUMENTS, run)
    assert reranked["q1"] == {"d4": scores[DOCUMENTS["d4"]], "d1": scores[DOCUMENTS["d1"]]}
    assert [reranked[query] for query in QUERIES if query != "q1"] == [{}, {}, {}]


def test_a_query_whose_judgments_are_all_zero_counts_zero_as_in_trec_eval(tmp_path: Path) -> None:
    judgments = JUDGMENTS | {"unjudged": {"d2": 0}}
    folder, run = write_folder(tmp_path, judgments), {"q1": {"d0": 1.0}, "unjudged": {"d2": 1.0}}
    write_run(tmp_path / "some.run", run, "some")
    done = evaluate_beir([tmp_path / "some.run"], folder, metrics=METRICS)[0]
    assert done.examples == 4
    expected = trec_means(run | {"q2": {}, "d3": {}}, judgments)
    assert done.scores == pytest.approx(expected)


def test_run_files_are_compared_by_a_paired_bootstrap(folder: Path, tmp_path: Path) -> None:
    good = {"q1": {"d0": 3.0, "d3": 2.0}, "q2": {"d10": 1.0}, "d3": {"d4": 1.0}}
    bad = {query: {"d11": 5.0, **scores} for query, scores in good.items()}
    for name, run in (("good", good), ("bad", bad)):
        write_run(tmp_path / name, run, name)
    first, second = evaluate_beir([tmp_path / "bad", tmp_path / "good"], folder)
    assert first.scores["mrr@10"] == 0.5
    assert second.scores["mrr@10"] == 1.0
    (difference,) = compare([first, second])
    assert difference.difference == pytest.approx(second.scores["ndcg@10"] - first.scores["ndcg@10"])
    assert 0 < difference.low <= difference.difference <= difference.high


def test_fusion_adds_reciprocal_ranks() -> None:
    fused = fuse_runs([{"q": {"a": 0.9, "b": 0.8}}, {"q": {"b": 7.0, "c": 1.0}}])
    assert fused["q"] == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 62})


def test_models_joined_by_plus_are_fused(folder: Path, embedder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other.run", {"q1": {"d7": 1.0}}, "other")
    name = f"{embedder}+{tmp_path / 'other.run'}"
    evaluate_beir([name], folder, output=tmp_path / "out", candidates=2)
    (file,) = (tmp_path / "out").iterdir()
    assert read_run(file)["q1"]["d7"] >= 1 / 61


def test_bad_folders_and_settings_get_one_sentence(folder: Path, embedder: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--task", "beir"])
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        return " ".join((result.output + result.stderr).split())

    assert "beir needs a folder" in run(embedder)
    assert "is not a folder" in run(embedder, "--data", folder / "corpus.jsonl")
    assert "split may be test" in run(embedder, "--data", folder, "split=dev")
    assert "metric is 'ndgc@10'" in run(embedder, "--data", folder, "metrics=[ndgc@10]")
    assert "did you mean 'metrics'" in run(embedder, "--data", folder, "metric=[ndcg@10]")
    broken = tmp_path / "broken"
    for change, message in (
        (("qrels/test.tsv", "q9\td1\t1\n"), "does not have the query 'q9'"),
        (("qrels/test.tsv", "q1\td1\thigh\n"), "the score is 'high'"),
        (("qrels/test.tsv", "q1\tother\t1\n"), "has none of the documents"),
        (
            ("corpus.jsonl", '{"_id": "a", "text": "b"}\n{"_id": "a", "text": "c"}\n'),
            "line 2: the _id 'a'",
        ),
        (("corpus.jsonl", '{"id": "a", "text": "b"}\n'), "has no column '_id'"),
        (("queries.jsonl", '{"_id": "q1", "text": 7}\n'), "the text is 7"),
    ):
        write_folder(broken)
        (broken / change[0]).write_text(change[1])
        assert message in run(embedder, "--data", broken)
    (tmp_path / "bad.run").write_text("q1 Q0 d1 1\n")
    assert "bad.run line 1" in run(tmp_path / "bad.run", "--data", folder)


def test_the_command_prints_tables_and_json(folder: Path, embedder: Path) -> None:
    arguments = ["evaluate", str(embedder), str(embedder), "--task", "beir", "--data", str(folder)]
    text = CliRunner().invoke(app, arguments).output
    assert "3 queries" in text
    assert "recall@100" in text
    values = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert values["metric"] == "ndcg@10"
    assert values["differences"][0]["difference"] == 0


def test_queries_with_the_id_of_a_document_are_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "some.run", {"q1": {"d0": 1.0}}, "some")
    evaluate_beir([tmp_path / "some.run"], folder)
    assert "1 queries have the id of a document" in caplog.text
