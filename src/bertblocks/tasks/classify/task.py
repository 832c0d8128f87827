"""Fine-tuning and evaluation of classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.classify.examples import TextExample, read_examples
from bertblocks.tasks.classify.metrics import classification_scores, multi_label_scores, regression_scores
from bertblocks.tasks.classify.predictions import Classification
from bertblocks.tasks.classify.probe import fit_probe, fitted_examples, frozen_vectors, head_vectors, set_head
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.labels import Labels, find_labels, find_positive, labels_of_config
from bertblocks.tasks.settings import ClassifySettings
from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError, read_records
from bertblocks.text.windows import cut_pair

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


class ClassifyTask(FineTuneTask):
    """One label, several labels, or a number for each text or pair; the labels determine the kind unless it is set."""

    name, noun = "classify", "A classifier"
    settings_class = ClassifySettings
    model_task = "sequence-classification"
    packages = ("sklearn", "scipy")

    def __init__(self, settings: ClassifySettings) -> None:
        super().__init__(settings)
        self.labels: Labels | None = None
        self.class_weights: Tensor | None = None
        #: The regularization of the head's first fit, which later fits share.
        self._strength: float | None = None

    @property
    def metric(self) -> str:
        problem = self._known_labels.problem
        return {"regression": "spearman", "multi_label_classification": "f1_micro"}.get(problem, "accuracy")

    @property
    def _known_labels(self) -> Labels:
        assert self.labels is not None, "labels are known once a file has been read or a model adopted"
        return self.labels

    @property
    def _positive(self) -> int:
        """With two labels, the index of the label whose F1 is reported."""
        names = self._known_labels.names
        return find_positive(names, self.settings.positive) if len(names) == 2 else 1

    def adopt(self, config: Any) -> None:
        self.labels = labels_of_config(config.id2label, config.problem_type, self.settings.separator)

    def read(self, source: str | Path) -> list[TextExample]:
        settings = self.settings
        given = self.given_columns("text", "text_pair", "label")
        records = read_records(source, settings.read_options, given.values())
        columns = choose_columns(records, ["text", "label"], ["text_pair"], given)
        is_main = self.labels is None
        if self.labels is None:
            self.labels = find_labels(records, columns["label"], settings.problem, settings.separator)
        kind = f"{self.labels.size} labels" if self.labels.names else "a number"
        if is_main and self.labels.problem == "single_label_classification" and self.labels.size == 2:
            kind += f" (f1 is that of {self.labels.names[self._positive]!r})"
        self.notes.append(f"{source}: {len(records):,} rows, {write_columns(columns, records)}, {kind}")
        examples = read_examples(records, columns, self.labels)
        if is_main and settings.class_weights == "balanced":
            self.class_weights = balanced_weights(examples, self.labels)
        return examples

    def stratum(self, example: TextExample) -> str | None:
        return str(example.target) if self._known_labels.problem == "single_label_classification" else None

    def config_changes(self) -> dict[str, Any]:
        labels = self._known_labels
        names = labels.names or ["score"]
        return {
            "problem_type": labels.problem,
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
        }

    def features(self, examples: Sequence[TextExample], tokenizer: TextTokenizer, max_length: int) -> list[Feature]:
        """One sequence for each example; longer ones are cut."""
        first = tokenizer.tokenize([example.text for example in examples])
        second = tokenizer.tokenize([example.pair or "" for example in examples])
        features, cut = [], 0
        for example, left, right in zip(examples, first, second, strict=True):
            has_pair = example.pair is not None
            room = max_length - tokenizer.num_special(has_pair)
            head, tail = cut_pair(left.ids, right.ids if has_pair else [], room)
            cut += len(head) + len(tail) < len(left.ids) + (len(right.ids) if has_pair else 0)
            sequence = tokenizer.add_special_tokens(head, tail if has_pair else None)
            features.append(Feature(sequence.ids, sequence.types, example.target))
        if cut:
            self.notes.append(f"{cut:,} texts are truncated to {max_length} tokens; raise max_length to keep more")
        return features

    def fit_head(self, model: Any, features: Sequence[Feature]) -> bool:
        if self.settings.head == "random" and not self.refits_head:
            return False
        chosen = [features[index] for index in fitted_examples(len(features))]
        targets = np.array([feature.target for feature in chosen])
        probe = fit_probe(head_vectors(model, chosen), targets, self._known_labels, self._is_balanced, self._strength)
        self._strength = probe.strength
        set_head(model, probe)
        return True

    def baselines(
        self, predictor: Predictor, train: Sequence[TextExample], held_out: Sequence[TextExample]
    ) -> dict[str, Scores]:
        """The most common answer, and a linear probe on frozen vectors.

        For pairs, the probe reads the absolute difference and the product of both vectors (Conneau et al., 2017).
        """
        labels = self._known_labels
        train = [train[index] for index in fitted_examples(len(train))]
        targets = np.array([example.target for example in train])
        gold = np.array([example.target for example in held_out])
        if labels.problem == "single_label_classification":
            constant = np.eye(labels.size)[np.bincount(targets, minlength=labels.size).argmax()]
        else:
            constant = np.atleast_1d(targets.mean(axis=0)) - (0.5 if labels.names else 0.0)
        probe = fit_probe(frozen_vectors(predictor, train), targets, labels, self._is_balanced)
        name = "mean" if labels.problem == "regression" else "majority"
        return {
            name: self._score(gold, np.tile(constant, (len(gold), 1))),
            "linear probe": self._score(gold, probe.logits(frozen_vectors(predictor, held_out))),
        }

    def _score(self, gold: np.ndarray, logits: np.ndarray) -> Scores:
        labels = self._known_labels
        if labels.problem == "regression":
            return regression_scores(gold, logits[:, 0])
        if labels.problem == "multi_label_classification":
            return multi_label_scores(gold, logits >= 0)
        return classification_scores(gold.tolist(), logits.argmax(axis=1).tolist(), labels.size, self._positive)

    @property
    def _is_balanced(self) -> bool:
        return self.settings.class_weights == "balanced"

    def batch(self, features: Sequence[Feature]) -> FlatBatch:
        is_class = self._known_labels.problem == "single_label_classification"
        targets = torch.tensor([f.target for f in features], dtype=torch.long if is_class else torch.float32)
        return make_batch(features, targets, targets.numel())

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(**batch.inputs, labels=batch.labels, class_weights=self.class_weights, num_items_in_batch=1)
        return {"loss": out.loss}

    def evaluate(self, predictor: Predictor, examples: Sequence[TextExample]) -> Evaluated:
        texts = [example.text if example.pair is None else (example.text, example.pair) for example in examples]
        predictions = predictor.classify(texts)
        labels = self._known_labels
        if labels.problem == "single_label_classification":
            return _score_classes(examples, predictions, labels.names, self._positive)
        targets = np.array([example.target for example in examples])
        if labels.problem == "regression":
            numbers = np.array([next(iter(prediction.scores.values())) for prediction in predictions])
            scores = regression_scores(targets, numbers)
            records = [
                {"text": _write(example), "gold": float(target), "predicted": float(number)}
                for example, target, number in zip(examples, targets, numbers, strict=True)
            ]
            return Evaluated(scores, lambda i: regression_scores(targets[i], numbers[i])[self.metric], records)
        chosen = np.array([[name in prediction.labels for name in labels.names] for prediction in predictions])
        return Evaluated(
            multi_label_scores(targets, chosen),
            lambda i: multi_label_scores(targets[i], chosen[i])[self.metric],
            [
                {
                    "text": _write(example),
                    "gold": [name for name, is_gold in zip(labels.names, target, strict=True) if is_gold],
                    "predicted": prediction.labels,
                    "probabilities": {name: round(share, 4) for name, share in prediction.scores.items()},
                }
                for example, target, prediction in zip(examples, targets, predictions, strict=True)
            ],
        )


def balanced_weights(examples: Sequence[TextExample], labels: Labels) -> Tensor:
    """Computes weights that balance the classes; with several labels per text, that balance 0 and 1 of each label."""
    if labels.problem == "regression":
        raise DataError("class_weights is 'balanced', but the labels are numbers, which do not have classes.")
    if labels.problem == "single_label_classification":
        counts = torch.bincount(torch.tensor([e.target for e in examples]), minlength=labels.size).clamp(min=1)
        return len(examples) / (labels.size * counts)
    ones = torch.tensor([e.target for e in examples]).sum(dim=0).clamp(min=1)
    return (len(examples) - ones).clamp(min=1) / ones


def _score_classes(
    examples: Sequence[TextExample], predictions: Sequence[Classification], names: list[str], positive: int
) -> Evaluated:
    index = {name: number for number, name in enumerate(names)}
    gold = [int(example.target) for example in examples]  # type: ignore[arg-type]
    predicted = [index[prediction.labels[0]] for prediction in predictions]
    correct = np.array(gold) == np.array(predicted)
    return Evaluated(
        classification_scores(gold, predicted, len(names), positive),
        lambda i: float(correct[i].mean()),
        [
            {
                "text": _write(example),
                "gold": names[target],
                "predicted": prediction.labels[0],
                "probability": prediction.scores[prediction.labels[0]],
                "gold_probability": prediction.scores[names[target]],
            }
            for example, target, prediction in zip(examples, gold, predictions, strict=True)
        ],
    )


def _write(example: TextExample) -> str:
    return example.text if example.pair is None else f"{example.text} | {example.pair}"
