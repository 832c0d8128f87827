"""Labels for the entities, words or tokens of a text, with their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from bertblocks.core.registry import nearest
from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.tasks.classify.predictions import softmax
from bertblocks.text.alignment import Span, align, join_words, words_of
from bertblocks.text.tag_schemes import entities, find_scheme
from bertblocks.text.windows import merge_windows

Level = Literal["entities", "words", "tokens"]
LEVELS: tuple[Level, ...] = ("entities", "words", "tokens")


@dataclass(frozen=True)
class Tagged:
    """A labelled span of the input.

    `start` and `end` count characters of a text, or words if the input is a list of words. `text` is the span itself.
    """

    label: str
    start: int
    end: int
    text: str
    score: float


@dataclass(frozen=True)
class _Context:
    """A text, its words if the input was a list of words, and the spans of its words and tokens."""

    text: str
    given: list[str] | None
    words: list[Span]
    tokens: list[Span]


class TaggingPipeline(Pipeline[list[Tagged]]):
    """Labels each word by its first token, as taggers are trained."""

    def __init__(
        self, model: BertBlocksPreTrainedModel, splitter: SequenceSplitter, level: Level | None = None
    ) -> None:
        super().__init__(model, splitter)
        config = model.config
        self.labels = [cast(dict[int, str], config.id2label)[index] for index in range(config.num_labels)]
        has_entities = find_scheme([self.labels]) != "plain"
        self.level = level or ("entities" if has_entities else "words")
        if self.level not in LEVELS:
            raise ValueError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}{nearest(self.level, LEVELS)}.")
        if self.level == "entities" and not has_entities:
            raise ValueError(f"level is 'entities'; this model's labels (such as {self.labels[0]!r}) do not mark any.")

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        contexts = [self._check(item, index) for index, item in enumerate(items, start=first)]
        tokenized = self.tokenize([text for text, _, _ in contexts], offsets=True)
        return [
            Request(self.splitter.split(tokens, index), _Context(text, given, words, tokens.offsets))
            for index, (tokens, (text, given, words)) in enumerate(zip(tokenized, contexts, strict=True), start=first)
        ]

    def _check(self, item: Any, index: int) -> tuple[str, list[str] | None, list[Span]]:
        if isinstance(item, (list, tuple)):
            given = [check_text(word, f"Text {index}, word {number}") for number, word in enumerate(item)]
            if self.level == "tokens":
                raise ValueError(f"Text {index} is a list of words, but level is 'tokens'; pass the text itself.")
            text, words = join_words(given)
            return text, given, words
        text = check_text(item, f"Text {index}")
        return text, None, [] if self.level == "tokens" else words_of(text)

    def forward(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        return list(batch.text_values(to_numpy(self.model(**batch.inputs).logits)))

    def postprocess(self, request: Request) -> list[Tagged]:
        context: _Context = request.context
        windows = [segment.window for segment in request.segments]
        scores = softmax(merge_windows(windows, request.outputs))  # [tokens, labels]
        self.warn_if_not_finite(scores, request)
        if self.level == "tokens":
            best = scores.argmax(axis=-1)
            return [
                self._tagged(context, self.labels[label], span, float(row[label]))
                for span, label, row in zip(context.tokens, best, scores, strict=False)
                if span[0] < span[1]
            ]
        tags, word_scores = self._tag_words(context, scores)
        spans = context.words if context.given is None else [(index, index + 1) for index in range(len(tags))]
        if self.level == "words":
            return [
                self._tagged(context, tag, span, score)
                for tag, span, score in zip(tags, spans, word_scores, strict=True)
            ]
        return [
            self._tagged(
                context,
                entity.kind,
                (spans[entity.start][0], spans[entity.end - 1][1]),
                float(np.mean(word_scores[entity.start : entity.end])),
            )
            for entity in entities(tags)
        ]

    def _tag_words(self, context: _Context, scores: np.ndarray) -> tuple[list[str], list[float]]:
        """Returns each word's label and score; a word without a token is outside any entity and has a score of 0."""
        outside = "O" if "O" in self.labels else self.labels[0]
        tags, word_scores = [], []
        for token in align(context.words, context.tokens).word_tokens:
            is_scored = token is not None and token < len(scores)  # a text may be truncated
            best = int(scores[token].argmax()) if is_scored else None
            tags.append(outside if best is None else self.labels[best])
            word_scores.append(0.0 if best is None else float(scores[token, best]))
        return tags, word_scores

    @staticmethod
    def _tagged(context: _Context, label: str, span: Span, score: float) -> Tagged:
        start, end = span
        text = context.text[start:end] if context.given is None else " ".join(context.given[start:end])
        return Tagged(label, start, end, text, score)
