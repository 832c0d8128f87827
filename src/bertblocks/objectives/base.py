"""What all objectives share: flat batches, keys of randomness, and rates that change as training goes on."""

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
from bertblocks.data.stream import DocumentSlice, Row


class Objective(ABC):
    """Turns pieces of text into inputs and targets.

    Everything random follows from (seed, epoch, source, index of the piece), so it is the same however a global batch
    is split among processes and micro-batches, and no generator has to be saved.
    """

    #: Special tokens that are added to each piece.
    overhead: int

    @abstractmethod
    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        """Inputs and targets of these rows; `progress` is the share of the training that is done."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        """The sum of each loss over the batch; dividing by the counts of the global batch gives its mean."""


@dataclass(frozen=True)
class RateSchedule:
    """A rate that moves from `start` to `end` over the training.

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
class SequenceTokens:
    """Pieces laid end to end with a key for each; what objectives draw their numbers from."""

    ids: NDArray[np.int64]  # [tokens]
    lengths: NDArray[np.int64]  # [pieces]
    keys: UInt64  # [pieces]
    places: NDArray[np.int64]  # [pieces]

    @classmethod
    def of(cls, rows: Sequence[Row], seed: int) -> SequenceTokens:
        pieces: list[DocumentSlice] = [piece for row in rows for piece in row]
        if not pieces:
            raise ValueError("A batch needs at least one piece.")
        epochs, sources, indices, places = np.array([[p.epoch, p.source, p.index, p.place] for p in pieces]).T
        return cls(
            ids=np.concatenate([piece.ids for piece in pieces]).astype(np.int64),
            lengths=np.array([len(piece.ids) for piece in pieces]),
            keys=combine(seed, epochs, sources, indices),
            places=places,
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each piece begins."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def positions(self) -> NDArray[np.int64]:
        """The number of each token in its piece."""
        return count_within(self.lengths)

    def token_keys(self, purpose: str) -> UInt64:
        """The key of each token's piece, for one kind of draw."""
        return np.repeat(combine(self.keys, purpose), self.lengths)


def count_within(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... of each piece, end to end.

    Example:
        >>> count_within(np.array([2, 3])).tolist()
        [0, 1, 0, 1, 2]
    """
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def enclose(values: NDArray, lengths: NDArray[np.int64], before: int, after: int) -> NDArray[np.int64]:
    """Flat pieces with one value put before each and one behind it.

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


def offsets(lengths: NDArray[np.int64]) -> Tensor:
    """`cu_seqlens` of sequences of these lengths."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
