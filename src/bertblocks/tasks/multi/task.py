"""Fine-tuning and evaluation of multi-vector encoders."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.multi_vector import (
    DOCUMENT_MARKER,
    QUERY_LENGTH,
    QUERY_MARKER,
    Expansion,
    MultiVectorSettings,
    add_markers,
    save_multi_vector,
)
from bertblocks.nn.embedding_head import Dense, Normalize
from bertblocks.nn.layout import to_device
from bertblocks.nn.ops.maxsim import maxsim
from bertblocks.nn.token_head import TokenHead
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.gather import gather_numbers, gather_ragged
from bertblocks.tasks.multi.batches import MultiBatch, MultiFeature, find_false_negatives, hash_text
from bertblocks.tasks.multi.scores import score_multi
from bertblocks.tasks.multi.sequences import RoleTokenizer, token_vectors
from bertblocks.tasks.retrieval.evaluation import evaluate_rankings, judge_queries
from bertblocks.tasks.retrieval.examples import RetrievalExample, read_retrieval_data
from bertblocks.tasks.retrieval.losses import kl_divergence, margin_mse
from bertblocks.tasks.retrieval.metrics import METRICS
from bertblocks.tasks.settings import MultiSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

DIMENSIONS = 128
#: Prompts for vocabularies without unused tokens.
TEXT_PROMPTS = {"query": "query: ", "document": "document: "}
#: Queries that are scored against all documents at once.
QUERIES_AT_ONCE = 64


class MultiTask(FineTuneTask):
    """One vector per token, compared by late interaction (ColBERT; Khattab and Zaharia, 2020).

    Relevant documents are contrasted with all other documents of the batch. A teacher's scores are learned by the KL
    divergence (ColBERTv2; Santhanam et al., 2022) or by MarginMSE (Hofstätter et al., 2020).
    """

    name, noun = "multi", "A multi-vector encoder"
    settings_class = MultiSettings
    model_task = "base"
    default_length = 256
    compares_examples = True
    starts_from_embeddings = True
    embedding: MultiVectorSettings = MultiVectorSettings()

    def __init__(self, settings: MultiSettings) -> None:
        super().__init__(settings)
        self._loss: str | None = None

    @property
    def metric(self) -> str:
        return METRICS[0]

    def read(self, source: str | Path) -> list[RetrievalExample]:
        given = self.given_columns("query", "document", "negative", "label")
        data = read_retrieval_data(source, self.settings.read_options, given)
        self.notes.append(data.note)
        has_scores = data.shape in ("teacher", "scores")
        if self._loss is None:
            self._loss = self.settings.loss or ("kl" if has_scores else "contrast")
            if self._loss != "contrast" and not has_scores:
                raise DataError(f"{source}: loss is {self._loss!r}, which needs a teacher's scores, label=COLUMN.")
        return _join_rows(data.examples) if data.shape in ("labels", "scores") else data.examples

    def group(self, example: RetrievalExample) -> str:
        return example.query

    def check(self, examples: Sequence[RetrievalExample], tokenizer: TextTokenizer, max_length: int) -> None:
        if examples and not any(gain > 0 for example in examples for gain in example.gains):
            raise DataError(f"{examples[0].place}: no query of the evaluation examples has a relevant document.")

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase, embedding: EmbeddingSettings) -> None:
        """Takes the settings of a multi-vector checkpoint, or chooses those of a new one."""
        settings = self.settings
        if isinstance(embedding, MultiVectorSettings):
            self.embedding = embedding
        else:
            vocabulary = tokenizer.get_vocab()
            marks = (QUERY_MARKER, DOCUMENT_MARKER)
            has_marks = all(mark in vocabulary for mark in marks)
            prompts = {"query": f"{marks[0]} ", "document": f"{marks[1]} "} if has_marks else TEXT_PROMPTS
            self.embedding = MultiVectorSettings(
                prompts=prompts,
                markers=marks if has_marks else (),
                expansion=Expansion() if tokenizer.mask_token_id is not None else None,
                query_length=None if tokenizer.mask_token_id is not None else QUERY_LENGTH,
                skiplist=tuple(word for word in string.punctuation if word in vocabulary),
            )
        if settings.query_length is not None:
            expansion = self.embedding.expansion
            if expansion is not None:
                changes: dict[str, Any] = {"expansion": replace(expansion, length=settings.query_length)}
            else:
                changes = {"query_length": settings.query_length}
            self.embedding = replace(self.embedding, **changes)
        add_markers(tokenizer, self.embedding)

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        size = model.config.hidden_size
        layers: tuple[nn.Module, ...] = embedding.layers if isinstance(embedding, MultiVectorSettings) else ()
        known = next((int(layer.out_size) for layer in layers if isinstance(layer, Dense)), None)
        width = self.settings.dimensions or known or DIMENSIONS
        if not layers or width != known:
            projection = Dense(size, width, bias=False, activation="Identity")
            nn.init.orthogonal_(projection.linear.weight)
            layers = (projection, Normalize())
            self.notes.append(f"a new projection from {size} to {width} dimensions")
        self.embedding = replace(self.embedding, layers=layers)
        model.embedding_head = TokenHead(size, layers)
        if model.pooler is not None:
            model.pooler.requires_grad_(False)  # tokens do not use it

    def features(
        self, examples: Sequence[RetrievalExample], tokenizer: TextTokenizer, max_length: int
    ) -> list[MultiFeature]:
        """One feature for each relevant document of a query, together with those that are not relevant to it."""
        self.embedding = replace(self.embedding, document_length=self._document_length(max_length))
        sides = {}
        for role in ("query", "document"):
            own = (e.query for e in examples) if role == "query" else (text for e in examples for text in e.documents)
            texts = list(dict.fromkeys(own))
            segments = RoleTokenizer(tokenizer, self.embedding, role, max_length).segments(texts)
            sides[role] = dict(zip(texts, (parts[0] for parts in segments), strict=True))
        features = []
        for example in examples:
            lists: Sequence[Sequence[int]] = [range(len(example.documents))]
            if self._loss == "contrast":
                others = [index for index, gain in enumerate(example.gains) if gain <= 0]
                lists = [[index, *others] for index, gain in enumerate(example.gains) if gain > 0]
            for chosen in lists:
                texts = [example.documents[index] for index in chosen]
                features.append(
                    MultiFeature(
                        sides["query"][example.query],
                        tuple(sides["document"][text] for text in texts),
                        tuple(example.targets[index] for index in chosen),
                        tuple(example.gains[index] for index in chosen),
                        tuple(hash_text(text) for text in (example.query, *texts)),
                    )
                )
        if self._loss != "contrast":
            features = [feature for feature in features if len(feature.documents) > 1]
        if not features:
            raise DataError(f"{examples[0].place}: no query has documents that loss={self._loss} can compare.")
        return features

    def _document_length(self, max_length: int) -> int:
        own = self.embedding.document_length
        return max_length if own is None or self.settings.max_length is not None else min(own, max_length)

    def batch(self, features: Sequence[MultiFeature]) -> MultiBatch:
        return MultiBatch.from_features(features)

    def encode(self, model: nn.Module, batch: Any) -> Tensor:
        """Computes the vectors of all tokens that get one, those of queries first."""

        def run(**inputs: Any) -> Tensor:
            return model(**inputs).pooler_output

        return torch.cat(token_vectors(run, batch.inputs, batch.seen.tolist()))[batch.kept]

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[Any]) -> dict[str, Tensor]:
        """Computes the loss of this process's queries; contrast compares them with the documents of all processes."""
        lengths = [batch.lengths for batch in batches]
        parts = [output.split([sum(own) for own in sizes]) for output, sizes in zip(outputs, lengths, strict=True)]
        queries, documents = (torch.cat(side) for side in zip(*parts, strict=True))
        query_lengths, document_lengths = (list(chain(*side)) for side in zip(*lengths, strict=True))
        sizes, gains = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("list_lengths", "gains"))
        owners = to_device(torch.repeat_interleave(sizes), gains.device)
        temperature = self.settings.temperature
        if self._loss == "contrast":
            keys = [batch.keys.split([len(batch.list_lengths), len(batch.gains)]) for batch in batches]
            query_keys, document_keys = (torch.cat(side) for side in zip(*keys, strict=True))
            everything, first = gather_numbers(document_lengths, gains.device)
            own = to_device(sizes.cumsum(0) - sizes + first, gains.device)
            query_of, texts, relevant = (gather_ragged(x)[0] for x in (query_keys[owners], document_keys, gains))
            hidden = find_false_negatives(query_keys, query_of, texts, relevant, own)
            scores = self._score(queries, query_lengths, gather_ragged(documents)[0], everything)
            logits = scores.masked_fill(hidden, float("-inf")) / temperature
            return {"loss": F.cross_entropy(logits, own, reduction="sum")}
        scores = self._score(queries, query_lengths, documents, document_lengths)
        own_scores = scores[owners, torch.arange(len(owners), device=owners.device)]
        targets = torch.cat([batch.labels for batch in batches])
        if self._loss == "margin_mse":
            return {"loss": margin_mse(own_scores, targets, sizes.tolist())}
        divergence = kl_divergence(own_scores / temperature, targets / temperature, sizes.tolist())
        return {"loss": divergence * temperature**2}

    def _score(
        self, queries: Tensor, query_lengths: list[int], documents: Tensor, document_lengths: list[int]
    ) -> Tensor:
        """Scores all queries against all documents."""
        scores = maxsim(queries, query_lengths, documents, document_lengths)
        if self.embedding.similarity == "meanmaxsim":
            scores = scores / to_device(torch.tensor(query_lengths), scores.device).clamp(min=1)[:, None]
        return scores

    def evaluate(self, predictor: Predictor, examples: Sequence[RetrievalExample]) -> Evaluated:
        """Ranks the documents of all examples for each query, by exact scores."""
        gains = judge_queries(examples)
        names = list(dict.fromkeys(text for example in examples for text in example.documents))
        queries = predictor.encode_multi(list(gains), role="query")
        documents = predictor.encode_multi(names, role="document")
        is_mean = getattr(predictor.embedding, "similarity", None) == "meanmaxsim"

        def rank() -> Iterator[list[tuple[str, float]]]:
            for start in range(0, len(queries), QUERIES_AT_ONCE):
                for scores in score_multi(queries[start : start + QUERIES_AT_ONCE], documents, mean=is_mean):
                    yield [(names[index], scores[index]) for index in np.argsort(-scores, kind="stable")]

        return evaluate_rankings(examples, gains, rank(), METRICS)

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        layers = tuple(model.embedding_head.layers)
        save_multi_vector(model, folder, tokenizer, replace(self.embedding, layers=layers, markers=()))


def _join_rows(examples: Sequence[RetrievalExample]) -> list[RetrievalExample]:
    """Joins rows with one document each by their query, relevant documents first."""
    by_query: dict[str, list[RetrievalExample]] = {}
    for example in examples:
        by_query.setdefault(example.query, []).append(example)
    joined = []
    for query, rows in by_query.items():
        found = [item for row in rows for item in zip(row.documents, row.targets, row.gains, strict=True)]
        documents, targets, gains = zip(*sorted(found, key=lambda item: -item[1]), strict=True)
        joined.append(RetrievalExample(query, documents, targets, gains, rows[0].place))
    return joined
