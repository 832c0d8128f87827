"""Embeddings of texts that belong together: pairs, triplets and scored pairs, and losses that bring them close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from bertblocks.blocks.head import pool
from bertblocks.layout import SequenceLayout
from bertblocks.numerics import upcast
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.records import DataError, Records, is_number
from bertblocks.tasks.tokens import TextTokenizer

#: Similarities are multiplied by this before the softmax, as sentence-transformers does.
SCALE = 20.0


@dataclass(frozen=True)
class EmbeddingExample:
    """Two texts that belong together, a third that does not, or two with a score of how close they are."""

    texts: list[str]
    score: float | None
    place: str


def read_examples(records: Records, columns: Mapping[str, str]) -> list[EmbeddingExample]:
    """Examples of a table: with a label column its two texts are scored, with a negative one they are triplets."""
    examples = []
    for index, row in enumerate(records.rows):
        place = records.place(index)
        texts = [row[columns[role]] for role in ("text", "text_pair", "negative") if role in columns]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"{place}: the text is {text!r}; it must be a string.")
        score = row[columns["label"]] if "label" in columns else None
        if "label" in columns and not is_number(score):
            raise DataError(f"{place}: the score is {score!r}; it must be a number.")
        examples.append(EmbeddingExample(texts, None if score is None else float(score), place))
    return examples


def make_features(
    examples: Sequence[EmbeddingExample], tokenizer: TextTokenizer, max_length: int
) -> tuple[list[list[Feature]], int]:
    """The sequences of each example, and how many texts were cut."""
    texts = [text for example in examples for text in example.texts]
    room = max_length - tokenizer.num_special()
    tokens = iter(tokenizer.tokenize(texts))
    features, cut = [], 0
    for example in examples:
        own = []
        for _ in example.texts:
            ids = next(tokens).ids
            cut += len(ids) > room
            framed = tokenizer.frame(ids[:room])
            own.append(Feature(framed.ids, framed.types, example.score))
        features.append(own)
    return features, cut


class EmbeddingLoss:
    """Contrast within the batch for pairs and triplets, CoSENT (Su, 2022) for scored pairs.

    Other texts of the batch, and of the batches of all processes, are the negatives. `dimensions` are prefixes of the
    embedding that are trained along with the whole (Matryoshka; Kusupati et al., 2022).
    """

    def __init__(self, pooling: str, dimensions: Sequence[int] = (), loss: str | None = None) -> None:
        self.pooling = pooling
        self.dimensions = sorted(dimensions)
        self.loss = loss

    def batch(self, features: Sequence[Sequence[Feature]]) -> FeatureBatch:
        """All first texts, then all second ones, then all third ones."""
        columns = [feature for column in zip(*features, strict=True) for feature in column]
        scores = [own[0].target for own in features]
        targets = torch.tensor([float("nan") if score is None else score for score in scores])
        return FeatureBatch.of(columns, targets, len(features))

    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]:
        sequences = len(batch.cu_seqlens) - 1
        embeddings = upcast(embed(model, batch, self.pooling))
        parts = embeddings.view(sequences // len(batch.targets), len(batch.targets), -1)  # [texts, examples, hidden]
        sizes = [size for size in self.dimensions if size < parts.shape[-1]]
        losses = [self._loss(parts[..., :size], batch.targets) for size in (*sizes, parts.shape[-1])]
        return {"loss": torch.stack(losses).mean() * len(batch.targets)}

    def _loss(self, parts: Tensor, scores: Tensor) -> Tensor:
        parts = F.normalize(parts, dim=-1)
        if bool(scores.isnan().any()):
            return contrast(parts)
        similarities = (parts[0] * parts[1]).sum(-1)
        if self.loss == "cosine":
            return F.mse_loss(similarities, scores)
        return cosent(gather(similarities), gather(scores))


def embed(model: nn.Module, batch: FeatureBatch, pooling: str) -> Tensor:
    """One vector for each sequence of a flat batch."""
    hidden = model(**batch.inputs).last_hidden_state
    return pool(hidden, SequenceLayout.from_cu_seqlens(batch.cu_seqlens, tuple(hidden.shape[:1])), pooling)


def contrast(parts: Tensor) -> Tensor:
    """The mean cross-entropy of each first text finding its second among all second and third ones.

    Example:
        >>> parts = torch.eye(2).expand(2, 2, 2)  # each text is its own partner
        >>> round(contrast(parts).item(), 4)  # log(1 + exp(-20))
        0.0
    """
    candidates = torch.cat([gather(part) for part in parts[1:]])
    own = parts.shape[1] * _rank() + torch.arange(parts.shape[1], device=parts.device)
    return F.cross_entropy(parts[0] @ candidates.T * SCALE, own)


def cosent(similarities: Tensor, scores: Tensor) -> Tensor:
    """log(1 + sum of exp(SCALE (s_j - s_i))) over pairs of which i should be closer than j.

    Example:
        >>> round(cosent(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).item(), 4)  # log 2
        0.6931
    """
    differences = (similarities[None, :] - similarities[:, None]) * SCALE  # [i, j]
    wrong = differences.masked_fill(scores[:, None] <= scores[None, :], float("-inf"))
    return torch.logsumexp(torch.cat((wrong.flatten(), wrong.new_zeros(1))), dim=0)


def gather(x: Tensor) -> Tensor:
    """The rows of all processes, through which gradients flow; each has equally many."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(tuple(all_gather(x)))


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
