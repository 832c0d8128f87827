"""Evaluates a language model on held-out texts and compares it with a unigram baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import DocumentChunk, Documents, cut_chunks, sample_documents
from bertblocks.models import GeneratorAndDiscriminator, TrainingModel
from bertblocks.models.masked_lm import IGNORE
from bertblocks.nn.numerics import upcast
from bertblocks.objectives import CausalLanguageModeling, MaskedLanguageModeling, SentenceOrder
from bertblocks.text.vocabulary import Vocabulary

#: Every model is evaluated with this share of tokens replaced by [MASK].
MASK_RATE = 0.15
#: The choice of held-out texts and their masks do not depend on the run's seed.
SEED = 0
#: Tokens per forward pass.
CHUNK_TOKENS = 2048
#: The unigram baseline counts at most this many training tokens of each source.
UNIGRAM_TOKENS = 5_000_000
#: The length, in tokens, of texts that are shown with a word filled in.
MIN_SHOWN, MAX_SHOWN = 8, 24


@dataclass(frozen=True)
class UnigramBaseline:
    """The baseline that ignores context and predicts each token by its frequency."""

    log_probabilities: NDArray[np.float64]

    @classmethod
    def count(cls, sources: Iterable[Documents], size: int) -> UnigramBaseline:
        """Counts the first tokens of each source, with add-one smoothing."""
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


@dataclass(frozen=True)
class DocumentScores:
    """The loss, the correct predictions and the predicted tokens of each held-out document, as sums."""

    loss: NDArray[np.float64]
    correct: NDArray[np.float64]
    tokens: NDArray[np.float64]


class HeldOutEvaluator:
    """Scores a model on a fixed sample of held-out texts with fixed masks, which do not depend on the length."""

    def __init__(
        self,
        sources: Sequence[Documents],
        vocabulary: Vocabulary,
        length: int,
        tokens: int,
        order: SentenceOrder | None = None,
    ) -> None:
        self.objective = MaskedLanguageModeling(vocabulary, MASK_RATE, mask_share=1.0, random_share=0.0)
        self.length = length
        documents = sample_documents(sources, tokens, SEED)
        self.chunks = cut_chunks(documents, length - self.objective.overhead)
        self.batches = self.objective.batch_documents(documents, length, CHUNK_TOKENS, SEED)
        self.order_batches: list[FlatBatch] = []
        if order is not None:
            chunks = cut_chunks(documents, length - order.overhead)
            per_batch = max(CHUNK_TOKENS // length, 1)
            starts = range(0, len(chunks), per_batch)
            self.order_batches = [order.batch([chunks[start : start + per_batch]], SEED) for start in starts]

    def batches_for(self, model: Any) -> list[FlatBatch]:
        """The masked texts or, for a causal model, texts in which every token is predicted from those before it."""
        if not model.config.causal:
            return self.batches
        objective = CausalLanguageModeling(self.objective.vocabulary)
        size = max(CHUNK_TOKENS // self.length, 1)
        starts = range(0, len(self.chunks), size)
        return [objective.batch([self.chunks[start : start + size]], SEED) for start in starts]

    def targets_for(self, model: Any) -> NDArray[np.int64]:
        """Every token that the model has to predict."""
        labels = [_labels(batch) for batch in self.batches_for(model)]
        return torch.cat([batch_labels[batch_labels != IGNORE] for batch_labels in labels]).numpy()

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss and accuracy on the predicted tokens, and on the order of segments if the objective trains it."""
        loss, correct, count = 0.0, 0, 0
        for logits, targets, _, _ in self._predict(model):
            loss += float(F.cross_entropy(upcast(logits), targets, reduction="sum"))
            correct += int((logits.argmax(dim=1) == targets).sum())
            count += len(targets)
        metrics = {"held_out_loss": loss / max(count, 1), "held_out_accuracy": correct / max(count, 1)}
        if isinstance(model, GeneratorAndDiscriminator):
            metrics |= self._evaluate_detection(model)
        return metrics | (self._evaluate_order(model) if self.order_batches else {})

    @torch.no_grad()
    def score_documents(self, model: Any) -> DocumentScores:
        """The scores of each document in which tokens are predicted, in the same order for every model."""
        owners = np.array([chunk.stream_index for chunk in self.chunks])
        sums = np.zeros((3, owners.max() + 1))
        for logits, targets, _, sequences in self._predict(model):
            losses = F.cross_entropy(upcast(logits), targets, reduction="none").cpu().numpy()
            is_correct = (logits.argmax(dim=1) == targets).cpu().numpy()
            for row, values in enumerate((losses, is_correct, np.ones(len(losses)))):
                np.add.at(sums[row], owners[sequences.numpy()], values)
        return DocumentScores(*sums[:, sums[2] > 0])

    def _predict(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The logits, targets, positions and sequences of all predicted tokens, batch by batch."""
        first = 0
        for batch in self.batches_for(model):
            labels = _labels(batch)
            token_indices = (labels != IGNORE).nonzero().squeeze(1)
            sequences = torch.searchsorted(batch.cu_seqlens.long(), token_indices, right=True) - 1
            targets = labels[token_indices].to(model.device)
            logits = _logits(model, batch)[token_indices.to(model.device)]
            yield logits, targets, token_indices - batch.cu_seqlens.long()[sequences], first + sequences
            first += len(batch.cu_seqlens) - 1

    @torch.no_grad()
    def evaluate_parts(self, model: Any, unigram: UnigramBaseline) -> dict[str, list[dict[str, Any]]]:
        """The loss of tokens by their frequency in the training texts, and by their position."""
        losses, per_million, positions = [], [], []
        for logits, targets, places, _ in self._predict(model):
            losses.append(F.cross_entropy(upcast(logits), targets, reduction="none").cpu().numpy())
            per_million.append(1e6 * np.exp(unigram.log_probabilities[targets.cpu().numpy()]))
            positions.append(places.numpy())
        loss = np.concatenate(losses)
        return {
            "by_frequency": _by_power(loss, np.concatenate(per_million), 10),
            "by_position": _by_power(loss, np.concatenate(positions), 2),
        }

    def _evaluate_detection(self, model: GeneratorAndDiscriminator) -> dict[str, float]:
        """The discriminator on texts that the generator filled, with samples that depend only on the two models."""
        random = torch.Generator(model.device).manual_seed(SEED)
        loss, correct, found, replaced, count = 0.0, 0, 0, 0, 0
        for batch in self.batches:
            batch = batch.to(model.device)
            out = model(batch.input_ids, batch.cu_seqlens, _labels(batch), random)
            is_found = (out.logits > 0) & out.replaced
            loss += float(out.discriminator_total)
            correct += int(((out.logits > 0) == out.replaced).sum())
            found, replaced = found + int(is_found.sum()), replaced + int(out.replaced.sum())
            count += len(out.replaced)
        return {
            "held_out_detection_loss": loss / max(count, 1),
            "held_out_detection_accuracy": correct / max(count, 1),
            "held_out_detection_recall": found / max(replaced, 1),
            "held_out_replaced_share": replaced / max(count, 1),
        }

    def _evaluate_order(self, model: Any) -> dict[str, float]:
        loss, correct, count = 0.0, 0, 0
        for batch in self.order_batches:
            batch = batch.to(model.device)
            logits = model(**batch.inputs).seq_relationship_logits  # [sequences, 2]
            labels = batch.order_labels
            assert labels is not None
            loss += float(F.cross_entropy(upcast(logits), labels, ignore_index=IGNORE, reduction="sum"))
            correct += int((logits.argmax(dim=1) == labels).sum())
            count += int((labels != IGNORE).sum())
        return {"held_out_order_loss": loss / max(count, 1), "held_out_order_accuracy": correct / max(count, 1)}

    @torch.no_grad()
    def pseudo_perplexity(self, model: Any, tokens: int) -> float:
        """exp of the mean loss of tokens that are masked one at a time (Salazar et al., 2020), over whole chunks."""
        total, count = 0.0, 0
        chunks = iter(self.chunks)
        while count < tokens and (chunk := next(chunks, None)) is not None:
            total += self._pseudo_loss(model, chunk)
            count += len(chunk.ids)
        return math.exp(total / max(count, 1))

    def pseudo_scores(self, model: Any) -> DocumentScores:
        """The loss of each document whose tokens are masked one at a time. What is correct is not counted."""
        owners = [chunk.stream_index for chunk in self.chunks]
        sums = np.zeros((3, max(owners) + 1))
        for owner, chunk in zip(owners, self.chunks, strict=True):
            sums[:, owner] += (self._pseudo_loss(model, chunk), 0.0, len(chunk.ids))
        return DocumentScores(*sums)

    def _pseudo_loss(self, model: Any, chunk: DocumentChunk) -> float:
        vocabulary = self.objective.vocabulary
        text = torch.tensor([vocabulary.cls, *chunk.ids.tolist(), vocabulary.sep])
        return float(pseudo_losses(model, text, torch.arange(1, len(text) - 1), vocabulary.mask).sum())


@torch.no_grad()
def pseudo_losses(model: Any, text: Tensor, positions: Tensor, mask: int) -> Tensor:
    """The loss of the token at each position when it alone is masked. Copies of the text form a batch."""
    losses = []
    for part in positions.split(max(CHUNK_TOKENS // len(text), 1)):
        copy_indices = torch.arange(len(part))
        copies = text.repeat(len(part), 1)
        copies[copy_indices, part] = mask
        cu_seqlens = torch.arange(len(part) + 1, dtype=torch.int32) * len(text)
        logits = _logits(model, FlatBatch(input_ids=copies.flatten(), cu_seqlens=cu_seqlens))
        masked = logits.view(len(part), len(text), -1)[copy_indices, part]
        losses.append(F.cross_entropy(upcast(masked), text[part].to(model.device), reduction="none"))
    return torch.cat(losses) if losses else torch.zeros(0)


def _by_power(losses: NDArray, values: NDArray, base: int) -> list[dict[str, Any]]:
    """The mean loss where a value is between two powers of `base`; values below 1 form the first group.

    Example:
        >>> _by_power(np.array([1.0, 2.0, 4.0]), np.array([0, 5, 7]), 2)
        [{'from': 0, 'to': 1, 'tokens': 1, 'loss': 1.0}, {'from': 4, 'to': 8, 'tokens': 2, 'loss': 3.0}]
    """
    groups = np.floor(np.log(np.maximum(values, 1 / base)) / math.log(base) + 1e-9).astype(int)
    groups = np.maximum(groups, -1)
    return [
        {
            "from": 0 if group < 0 else base**group,
            "to": base ** (group + 1),
            "tokens": int((groups == group).sum()),
            "loss": float(losses[groups == group].mean()),
        }
        for group in np.unique(groups).tolist()
    ]


def _labels(batch: FlatBatch) -> Tensor:
    assert batch.labels is not None
    return batch.labels


def _logits(model: Any, batch: FlatBatch) -> Tensor:
    batch = batch.to(model.device)
    model = model.language_model if isinstance(model, TrainingModel) else model
    out = model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens)
    return out["logits" if "logits" in out else "prediction_logits"]  # [tokens, vocabulary]


# ---------------------------------------------------------------------- filled masks


@dataclass(frozen=True)
class FilledMask:
    """A text with one masked token, the original token, and the model's best predictions with their probabilities."""

    text: str
    answer: str
    guesses: list[tuple[str, float]]


@torch.no_grad()
def fill_masks(
    model: Any, tokenizer: Any, held_out: HeldOutEvaluator, count: int, guesses: int = 3
) -> list[FilledMask]:
    """Predictions for the first held-out texts of sentence length, each with one word in its middle masked."""
    vocabulary = held_out.objective.vocabulary
    filled: list[FilledMask] = []
    for chunk in held_out.chunks:
        if len(filled) == count:
            break
        words = _whole_words(tokenizer, chunk.ids, vocabulary)
        if not MIN_SHOWN <= len(chunk.ids) <= MAX_SHOWN or not words:
            continue
        position, answer = words[len(words) // 2]
        ids = torch.tensor([vocabulary.cls, *chunk.ids.tolist(), vocabulary.sep])
        ids[position + 1] = vocabulary.mask
        batch = FlatBatch(input_ids=ids, cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32))
        best = upcast(_logits(model, batch)[position + 1]).softmax(dim=0).topk(guesses)
        names = [tokenizer.decode([index]).strip() for index in best.indices.tolist()]
        text = " ".join(tokenizer.decode(ids[1:-1].tolist()).split())
        filled.append(FilledMask(text, answer, list(zip(names, best.values.tolist(), strict=True))))
    return filled


def _whole_words(tokenizer: Any, ids: NDArray, vocabulary: Vocabulary) -> list[tuple[int, str]]:
    """Positions of tokens that are whole words of three letters or more."""
    starts = np.ones(len(ids) + 1, dtype=bool)
    if vocabulary.starts_word is not None:
        starts[:-1] = vocabulary.starts_word[ids]
    positions = np.flatnonzero(starts[:-1] & starts[1:]).tolist()
    words = [(position, tokenizer.decode([int(ids[position])]).strip()) for position in positions]
    return [(position, word) for position, word in words if word.isalpha() and len(word) > 2]
