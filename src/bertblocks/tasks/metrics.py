"""Scores of predictions. What scikit-learn and seqeval define is computed by them; SQuAD's two scores are its own."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

Scores = dict[str, float]


def classification_scores(gold: Sequence[int], predicted: Sequence[int], classes: int) -> Scores:
    """Scores of one label per text; of two classes also the F1 of the second.

    Example:
        >>> classification_scores([0, 1, 1, 0], [0, 1, 0, 0], classes=2)["accuracy"]
        0.75
    """
    from sklearn import metrics

    binary = {"f1": float(metrics.f1_score(gold, predicted, zero_division=0))} if classes == 2 else {}
    return {
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "f1_macro": float(metrics.f1_score(gold, predicted, average="macro", zero_division=0)),
        "f1_micro": float(metrics.f1_score(gold, predicted, average="micro", zero_division=0)),
        "mcc": float(metrics.matthews_corrcoef(gold, predicted)),
        **binary,
    }


def multi_label_scores(gold: np.ndarray, predicted: np.ndarray) -> Scores:
    """Scores of `[texts, labels]` zeros and ones; accuracy counts texts whose labels are all right."""
    from sklearn import metrics

    return {
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "f1_macro": float(metrics.f1_score(gold, predicted, average="macro", zero_division=0)),
        "f1_micro": float(metrics.f1_score(gold, predicted, average="micro", zero_division=0)),
    }


def regression_scores(gold: ArrayLike, predicted: ArrayLike) -> Scores:
    """Pearson and Spearman correlation, 0 where one side is constant, and the mean squared error.

    Example:
        >>> regression_scores([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])["spearman"]
        1.0
    """
    from scipy import stats

    first, second = np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    varies = len(first) > 1 and np.ptp(first) > 0 and np.ptp(second) > 0
    return {
        "pearson": float(stats.pearsonr(first, second).statistic) if varies else 0.0,
        "spearman": float(stats.spearmanr(first, second).statistic) if varies else 0.0,
        "mse": float(np.mean((first - second) ** 2)),
    }


def tagging_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], has_entities: bool) -> Scores:
    """Accuracy over words and, for tags that mark entities, precision, recall and F1 of whole entities.

    Example:
        >>> tagging_scores([["B-LOC", "O"]], [["B-LOC", "B-PER"]], has_entities=True)["precision"]
        0.5
    """
    pairs = [(a, b) for left, right in zip(gold, predicted, strict=True) for a, b in zip(left, right, strict=True)]
    scores = {"accuracy": float(np.mean([a == b for a, b in pairs])) if pairs else 0.0}
    if has_entities:
        from seqeval import metrics

        names: dict[str, Callable[..., float]] = {
            "precision": metrics.precision_score,
            "recall": metrics.recall_score,
            "f1": metrics.f1_score,
        }
        lists = [list(row) for row in gold], [list(row) for row in predicted]
        scores |= {name: float(score(*lists, zero_division=0)) for name, score in names.items()}
    return scores


# ---------------------------------------------------------------------- question answering


def normalize_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation, articles and extra spaces.

    Example:
        >>> normalize_answer("The  Old, Man!")
        'old man'
    """
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(gold: str, predicted: str) -> float:
    return float(normalize_answer(gold) == normalize_answer(predicted))


def answer_f1(gold: str, predicted: str) -> float:
    """The harmonic mean of precision and recall over words; answers without words must be equal.

    Example:
        >>> answer_f1("the old man", "old man and the sea")
        0.6666666666666666
    """
    left, right = normalize_answer(gold).split(), normalize_answer(predicted).split()
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    return 2 * shared / (len(left) + len(right))


def answering_scores(gold: Mapping[str, Sequence[str]], predicted: Mapping[str, str]) -> Scores:
    """Exact match and F1 in percent over questions, each against its best gold answer; no gold answer means "".

    With unanswerable questions among them the two are given for each kind too, as SQuAD 2 does.
    """
    scores: dict[str, list[tuple[float, float]]] = {"": [], "has_answer_": [], "no_answer_": []}
    for question, answers in gold.items():
        # an answer that is nothing once normalised counts for nothing, as in the official script
        valid = [answer for answer in answers if normalize_answer(answer)] or [""]
        said = predicted[question]
        pair = max(exact_match(a, said) for a in valid), max(answer_f1(a, said) for a in valid)
        scores[""].append(pair)
        scores["has_answer_" if answers else "no_answer_"].append(pair)
    kinds = scores if scores["no_answer_"] else {"": scores[""]}
    return {
        f"{kind}{name}": 100 * float(np.mean([pair[index] for pair in pairs]))
        for kind, pairs in kinds.items()
        if pairs
        for index, name in enumerate(("exact_match", "f1"))
    }


# ---------------------------------------------------------------------- retrieval


def retrieval_scores(ranked: Sequence[Sequence[str]], relevant: Sequence[set[str]], at: Sequence[int]) -> Scores:
    """Mean recall@k and NDCG@k of ranked documents, one ranking for each query.

    Example:
        >>> retrieval_scores([["a", "b"]], [{"b"}], at=[1, 2])
        {'recall@1': 0.0, 'ndcg@1': 0.0, 'recall@2': 1.0, 'ndcg@2': 0.6309297535714575}
    """
    scores: Scores = {}
    for k in at:
        recalls, gains = [], []
        for documents, wanted in zip(ranked, relevant, strict=True):
            hits = np.array([document in wanted for document in documents[:k]], dtype=np.float64)
            discounts = 1 / np.log2(np.arange(2, k + 2))
            ideal = discounts[: min(len(wanted), k)].sum()
            recalls.append(hits.sum() / len(wanted))
            gains.append((hits * discounts[: len(hits)]).sum() / ideal)
        scores[f"recall@{k}"] = float(np.mean(recalls))
        scores[f"ndcg@{k}"] = float(np.mean(gains))
    return scores


# ---------------------------------------------------------------------- comparing models


def paired_bootstrap(
    score: Callable[[np.ndarray], tuple[float, float]], examples: int, samples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the difference second - first of two models' scores on the same examples.

    `score` takes the indices of a resample and gives both models' scores on it.
    """
    generator = np.random.default_rng(seed)
    differences = []
    for _ in range(samples):
        first, second = score(generator.integers(0, examples, examples))
        differences.append(second - first)
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)
