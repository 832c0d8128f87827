"""Labels or numbers for texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, is_pair, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel


@dataclass(frozen=True)
class Classification:
    """The labels of a text and their scores.

    `labels` holds the most probable label, or all labels at or above the threshold for multi-label models. `scores`
    are probabilities, highest first. For regression, `scores` holds the predicted numbers and `labels` is empty.
    """

    labels: list[str]
    scores: dict[str, float]
    is_regression: bool = False


class ClassificationPipeline(Pipeline[Classification]):
    """Classifies by the model's `problem_type`; if it is unset, a single label means regression.

    The logits of a long text are the mean over its windows. With `raw_scores`, the scores are logits.
    """

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        splitter: SequenceSplitter,
        top_k: int | None = None,
        threshold: float = 0.5,
        raw_scores: bool = False,
    ) -> None:
        super().__init__(model, splitter)
        self.top_k = top_k
        self.threshold = threshold
        self.raw_scores = raw_scores
        config = model.config
        self.labels = [cast(dict[int, str], config.id2label)[index] for index in range(config.num_labels)]
        default = "regression" if config.num_labels == 1 else "single_label_classification"
        self.problem = config.problem_type or default

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        pairs = [self._check(item, index) for index, item in enumerate(items, start=first)]
        texts = [text for pair in pairs for text in pair]
        tokens = iter(self.tokenize(texts))
        requests = []
        for index, pair in enumerate(pairs, start=first):
            text = next(tokens)
            is_single = len(pair) == 1
            segments = (
                self.splitter.split(text, index) if is_single else self.splitter.split_pair(text, next(tokens), index)
            )
            requests.append(Request(segments))
        return requests

    def _check(self, item: Any, index: int) -> tuple[str, ...]:
        if is_pair(item):
            return check_text(item[0], f"Text {index}, first"), check_text(item[1], f"Text {index}, second")
        return (check_text(item, f"Text {index}"),)

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        return list(to_numpy(self.model(**batch.inputs).logits))

    def postprocess(self, request: Request) -> Classification:
        logits = np.stack(request.outputs).mean(axis=0, dtype=np.float64)
        self.warn_if_not_finite(logits, request)
        if self.problem == "regression":
            return Classification([], dict(zip(self.labels, logits.tolist(), strict=True)), is_regression=True)
        is_single = self.problem == "single_label_classification"
        scores = softmax(logits) if is_single else 1 / (1 + np.exp(-logits))
        ranked = np.argsort(-scores, kind="stable")[: self.top_k].tolist()
        chosen = ranked[:1] if is_single else [index for index in ranked if scores[index] >= self.threshold]
        shown = logits if self.raw_scores else scores
        return Classification(
            [self.labels[index] for index in chosen], {self.labels[index]: float(shown[index]) for index in ranked}
        )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Computes the softmax over the last dimension."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
