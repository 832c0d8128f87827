"""Fine-tuning and evaluation of embedding models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, save_embedder
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.nn.attention import Attention
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import not_cast
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.classify.metrics import regression_scores
from bertblocks.tasks.embed.examples import EmbeddingExample, find_scale, read_examples
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.retrieval.metrics import mean_scores, score_ranking
from bertblocks.tasks.settings import EmbedSettings
from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError, read_records

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: Similarities are multiplied by this before the softmax, as in sentence-transformers.
SCALE = 20.0
#: How well first texts find their second texts; the last chooses the best model.
METRICS = ("recall@1", "ndcg@1", "recall@10", "ndcg@10")
#: The documents of a ranking that are scored.
DEPTH = 10


class EmbedTask(FineTuneTask):
    """Embeddings that are close for related texts.

    Pairs and triplets are contrasted with the other texts of the batch, including those of all other processes. Single
    texts are paired with themselves: dropout makes the two vectors differ (SimCSE; Gao et al., 2021). Scored pairs are
    ordered by CoSENT (Su, 2022). Prefixes of the embedding can be trained along with the whole (Matryoshka;
    Kusupati et al., 2022).
    """

    name, noun = "embed", "An embedding model"
    settings_class = EmbedSettings
    packages = ("scipy",)
    model_task = "base"
    default_length = 256
    compares_examples = True
    starts_from_embeddings = True

    def __init__(self, settings: EmbedSettings) -> None:
        super().__init__(settings)
        self.is_scored = self.is_read = False
        #: The scores that correspond to cosines of 0 and 1.
        self.scale: tuple[float, float] | None = None

    @property
    def metric(self) -> str:
        return "spearman" if self.is_scored else METRICS[-1]

    def read(self, source: str | Path) -> list[EmbeddingExample]:
        settings = self.settings
        given = self.given_columns("text", "text_pair", "negative", "label")
        records = read_records(source, settings.read_options, given.values())
        is_main, self.is_read = not self.is_read, True
        needed, optional = ["text", "text_pair"], ["negative", "label"]
        if is_main and settings.loss == "contrast":
            optional = ["negative"]
        elif is_main and settings.loss == "simcse":
            needed, optional, given = ["text"], [], {role: name for role, name in given.items() if role == "text"}
        columns = choose_columns(records, needed, optional, given)
        self.is_scored = "label" in columns
        if is_main and settings.loss in ("cosent", "cosine") and not self.is_scored:
            raise DataError(f"{source}: loss is {settings.loss!r}, which needs a column of scores, label=COLUMN.")
        self.notes.append(f"{source}: {len(records):,} rows, {write_columns(columns, records)}")
        examples = read_examples(records, columns)
        if is_main and settings.loss == "cosine":
            self.scale = find_scale(examples, source)
            if self.scale != (0, 1):
                low, high = self.scale
                self.notes.append(f"scores from {low:g} to {high:g} are scaled to cosines from 0 to 1")
        return examples

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        self.pooling = self.settings.pooling or embedding.pooling
        self.embedding = replace(embedding, pooling=self.pooling)
        model.embedding_head = EmbeddingHead(self.pooling, model.config.hidden_size, embedding.layers)
        if model.pooler is not None:
            model.pooler.requires_grad_(False)  # embeddings do not use it
        rates = dropouts(model)
        if self.settings.dropout is not None:
            for module, name in rates:
                setattr(module, name, self.settings.dropout)
        if self.settings.loss == "simcse" and not any(getattr(module, name) for module, name in rates):
            raise ValueError("loss is 'simcse', which needs dropout, but the model has none; set dropout=0.1.")

    def check(self, examples: Sequence[EmbeddingExample], tokenizer: TextTokenizer, max_length: int) -> None:
        for example in examples:
            if len(example.texts) < 2:
                raise DataError(
                    f"{example.place}: a single text cannot be scored; loss=simcse needs pairs or scored pairs to "
                    "evaluate on (--eval)."
                )

    def features(
        self, examples: Sequence[EmbeddingExample], tokenizer: TextTokenizer, max_length: int
    ) -> list[list[Feature]]:
        """Makes the sequences of each example and truncates long texts."""
        prompts = [self.embedding.find_prompt(None, self._role(column, self.embedding)) for column in range(3)]
        texts = [prompts[column] + text for example in examples for column, text in enumerate(example.texts)]
        room = max_length - tokenizer.num_special()
        tokens = iter(tokenizer.tokenize(texts))
        features, cut = [], 0
        for example in examples:
            own = []
            for _ in example.texts:
                ids = next(tokens).ids
                cut += len(ids) > room
                sequence = tokenizer.add_special_tokens(ids[:room])
                own.append(Feature(sequence.ids, sequence.types, example.score))
            features.append(own * 2 if self.settings.loss == "simcse" else own)
        if cut:
            self.notes.append(f"{cut:,} texts are truncated to {max_length} tokens; raise max_length to keep more")
        return features

    def batch(self, features: Sequence[Sequence[Feature]]) -> FlatBatch:
        """Joins all first texts, then all second texts, then all third texts."""
        columns = [feature for column in zip(*features, strict=True) for feature in column]
        scores = [own[0].target for own in features]
        targets = torch.tensor([float("nan") if score is None else score for score in scores])
        return make_batch(columns, targets, len(features))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        assert batch.labels is not None
        sequences = len(batch.cu_seqlens) - 1
        embeddings = upcast(model(**batch.inputs).pooler_output)
        parts = embeddings.view(sequences // len(batch.labels), len(batch.labels), -1)  # [texts, examples, hidden]
        width = parts.shape[-1]
        sizes = [*sorted(size for size in self.settings.dimensions if size < width), width]
        losses = [self._loss(F.normalize(parts[..., :size], dim=-1), batch.labels) for size in sizes]
        return {"loss": torch.stack(losses).mean() * len(batch.labels)}

    def _loss(self, parts: Tensor, scores: Tensor) -> Tensor:
        """Computes the mean loss over the batch, for vectors of length 1."""
        if bool(scores.isnan().any()):
            return contrast(parts, self.settings.temperature)
        similarities = (parts[0] * parts[1]).sum(-1)
        if self.scale is not None:
            low, high = self.scale
            return F.mse_loss(similarities, (scores - low) / (high - low))
        return cosent(gather(similarities), gather(scores))

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        layers = tuple(model.embedding_head.layers)
        save_embedder(model, folder, tokenizer, replace(self.embedding, max_length=max_length, layers=layers))

    def evaluate(self, predictor: Predictor, examples: Sequence[EmbeddingExample]) -> Evaluated:
        """Computes the correlation with the scores or, for pairs, how well first texts retrieve their second texts."""
        first_texts = [example.texts[0] for example in examples]
        queries = self._embed(predictor, 0, first_texts)
        documents = self._embed(predictor, 1, (text for example in examples for text in example.texts[1:]))
        if self.is_scored:
            first = np.stack([queries[text] for text in first_texts])
            second = np.stack([documents[example.texts[1]] for example in examples])
            scores = np.array([example.score for example in examples], dtype=np.float64)
            similarities = (first * second).sum(axis=1)
            correlations = regression_scores(scores, similarities)
            del correlations["mse"]  # cosines and scores have different scales
            return Evaluated(
                correlations,
                lambda i: regression_scores(scores[i], similarities[i])["spearman"],
                [
                    {"texts": list(example.texts[:2]), "gold": float(score), "cosine": float(cosine)}
                    for example, score, cosine in zip(examples, scores, similarities, strict=True)
                ],
            )
        return _score_retrieval(examples, queries, documents)

    def _embed(self, predictor: Predictor, column: int, texts: Iterable[str]) -> dict[str, np.ndarray]:
        """Computes the embedding of each different text in one column."""
        unique = list(dict.fromkeys(texts))
        vectors = predictor.encode(unique, prompt_name=self._role(column, predictor.embedding))
        return dict(zip(unique, vectors, strict=True))

    def _role(self, column: int, embedding: EmbeddingSettings) -> str | None:
        """Returns the prompt of a column: first texts are queries and the others documents, if their sides differ.

        None stands for the default prompt, also if the checkpoint has no prompt of that name.
        """
        role = "document" if column else "query"
        is_symmetric = self.is_scored or self.settings.loss == "simcse"
        return role if role in embedding.prompts and not is_symmetric else None


def _score_retrieval(
    examples: Sequence[EmbeddingExample], queries: Mapping[str, np.ndarray], documents: Mapping[str, np.ndarray]
) -> Evaluated:
    gains: dict[str, dict[str, float]] = {query: {} for query in queries}
    for example in examples:
        gains[example.texts[0]][example.texts[1]] = 1.0
    names, targets = list(documents), np.stack(list(documents.values()))
    scores, records = [], []
    for query, vector in queries.items():
        cosines = targets @ vector
        order = np.argsort(-cosines, kind="stable")
        scores.append(score_ranking([names[i] for i in order[:DEPTH]], gains[query], METRICS))
        rank, gold = next((rank, i) for rank, i in enumerate(order) if names[i] in gains[query])
        records.append(
            {
                "query": query,
                "gold": names[gold],
                "rank": rank + 1,
                "gold_cosine": float(cosines[gold]),
                "nearest": names[order[0]],
                "nearest_cosine": float(cosines[order[0]]),
            }
        )
    by_query = np.array([own[METRICS[-1]] for own in scores])
    number = {query: position for position, query in enumerate(queries)}
    owner = np.array([number[example.texts[0]] for example in examples])
    return Evaluated(mean_scores(scores), lambda i: float(by_query[owner[i]].mean()), records)


def contrast(parts: Tensor, temperature: float = 1 / SCALE) -> Tensor:
    """Computes the mean cross-entropy of retrieving each first text's second text among all second and third texts.

    Example:
        >>> parts = torch.eye(2).expand(2, 2, 2)  # each text is its own partner
        >>> round(contrast(parts).item(), 4)  # log(1 + exp(-20))
        0.0
    """
    candidates = torch.cat([gather(part) for part in parts[1:]])
    own = parts.shape[1] * _rank() + torch.arange(parts.shape[1], device=parts.device)
    with not_cast(parts):  # similarities in bf16 would be off by a tenth
        return F.cross_entropy(parts[0] @ candidates.T * (1 / temperature), own)


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Lists every module that has a dropout rate, with the name of its attribute."""
    names = {Dropout: "p", Attention: "dropout"}
    return [(module, name) for module in model.modules() for kind, name in names.items() if isinstance(module, kind)]


def cosent(similarities: Tensor, scores: Tensor) -> Tensor:
    """Computes log(1 + sum of exp(SCALE (s_j - s_i))) over all i, j where example i has the higher score.

    Example:
        >>> round(cosent(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).item(), 4)  # log 2
        0.6931
    """
    differences = (similarities[None, :] - similarities[:, None]) * SCALE  # [i, j]
    wrong = differences.masked_fill(scores[:, None] <= scores[None, :], float("-inf"))
    return torch.logsumexp(torch.cat((wrong.flatten(), wrong.new_zeros(1))), dim=0)


def gather(x: Tensor) -> Tensor:
    """Concatenates the rows of all processes, which have equally many; gradients flow through."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(tuple(all_gather(x)))


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
