"""Answers to questions, as exact spans of a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertblocks.inference.job import Job, SegmentBatch, Work, check_text, is_pair, to_numpy
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.tasks.results import Answer, Answers
from bertblocks.text.answer_spans import best_answers


class AnsweringJob(Job[Answers]):
    """Searches every window of the context; the first token of a window stands for "no answer", as in SQuAD 2."""

    def __init__(
        self,
        model: BertBlocksPreTrainedModel,
        fitter: SequenceSplitter,
        n_best: int = 5,
        max_answer_tokens: int = 30,
        no_answer_threshold: float | None = None,
    ) -> None:
        super().__init__(model, fitter)
        for name, value in (("n_best", n_best), ("max_answer_tokens", max_answer_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.n_best = n_best
        self.max_answer_tokens = max_answer_tokens
        self.no_answer_threshold = no_answer_threshold

    def prepare(self, items: Sequence[Any], first: int) -> list[Work]:
        pairs = [self._check(item, index) for index, item in enumerate(items, start=first)]
        questions = self.tokenize([question for question, _ in pairs], first)
        contexts = self.tokenize([context for _, context in pairs], first, offsets=True)
        works = []
        for index, (question, context, (_, text)) in enumerate(zip(questions, contexts, pairs, strict=True), first):
            pieces = self.fitter.fit_pair(question, context, index, cut_first=False)
            places = [context.offsets[piece.window.start : piece.window.stop] for piece in pieces]
            works.append(Work(pieces, (text, places)))
        return works

    def _check(self, item: Any, index: int) -> tuple[str, str]:
        if isinstance(item, Mapping) and {"question", "context"} <= set(item):
            item = (item["question"], item["context"])
        if not is_pair(item):
            raise TypeError(f"Question {index} is {item!r}; it must be a pair of a question and its context.")
        return check_text(item[0], f"Question {index}"), check_text(item[1], f"The context of question {index}")

    def run(self, batch: SegmentBatch) -> Sequence[tuple[np.ndarray, np.ndarray, float]]:
        """Of each window the start and end scores of the context's tokens, and the score of no answer."""
        out = self.model(**batch.inputs)
        start, end = to_numpy(out.start_logits), to_numpy(out.end_logits)
        none = (start + end)[batch.starts[:-1]].tolist()
        return list(zip(batch.text_rows(start), batch.text_rows(end), none, strict=True))

    def read(self, work: Work) -> Answers:
        text, places = work.context
        windows = [(start, end, spans) for (start, end, _), spans in zip(work.outputs, places, strict=True)]
        none = min(score for _, _, score in work.outputs)  # the window that is least sure that there is none
        found = [
            Answer(text[span.start : span.end], span.start, span.end, span.score)
            for span in best_answers(windows, self.n_best, self.max_answer_tokens)
        ]
        limit = self.no_answer_threshold
        if not found or (limit is not None and none - found[0].score > limit):
            return Answers("", 0, 0, none, none, found)
        return Answers(found[0].text, found[0].start, found[0].end, found[0].score, none, found)
