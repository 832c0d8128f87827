"""Metrics of classification and regression, computed by scikit-learn and scipy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertblocks.tasks.base import Scores


def classification_scores(gold: Sequence[int], predicted: Sequence[int], classes: int, positive: int = 1) -> Scores:
    """Scores predictions of one label per text; with two classes, `f1` is that of the `positive` class.

    Example:
        >>> classification_scores([0, 1, 1, 0], [0, 1, 0, 0], classes=2)["accuracy"]
        0.75
    """
    from sklearn import metrics

    binary: Scores = {}
    if classes == 2:
        binary["f1"] = float(metrics.f1_score(gold, predicted, pos_label=positive, zero_division=0))
    return {
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "f1_macro": float(metrics.f1_score(gold, predicted, average="macro", zero_division=0)),
        "f1_micro": float(metrics.f1_score(gold, predicted, average="micro", zero_division=0)),
        "mcc": float(metrics.matthews_corrcoef(gold, predicted)),
        **binary,
    }


def multi_label_scores(gold: np.ndarray, predicted: np.ndarray) -> Scores:
    """Scores `[texts, labels]` arrays of zeros and ones; accuracy counts texts whose labels are all correct."""
    from sklearn import metrics

    return {
        "accuracy": float(metrics.accuracy_score(gold, predicted)),
        "f1_macro": float(metrics.f1_score(gold, predicted, average="macro", zero_division=0)),
        "f1_micro": float(metrics.f1_score(gold, predicted, average="micro", zero_division=0)),
    }


def regression_scores(gold: ArrayLike, predicted: ArrayLike) -> Scores:
    """Computes the mean squared error and the Pearson and Spearman correlations, which are 0 if a side is constant.

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
