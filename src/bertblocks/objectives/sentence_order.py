"""Sentence order prediction (Lan et al., 2019), alone or with masked language modeling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, draw, uniform
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import ChunkTokens, Objective, cumulative_lengths, labelled_indices
from bertblocks.objectives.masked_lm import MaskedLanguageModeling
from bertblocks.text.vocabulary import Vocabulary


class SentenceOrder(Objective):
    """Predicts whether two consecutive segments of a text are in order (0) or swapped (1): `[CLS] A [SEP] B [SEP]`.

    A text is divided in its middle half: after a sentence if one ends there, else before a word, else anywhere. A
    single token cannot be divided; it has an empty B and no label. The model is `BertBlocksForPreTraining`;
    `token_types` says whether the segments have different token types.
    """

    overhead = 3

    def __init__(
        self, vocabulary: Vocabulary, masking: MaskedLanguageModeling | None = None, token_types: bool = True
    ) -> None:
        self.vocabulary, self.masking, self.token_types = vocabulary, masking, token_types

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens = ChunkTokens.from_rows(rows, seed)
        ids, labels = tokens.ids, None
        if self.masking is not None:
            ids, labels = self.masking.mask(tokens, progress)
        first = self._divide(tokens)
        swapped = (uniform(draw(combine(tokens.keys, "swap"), np.zeros(1))) < 0.5) & (first < tokens.lengths)
        order = _arrange(tokens, first, swapped)
        second = tokens.lengths - first
        sizes = np.stack([np.where(swapped, second, first), np.where(swapped, first, second)], axis=1)
        order_labels = np.where(tokens.lengths > 1, swapped, IGNORE).astype(np.int64)
        counts = {"sentence_order": int((order_labels != IGNORE).sum())}
        if labels is not None:
            labels = _enclose_pairs(labels[order], sizes, IGNORE, IGNORE)
            counts = {"masked_lm": int((labels != IGNORE).sum()), **counts}
        types = np.repeat(np.tile([0, 1], len(sizes)), (sizes + np.array([2, 1])).ravel())
        vocabulary = self.vocabulary
        return FlatBatch(
            input_ids=torch.from_numpy(_enclose_pairs(ids[order], sizes, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=cumulative_lengths(tokens.lengths + self.overhead),
            counts=counts,
            labels=None if labels is None else torch.from_numpy(labels),
            scored_tokens=None if labels is None else labelled_indices(labels),
            token_type_ids=torch.from_numpy(types) if self.token_types else None,
            order_labels=torch.from_numpy(order_labels),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            token_type_ids=batch.token_type_ids,
            labels=batch.labels,
            order_labels=batch.order_labels,
            scored_tokens=batch.scored_tokens,
            return_logits=False,
            z_loss=0.0 if self.masking is None else self.masking.z_loss,
        )
        sums = {"masked_lm": out.masked_lm_total, "sentence_order": out.order_total}
        return {name: total for name, total in sums.items() if name in batch.counts}

    def _divide(self, tokens: ChunkTokens) -> NDArray[np.int64]:
        """The length of the first segment of each chunk."""
        draws = draw(combine(tokens.keys, "divide"), np.zeros(1))
        first = np.ones(len(tokens.lengths), dtype=np.int64)
        for chunk, (start, length, number) in enumerate(zip(tokens.starts, tokens.lengths, draws, strict=True)):
            if length > 1:
                least = max(length // 4, 1)
                choices = self._boundaries(tokens.ids[start + least - 1 : start + length - least + 1]) + least
                first[chunk] = choices[int(number % np.uint64(len(choices)))]
        return first

    def _boundaries(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens after the first may be divided, counted from the second."""
        after_sentence = np.flatnonzero(self.vocabulary.ends_sentence[ids[:-1]])
        if len(after_sentence):
            return after_sentence
        starts = self.vocabulary.starts_word
        before_word = np.flatnonzero(starts[ids[1:]]) if starts is not None else np.zeros(0, dtype=np.int64)
        return before_word if len(before_word) else np.arange(len(ids) - 1)


def _arrange(tokens: ChunkTokens, first: NDArray[np.int64], swapped: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The order of the tokens after the segments of swapped chunks are exchanged."""
    turn = np.repeat(np.where(swapped, first, 0), tokens.lengths)
    within = (tokens.positions + turn) % np.repeat(tokens.lengths, tokens.lengths)
    return np.repeat(tokens.starts, tokens.lengths) + within


def _enclose_pairs(values: NDArray, sizes: NDArray[np.int64], before: int, after: int) -> NDArray[np.int64]:
    """Inserts one value before each pair of segments and another after each segment.

    Example:
        >>> _enclose_pairs(np.array([5, 6, 7]), np.array([[2, 1]]), 1, 2).tolist()
        [1, 5, 6, 2, 7, 2]
    """
    ends = np.cumsum(sizes.ravel()).reshape(-1, 2)
    starts = ends[:, 0] - sizes[:, 0]
    positions = np.stack([starts, ends[:, 0], ends[:, 1]], axis=1).ravel()
    return np.insert(values.astype(np.int64), positions, np.tile([before, after, after], len(sizes)))
