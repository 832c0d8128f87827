"""Metrics of question answering: SQuAD's exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bertblocks.tasks.base import Scores


def normalize_answer(text: str) -> str:
    """Normalizes an answer as SQuAD does: lower case, without punctuation, articles and extra spaces.

    Example:
        >>> normalize_answer("The  Old, Man!")
        'old man'
    """
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(gold: str, predicted: str) -> float:
    return float(normalize_answer(gold) == normalize_answer(predicted))


def answer_f1(gold: str, predicted: str) -> float:
    """Computes the harmonic mean of precision and recall over words; empty answers must be equal.

    Example:
        >>> answer_f1("the old man", "old man and the sea")
        0.6666666666666666
    """
    left, right = normalize_answer(gold).split(), normalize_answer(predicted).split()
    return word_f1(left, right) if left and right else float(left == right)


def word_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Computes F1 over the words that two answers share; 0 if both are empty."""
    shared = sum((Counter(gold) & Counter(predicted)).values())
    return 2 * shared / max(len(gold) + len(predicted), 1)


def answering_scores(gold: Mapping[str, Sequence[str]], predicted: Mapping[str, str]) -> Scores:
    """Computes exact match and F1 in percent, each prediction against its best gold answer; no gold answer means "".

    If some questions are unanswerable, both scores are also given for each kind of question, as in SQuAD 2.
    """
    scores: dict[str, list[tuple[float, float]]] = {"": [], "has_answer_": [], "no_answer_": []}
    for question, answers in gold.items():
        # the official script ignores answers that normalize to nothing
        valid = [answer for answer in answers if normalize_answer(answer)] or [""]
        prediction = predicted[question]
        pair = (
            max(exact_match(answer, prediction) for answer in valid),
            max(answer_f1(answer, prediction) for answer in valid),
        )
        scores[""].append(pair)
        scores["has_answer_" if answers else "no_answer_"].append(pair)
    kinds = scores if scores["no_answer_"] else {"": scores[""]}
    return {
        f"{kind}{name}": 100 * float(np.mean([pair[index] for pair in pairs]))
        for kind, pairs in kinds.items()
        if pairs
        for index, name in enumerate(("exact_match", "f1"))
    }
