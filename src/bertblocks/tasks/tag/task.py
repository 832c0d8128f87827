"""Fine-tuning and evaluation of taggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models.masked_lm import IGNORE
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.settings import TagSettings
from bertblocks.tasks.tag.examples import TaggedExample, check_tags, find_tags, read_tagged
from bertblocks.tasks.tag.metrics import tagging_scores
from bertblocks.text.alignment import align, spread_labels
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tag_schemes import Entity, entities, find_scheme, to_bio, write_tags
from bertblocks.text.windows import cut_windows

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


class TagTask(FineTuneTask):
    """A tag for each word of a text: parts of speech, or BIO tags that mark entities."""

    name, noun = "tag", "A tagger"
    settings_class = TagSettings
    packages = ("seqeval",)
    model_task = "token-classification"

    def __init__(self, settings: TagSettings) -> None:
        super().__init__(settings)
        self.names: list[str] = []

    @property
    def metric(self) -> str:
        return "f1" if self._has_entities else "accuracy"

    @property
    def _has_entities(self) -> bool:
        return find_scheme([self.names]) != "plain"

    def adopt(self, config: Any) -> None:
        self.names = [config.id2label[index] for index in sorted(config.id2label)]

    def read(self, source: str | Path) -> list[TaggedExample]:
        settings = self.settings
        given = self.given_columns("words", "tags", "text", "spans")
        tagged = read_tagged(source, settings.column, given, settings.scheme)
        self.names = self.names or find_tags(tagged.examples)
        check_tags(tagged.examples, self.names)
        words = sum(len(example.words) for example in tagged.examples)
        note = f"{source}: {len(tagged.examples):,} texts, {words:,} words, {len(self.names)} tags"
        self.notes.append(note if tagged.scheme == "plain" else f"{note}, written as {tagged.scheme.upper()}")
        if tagged.repaired:
            self.notes.append(f"{source}: {tagged.repaired:,} tags violated their scheme and were repaired")
        return tagged.examples

    def config_changes(self) -> dict[str, Any]:
        return {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
        }

    def features(self, examples: Sequence[TaggedExample], tokenizer: TextTokenizer, max_length: int) -> list[Feature]:
        """Makes sequences with a label for every token.

        Windows of a long text overlap, and a token is scored in only one: the window with the most context around it.
        """
        index = {name: number for number, name in enumerate(self.names)}
        room = max_length - tokenizer.num_special()
        features, windowed = [], 0
        for example, tokens in zip(examples, tokenizer.tokenize([e.text for e in examples], offsets=True), strict=True):
            targets = [index[tag] for tag in example.tags]
            labels = spread_labels(align(example.words, tokens.offsets), targets, self.settings.every_piece)
            windows = cut_windows(len(tokens.ids), room, room // 4)
            windowed += len(windows) > 1
            for window in windows:
                sequence = tokenizer.add_special_tokens(tokens.ids[window.start : window.stop])
                target = [IGNORE] * len(sequence.ids)
                begin = sequence.start + window.core_start - window.start
                core = labels[window.core_start : window.core_stop]
                target[begin : begin + len(core)] = core
                features.append(Feature(sequence.ids, sequence.types, target))
        if windowed:
            self.notes.append(f"{windowed:,} texts are longer than {max_length} tokens and split into windows")
        return features

    def baselines(
        self, predictor: Predictor, train: Sequence[TaggedExample], held_out: Sequence[TaggedExample]
    ) -> dict[str, Scores]:
        """The most common tag of all words, and of each word."""
        by_word: dict[str, Counter[str]] = {}
        for example in train:
            for word, tag in zip(_words(example), example.tags, strict=True):
                by_word.setdefault(word, Counter())[tag] += 1
        majority = _most_common(sum(by_word.values(), Counter()))
        common = {word: _most_common(counts) for word, counts in by_word.items()}
        gold = [example.tags for example in held_out]
        guesses = {
            "majority": [[majority] * len(example.tags) for example in held_out],
            "by word": [[common.get(word, majority) for word in _words(example)] for example in held_out],
        }
        return {name: tagging_scores(gold, predicted, self._has_entities) for name, predicted in guesses.items()}

    def batch(self, features: Sequence[Feature]) -> FlatBatch:
        targets = torch.tensor([label for feature in features for label in feature.target])
        return make_batch(features, targets, int((targets != IGNORE).sum()))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        return {"loss": model(**batch.inputs, labels=batch.labels, num_items_in_batch=1).loss}

    def evaluate(self, predictor: Predictor, examples: Sequence[TaggedExample]) -> Evaluated:
        gold = [example.tags for example in examples]
        predicted = self._predict(predictor, examples)
        if self._has_entities:  # the model may use another scheme
            predicted = [to_bio(tags, find_scheme([self.names]))[0] for tags in predicted]
        scores = tagging_scores(gold, predicted, self._has_entities)
        kinds = entities if self._has_entities else _single_words
        real, found = ([set(kinds(tags)) for tags in side] for side in (gold, predicted))
        counts = np.array([[len(a & b), len(a), len(b)] for a, b in zip(real, found, strict=True)])

        def resample(chosen: np.ndarray) -> float:
            hits, num_real, num_found = counts[chosen].sum(axis=0)
            return 2 * hits / max(num_real + num_found, 1)

        records = [
            {"text": example.text, "words": example.words, "gold": tags, "predicted": found_tags}
            for example, tags, found_tags in zip(examples, gold, predicted, strict=True)
        ]
        return Evaluated(scores, resample, records)

    def _predict(self, predictor: Predictor, examples: Sequence[TaggedExample]) -> list[list[str]]:
        """Predicts the tags of the examples' words; a text without given words is tagged as a user would tag it."""
        given = [example.given for example in examples if example.given is not None]
        if len(given) == len(examples):
            return [[word.label for word in words] for words in predictor.tag(given, level="words")]
        predictions = predictor.tag([example.text for example in examples], level="entities")
        result = []
        for example, found in zip(examples, predictions, strict=True):
            spans = []
            for entity in found:
                words = [i for i, (start, end) in enumerate(example.words) if start < entity.end and end > entity.start]
                if words:
                    spans.append(Entity(words[0], words[-1] + 1, entity.label))
            result.append(write_tags(spans, len(example.words), "bio"))
        return result


def _single_words(tags: Sequence[str]) -> list[Entity]:
    return [Entity(index, index + 1, tag) for index, tag in enumerate(tags)]


def _words(example: TaggedExample) -> list[str]:
    return [example.text[start:end] for start, end in example.words]


def _most_common(counts: Counter[str]) -> str:
    """The most common tag; of equally common ones the first in the alphabet."""
    return min(counts, key=lambda tag: (-counts[tag], tag))
