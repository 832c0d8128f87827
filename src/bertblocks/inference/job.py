"""What every task does with an input: sequences for the model, their outputs, a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from bertblocks.inference.splitting import Segment, SequenceSplitter
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.text.encoding import TokenizedText

Result = TypeVar("Result")


@dataclass
class Work:
    """One input on its way through the model."""

    pieces: list[Segment]
    #: What the job needs to read the outputs.
    context: Any = None
    #: By piece; filled in as batches come back.
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.pieces)


class SegmentBatch:
    """Sequences laid end to end, without padding, on the model's device."""

    def __init__(self, pieces: Sequence[Segment], device: torch.device, with_types: bool) -> None:
        self.pieces = pieces
        self.starts = np.cumsum([0, *(len(piece.framed.ids) for piece in pieces)])
        ids = [token for piece in pieces for token in piece.framed.ids]
        self.inputs = {
            "input_ids": torch.tensor(ids, dtype=torch.long, device=device),
            "cu_seqlens": torch.from_numpy(self.starts).to(device, torch.int32),
        }
        types = [kind for piece in pieces for kind in piece.framed.types] if with_types else []
        if any(types):
            self.inputs["token_type_ids"] = torch.tensor(types, dtype=torch.long, device=device)

    def text_rows(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """Of values by token, those of each piece's own text."""
        for start, piece in zip(self.starts, self.pieces, strict=False):
            first = start + piece.framed.start
            yield values[first : first + piece.window.stop - piece.window.start]


class Job(ABC, Generic[Result]):
    """One task. Preparing runs beside the model, on another thread, and must not touch it."""

    def __init__(self, model: BertBlocksPreTrainedModel, fitter: SequenceSplitter) -> None:
        self.model = model
        self.fitter = fitter

    @abstractmethod
    def prepare(self, items: Sequence[Any], first: int) -> list[Work]:
        """Inputs `first`, `first + 1`, ... checked, tokenised and fitted."""

    @abstractmethod
    def run(self, batch: SegmentBatch) -> Sequence[Any]:
        """The model's output for each piece."""

    @abstractmethod
    def read(self, work: Work) -> Result:
        """The result, from the outputs of all pieces of an input."""

    def tokenize(self, texts: Sequence[str], first: int, offsets: bool = False) -> list[TokenizedText]:
        try:
            return self.fitter.tokenizer.tokenize(texts, offsets)
        except (TypeError, UnicodeEncodeError) as error:
            for index, text in enumerate(texts, start=first):
                if any("\ud800" <= character <= "\udfff" for character in text):
                    raise ValueError(f"Text {index} holds half of a surrogate pair, which is no character.") from error
            raise


def check_text(value: Any, name: str) -> str:
    """A string as it is; anything else is refused, so that no number or None is taken for a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a string.")
    return value


def is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def to_numpy(x: Tensor) -> np.ndarray:
    return x.float().cpu().numpy()
