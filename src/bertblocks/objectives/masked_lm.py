"""Masked language modeling (Devlin et al., 2018), of whole words or spans (Joshi et al., 2019) if requested."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64, combine, draw, uniform
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import (
    ChunkTokens,
    Objective,
    RateSchedule,
    count_within,
    cumulative_lengths,
    enclose,
)
from bertblocks.text.vocabulary import Vocabulary

#: Span lengths of SpanBERT: geometric with p = 0.2, at most ten.
SPAN_STOP = 0.2
SPAN_MAX = 10


class MaskedLanguageModeling(Objective):
    """Selects a share of the tokens; of these some become [MASK], some a random token, and the rest stay.

    Every token that is not special is selected with probability `rate`: on its own, with its whole word, or in spans of
    SpanBERT's lengths (spans of words if `whole_word` is set).
    """

    overhead = 2

    def __init__(
        self,
        vocabulary: Vocabulary,
        rate: float | RateSchedule = 0.3,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        whole_word: bool = False,
        spans: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self.rate = RateSchedule(rate, rate) if isinstance(rate, (int, float)) else rate
        for value in (self.rate.start, self.rate.end):
            if not 0 < value <= 1:
                raise ValueError(f"The masking rate is {value}; it must be above 0 and at most 1.")
        if mask_share < 0 or random_share < 0 or mask_share + random_share > 1:
            raise ValueError(
                f"mask_share is {mask_share} and random_share {random_share}; both must be at least 0 and their sum at "
                "most 1."
            )
        if whole_word and vocabulary.starts_word is None:
            raise ValueError("whole_word is true, but the tokenizer does not mark where words begin.")
        self.mask_share, self.random_share = mask_share, random_share
        self.whole_word, self.spans = whole_word, spans

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens = ChunkTokens.from_rows(rows, seed)
        return self._make_batch(*self.mask(tokens, progress), tokens.lengths)

    def batch_documents(self, documents: Row, length: int, max_tokens: int, seed: int) -> list[FlatBatch]:
        """Masks whole documents, then cuts them into sequences of at most `length`, in batches of `max_tokens`.

        So the masked tokens do not depend on the length, and models of different lengths can be compared.
        """
        tokens = ChunkTokens.from_rows([documents], seed)
        ids, labels = self.mask(tokens, progress=0.0)
        lengths = np.concatenate([_cut_length(size, length - self.overhead) for size in tokens.lengths.tolist()])
        starts, filled = [0], 0
        for index, size in enumerate((lengths + self.overhead).tolist()):
            filled += size
            if filled > max_tokens and index > starts[-1]:
                starts.append(index)
                filled = size
        token_starts = (np.cumsum(lengths) - lengths)[starts[1:]]
        parts = (np.split(ids, token_starts), np.split(labels, token_starts), np.split(lengths, starts[1:]))
        return [self._make_batch(*part) for part in zip(*parts, strict=True)]

    def _make_batch(self, ids: NDArray[np.int64], labels: NDArray[np.int64], lengths: NDArray[np.int64]) -> FlatBatch:
        vocabulary = self.vocabulary
        return FlatBatch(
            input_ids=torch.from_numpy(enclose(ids, lengths, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=cumulative_lengths(lengths + self.overhead),
            counts={"masked_lm": int((labels != IGNORE).sum())},
            labels=torch.from_numpy(enclose(labels, lengths, IGNORE, IGNORE)),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            num_items_in_batch=1,
            return_logits=False,
        )
        return {"masked_lm": out.loss}

    def mask(self, tokens: ChunkTokens, progress: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The input ids, and the labels of the selected tokens."""
        selected = self._select(tokens, self.rate.at(progress)) & ~self.vocabulary.is_special[tokens.ids]
        kind = uniform(draw(tokens.token_keys("replace"), tokens.positions))
        ordinary = self.vocabulary.ordinary
        random = ordinary[draw(tokens.token_keys("random"), tokens.positions) % np.uint64(len(ordinary))]
        changed = np.where(kind < self.mask_share, self.vocabulary.mask, random)
        is_changed = selected & (kind < self.mask_share + self.random_share)
        return np.where(is_changed, changed, tokens.ids), np.where(selected, tokens.ids, IGNORE)

    def _select(self, tokens: ChunkTokens, rate: float) -> NDArray[np.bool_]:
        is_first = tokens.positions == 0
        starts_unit = np.ones_like(is_first)
        if self.whole_word and self.vocabulary.starts_word is not None:
            starts_unit = self.vocabulary.starts_word[tokens.ids] | is_first
        unit = np.cumsum(starts_unit) - 1  # the word or token that each token belongs to
        units = np.add.reduceat(starts_unit, tokens.starts, dtype=np.int64)  # in each chunk
        keys = combine(tokens.keys, "choose")
        if self.spans:
            return _in_spans(keys, units, rate)[unit]
        return (uniform(draw(np.repeat(keys, units), count_within(units))) < rate)[unit]


def _cut_length(size: int, capacity: int) -> NDArray[np.int64]:
    """The lengths of the parts of at most `capacity` of a text of `size` tokens.

    Example:
        >>> _cut_length(7, 3).tolist()
        [3, 3, 1]
    """
    return np.diff(np.append(np.arange(0, size, capacity), size))


def _in_spans(keys: UInt64, units: NDArray[np.int64], rate: float) -> NDArray[np.bool_]:
    """Which units are in a span.

    A span may start at every unit, and at imaginary units before the chunk, with the one probability that covers each
    unit with probability `rate`. So neither the ends of a chunk nor overlaps change the rate.
    """
    widths = units + SPAN_MAX - 1
    number = count_within(widths)
    repeated = np.repeat(keys, widths)
    starts = uniform(draw(repeated, 2 * number)) < _start_probability(rate)
    # geometric lengths by inversion
    tail = 1 - uniform(draw(repeated, 2 * number + 1))
    lengths = np.minimum(1 + np.floor(np.log(tail) / np.log(1 - SPAN_STOP)), SPAN_MAX).astype(np.int64)
    index = np.arange(len(number))
    # the next chunk has as many imaginary units as a span can reach beyond the end of this one
    covered = np.maximum.accumulate(index + np.where(starts, lengths, 0)) > index
    return covered[number >= SPAN_MAX - 1]


def _start_probability(rate: float) -> float:
    """The q for which 1 - prod over k of (1 - q P(length > k)) is `rate`, by bisection."""
    longer = (1 - SPAN_STOP) ** np.arange(SPAN_MAX)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - np.prod(1 - middle * longer) < rate else (low, middle)
    return high
