"""Masked language modeling (Devlin et al., 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import draw, uniform
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import (
    ChunkTokens,
    Objective,
    RateSchedule,
    cumulative_lengths,
    enclose,
    labelled_indices,
)
from bertblocks.objectives.maskings import Masking, mask_tokens
from bertblocks.text.vocabulary import Vocabulary


class MaskedLanguageModeling(Objective):
    """Selects a share of the tokens; of these some become [MASK], some a random token, and the rest stay.

    Every token that is not special is selected with probability `rate`; `masking` says which ones together. `z_loss` is
    that of `BertBlocksForMaskedLM`.
    """

    overhead = 2

    def __init__(
        self,
        vocabulary: Vocabulary,
        rate: float | RateSchedule = 0.3,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        masking: Masking = mask_tokens,
        z_loss: float = 0.0,
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
        self.mask_share, self.random_share, self.masking, self.z_loss = mask_share, random_share, masking, z_loss

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
        labels = enclose(labels, lengths, IGNORE, IGNORE)
        scored_tokens = labelled_indices(labels)
        return FlatBatch(
            input_ids=torch.from_numpy(enclose(ids, lengths, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=cumulative_lengths(lengths + self.overhead),
            counts={"masked_lm": len(scored_tokens)},
            labels=torch.from_numpy(labels),
            scored_tokens=scored_tokens,
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            scored_tokens=batch.scored_tokens,
            num_items_in_batch=1,
            return_logits=False,
            z_loss=self.z_loss,
        )
        return {"masked_lm": out.loss}

    def mask(self, tokens: ChunkTokens, progress: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The input ids, and the labels of the selected tokens."""
        selected = self.masking(tokens, self.rate.at(progress), self.vocabulary)
        if selected.shape != tokens.ids.shape or selected.dtype != bool:
            raise ValueError(
                f"The masking returned {selected.dtype} of shape {list(selected.shape)}; it must return one boolean "
                f"per token, of shape {list(tokens.ids.shape)}."
            )
        selected = selected & ~self.vocabulary.is_special[tokens.ids]
        kind = uniform(draw(tokens.token_keys("replace"), tokens.positions))
        ordinary = self.vocabulary.ordinary
        random = ordinary[draw(tokens.token_keys("random"), tokens.positions) % np.uint64(len(ordinary))]
        changed = np.where(kind < self.mask_share, self.vocabulary.mask, random)
        is_changed = selected & (kind < self.mask_share + self.random_share)
        return np.where(is_changed, changed, tokens.ids), np.where(selected, tokens.ids, IGNORE)


def _cut_length(size: int, capacity: int) -> NDArray[np.int64]:
    """The lengths of the parts of at most `capacity` of a text of `size` tokens.

    Example:
        >>> _cut_length(7, 3).tolist()
        [3, 3, 1]
    """
    return np.diff(np.append(np.arange(0, size, capacity), size))
