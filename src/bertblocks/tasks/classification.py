"""Labels and scores for texts and pairs of texts: examples, features and the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.numerics import upcast
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.labels import Labels
from bertblocks.tasks.records import DataError, Records
from bertblocks.tasks.tokens import TextTokenizer


@dataclass(frozen=True)
class TextExample:
    text: str
    pair: str | None
    #: A class, a number, or a 0 or 1 for each label.
    target: int | float | list[float]
    place: str


def read_examples(records: Records, columns: Mapping[str, str], labels: Labels) -> list[TextExample]:
    examples = []
    for index, row in enumerate(records.rows):
        place = records.place(index)
        texts = [row[columns[role]] for role in ("text", "text_pair") if role in columns]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"{place}: the text is {text!r}; it must be a string.")
        target = labels.encode(row[columns["label"]], place)
        examples.append(TextExample(texts[0], texts[1] if len(texts) > 1 else None, target, place))
    return examples


def make_features(
    examples: Sequence[TextExample], tokenizer: TextTokenizer, max_length: int
) -> tuple[list[Feature], int]:
    """One sequence for each example, and how many were cut because they are longer than `max_length`."""
    first = tokenizer.tokenize([example.text for example in examples])
    second = tokenizer.tokenize([example.pair or "" for example in examples])
    features, cut = [], 0
    for example, left, right in zip(examples, first, second, strict=True):
        has_pair = example.pair is not None
        room = max_length - tokenizer.num_special(has_pair)
        head, tail = cut_pair(left.ids, right.ids if has_pair else [], room)
        cut += len(head) + len(tail) < len(left.ids) + (len(right.ids) if has_pair else 0)
        framed = tokenizer.frame(head, tail if has_pair else None)
        features.append(Feature(framed.ids, framed.types, example.target))
    return features, cut


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Both texts cut to `room` tokens together, the longer one first.

    Example:
        >>> cut_pair([1, 2, 3, 4], [5], 3), cut_pair([1, 2], [3, 4], 3)
        (([1, 2], [5]), ([1], [3, 4]))
    """
    if len(first) + len(second) <= room:
        return first, second
    shorter = min(len(first), len(second), room // 2)
    if len(first) > len(second):
        return first[: room - shorter], second[:shorter]
    return first[:shorter], second[: room - shorter]


class ClassificationLoss:
    """The summed loss of a batch by the kind of its labels; `class_weights` count a class more or less."""

    def __init__(self, labels: Labels, class_weights: Tensor | None = None) -> None:
        self.problem = labels.problem
        self.class_weights = class_weights

    def batch(self, features: Sequence[Feature]) -> FeatureBatch:
        is_class = self.problem == "single_label_classification"
        targets = torch.tensor([f.target for f in features], dtype=torch.long if is_class else torch.float32)
        return FeatureBatch.of(features, targets, targets.numel())

    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]:
        logits = upcast(model(**batch.inputs).logits)
        if self.problem == "single_label_classification":
            weight = None if self.class_weights is None else self.class_weights.to(logits)
            loss = F.cross_entropy(logits, batch.targets, weight=weight, reduction="sum")
        elif self.problem == "regression":
            loss = F.mse_loss(logits.squeeze(-1), batch.targets, reduction="sum")
        else:
            loss = F.binary_cross_entropy_with_logits(
                logits, batch.targets, pos_weight=self.class_weights, reduction="sum"
            )
        return {"loss": loss}


def balanced_weights(examples: Sequence[TextExample], labels: Labels) -> Tensor:
    """Weights that make every class count alike; of several labels, those that make 0 and 1 of each count alike."""
    if labels.problem == "regression":
        raise DataError("class_weights is 'balanced', and the labels are numbers: they have no classes.")
    if labels.problem == "single_label_classification":
        counts = torch.bincount(torch.tensor([e.target for e in examples]), minlength=labels.size).clamp(min=1)
        return len(examples) / (labels.size * counts)
    ones = torch.tensor([e.target for e in examples]).sum(dim=0).clamp(min=1)
    return (len(examples) - ones).clamp(min=1) / ones
