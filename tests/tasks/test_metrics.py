"""Metrics, tested against scikit-learn, seqeval, scipy, and a second implementation of SQuAD's definition."""

from __future__ import annotations

import collections
import re
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics

from bertblocks.tasks.answer.metrics import answering_scores
from bertblocks.tasks.classify.metrics import classification_scores, multi_label_scores, regression_scores
from bertblocks.tasks.retrieval.metrics import score_ranking
from bertblocks.tasks.tag.metrics import tagging_scores

labels = st.integers(0, 3)
pairs = st.lists(st.tuples(labels, labels), min_size=2, max_size=30)


@given(pairs=pairs)
def test_classification_metrics_equal_scikit_learn(pairs: Any) -> None:
    gold, predicted = zip(*pairs, strict=True)
    scores = classification_scores(gold, predicted, classes=4)
    confusion = sklearn_metrics.confusion_matrix(gold, predicted)
    hits, real, predicted_counts = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    f1 = 2 * hits / np.maximum(real + predicted_counts, 1)
    assert scores["accuracy"] == pytest.approx(hits.sum() / len(gold))
    assert scores["f1_macro"] == pytest.approx(f1.mean())
    assert scores["f1_micro"] == pytest.approx(hits.sum() / len(gold))
    total = len(gold)
    spread = np.sqrt(float(total**2 - (predicted_counts**2).sum()) * float(total**2 - (real**2).sum()))
    mcc = (hits.sum() * total - (real * predicted_counts).sum()) / spread if spread else 0.0
    assert scores["mcc"] == pytest.approx(mcc)


def test_f1_of_two_classes_is_computed_for_the_second() -> None:
    scores = classification_scores([0, 1, 1, 1], [1, 1, 1, 0], classes=2)
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    first = classification_scores([0, 1, 1, 1, 0], [1, 1, 1, 0, 0], classes=2, positive=0)
    assert first["f1"] == pytest.approx(2 * 1 / (2 * 1 + 1 + 1))


def test_multi_label_metrics_equal_scikit_learn() -> None:
    gold, predicted = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[1, 0], [0, 1], [0, 1]])
    scores = multi_label_scores(gold, predicted)
    assert scores["accuracy"] == pytest.approx(1 / 3)
    assert scores["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert scores["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)


@given(st.lists(st.tuples(st.floats(-5, 5, width=16), st.floats(-5, 5, width=16)), min_size=3, max_size=20))
def test_correlations_equal_scipy(values: Any) -> None:
    gold, predicted = (np.array(side, dtype=np.float64) for side in zip(*values, strict=True))
    scores = regression_scores(gold, predicted)
    if np.ptp(gold) < 1e-3 or np.ptp(predicted) < 1e-3:
        return
    assert scores["pearson"] == pytest.approx(np.corrcoef(gold, predicted)[0, 1], abs=1e-9)
    ranks = stats.rankdata(gold), stats.rankdata(predicted)
    assert scores["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)


def test_correlation_of_a_constant_is_zero() -> None:
    assert regression_scores([1, 2, 3], [2, 2, 2])["spearman"] == 0.0


tags = st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])


@given(st.lists(st.lists(st.tuples(tags, tags), min_size=1, max_size=8), min_size=1, max_size=4))
def test_entity_scores_count_whole_spans(sentences: Any) -> None:
    from bertblocks.text.tag_schemes import entities

    gold = [[a for a, _ in sentence] for sentence in sentences]
    predicted = [[b for _, b in sentence] for sentence in sentences]
    scores = tagging_scores(gold, predicted, has_entities=True)
    real = {(i, entity) for i, row in enumerate(gold) for entity in entities(row)}
    found = {(i, entity) for i, row in enumerate(predicted) for entity in entities(row)}
    shared = len(real & found)
    assert scores["precision"] == pytest.approx(shared / len(found) if found else 0.0)
    assert scores["recall"] == pytest.approx(shared / len(real) if real else 0.0)
    assert scores["f1"] == pytest.approx(2 * shared / (len(real) + len(found)) if real or found else 0.0)


def squad_reference(gold: list[str], predicted: str) -> tuple[int, float]:
    """The two scores of SQuAD 2 for one question, step by step as defined."""

    def tokens(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    golds = [g for g in gold if tokens(g)] or [""]
    best_exact, best_f1 = 0, 0.0
    for g in golds:
        a, b = tokens(g), tokens(predicted)
        best_exact = max(best_exact, int(a == b))
        common = sum((collections.Counter(a) & collections.Counter(b)).values())
        if not a or not b:
            f1 = float(a == b)
        elif common == 0:
            f1 = 0.0
        else:
            precision, recall = common / len(b), common / len(a)
            f1 = 2 * precision * recall / (precision + recall)
        best_f1 = max(best_f1, f1)
    return best_exact, best_f1


answers = st.text(alphabet="aAn the,.x y'", max_size=12)


@given(st.lists(st.tuples(st.lists(answers, max_size=3), answers), min_size=1, max_size=6))
def test_answer_scores_equal_squads_definition(cases: Any) -> None:
    gold = {str(i): case[0] for i, case in enumerate(cases)}
    predicted = {str(i): case[1] for i, case in enumerate(cases)}
    scores = answering_scores(gold, predicted)
    reference = np.array([squad_reference(*case) for case in cases], dtype=np.float64)
    assert scores["exact_match"] == pytest.approx(100 * reference[:, 0].mean())
    assert scores["f1"] == pytest.approx(100 * reference[:, 1].mean())
    unanswerable = [not case[0] for case in cases]
    if any(unanswerable):
        assert scores["no_answer_f1"] == pytest.approx(100 * reference[unanswerable, 1].mean())


@given(st.permutations(list("abcdef")), st.sets(st.sampled_from("abcdef"), min_size=1), st.integers(1, 6))
def test_retrieval_metrics_equal_scikit_learn(ranked: Any, relevant: Any, k: Any) -> None:
    scores = score_ranking(ranked, dict.fromkeys(relevant, 1.0), [f"ndcg@{k}", f"recall@{k}"])
    truth = np.array([[document in relevant for document in ranked]], dtype=np.float64)
    order = np.arange(len(ranked), 0, -1, dtype=np.float64)[None]
    assert scores[f"ndcg@{k}"] == pytest.approx(sklearn_metrics.ndcg_score(truth, order, k=k))
    assert scores[f"recall@{k}"] == pytest.approx(truth[0, :k].sum() / len(relevant))
