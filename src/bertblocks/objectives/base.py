"""The interface of objectives, the keys of their random draws, and schedules of masking rates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64, combine
from bertblocks.data.stream import DocumentChunk, Row
from bertblocks.models.masked_lm import IGNORE


class Objective(ABC):
    """Turns chunks of documents into inputs and targets.

    All random draws are functions of (seed, epoch, source, index of the chunk). So they do not depend on how a global
    batch is split into processes and micro-batches, and checkpoints do not store a generator.
    """

    #: How many special tokens are added to each chunk.
    overhead: int
    #: Whether tokens must not see later ones.
    is_causal: bool = False

    @abstractmethod
    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        """Inputs and targets for these rows; `progress` is the finished share of the training."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        """The sum of each loss over the batch. Divided by the count of the global batch it is the mean."""


@dataclass(frozen=True)
class RateSchedule:
    """A rate that changes from `start` to `end` over the training.

    Example:
        >>> RateSchedule(0.3, 0.1).at(0.5)
        0.2
    """

    start: float
    end: float
    kind: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "cosine"):
            raise ValueError(f"The kind of a rate schedule is {self.kind!r}; it must be linear or cosine.")

    def at(self, progress: float) -> float:
        progress = min(max(progress, 0.0), 1.0)
        if self.kind == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class ChunkTokens:
    """The tokens of chunks laid end to end, and a key for the random draws of each chunk."""

    ids: NDArray[np.int64]  # [tokens]
    lengths: NDArray[np.int64]  # [chunks]
    keys: UInt64  # [chunks]
    stream_indices: NDArray[np.int64]  # [chunks]

    @classmethod
    def from_rows(cls, rows: Sequence[Row], seed: int) -> ChunkTokens:
        chunks: list[DocumentChunk] = [chunk for row in rows for chunk in row]
        if not chunks:
            raise ValueError("A batch needs at least one chunk.")
        numbers = np.array([[chunk.epoch, chunk.source, chunk.index, chunk.stream_index] for chunk in chunks])
        epochs, sources, indices, stream_indices = numbers.T
        return cls(
            ids=np.concatenate([chunk.ids for chunk in chunks]).astype(np.int64),
            lengths=np.array([len(chunk.ids) for chunk in chunks]),
            keys=combine(seed, epochs, sources, indices),
            stream_indices=stream_indices,
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """The index of each chunk's first token."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each token in its chunk."""
        return count_within(self.lengths)

    def token_keys(self, purpose: str) -> UInt64:
        """For each token the key of its chunk, for one kind of draw."""
        return np.repeat(combine(self.keys, purpose), self.lengths)


def count_within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each length, end to end.

    Example:
        >>> count_within(np.array([2, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def enclose(values: NDArray, lengths: NDArray[np.int64], before: int, after: int) -> NDArray[np.int64]:
    """Inserts one value before each sequence and one after it.

    Example:
        >>> enclose(np.array([5, 6, 7]), np.array([2, 1]), 1, 2).tolist()
        [1, 5, 6, 2, 1, 7, 2]
    """
    ends = np.cumsum(lengths)
    return np.insert(
        values.astype(np.int64),
        np.stack([ends - lengths, ends], axis=1).ravel(),
        np.tile([before, after], len(lengths)),
    )


def labelled_indices(labels: NDArray[np.int64]) -> Tensor:
    """The indices of the tokens that have a label, which the host knows before the batch is on its device."""
    return torch.from_numpy(np.flatnonzero(labels != IGNORE))


def cumulative_lengths(lengths: NDArray[np.int64]) -> Tensor:
    """The `cu_seqlens` of sequences of these lengths."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
