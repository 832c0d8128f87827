"""Embeddings of texts that belong together: pairs, triplets and scored pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from bertblocks.nn.head import pool
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import not_cast
from bertblocks.tasks.base import WORST, Evaluated, FineTuneTask
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.metrics import regression_scores, retrieval_scores
from bertblocks.tasks.settings import EmbedSettings
from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.headers import is_number
from bertblocks.text.tables import DataError, Records, read_records

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: Similarities are multiplied by this before the softmax, as sentence-transformers does.
SCALE = 20.0
#: Ranks at which retrieval is scored.
RANKS = (1, 10)


@dataclass(frozen=True)
class EmbeddingExample:
    """Two texts that belong together, a third that does not, or two with a score of how close they are."""

    texts: list[str]
    score: float | None
    place: str


class EmbedTask(FineTuneTask):
    """Vectors that are close where texts belong together.

    Pairs and triplets are contrasted with the other texts of the batch, those of all processes included; scored pairs
    are ordered by CoSENT (Su, 2022). Prefixes of the vectors can be trained along (Matryoshka; Kusupati et al., 2022).
    """

    settings_class = EmbedSettings
    model_task = "base"
    default_length = 256

    def __init__(self, settings: EmbedSettings) -> None:
        super().__init__(settings)
        self.is_scored = self.is_read = False
        #: The scores that are learned as cosines of 0 and 1.
        self.scale: tuple[float, float] | None = None

    @property
    def metric(self) -> str:
        return "spearman" if self.is_scored else f"ndcg@{RANKS[-1]}"

    def read(self, source: str | Path) -> list[EmbeddingExample]:
        settings = self.settings
        given = self.given_columns("text", "text_pair", "negative", "label")
        records = read_records(source, settings.header, given.values())
        is_main, self.is_read = not self.is_read, True
        optional = ["negative"] if is_main and settings.loss == "contrast" else ["negative", "label"]
        columns = choose_columns(records, ["text", "text_pair"], optional, given)
        self.is_scored = "label" in columns
        if is_main and settings.loss in ("cosent", "cosine") and not self.is_scored:
            raise DataError(f"{source}: loss is {settings.loss!r}, which takes a column of scores, label=COLUMN.")
        self.notes.append(f"{source}: {len(records):,} rows, {write_columns(columns, records)}")
        examples = read_examples(records, columns)
        if is_main and settings.loss == "cosine":
            self.scale = _find_scale(examples, source)
            if self.scale != (0, 1):
                low, high = self.scale
                self.notes.append(f"scores from {low:g} to {high:g} are learned as cosines from 0 to 1")
        return examples

    def features(
        self, examples: Sequence[EmbeddingExample], tokenizer: TextTokenizer, max_length: int
    ) -> list[list[Feature]]:
        """The sequences of each example; longer ones are cut."""
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
        if cut:
            self.notes.append(f"{cut:,} texts are cut to {max_length} tokens; max_length may be raised")
        return features

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
        width = parts.shape[-1]
        sizes = [*sorted(size for size in self.settings.dimensions if size < width), width]
        losses = [self._loss(F.normalize(parts[..., :size], dim=-1), batch.targets) for size in sizes]
        return {"loss": torch.stack(losses).mean() * len(batch.targets)}

    def _loss(self, parts: Tensor, scores: Tensor) -> Tensor:
        """The mean over the batch, for vectors of length 1."""
        if bool(scores.isnan().any()):
            return contrast(parts)
        similarities = (parts[0] * parts[1]).sum(-1)
        if self.scale is not None:
            low, high = self.scale
            return F.mse_loss(similarities, (scores - low) / (high - low))
        return cosent(gather(similarities), gather(scores))

    def evaluate(self, predictor: Predictor, examples: Sequence[EmbeddingExample]) -> Evaluated:
        """Correlation with the scores, or how well first texts find their second ones among all."""
        texts = list(dict.fromkeys(text for example in examples for text in example.texts))
        place = {text: number for number, text in enumerate(texts)}
        vectors = predictor.encode(texts)
        first = vectors[[place[example.texts[0]] for example in examples]]
        second = vectors[[place[example.texts[1]] for example in examples]]
        if self.is_scored:
            scores = np.array([example.score for example in examples], dtype=np.float64)
            similarities = (first * second).sum(axis=1)
            correlations = regression_scores(scores, similarities)
            del correlations["mse"]  # cosines and scores have different scales
            return Evaluated(
                correlations,
                lambda i: regression_scores(scores[i], similarities[i])["spearman"],
                {"Worst examples": _worst_pairs(examples, scores, similarities)},
            )
        return _score_retrieval(examples, vectors, place)


def _worst_pairs(examples: Sequence[EmbeddingExample], scores: np.ndarray, cosines: np.ndarray) -> list[list[str]]:
    """The pairs whose places in the order by score and in that by cosine lie furthest apart."""
    from scipy.stats import rankdata

    distance = np.abs(rankdata(scores) - rankdata(cosines))
    rows = [
        [f"{scores[i]:g}", f"{cosines[i]:.3f}", " | ".join(examples[i].texts)]
        for i in np.argsort(-distance, kind="stable")[:WORST]
    ]
    return [["score", "cosine", "texts"], *rows]


def _score_retrieval(examples: Sequence[EmbeddingExample], vectors: np.ndarray, place: Mapping[str, int]) -> Evaluated:
    queries = list(dict.fromkeys(example.texts[0] for example in examples))
    documents = list(dict.fromkeys(text for example in examples for text in example.texts[1:]))
    relevant: dict[str, set[str]] = {query: set() for query in queries}
    for example in examples:
        relevant[example.texts[0]].add(example.texts[1])
    targets = vectors[[place[document] for document in documents]]
    ranked = []
    for query in queries:
        order = np.argsort(-(targets @ vectors[place[query]]), kind="stable")
        ranked.append([documents[i] for i in order[: RANKS[-1]]])
    wanted = [relevant[query] for query in queries]
    by_query = np.array(
        [retrieval_scores([a], [b], RANKS[-1:])[f"ndcg@{RANKS[-1]}"] for a, b in zip(ranked, wanted, strict=True)]
    )
    number = {query: index for index, query in enumerate(queries)}
    owner = np.array([number[example.texts[0]] for example in examples])
    return Evaluated(retrieval_scores(ranked, wanted, RANKS), lambda i: float(by_query[owner[i]].mean()))


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


def _find_scale(examples: Sequence[EmbeddingExample], source: str | Path) -> tuple[float, float]:
    """The lowest and the highest score, unless all are cosines already."""
    scores = [example.score for example in examples if example.score is not None]
    if min(scores) == max(scores):
        raise DataError(f"{source}: all scores are {scores[0]:g}; loss=cosine needs texts that are closer than others.")
    return (0, 1) if min(scores) >= -1 and max(scores) <= 1 else (min(scores), max(scores))


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
    with not_cast(parts):  # rounded to bf16 these would be off by a tenth
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
