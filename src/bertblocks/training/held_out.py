"""How well a language model knows texts that it has not seen, beside a model that knows no context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import Documents, PackedStream, Position, StreamSource
from bertblocks.models.masked_lm import IGNORE
from bertblocks.nn.numerics import upcast
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.text.vocabulary import Vocabulary

#: All models are measured at this share of tokens hidden, all of them as [MASK].
RATE = 0.15
#: Held-out texts, their cut and their masks are the same for every run.
SEED = 0
#: Tokens that are scored at once.
CHUNK_TOKENS = 2048
#: Training tokens that the unigram model counts at most.
UNIGRAM_TOKENS = 5_000_000
#: Tokens of texts that are shown with a word filled in.
MIN_SHOWN, MAX_SHOWN = 8, 24


@dataclass(frozen=True)
class Unigram:
    """The model that says the same whatever the context: how often each token is."""

    log_probabilities: NDArray[np.float64]

    @classmethod
    def count(cls, sources: Iterable[Documents], size: int) -> Unigram:
        """From the first tokens of each source; tokens that are not there count as one."""
        counts = np.ones(size)
        for documents in sources:
            seen = 0
            for index in range(len(documents.lengths)):
                ids = documents[index]
                counts += np.bincount(ids, minlength=size)
                seen += len(ids)
                if seen >= UNIGRAM_TOKENS:
                    break
        return cls(np.log(counts / counts.sum()))

    def evaluate(self, targets: NDArray[np.int64]) -> dict[str, float]:
        best = int(self.log_probabilities.argmax())
        return {
            "unigram_loss": float(-self.log_probabilities[targets].mean()),
            "unigram_accuracy": float((targets == best).mean()),
        }


class HeldOut:
    """A fixed sample of held-out texts with fixed masks."""

    def __init__(self, sources: Sequence[Documents], vocabulary: Vocabulary, length: int, tokens: int) -> None:
        self.objective = MaskedLanguageModeling(vocabulary, RATE, mask_share=1.0, random_share=0.0)
        stream = PackedStream([StreamSource(one) for one in sources], length, self.objective.overhead, SEED)
        available = int(sum(np.sum(one.lengths) for one in sources))
        rows, _ = stream.take(Position(), max(min(tokens, available) // length, 1))
        per_batch = max(CHUNK_TOKENS // length, 1)
        self.pieces = [piece for row in rows for piece in row]
        self.batches = [
            self.objective.batch(rows[start : start + per_batch], SEED) for start in range(0, len(rows), per_batch)
        ]

    @property
    def targets(self) -> NDArray[np.int64]:
        """The original of every hidden token."""
        labels = [_labels(batch) for batch in self.batches]
        return torch.cat([one[one != IGNORE] for one in labels]).numpy()

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss and accuracy on hidden tokens."""
        loss, right, count = 0.0, 0, 0
        for batch in self.batches:
            labels = _labels(batch)
            rows = (labels != IGNORE).nonzero().squeeze(1)
            targets = labels[rows].to(model.device)
            logits = _logits(model, batch)[rows.to(model.device)]
            loss += float(F.cross_entropy(upcast(logits), targets, reduction="sum"))
            right += int((logits.argmax(dim=1) == targets).sum())
            count += len(targets)
        return {"held_out_loss": loss / max(count, 1), "held_out_accuracy": right / max(count, 1)}

    @torch.no_grad()
    def pseudo_perplexity(self, model: Any, tokens: int) -> float:
        """exp of the mean loss of tokens that are hidden one at a time (Salazar et al., 2020), over whole pieces."""
        total, count = 0.0, 0
        pieces = iter(self.pieces)
        while count < tokens and (piece := next(pieces, None)) is not None:
            vocabulary = self.objective.vocabulary
            text = torch.tensor([vocabulary.cls, *piece.ids.tolist(), vocabulary.sep])
            total += float(one_at_a_time(model, text, torch.arange(1, len(text) - 1), vocabulary.mask).sum())
            count += len(piece.ids)
        return math.exp(total / max(count, 1))


@torch.no_grad()
def one_at_a_time(model: Any, text: Tensor, places: Tensor, mask: int) -> Tensor:
    """The loss of each of these tokens of a text when it alone is hidden; copies of the text are run side by side."""
    losses = []
    for part in places.split(max(CHUNK_TOKENS // len(text), 1)):
        numbers = torch.arange(len(part))
        copies = text.repeat(len(part), 1)
        copies[numbers, part] = mask
        bounds = torch.arange(len(part) + 1, dtype=torch.int32) * len(text)
        logits = _logits(model, FlatBatch(input_ids=copies.flatten(), cu_seqlens=bounds))
        hidden = logits.view(len(part), len(text), -1)[numbers, part]
        losses.append(F.cross_entropy(upcast(hidden), text[part].to(model.device), reduction="none"))
    return torch.cat(losses) if losses else torch.zeros(0)


def _labels(batch: FlatBatch) -> Tensor:
    assert batch.labels is not None
    return batch.labels


def _logits(model: Any, batch: FlatBatch) -> Tensor:
    """`[tokens, vocabulary]`."""
    batch = batch.to(model.device)
    out = model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)
    return out["logits" if "logits" in out else "prediction_logits"]


# ---------------------------------------------------------------------- examples to look at


@dataclass(frozen=True)
class FilledMask:
    """A text with one token hidden, that token, and the model's first guesses with their probabilities."""

    text: str
    answer: str
    guesses: list[tuple[str, float]]


@torch.no_grad()
def fill_masks(model: Any, tokenizer: Any, held_out: HeldOut, count: int, guesses: int = 3) -> list[FilledMask]:
    """The first held-out texts of a sentence's length, each with the middle one of its whole words hidden."""
    vocabulary = held_out.objective.vocabulary
    filled: list[FilledMask] = []
    for piece in held_out.pieces:
        if len(filled) == count:
            break
        words = _whole_words(tokenizer, piece.ids, vocabulary)
        if not MIN_SHOWN <= len(piece.ids) <= MAX_SHOWN or not words:
            continue
        place, answer = words[len(words) // 2]
        ids = torch.tensor([vocabulary.cls, *piece.ids.tolist(), vocabulary.sep])
        ids[place + 1] = vocabulary.mask
        batch = FlatBatch(input_ids=ids, cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32))
        best = upcast(_logits(model, batch)[place + 1]).softmax(dim=0).topk(guesses)
        names = [tokenizer.decode([index]).strip() for index in best.indices.tolist()]
        text = " ".join(tokenizer.decode(ids[1:-1].tolist()).split())
        filled.append(FilledMask(text, answer, list(zip(names, best.values.tolist(), strict=True))))
    return filled


def _whole_words(tokenizer: Any, ids: NDArray, vocabulary: Vocabulary) -> list[tuple[int, str]]:
    """Places of tokens that are words by themselves, of three letters or more."""
    starts = np.ones(len(ids) + 1, dtype=bool)
    if vocabulary.starts_word is not None:
        starts[:-1] = vocabulary.starts_word[ids]
    words = [(place, tokenizer.decode([int(ids[place])]).strip()) for place in np.flatnonzero(starts[:-1] & starts[1:])]
    return [(int(place), word) for place, word in words if word.isalpha() and len(word) > 2]
