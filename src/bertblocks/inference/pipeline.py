"""The interface between the engine and a task: preprocess inputs, run the model, postprocess its outputs."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from bertblocks.core.log import logger
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.inference.splitting import Segment, SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.text.encoding import TokenizedText

Result = TypeVar("Result")


@dataclass
class Request:
    """One input on its way through the model, split into segments that the model can read."""

    segments: list[Segment]
    #: What the pipeline needs to postprocess the outputs.
    context: Any = None
    #: The number of the input in the stream.
    index: int = 0
    #: The model's output for each segment, filled in as batches finish.
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.segments)


@dataclass(frozen=True)
class SegmentBatch:
    """Segments, possibly of several requests, and the flat batch that the model reads."""

    segments: Sequence[Segment]
    flat: FlatBatch
    #: Where each segment starts in the flat batch, and where the last one ends.
    starts: np.ndarray

    @classmethod
    def from_segments(cls, segments: Sequence[Segment], device: torch.device, with_types: bool) -> SegmentBatch:
        ids = [segment.sequence.ids for segment in segments]
        types = [segment.sequence.types for segment in segments] if with_types else None
        flat = FlatBatch.from_sequences(ids, types)
        return cls(segments, flat.to(device), flat.cu_seqlens.numpy())

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of a model's forward pass."""
        return self.flat.inputs

    def text_values(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """Yields, from one value per token, those of each segment's own text without special tokens."""
        for start, segment in zip(self.starts[:-1], self.segments, strict=True):
            first = start + segment.sequence.start
            yield values[first : first + segment.window.stop - segment.window.start]


class Pipeline(ABC, Generic[Result]):
    """One task on one model. `preprocess` runs on another thread, in parallel with the model, and must not touch it."""

    def __init__(self, model: BertBlocksPreTrainedModel, splitter: SequenceSplitter) -> None:
        self.model = model
        self.splitter = splitter
        self._has_warned = False

    @abstractmethod
    def preprocess(self, items: Sequence[Any], first: int) -> list[Request]:
        """Checks, tokenizes and splits inputs number `first`, `first + 1`, ..."""

    @abstractmethod
    def forward(self, batch: SegmentBatch) -> Sequence[Any]:
        """Runs the model and returns its output for each segment."""

    @abstractmethod
    def postprocess(self, request: Request) -> Result:
        """Makes the result of an input from the outputs of all its segments."""

    @property
    def batch_key(self) -> Hashable:
        """Pipelines of one model with equal keys may share batches, because their forward passes are the same."""
        return type(self)

    def tokenize(self, texts: Sequence[str], offsets: bool = False) -> list[TokenizedText]:
        """Tokenizes texts; the end of a text that will be truncated may be left out."""
        return self.splitter.tokenizer.tokenize([self.splitter.shorten(text) for text in texts], offsets)

    def warn_if_not_finite(self, values: np.ndarray, request: Request) -> None:
        """Warns about the first input for which the model's output contains NaN or infinity."""
        if not self._has_warned and not np.isfinite(values).all():
            self._has_warned = True
            logger.warning(
                f"The model's output for input {request.index} contains NaN or infinity, and so may others; check the "
                "weights, or use dtype=torch.float32."
            )


def check_text(value: Any, name: str) -> str:
    """Returns a valid string unchanged and rejects anything else, such as a number or None."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {reprlib.repr(value)}; it must be a string.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} contains half of a surrogate pair, {value[error.start]!r}, at character {error.start}; "
                "it is not valid Unicode."
            ) from error
    return value


def is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def to_numpy(x: Tensor) -> np.ndarray:
    return x.float().cpu().numpy()
