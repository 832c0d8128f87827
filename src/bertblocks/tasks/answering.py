"""Answers to questions as spans of a passage: features over windows, and the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.numerics import upcast
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.records import DataError
from bertblocks.tasks.spans import tokens_of_span
from bertblocks.tasks.squad import Question
from bertblocks.tasks.tokens import TextTokenizer
from bertblocks.tasks.windows import cut_windows


def make_features(
    questions: Sequence[Question], tokenizer: TextTokenizer, max_length: int, stride: int
) -> list[Feature]:
    """Question and passage in windows that start `stride` tokens apart, with the first and last token of the answer.

    In a window without the answer both are the first token, which stands for "no answer".
    """
    asked = tokenizer.tokenize([question.question for question in questions])
    passages = tokenizer.tokenize([question.context for question in questions], offsets=True)
    features = []
    for question, query, passage in zip(questions, asked, passages, strict=True):
        room = max_length - tokenizer.num_special(pair=True) - len(query.ids)
        if room < 2:
            raise DataError(
                f"{question.place}: the question has {len(query.ids)} tokens, which leaves no room for the passage "
                f"within max_length {max_length}."
            )
        for window in cut_windows(len(passage.ids), room, max(room - stride, 0)):
            framed = tokenizer.frame(query.ids, passage.ids[window.start : window.stop])
            span = None
            if question.answers:
                answer = question.answers[0]
                span = tokens_of_span(passage.offsets[window.start : window.stop], answer.start, answer.end)
            target = (0, 0) if span is None else (framed.start + span[0], framed.start + span[1])
            features.append(Feature(framed.ids, framed.types, target))
    return features


class AnsweringLoss:
    """The summed cross-entropy of the first and of the last token over each sequence's own tokens."""

    def batch(self, features: Sequence[Feature]) -> FeatureBatch:
        return FeatureBatch.of(features, torch.tensor([feature.target for feature in features]), len(features))

    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]:
        out = model(**batch.inputs)
        scores = upcast(torch.stack((out.start_logits, out.end_logits), dim=-1))  # [tokens, 2]
        lengths = batch.cu_seqlens.diff().tolist()
        padded = nn.utils.rnn.pad_sequence(list(scores.split(lengths)), batch_first=True, padding_value=float("-inf"))
        return {"loss": F.cross_entropy(padded, batch.targets, reduction="sum") / 2}
