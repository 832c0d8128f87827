"""Reranking: lists of queries, streams, bad input, the lists that a reranker learns from, and the losses it chooses."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from bertblocks import Predictor
from bertblocks.data.hashing import combine
from bertblocks.tasks.rerank.bm25 import BM25
from bertblocks.tasks.rerank.lists import add_random_negatives, merge_rows, shuffle
from bertblocks.tasks.rerank.task import RerankFeature, RerankTask
from bertblocks.tasks.retrieval.examples import RetrievalExample
from bertblocks.tasks.settings import RerankSettings
from bertblocks.text.tables import DataError
from tests.small_tokenizers import wrap

QUERIES = ["plain words?", "two leading"]
DOCUMENTS = [["plain words are here", "", "two leading trailing"], ["here", "plain words are here"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "initializer_range": 0.3, "max_position_embeddings": 40, "num_labels": 1}
    BertForSequenceClassification(BertConfig(vocab_size=120, **sizes)).save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return folder


def reference(folder: Path, query: str, document: str) -> float:
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return float(model(**wrap("wordpiece")([(query, document)], return_tensors="pt")).logits.sigmoid())


def test_many_queries_are_ranked_as_one_by_one(folder: Path) -> None:
    predictor = Predictor(folder, dtype=torch.float32, token_budget=24)
    found = predictor.rerank(QUERIES, DOCUMENTS)
    for query, documents, ranking in zip(QUERIES, DOCUMENTS, found, strict=True):
        expected = {index: reference(folder, query, document) for index, document in enumerate(documents)}
        assert [ranked.index for ranked in ranking] == sorted(expected, key=lambda index: -expected[index])
        assert {ranked.index: ranked.score for ranked in ranking} == pytest.approx(expected, abs=1e-6)
        assert [ranked.text for ranked in ranking] == [documents[ranked.index] for ranked in ranking]
        single = predictor.rerank(query, documents, top_k=2)
        assert [ranked.index for ranked in single] == [ranked.index for ranked in ranking][:2]
    streamed = predictor.stream("rerank", iter(zip(QUERIES, DOCUMENTS, strict=True)), top_k=1)
    assert [[ranked.index for ranked in own] for own in streamed] == [[own[0].index] for own in found]
    assert predictor.rerank([], []) == []


def test_int8_orders_documents_alike(folder: Path) -> None:
    exact, int8 = (Predictor(folder, dtype=torch.float32, int8=flag) for flag in (False, True))
    for query, documents in zip(QUERIES, DOCUMENTS, strict=True):
        scores = [{r.index: r.score for r in predictor.rerank(query, documents)} for predictor in (exact, int8)]
        assert scores[1] == pytest.approx(scores[0], abs=0.05)
        assert scores[1] != scores[0]


def test_scores_that_the_sigmoid_rounds_to_one_are_ordered_by_their_logits(folder: Path) -> None:
    predictor = Predictor(folder, dtype=torch.float32)
    model: Any = predictor.model
    first = predictor.rerank(QUERIES[0], DOCUMENTS[0])
    plain = [ranked.index for ranked in first]
    model.classifier.bias.data += 40.0
    ranking = predictor.rerank(QUERIES[0], DOCUMENTS[0])
    assert {ranked.score for ranked in ranking} == {1.0}
    assert [ranked.index for ranked in ranking] == plain
    raw = predictor.rerank(QUERIES[0], DOCUMENTS[0], raw_scores=True)
    assert [ranked.index for ranked in raw] == plain
    logits = torch.tensor([ranked.score for ranked in raw]) - 40.0
    assert logits.sigmoid().tolist() == pytest.approx([ranked.score for ranked in first], abs=1e-5)


@pytest.mark.parametrize(
    ("query", "documents", "message"),
    [
        (" ", ["a"], r"Query 0 is empty; it must be a text\."),
        ("a", [], r"Query 0 has no documents; give at least one\."),
        ("a", ["b", None], r"Document 1 of query 0 is None; it must be a string"),
        (["a", "b"], [["x"], []], r"Query 1 has no documents"),
        (["a", "b"], [["x"]], r"There are 2 queries and 1 lists of documents"),
        ("a", "text", r"Input 0 is \('a', 'text'\); it must be a query and a list of documents"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, query: Any, documents: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Predictor(folder).rerank(query, documents)
    with pytest.raises(ValueError, match="top_k is 0"):
        Predictor(folder).rerank("a", ["b"], top_k=0)


def test_other_models_cannot_rerank(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rerank needs a model with a sequence-classification head; this model is a B"
    ):
        Predictor(folder, task="base").rerank("a", ["b"])


# ---------------------------------------------------------------------- lists


def row(query: str, documents: str, gains: list[float]) -> RetrievalExample:
    return RetrievalExample(query, tuple(documents), tuple(gains), tuple(gains), "rows.csv line 2")


def test_rows_of_a_query_become_one_list_with_relevant_documents_first() -> None:
    merged = merge_rows([row("q", "ab", [0, 0]), row("r", "a", [1]), row("q", "cb", [1, 0]), row("q", "a", [2])])
    assert [(list_.query, list_.documents, list_.gains) for list_ in merged] == [
        ("q", ("a", "c", "b"), (2, 1, 0)),
        ("r", ("a",), (1,)),
    ]


def test_pairs_get_documents_of_other_queries_as_negatives() -> None:
    lists = add_random_negatives([row(f"q{n}", "xy"[n % 2], [1]) for n in range(3)])
    assert {list_.documents for list_ in lists} == {("x", "y"), ("y", "x")}
    many = [RetrievalExample(f"q{n}", (f"d{n}",), (1,), (1,), "") for n in range(100)]
    drawn = [list_.documents for list_ in add_random_negatives(many)]
    assert all(len(set(documents)) == 31 and documents[0] == f"d{n}" for n, documents in enumerate(drawn))
    assert len({frozenset(documents) for documents in drawn}) == 100
    assert drawn == [list_.documents for list_ in add_random_negatives(many)]


def test_shuffling_depends_on_the_documents_alone() -> None:
    texts = [str(number) for number in range(50)]
    assert shuffle(texts) == shuffle(texts[::-1]) != texts


def test_bm25_equals_its_formula() -> None:
    documents = ["the red house", "the red red tree", "a river"]
    bm25 = BM25([*documents, "a river"])
    words = [document.split() for document in documents]
    mean = sum(map(len, words)) / 3

    def expected(query: str, own: list[str]) -> float:
        total = 0.0
        for word in query.split():
            having, count = sum(word in other for other in words), Counter(own)[word]
            rarity = math.log(1 + (3 - having + 0.5) / (having + 0.5))
            total += rarity * count / (count + 1.2 * (0.25 + 0.75 * len(own) / mean))
        return total

    for document, own in zip(documents, words, strict=True):
        assert bm25.score("Red tree", document) == pytest.approx(expected("red tree", own))


def test_negatives_are_drawn_anew_and_relevant_documents_stay() -> None:
    task = RerankTask(RerankSettings(negatives=2))
    item = RerankFeature([1], [[n] for n in range(10)], tuple(range(10)), 3)
    drawn = [task.draw([item], combine("x", np.array([key])))[0] for key in range(40)]
    assert all([ids[0] for ids in own.documents[:3]] == [0, 1, 2] for own in drawn)
    assert all(own.targets == tuple(ids[0] for ids in own.documents) and len(own.targets) == 5 for own in drawn)
    assert {target for own in drawn for target in own.targets[3:]} == set(range(3, 10))
    assert task.draw([RerankFeature([1], [[0], [1]], (1, 0), 1)], combine("x", np.array([0])))[0].targets == (1, 0)


@pytest.mark.parametrize(
    ("rows", "loss"),
    [
        ([{"query": "q", "document": "a", "label": 1}, {"query": "q", "document": "b", "label": 0}], "bce"),
        ([{"query": "q", "document": "a", "score": 0.7}, {"query": "q", "document": "b", "score": 0.1}], "bce"),
        ([{"query": "q", "document": "a", "score": 3.5}, {"query": "q", "document": "b", "score": -2}], "mse"),
        ([{"query": "q", "positive": "a", "negatives": ["b", "c"]}], "cross_entropy"),
        ([{"query": "q", "positive": "a"}, {"query": "r", "positive": "b"}], "cross_entropy"),
        ([{"query": "q", "positive": "a", "negative": "b", "margin": 3.5}], "margin_mse"),
        ([{"query": "q", "pos": ["a"], "neg": ["b"], "pos_scores": [4], "neg_scores": [1]}], "margin_mse"),
    ],
)
def test_the_data_chooses_the_loss(tmp_path: Path, rows: Any, loss: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(values) + "\n" for values in rows))
    task = RerankTask(RerankSettings())
    task.read(path)
    assert f"loss: {loss}" in task.notes
    assert task.method == ("lists" if loss in ("cross_entropy", "margin_mse") else "full")


def test_targets_that_a_loss_cannot_learn_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("query,document,score\na,b,3.5\na,c,1\n")
    with pytest.raises(DataError, match=r"rows\.csv line 2: a score is 3\.5; loss=bce needs scores from 0 to 1"):
        RerankTask(RerankSettings(loss="bce")).read(path)
    path.write_text("query,document,score\na,b,-3.5\na,c,1\n")
    with pytest.raises(DataError, match=r"a score is -3\.5; loss=cross_entropy needs scores of 0 or more"):
        RerankTask(RerankSettings(loss="cross_entropy")).read(path)
    path.write_text("name,price\na,2\n")
    with pytest.raises(DataError, match=r"rows\.csv: no column looks like \w+; the columns are name, price"):
        RerankTask(RerankSettings()).read(path)
