"""Classifiers from a few examples per label: contrastive training of the encoder, then a head (SetFit)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64, uniform
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import not_cast
from bertblocks.tasks.base import FineTuneTask
from bertblocks.tasks.classify.examples import TextExample
from bertblocks.tasks.classify.probe import read_inputs
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.embed.losses import SCALE
from bertblocks.tasks.features import Feature
from bertblocks.tasks.gather import gather
from bertblocks.text.encoding import TextTokenizer


class FewShotTask(ClassifyTask):
    """Brings texts with the same label together and others apart, and fits the head by logistic regression.

    This follows SetFit (Tunstall et al., 2022), with all pairs of a batch instead of sampled ones. The head reads the
    pooled vectors of the sentence encoder.
    """

    method = "few-shot"
    compares_examples = True
    refits_head = True

    @classmethod
    def from_task(cls, task: ClassifyTask, pooling: str) -> FewShotTask:
        """A task with the same settings and labels."""
        few_shot = cls(task.settings)
        few_shot.labels, few_shot.class_weights, few_shot.notes = task.labels, task.class_weights, task.notes
        few_shot.pooling = pooling
        return few_shot

    def config_changes(self) -> dict[str, Any]:
        return {
            **super().config_changes(),
            "classifier_head": "none",
            "classifier_pooling": self.pooling,
            "classifier_head_before_pooling": False,
            "classifier_head_on_tokens": False,
        }

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        model.classifier.requires_grad_(False)  # it is fitted, not trained

    def features(self, examples: Sequence[TextExample], tokenizer: TextTokenizer, max_length: int) -> list[Feature]:
        features = super().features(examples, tokenizer, max_length)
        self.remember(np.array([feature.target for feature in features]))
        return features

    def remember(self, targets: np.ndarray) -> None:
        """Takes the labels of the training examples, from which partners are drawn."""
        self._targets = targets
        self._members = {target: np.flatnonzero(targets == target) for target in np.unique(targets)}

    def add_partners(self, chosen: np.ndarray, keys: UInt64) -> np.ndarray:
        """Puts after each example another one of the same label, or the example itself if it is the only one."""
        partners = []
        for index, share in zip(chosen.tolist(), uniform(keys).tolist(), strict=True):
            others = self._members[self._targets[index]]
            others = others[others != index] if len(others) > 1 else others
            partners.append(int(others[int(share * len(others))]))
        return np.stack((chosen, np.array(partners)), axis=1).flatten()

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        vectors: list[Tensor] = []
        with read_inputs(inner.get_submodule("classifier"), vectors):
            model(**batch.inputs)
        return upcast(vectors[0])

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return FineTuneTask.losses(self, model, batch)

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        labels = torch.cat([batch.labels for batch in batches if batch.labels is not None])
        loss = contrast_labels(gather(F.normalize(torch.cat(list(outputs)), dim=-1)), gather(labels))
        return {"loss": loss * len(labels)}


def contrast_labels(vectors: Tensor, labels: Tensor) -> Tensor:
    """CoSENT (Su, 2022) over all pairs of texts: log(1 + sum of exp(SCALE (negative - positive))) of their cosines.

    `vectors` have length 1. The sum over all combinations of a positive pair (same label) and a negative pair is the
    product of two sums.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(contrast_labels(vectors, torch.tensor([0, 1, 1])).item(), 4)  # cosines 1 and 0, and 0 of a positive
        20.0
    """
    first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=vectors.device)
    with not_cast(vectors):
        cosines = (vectors @ vectors.T)[first, second] * SCALE
    same = labels[first] == labels[second]
    if same.all() or not same.any():
        return vectors.sum() * 0.0
    return F.softplus(cosines[~same].logsumexp(0) + (-cosines[same]).logsumexp(0))
