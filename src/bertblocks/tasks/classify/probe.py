"""Linear probes: logistic or ridge regression on the vectors of a frozen encoder.

They are a baseline, and a good start for a classifier's head (Kumar et al., 2022).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.tasks.classify.examples import TextExample
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.labels import Labels

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: A probe is fitted to at most this many examples, and its regularization is chosen on at most this many.
MAX_EXAMPLES, MAX_CHOSEN_ON = 10_000, 2_000
#: Inverse strengths of regularization to choose from, for vectors whose numbers have a standard deviation of 1.
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)
#: The logit of a label that training examples always have, or its negative for one that they never have.
CERTAIN = 5.0
#: Steps of a fit, and of those that choose the regularization. With many labels a fit takes minutes to converge, and
#: its last steps hardly change which labels win.
MAX_STEPS, CHOICE_STEPS = 200, 50
_FOLDS = 3
_BATCH = 32


@dataclass(frozen=True)
class LinearProbe:
    """A linear layer from vectors to the logits of labels, or to a number."""

    weight: np.ndarray  # [outputs, size]
    bias: np.ndarray  # [outputs]
    #: The inverse strength of regularization of a probe with one label per vector.
    strength: float = 1.0

    def logits(self, vectors: np.ndarray) -> np.ndarray:
        return vectors @ self.weight.T + self.bias


def fit_probe(
    vectors: np.ndarray, targets: np.ndarray, labels: Labels, is_balanced: bool = False, strength: float | None = None
) -> LinearProbe:
    """Fits a probe. `targets` are class indices, numbers, or a 0 or 1 for each label; `strength` is chosen if None."""
    # vectors of many encoders have a large mean in common, which slows the fit down; the bias makes up for it
    center = vectors.mean(axis=0, dtype=np.float64)
    x, weighting = vectors - center, "balanced" if is_balanced else None
    scale = 1 / max(float(x.std()), 1e-12)
    x *= scale
    with _one_thread():
        if labels.problem == "regression":
            from sklearn.linear_model import RidgeCV

            model = RidgeCV(alphas=[1 / strength for strength in STRENGTHS]).fit(x, targets)
            weight, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
        elif labels.problem == "multi_label_classification":
            columns = [_fit_classes(x, column.astype(int), 2, weighting, 1.0) for column in targets.T]
            # the logit of yes against no
            weight = np.stack([weight[1] - weight[0] for weight, _ in columns])
            bias = np.array([bias[1] - bias[0] for _, bias in columns])
        else:
            strength = strength or choose_strength(x, targets, weighting)
            weight, bias = _fit_classes(x, targets, labels.size, weighting, strength)
    weight = weight * scale
    return LinearProbe(weight, bias - weight @ center, strength or 1.0)


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    """The many small products of a fit are several times slower on the threads of BLAS, next to those of torch."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def choose_strength(x: np.ndarray, targets: np.ndarray, weighting: str | None = None) -> float:
    """The strength with the best accuracy in cross-validation; of equally good ones the strongest regularization."""
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    chosen = _shuffled(len(x))[:MAX_CHOSEN_ON]
    x, targets = x[chosen], targets[chosen]
    if np.unique(targets, return_counts=True)[1].max() < _FOLDS or len(np.unique(targets)) < 2:
        return 1.0
    scoring = "accuracy" if weighting is None else "balanced_accuracy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about labels with fewer examples than folds, and fits that could go on
        scores = [
            cross_val_score(
                _regression(strength, weighting, CHOICE_STEPS),
                x,
                targets,
                cv=StratifiedKFold(_FOLDS),
                scoring=scoring,
            )
            for strength in STRENGTHS
        ]
    return STRENGTHS[int(np.argmax([np.nanmean(score) for score in scores]))]


def _regression(strength: float, weighting: str | None, steps: int = MAX_STEPS) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=steps, class_weight=weighting)


def _fit_classes(
    x: np.ndarray, targets: np.ndarray, size: int, weighting: str | None, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias with one logit for each of `size` classes; a class without examples gets a low one."""
    present = np.unique(targets)
    weight, bias = np.zeros((size, x.shape[1])), np.zeros(size)
    if len(present) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a fit that could go on
            model = _regression(strength, weighting).fit(x, targets)
        if len(present) == 2:  # one logit for two classes
            weight[present] = np.stack((-model.coef_[0] / 2, model.coef_[0] / 2))
            bias[present] = np.array([-model.intercept_[0] / 2, model.intercept_[0] / 2])
        else:
            weight[present], bias[present] = model.coef_, model.intercept_
    absent = np.setdiff1d(np.arange(size), present)
    bias[absent] = bias[present].min() - CERTAIN
    return weight, bias


@contextlib.contextmanager
def read_inputs(layer: nn.Module, inputs: list[Tensor]) -> Iterator[None]:
    """Appends what a layer reads to a list."""
    handle = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def head_vectors(model: Any, features: Sequence[Feature]) -> np.ndarray:
    """The vectors that the last layer of a classifier reads, `[features, hidden]`, without dropout."""
    model.eval()
    vectors: list[Tensor] = []
    with read_inputs(model.classifier, vectors):
        for first in range(0, len(features), _BATCH):
            part = features[first : first + _BATCH]
            model(**make_batch(part, torch.empty(0), len(part)).to(model.device).inputs)
    return torch.cat(vectors).float().cpu().numpy()


@torch.no_grad()
def set_head(model: Any, probe: LinearProbe) -> None:
    """Makes a probe the last layer of a classifier."""

    def copy(values: np.ndarray, target: Tensor) -> None:
        target.copy_(torch.from_numpy(values).to(target))

    copy(probe.weight, model.classifier.weight)
    if model.classifier.bias is not None:
        copy(probe.bias, model.classifier.bias)


def frozen_vectors(predictor: Predictor, examples: Sequence[TextExample]) -> np.ndarray:
    """The pooled vectors of texts; for pairs, the absolute difference and the product of both normalized vectors."""
    if not any(example.pair is not None for example in examples):
        return predictor.encode([example.text for example in examples], normalize=False)
    first, second = (
        predictor.encode(texts)
        for texts in ([example.text for example in examples], [example.pair or "" for example in examples])
    )
    return np.concatenate((np.abs(first - second), first * second), axis=1)


def fitted_examples(count: int) -> list[int]:
    """The indices of the examples that a probe is fitted to."""
    return list(range(count)) if count <= MAX_EXAMPLES else _shuffled(count)[:MAX_EXAMPLES].tolist()


def _shuffled(count: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(count)
