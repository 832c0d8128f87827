"""Fine-tuning and evaluation of sparse encoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import SparseEncoderSettings, save_sparse_encoder
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.nn.layout import to_device
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import not_cast
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.features import Feature
from bertblocks.tasks.gather import gather, gather_ragged
from bertblocks.tasks.retrieval.evaluation import evaluate_rankings, judge_queries
from bertblocks.tasks.retrieval.examples import RetrievalExample, Shape, read_retrieval_data
from bertblocks.tasks.retrieval.losses import kl_divergence, margin_mse
from bertblocks.tasks.settings import SparseSettings
from bertblocks.tasks.sparse.lists import (
    TARGET,
    SparseFeature,
    find_hidden,
    inverse_frequencies,
    make_batch,
    make_lists,
)
from bertblocks.tasks.sparse.losses import contrast, flops, warmed_up
from bertblocks.tasks.sparse.new_head import fit_to_own_tokens
from bertblocks.tasks.sparse.vectors import search, sparsity
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: Scores of rankings; the first chooses the best model.
METRICS = ("ndcg@10", "mrr@10", "recall@10")


class SparseTask(FineTuneTask):
    """Sparse vectors whose dot product says how relevant a document is (SPLADE; Formal et al., 2021).

    Relevant documents are contrasted with all others of the batch; a teacher's scores are learned by MarginMSE
    (Hofstätter et al., 2020) or by the KL divergence. The FLOPS regularizer (Paria et al., 2020) keeps vectors sparse.
    """

    name, noun = "sparse", "A sparse encoder"
    settings_class = SparseSettings
    model_task = "masked-lm"
    default_length = 256
    compares_examples = True
    new_head_note = "the checkpoint has no masked-LM head: a new one, tied to its embeddings, is trained"
    embedding: SparseEncoderSettings = SparseEncoderSettings()

    def __init__(self, settings: SparseSettings) -> None:
        super().__init__(settings)
        self.shape: Shape | None = None
        self.weights: Tensor | None = None
        self.document_weight = self.query_weight = 0.0

    @property
    def metric(self) -> str:
        return METRICS[0]

    def read(self, source: str | Path) -> list[RetrievalExample]:
        given = self.given_columns("query", "document", "negative", "label")
        data = read_retrieval_data(source, self.settings.read_options, given)
        self.shape = self.shape or data.shape
        self.notes.append(data.note)
        return data.examples

    def group(self, example: RetrievalExample) -> str:
        return example.query

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        settings = self.settings
        if not isinstance(embedding, SparseEncoderSettings):
            prompts, default = embedding.prompts, embedding.default_prompt
            embedding = SparseEncoderSettings(prompts=prompts, default_prompt=default)
        self.weights = embedding.query_weights if self.weights is None else self.weights
        queries = settings.queries or ("encoded" if self.weights is None else "learned")
        if settings.queries is None and embedding.is_frozen and self.weights is not None:
            queries = "idf"
        self.queries = queries
        self.embedding = replace(
            embedding,
            sparse_pooling=settings.pooling or embedding.sparse_pooling,
            activation=settings.activation or embedding.activation,
            query_weights=None if queries == "encoded" else self.weights,
            is_frozen=queries != "learned",
        )
        model.sparse_head = self.embedding.make_head()
        self._model = model

    @property
    def loss(self) -> str:
        return self.settings.loss or ("margin_mse" if self.shape == "teacher" else "contrast")

    def features(
        self, examples: Sequence[RetrievalExample], tokenizer: TextTokenizer, max_length: int
    ) -> list[SparseFeature]:
        """Tokenizes queries and documents, and truncates long ones."""
        if self.shape == "scores":
            raise DataError(
                f"{examples[0].place}: the labels are scores; sparse learns from relevant documents (labels of 1 and "
                "0), or from a teacher's scores of several documents per query."
            )
        if self.loss != "contrast" and self.shape != "teacher":
            raise DataError(
                f"{examples[0].place}: loss is {self.loss!r}, which needs a teacher's scores, label=COLUMN."
            )
        lists = make_lists(examples, self.settings.negatives, self.loss != "contrast")
        if not lists:
            raise DataError(f"{examples[0].place}: no query has a relevant document, so there is nothing to learn.")
        documents = _number(text for own in lists for text in own.documents)
        queries = _number(own.query for own in lists)
        document_tokens = self._tokenize(list(documents), "document", tokenizer, max_length, with_special=True)
        self._weigh_tokens(document_tokens, tokenizer)
        is_encoded = self.queries == "encoded"
        query_tokens = self._tokenize(list(queries), "query", tokenizer, max_length, with_special=is_encoded)
        return [
            SparseFeature(
                query_tokens[queries[own.query]],
                [document_tokens[documents[text]] for text in own.documents],
                list(own.targets),
                queries[own.query],
                [documents[text] for text in own.documents],
            )
            for own in lists
        ]

    def _tokenize(
        self, texts: list[str], role: str, tokenizer: TextTokenizer, max_length: int, with_special: bool
    ) -> list[Feature]:
        prompt = self.embedding.find_prompt(None, role)
        room = max_length - (tokenizer.num_special() if with_special else 0)
        features, cut = [], 0
        for tokens in tokenizer.tokenize([prompt + text for text in texts]):
            ids = tokens.ids[:room]
            cut += len(tokens.ids) > room
            sequence = tokenizer.add_special_tokens(ids) if with_special else None
            features.append(Feature(ids, [0] * len(ids)) if sequence is None else Feature(sequence.ids, sequence.types))
        if cut:
            kind = "queries" if role == "query" else "documents"
            self.notes.append(f"{cut:,} {kind} are truncated to {max_length} tokens; raise max_length to keep more")
        return features

    def _weigh_tokens(self, documents: Sequence[Feature], tokenizer: TextTokenizer) -> None:
        """Gives query tokens their weights, unless they are encoded or the checkpoint has weights."""
        if self.queries == "encoded" or self.weights is not None:
            return
        size = len(tokenizer.tokenizer.get_vocab())
        self.weights = inverse_frequencies([document.ids for document in documents], size)
        self.embedding = replace(self.embedding, query_weights=self.weights)
        self._model.sparse_head = self.embedding.make_head()
        self.notes.append(f"queries are not encoded: the weights of tokens come from {len(documents):,} documents")

    def fit_head(self, model: Any, features: Sequence[SparseFeature]) -> bool:
        fit_to_own_tokens(model, [document for feature in features for document in feature.documents])
        return True

    def batch(self, features: Sequence[SparseFeature]) -> FlatBatch:
        return make_batch(features, has_bags=self.queries != "encoded")

    def before_step(self, step: int, total_steps: int) -> None:
        settings = self.settings
        self.document_weight, self.query_weight = (
            warmed_up(weight, step, total_steps, settings.flops_warmup)
            for weight in (settings.document_flops, settings.query_flops)
        )

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        """Computes the vectors of all queries, then of all documents."""
        count = batch.counts["ranking"]
        if batch.bags is None:
            return upcast(model(**batch.inputs).vectors)
        output = model(**batch.inputs, bags=(batch.bags, count))
        return torch.cat([output.bag_vectors, upcast(output.vectors)])

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        counts = [batch.counts["ranking"] for batch in batches]
        queries = torch.cat([output[:count] for output, count in zip(outputs, counts, strict=True)])
        documents = torch.cat([output[count:] for output, count in zip(outputs, counts, strict=True)])
        labels = torch.cat([batch.labels for batch in batches if batch.labels is not None])
        lengths = torch.cat([batch.list_lengths for batch in batches if batch.list_lengths is not None])
        with not_cast(queries):
            return self._losses(queries, documents, labels, lengths)

    def _losses(self, queries: Tensor, documents: Tensor, labels: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        everything, first = gather_ragged(documents)
        if self.loss == "contrast":
            all_labels, _ = gather_ragged(labels)
            own = to_device(lengths.cumsum(0) - lengths + first, labels.device)
            hidden = find_hidden(all_labels, own)
            ranking = contrast(queries, everything, own, hidden, self.settings.temperature)
        else:
            owners = to_device(torch.repeat_interleave(lengths), labels.device)
            scores = (queries[owners] * documents).sum(-1)
            measure = margin_mse if self.loss == "margin_mse" else kl_divergence
            ranking = measure(scores, labels[:, TARGET].to(scores), lengths.tolist())
        # means over the batch, times the number of queries that they are divided by
        losses = {"ranking": ranking, "document_flops": self.document_weight * flops(everything) * len(queries)}
        if self.queries == "encoded":
            losses["query_flops"] = self.query_weight * flops(gather(queries)) * len(queries)
        return losses

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        weights = model.sparse_head.query_weights
        weights = None if weights is None else weights.detach()
        settings = replace(self.embedding, max_length=max_length, query_weights=weights)
        save_sparse_encoder(model, folder, tokenizer, settings)

    def evaluate(self, predictor: Predictor, examples: Sequence[RetrievalExample]) -> Evaluated:
        """Ranks all documents of the examples for each query by exact search."""
        gains = judge_queries(examples)
        texts = list(dict.fromkeys(document for example in examples for document in example.documents))
        queries = predictor.encode_sparse(list(gains), role="query")
        documents = predictor.encode_sparse(texts, role="document")
        rankings = (
            [(texts[number], value) for number, value in zip(order, values, strict=True)]
            for order, values in search(queries, documents, len(documents))
        )
        evaluated = evaluate_rankings(examples, gains, rankings, METRICS)
        return replace(evaluated, scores={**evaluated.scores, **sparsity(queries, documents)})


def _number(texts: Iterable[str]) -> dict[str, int]:
    """Numbers texts; equal ones have the same number."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}
