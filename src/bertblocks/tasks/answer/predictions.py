"""Answers to questions, as exact spans of a context."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertblocks.inference.pipeline import Pipeline, Request, SegmentBatch, check_text, is_pair, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.text.answer_spans import best_answers


@dataclass(frozen=True)
class Answer:
    """Characters `start` to `end` of the context. The score is the sum of the start and end logits."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Answers:
    """The best answer to a question, the `best` few candidates, and the score of no answer.

    If there is no answer, `text` is empty, and `start` and `end` are 0.
    """

    text: str
    start: int
    end: int
    score: float
    no_answer_score: float
    best: list[Answer]


class QuestionAnsweringPipeline(Pipeline[Answers]):
    """Searches every window of the context; the first token of a window stands for "no answer", as in SQuAD 2."""

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        splitter: SequenceSplitter,
        n_best: int = 5,
        max_answer_tokens: int = 30,
        no_answer_threshold: float | None = None,
    ) -> None:
        super().__init__(model, splitter)
        for name, value in (("n_best", n_best), ("max_answer_tokens", max_answer_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.n_best = n_best
        self.max_answer_tokens = max_answer_tokens
        self.no_answer_threshold = no_answer_threshold

    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        pairs = [self._check(item, index) for index, item in enumerate(items, start=first)]
        questions = self.tokenize([question for question, _ in pairs])
        contexts = self.tokenize([context for _, context in pairs], offsets=True)
        requests = []
        for index, (question, context, (_, text)) in enumerate(zip(questions, contexts, pairs, strict=True), first):
            segments = self.splitter.split_pair(question, context, index, cut_first=False)
            offsets = [context.offsets[segment.window.start : segment.window.stop] for segment in segments]
            requests.append(Request(segments, (text, offsets)))
        return requests

    def _check(self, item: Any, index: int) -> tuple[str, str]:
        if isinstance(item, Mapping) and {"question", "context"} <= set(item):
            item = (item["question"], item["context"])
        if not is_pair(item):
            raise TypeError(
                f"Question {index} is {reprlib.repr(item)}; it must be a pair of a question and its context."
            )
        return check_text(item[0], f"Question {index}"), check_text(item[1], f"The context of question {index}")

    def forward(self, batch: SegmentBatch) -> Sequence[tuple[np.ndarray, np.ndarray, float]]:
        """Returns, for each window, the start and end scores of the context's tokens and the score of no answer."""
        out = self.model(**batch.inputs)
        start, end = to_numpy(out.start_logits), to_numpy(out.end_logits)
        no_answer = (start + end)[batch.starts[:-1]].tolist()
        return list(zip(batch.text_values(start), batch.text_values(end), no_answer, strict=True))

    def postprocess(self, request: Request) -> Answers:
        text, offsets = request.context
        self.warn_if_not_finite(np.array([score for _, _, score in request.outputs]), request)
        windows = [(start, end, spans) for (start, end, _), spans in zip(request.outputs, offsets, strict=True)]
        no_answer = min(score for _, _, score in request.outputs)  # as in SQuAD 2: the least sure window decides
        found = [
            Answer(text[span.start : span.end], span.start, span.end, span.score)
            for span in best_answers(windows, self.n_best, self.max_answer_tokens)
        ]
        threshold = self.no_answer_threshold
        if not found or (threshold is not None and no_answer - found[0].score > threshold):
            return Answers("", 0, 0, no_answer, no_answer, found)
        return Answers(found[0].text, found[0].start, found[0].end, found[0].score, no_answer, found)
