"""Scores as other servers give them."""

from __future__ import annotations

import math
from typing import Any

from bertblocks.tasks.classify.predictions import Classification


def sigmoid(logit: float) -> float:
    """The logistic function, without overflow.

    Example:
        >>> sigmoid(0.0), sigmoid(-1000.0)
        (0.5, 0.0)
    """
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)


def score_labels(result: Classification, raw_scores: bool) -> list[dict[str, Any]]:
    """Labels with their scores, the highest first; those of a regression become probabilities, as in TEI."""
    scores = result.scores
    if result.is_regression and not raw_scores:
        scores = {label: sigmoid(score) for label, score in scores.items()}
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return [{"label": label, "score": score} for label, score in ranked]
