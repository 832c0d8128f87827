"""Fine-tuning and evaluation of rerankers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.any_kind import read_settings_of_any
from bertblocks.checkpoints.sentence_transformers.cross_encoder import (
    CrossEncoderSettings,
    save_cross_encoder,
)
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64, permute
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.numerics import upcast
from bertblocks.tasks.base import Evaluated, FineTuneTask, Scores
from bertblocks.tasks.rerank.bm25 import BM25
from bertblocks.tasks.rerank.lists import RANDOM_NEGATIVES, add_random_negatives, merge_rows, shuffle
from bertblocks.tasks.retrieval.evaluation import evaluate_rankings, judge_queries
from bertblocks.tasks.retrieval.examples import RetrievalExample, Shape, judge, read_retrieval_data
from bertblocks.tasks.retrieval.losses import binary_cross_entropy, list_cross_entropy, margin_mse, squared_error
from bertblocks.tasks.retrieval.metrics import mean_scores, score_ranking
from bertblocks.tasks.settings import RerankSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from bertblocks.text.windows import cut_pair

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

METRICS = ("ndcg@10", "mrr@10", "map")
#: Losses that compare the documents of a list with each other.
LIST_LOSSES = ("cross_entropy", "margin_mse")


@dataclass(frozen=True)
class RerankFeature:
    """The tokens of a query and of documents, with their targets. The first `fixed` documents are in every draw."""

    query: list[int]
    documents: list[list[int]]
    targets: tuple[float, ...]
    fixed: int


class RerankTask(FineTuneTask):
    """Scores of documents for a query, by a model that reads both at once (a cross-encoder; Nogueira and Cho, 2019).

    Labels are learned by binary cross-entropy, relevant documents among others by cross-entropy over their list, a
    teacher's scores by MarginMSE (Hofstätter et al., 2020), and scores by the squared error.
    """

    name = "rerank"
    noun = "A reranker"
    settings_class = RerankSettings
    model_task = "sequence-classification"
    starts_from_head = True
    embedding: CrossEncoderSettings = CrossEncoderSettings()

    def __init__(self, settings: RerankSettings) -> None:
        super().__init__(settings)
        self._loss: str | None = None
        self._has_layers = False

    @property
    def metric(self) -> str:
        return METRICS[0]

    @property
    def method(self) -> str:  # type: ignore[override]
        return "lists" if self._loss in LIST_LOSSES else "full"

    def read(self, source: str | Path) -> list[RetrievalExample]:
        settings = self.settings
        given = self.given_columns("query", "document", "negative", "label")
        data = read_retrieval_data(source, settings.read_options, given)
        self.notes.append(data.note)
        examples = data.examples if data.shape == "teacher" else merge_rows(data.examples)
        if data.shape == "pairs":
            examples = add_random_negatives(examples)
            self.notes.append(
                f"{source}: the rows are pairs, so up to {RANDOM_NEGATIVES} documents of other queries, drawn at "
                "random, are the negatives of each query; `bertblocks mine` finds harder ones"
            )
        if self._loss is None:
            self._loss = settings.loss or _choose_loss(data.shape, examples)
            _check_targets(self._loss, examples, source)
            self.notes.append(f"loss: {self._loss}")
        return examples

    def group(self, example: RetrievalExample) -> str:
        return example.query

    def head_of(self, folder: Path) -> str:
        self._has_layers = bool(
            isinstance(found := read_settings_of_any(folder), CrossEncoderSettings) and found.layers
        )
        return "base" if self._has_layers else self.model_task

    def config_changes(self) -> dict[str, Any]:
        return {} if self._has_layers else {"num_labels": 1}

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        activation = "Sigmoid" if self._loss == "bce" else "Identity"
        self.pooling = embedding.pooling
        if isinstance(embedding, CrossEncoderSettings):
            self.embedding = replace(embedding, activation=activation)
        else:  # its prompts are those of embeddings
            self.embedding = CrossEncoderSettings(activation=activation)
        if self._has_layers:
            model.embedding_head = EmbeddingHead(embedding.pooling, model.config.hidden_size, embedding.layers)
            if model.embedding_head.size != 1:
                raise ValueError(f"The model has {model.embedding_head.size} labels; a reranker has one.")
            if model.pooler is not None:
                model.pooler.requires_grad_(False)  # scores do not use it

    def check(self, examples: Sequence[RetrievalExample], tokenizer: TextTokenizer, max_length: int) -> None:
        if not any(len(gains) > 1 and any(gain > 0 for gain in gains.values()) for gains in judge(examples).values()):
            raise DataError(
                f"{examples[0].place}: no query of the evaluation examples has a relevant document and another one, so "
                "there is nothing to rank; `finetune classify problem=regression` learns scores of single pairs."
            )

    def features(
        self, examples: Sequence[RetrievalExample], tokenizer: TextTokenizer, max_length: int
    ) -> list[RerankFeature]:
        """Lists of documents, or documents one by one, by the loss. Sequences are made when they are needed."""
        self._tokenizer, self._room = tokenizer, max_length - tokenizer.num_special(pair=True)
        prompt = self.embedding.find_prompt(None, None)
        texts = dict.fromkeys(prompt + example.query for example in examples)
        texts |= dict.fromkeys(document for example in examples for document in example.documents)
        tokens = {text: found.ids for text, found in zip(texts, tokenizer.tokenize(list(texts)), strict=True)}
        features, cut = [], 0
        for example in examples:
            query, documents = tokens[prompt + example.query], [tokens[document] for document in example.documents]
            cut += sum(len(query) + len(document) > self._room for document in documents)
            if self._loss in LIST_LOSSES:
                fixed = 1 if self._loss == "margin_mse" else sum(gain > 0 for gain in example.gains)
                features.append(RerankFeature(query, documents, example.targets, fixed))
            else:
                features += [
                    RerankFeature(query, [document], (target,), 1)
                    for document, target in zip(documents, example.targets, strict=True)
                ]
        if cut:
            self.notes.append(f"{cut:,} pairs are truncated to {max_length} tokens; raise max_length to keep more")
        if self._loss in LIST_LOSSES:
            features = self._usable(features)
        return features

    def _usable(self, features: list[RerankFeature]) -> list[RerankFeature]:
        """The lists from which something can be learned."""
        usable = [feature for feature in features if 1 <= feature.fixed < len(feature.documents)]
        if not usable:
            raise DataError(
                f"No query has a relevant document and another one, which loss={self._loss} compares; use loss=bce."
            )
        if len(usable) < len(features):
            self.notes.append(f"{len(features) - len(usable):,} queries without a document to compare are left out")
        return usable

    def draw(self, items: Sequence[RerankFeature], keys: UInt64) -> list[RerankFeature]:
        """Draws the documents of a list that are not relevant anew, if there are more than the settings ask for."""
        return [self._draw(item, keys[index : index + 1]) for index, item in enumerate(items)]

    def _draw(self, item: RerankFeature, key: UInt64) -> RerankFeature:
        count, others = self.settings.negatives, len(item.documents) - item.fixed
        if others <= count:
            return item
        drawn = item.fixed + permute(np.arange(count), others, key)
        chosen = [*range(item.fixed), *drawn.tolist()]
        targets = tuple(item.targets[index] for index in chosen)
        return replace(item, documents=[item.documents[index] for index in chosen], targets=targets)

    def batch(self, features: Sequence[RerankFeature]) -> FlatBatch:
        """Joins the pairs of all lists; the labels are the targets of pairs."""
        pairs = [cut_pair(item.query, document, self._room) for item in features for document in item.documents]
        sequences = [self._tokenizer.add_special_tokens(*pair) for pair in pairs]
        count = len(features) if self._loss in LIST_LOSSES else len(pairs)
        batch = FlatBatch.from_sequences(
            [sequence.ids for sequence in sequences],
            [sequence.types for sequence in sequences],
            torch.tensor([target for item in features for target in item.targets]),
            {"loss": count},
        )
        return replace(batch, list_lengths=torch.tensor([len(item.documents) for item in features]))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        targets, lengths = batch.labels, batch.list_lengths
        assert targets is not None
        assert lengths is not None
        output = model(**batch.inputs)
        scores = upcast(output.pooler_output if self._has_layers else output.logits).flatten()
        if self._loss in LIST_LOSSES:
            compare: Callable[..., Tensor] = list_cross_entropy if self._loss == "cross_entropy" else margin_mse
            return {"loss": compare(scores, targets, lengths.tolist())}
        return {"loss": (binary_cross_entropy if self._loss == "bce" else squared_error)(scores, targets)}

    def baselines(
        self, predictor: Predictor, train: Sequence[RetrievalExample], held_out: Sequence[RetrievalExample]
    ) -> dict[str, Scores]:
        """The words that query and document share, and the cosine of their vectors from the untrained encoder."""
        gains = judge(held_out)
        documents = list(dict.fromkeys(document for own in gains.values() for document in own))
        bm25 = BM25(documents)
        found: dict[str, Callable[[str, str], float]] = {"bm25": bm25.score}
        if not self._has_layers:
            texts = list(dict.fromkeys([*gains, *documents]))
            vectors = dict(zip(texts, predictor.encode(texts, prompt=""), strict=True))
            found["cosine"] = lambda query, document: float(vectors[query] @ vectors[document])
        return {name: _score_baseline(gains, score) for name, score in found.items()}

    def evaluate(self, predictor: Predictor, examples: Sequence[RetrievalExample]) -> Evaluated:
        gains = judge_queries(examples)
        found = predictor.rerank(list(gains), [shuffle(list(own)) for own in gains.values()])
        rankings = ([(document.text, document.score) for document in ranking] for ranking in found)
        return evaluate_rankings(examples, gains, rankings, METRICS)

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        layers = tuple(model.embedding_head.layers) if self._has_layers else ()
        save_cross_encoder(model, folder, tokenizer, replace(self.embedding, max_length=max_length, layers=layers))


def _choose_loss(shape: Shape, examples: Sequence[RetrievalExample]) -> str:
    if shape in ("pairs", "lists"):
        return "cross_entropy"
    if shape == "teacher":
        return "margin_mse"
    return "bce" if all(0 <= target <= 1 for example in examples for target in example.targets) else "mse"


def _check_targets(loss: str, examples: Sequence[RetrievalExample], source: str | Path) -> None:
    if loss not in ("bce", "cross_entropy"):
        return
    low, high = (0.0, 1.0) if loss == "bce" else (0.0, float("inf"))
    for example in examples:
        wrong = next((target for target in example.targets if not low <= target <= high), None)
        if wrong is not None:
            raise DataError(
                f"{example.place}: a score is {wrong:g}; loss={loss} needs scores "
                f"{'from 0 to 1' if loss == 'bce' else 'of 0 or more'}. Use loss=mse or loss=margin_mse."
            )


def _score_baseline(gains: dict[str, dict[str, float]], score: Callable[[str, str], float]) -> Scores:
    found = []
    for query, own in gains.items():
        if any(gain > 0 for gain in own.values()):
            ranking = sorted(shuffle(list(own)), key=lambda document: -score(query, document))
            found.append(score_ranking(ranking, own, METRICS))
    return mean_scores(found)
