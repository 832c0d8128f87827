"""Metrics of tagging, computed by seqeval."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bertblocks.tasks.base import Scores


def tagging_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], has_entities: bool) -> Scores:
    """Computes the accuracy over words and, if tags mark entities, precision, recall and F1 of whole entities.

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
