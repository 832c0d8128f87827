"""Labels for words, tokens or entities of a text, with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bertblocks.core.registry import nearest
from bertblocks.inference.job import Job, SegmentBatch, Work, check_text, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.tasks.classify.predictions import softmax
from bertblocks.tasks.results import Tagged
from bertblocks.text.alignment import Span, align, join_words, words_of
from bertblocks.text.tag_schemes import entities, find_scheme
from bertblocks.text.windows import merge_windows

Level = Literal["entities", "words", "tokens"]
LEVELS: tuple[Level, ...] = ("entities", "words", "tokens")


@dataclass(frozen=True)
class _Context:
    """A text, the words it was given in, if it was, and what lies where."""

    text: str
    given: list[str] | None
    words: list[Span]
    tokens: list[Span]


class TaggingJob(Job[list[Tagged]]):
    """A word has the label of its first token, as taggers are trained."""

    def __init__(self, model: BertBlocksPreTrainedModel, fitter: SequenceSplitter, level: Level | None = None) -> None:
        super().__init__(model, fitter)
        config = model.config
        self.labels = [config.id2label[index] for index in range(config.num_labels)]
        has_entities = find_scheme([self.labels]) != "plain"
        self.level = level or ("entities" if has_entities else "words")
        if self.level not in LEVELS:
            raise ValueError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}{nearest(self.level, LEVELS)}.")
        if self.level == "entities" and not has_entities:
            raise ValueError(f"level is 'entities'; this model's labels (such as {self.labels[0]!r}) mark none.")

    def prepare(self, items: Sequence[Any], first: int) -> list[Work]:
        contexts = [self._check(item, index) for index, item in enumerate(items, start=first)]
        tokens = self.tokenize([text for text, _, _ in contexts], first, offsets=True)
        return [
            Work(self.fitter.fit(one, index), _Context(text, given, words, one.offsets))
            for index, (one, (text, given, words)) in enumerate(zip(tokens, contexts, strict=True), start=first)
        ]

    def _check(self, item: Any, index: int) -> tuple[str, list[str] | None, list[Span]]:
        if isinstance(item, (list, tuple)):
            given = [check_text(word, f"Text {index}, word {number}") for number, word in enumerate(item)]
            if self.level == "tokens":
                raise ValueError(f"Text {index} is a list of words, and level is 'tokens': give the text itself.")
            text, words = join_words(given)
            return text, given, words
        text = check_text(item, f"Text {index}")
        return text, None, [] if self.level == "tokens" else words_of(text)

    def run(self, batch: SegmentBatch) -> Sequence[np.ndarray]:
        return list(batch.text_rows(to_numpy(self.model(**batch.inputs).logits)))

    def read(self, work: Work) -> list[Tagged]:
        context: _Context = work.context
        scores = softmax(merge_windows([piece.window for piece in work.pieces], work.outputs))  # [tokens, labels]
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
        """Every word's label and score; one that no token speaks for is outside of everything, with a score of 0."""
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
