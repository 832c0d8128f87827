"""Fine-tuning and evaluation of question answering."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.tasks.answer.metrics import answer_f1, answering_scores
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.settings import AnswerSettings
from bertblocks.text.alignment import trim
from bertblocks.text.answer_spans import tokens_of_span
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.squad import Question, read_questions
from bertblocks.text.tables import DataError
from bertblocks.text.windows import cut_windows

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


class AnswerTask(FineTuneTask):
    """The span of a passage that answers a question, or no answer."""

    name, noun = "answer", "A reader"
    settings_class = AnswerSettings
    model_task = "question-answering"
    default_length = 384
    metric = "f1"

    def read(self, source: str | Path) -> list[Question]:
        questions = read_questions(source, self.given_columns("question", "context", "answers", "id"))
        without = sum(not question.answers for question in questions)
        note = f"{source}: {len(questions):,} questions"
        self.notes.append(f"{note}, {without:,} without an answer" if without else note)
        return questions

    def group(self, example: Question) -> str:
        return example.context

    def check(self, examples: Sequence[Question], tokenizer: TextTokenizer, max_length: int) -> None:
        self.features(examples, tokenizer, max_length)  # finds questions that are too long

    def features(self, examples: Sequence[Question], tokenizer: TextTokenizer, max_length: int) -> list[Feature]:
        """Splits passages into windows `stride` tokens apart; the targets are the answer's first and last token.

        In a window without the answer, both targets are the first token, which stands for "no answer".
        """
        questions = tokenizer.tokenize([question.question for question in examples])
        passages = tokenizer.tokenize([question.context for question in examples], offsets=True)
        features = []
        for question, query, passage in zip(examples, questions, passages, strict=True):
            room = max_length - tokenizer.num_special(pair=True) - len(query.ids)
            if room < 2:
                raise DataError(
                    f"{question.place}: the question has {len(query.ids)} tokens, which leaves no room for the "
                    f"passage within max_length {max_length}."
                )
            for window in cut_windows(len(passage.ids), room, max(room - self.settings.stride, 0)):
                sequence = tokenizer.add_special_tokens(query.ids, passage.ids[window.start : window.stop])
                span = None
                if question.answers:
                    first = question.answers[0]
                    # the spans of tokens do not include surrounding spaces
                    bounds = trim(question.context, (first.start, first.end))
                    span = tokens_of_span(passage.offsets[window.start : window.stop], *bounds)
                target = (0, 0) if span is None else (sequence.start + span[0], sequence.start + span[1])
                features.append(Feature(sequence.ids, sequence.types, target))
        return features

    def baselines(
        self, predictor: Predictor, train: Sequence[Question], held_out: Sequence[Question]
    ) -> dict[str, Scores]:
        """No answer at all, and the sentence of the passage that shares most words with the question."""
        gold = {question.id: [answer.text for answer in question.answers] for question in held_out}
        guesses = {"best sentence": {question.id: best_sentence(question) for question in held_out}}
        if not all(gold.values()):
            guesses["no answer"] = dict.fromkeys(gold, "")
        return {name: answering_scores(gold, predicted) for name, predicted in guesses.items()}

    def batch(self, features: Sequence[Feature]) -> FlatBatch:
        return make_batch(features, torch.tensor([feature.target for feature in features]), len(features))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        assert batch.labels is not None
        starts, ends = batch.labels.unbind(1)
        out = model(**batch.inputs, start_positions=starts, end_positions=ends, num_items_in_batch=1)
        return {"loss": out.loss}

    def evaluate(self, predictor: Predictor, examples: Sequence[Question]) -> Evaluated:
        has_unanswerable = any(not question.answers for question in examples)
        predictions = predictor.answer(
            [(question.question, question.context) for question in examples],
            max_answer_tokens=self.settings.max_answer_tokens,
            no_answer_threshold=self.settings.no_answer_threshold if has_unanswerable else None,
        )
        gold = {question.id: [answer.text for answer in question.answers] for question in examples}
        predicted = {question.id: answer.text for question, answer in zip(examples, predictions, strict=True)}
        f1 = np.array(
            [max(answer_f1(text, predicted[q.id]) for text in gold[q.id] or [""]) for q in examples], dtype=np.float64
        )
        records = [
            {
                "question": question.question,
                "context": question.context,
                "gold": [{"text": a.text, "start": a.start, "end": a.end} for a in question.answers],
                "predicted": {"text": found.text, "start": found.start, "end": found.end},
                "score": found.score,
                "no_answer_score": found.no_answer_score,
                "f1": float(quality),
            }
            for question, found, quality in zip(examples, predictions, f1, strict=True)
        ]
        return Evaluated(answering_scores(gold, predicted), lambda i: 100 * float(f1[i].mean()), records)


def best_sentence(question: Question) -> str:
    """The first of the passage's sentences that share most words with the question.

    Example:
        >>> best_sentence(Question("1", "Who saw it?", "Nobody. Ann saw it there. It rained.", (), "here"))
        'Ann saw it there.'
    """
    words = set(re.findall(r"\w+", question.question.lower()))
    sentences = [sentence.strip() for sentence in re.findall(r"[^.!?]+[.!?]*", question.context)] or [""]
    return max(sentences, key=lambda sentence: len(words & set(re.findall(r"\w+", sentence.lower()))))
