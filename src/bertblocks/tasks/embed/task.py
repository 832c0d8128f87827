"""Fine-tuning and evaluation of embedding models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, save_embedder
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models.embedder_and_language_model import EmbedderAndLanguageModel
from bertblocks.nn.attention import Attention
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.numerics import upcast
from bertblocks.tasks.base import Evaluated, FineTuneTask
from bertblocks.tasks.embed.evaluation import METRICS, is_scored, score_embeddings
from bertblocks.tasks.embed.examples import EmbeddingExample, read_examples, scale_scores
from bertblocks.tasks.embed.losses import Contrast, cosent
from bertblocks.tasks.embed.masking import TERM, TextMasking
from bertblocks.tasks.embed.vectors import PRECISIONS, Precision, fit_ranges, restore
from bertblocks.tasks.features import Feature, make_batch
from bertblocks.tasks.gather import gather
from bertblocks.tasks.retrieval.examples import find_negatives
from bertblocks.tasks.settings import EmbedSettings
from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError, read_records

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


class EmbedTask(FineTuneTask):
    """Embeddings that are close for related texts.

    Pairs are contrasted with the other texts of the batch, including those of all other processes, and with negatives
    of their own. Single texts are paired with themselves: dropout makes the two vectors differ (SimCSE; Gao et al.,
    2021). Scored pairs are ordered by CoSENT (Su, 2022). Prefixes of the embedding can be trained along with the whole
    (Matryoshka; Kusupati et al., 2022), and steps of masked language modeling can be mixed in.
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
        #: Whether the file that was read last has scores.
        self.is_scored = False
        self.contrast = Contrast(
            settings.temperature, settings.negative_weight, settings.false_negative_margin, settings.margin_kind
        )
        self.masking: TextMasking | None = None
        if settings.mlm_every is not None:
            self.model_task, self.has_unused_weights = "masked-lm", True

    @property
    def metric(self) -> str:
        return "spearman" if self.is_scored else METRICS[-1]

    def metric_of(self, examples: Sequence[EmbeddingExample]) -> str:
        return "spearman" if is_scored(examples) else METRICS[-1]

    def read(self, source: str | Path) -> list[EmbeddingExample]:
        loss = self.settings.loss
        if loss == "simcse":
            return self._read(source, ["text"], [])
        examples = self._read(source, ["text", "text_pair"], [] if loss == "contrast" else ["label"])
        if loss in ("cosent", "cosine") and not self.is_scored:
            raise DataError(f"{source}: loss is {loss!r}, which needs a column of scores, label=COLUMN.")
        if loss == "cosine":
            examples, (low, high) = scale_scores(examples, source)
            if (low, high) != (0, 1):
                self.notes.append(f"scores from {low:g} to {high:g} are scaled to cosines from 0 to 1")
        return examples

    def read_held_out(self, source: str | Path) -> list[EmbeddingExample]:
        return self._read(source, ["text", "text_pair"], ["label"])

    def _read(self, source: str | Path, needed: list[str], optional: list[str]) -> list[EmbeddingExample]:
        """Reads the examples of a file with these columns and, for pairs, columns of negatives."""
        given = self.given_columns("text", "text_pair", "negative", "label")
        records = read_records(source, self.settings.read_options, given.values())
        negative = given.pop("negative", None)
        negatives = find_negatives(records, negative) if "text_pair" in needed else []
        if negative is None and "text_pair" in needed and not negatives:
            optional = ["negative", *optional]  # the third text of a table without a header
        others = [column for column in records.columns if column not in negatives]
        roles = {role: name for role, name in given.items() if role in (*needed, *optional)}
        columns = choose_columns(records.only(others), needed, optional, roles)
        if "negative" in columns:
            negatives = [columns.pop("negative")]
        self.is_scored = "label" in columns
        described = columns | {("negative", f"negative {n}")[n > 1]: name for n, name in enumerate(negatives, 1)}
        self.notes.append(f"{source}: {len(records):,} rows, {write_columns(described, records)}")
        return read_examples(records, columns, negatives)

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        encoder = model.base_model
        self.pooling = self.settings.pooling or embedding.pooling
        self.embedding = replace(embedding, pooling=self.pooling)
        encoder.embedding_head = EmbeddingHead(self.pooling, model.config.hidden_size, embedding.layers)
        if encoder.pooler is not None:
            encoder.pooler.requires_grad_(False)  # embeddings do not use it
        rates = dropouts(model)
        if self.settings.dropout is not None:
            for module, name in rates:
                setattr(module, name, self.settings.dropout)
        if self.settings.loss == "simcse" and not any(getattr(module, name) for module, name in rates):
            raise ValueError("loss is 'simcse', which needs dropout, but the model has none; set dropout=0.1.")

    def add_parts(self, model: Any) -> Any:
        return model if self.settings.mlm_every is None else EmbedderAndLanguageModel(model)

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
        if self.settings.mlm_every is not None:
            self.masking = TextMasking(tokenizer.tokenizer, self.settings.mlm_rate, self.settings.seed)
        is_symmetric = is_scored(examples) or self.settings.loss == "simcse"
        roles = [self._role(column, self.embedding, is_symmetric) for column in range(2)]
        first, other = (self.embedding.find_prompt(None, role) for role in roles)
        texts = [(other if column else first) + text for row in examples for column, text in enumerate(row.texts)]
        room = max_length - tokenizer.num_special()
        tokens = iter(tokenizer.tokenize(texts))
        features, cut = [], 0
        for example in examples:
            own = []
            for _ in example.texts:
                ids = next(tokens).ids
                cut += len(ids) > room
                sequence = tokenizer.add_special_tokens(ids[:room])
                target = example.score if example.cosine is None else example.cosine
                own.append(Feature(sequence.ids, sequence.types, target))
            features.append(own * 2 if self.settings.loss == "simcse" else own)
        if cut:
            self.notes.append(f"{cut:,} texts are truncated to {max_length} tokens; raise max_length to keep more")
        return features

    def batch(self, features: Sequence[Sequence[Feature]]) -> FlatBatch:
        """Joins all first texts, then all second texts, then the negatives of each example."""
        firsts, seconds = [own[0] for own in features], [own[1] for own in features]
        negatives = [feature for own in features for feature in own[2:]]
        scores = [own[0].target for own in features]  # all or none have one
        labels = None if None in scores else torch.tensor(scores)
        batch = make_batch([*firsts, *seconds, *negatives], labels, len(features))
        return replace(batch, list_lengths=torch.tensor([len(own) - 2 for own in features]))

    def collate(self, step: int, features: Sequence[Sequence[Feature]]) -> FlatBatch:
        if self.masking is not None and self.is_side_step(step):
            return self.masking.batch(step, features)
        return self.batch(features)

    def is_side_step(self, step: int) -> bool:
        every = self.settings.mlm_every
        return every is not None and (step + 1) % every == 0

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        if self.masking is not None and TERM in batch.counts:
            return self.masking.losses(model, batch)
        return super().losses(model, batch)

    def compares(self, batch: FlatBatch) -> bool:
        return TERM not in batch.counts

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        return upcast(model(**batch.inputs).pooler_output)

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        scores = [batch.labels for batch in batches if batch.labels is not None]
        negatives = torch.cat([batch.list_lengths for batch in batches if batch.list_lengths is not None])
        columns = zip(*(_split(output, batch) for output, batch in zip(outputs, batches, strict=True)), strict=True)
        parts = [torch.cat(column) for column in columns]
        width = parts[0].shape[-1]
        sizes = [*sorted(size for size in self.settings.dimensions if size < width), width]
        owners, targets = torch.repeat_interleave(negatives), torch.cat(scores) if scores else None
        losses = [
            self._loss([F.normalize(part[:, :size], dim=-1) for part in parts], owners, targets) for size in sizes
        ]
        return {"loss": torch.stack(losses).mean() * len(negatives)}

    def _loss(self, parts: Sequence[Tensor], owners: Tensor, scores: Tensor | None) -> Tensor:
        """Computes the mean loss over the batch, for vectors of length 1; `owners` are those of the negatives."""
        firsts, seconds, negatives = parts
        if scores is None:
            return self.contrast(firsts, seconds, negatives, owners)
        similarities = (firsts * seconds).sum(-1)
        if self.settings.loss == "cosine":
            return F.mse_loss(similarities, scores)
        return cosent(gather(similarities), gather(scores))

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        encoder = model.base_model
        layers = tuple(encoder.embedding_head.layers)
        save_embedder(encoder, folder, tokenizer, replace(self.embedding, max_length=max_length, layers=layers))

    def evaluate(self, predictor: Predictor, examples: Sequence[EmbeddingExample]) -> Evaluated:
        """Computes the correlation with the scores or, for pairs, how well first texts retrieve their second texts."""
        return score_embeddings(examples, *self.embed(predictor, examples))

    def evaluate_precisions(
        self, predictor: Predictor, examples: Sequence[EmbeddingExample]
    ) -> dict[Precision, Evaluated]:
        """Scores vectors as they are, and as each smaller precision stores them."""
        firsts, others = self.embed(predictor, examples)
        ranges = fit_ranges(np.stack([*firsts.values(), *others.values()]))

        def store(vectors: dict[str, np.ndarray], precision: str) -> dict[str, np.ndarray]:
            return dict(zip(vectors, restore(list(vectors.values()), precision, ranges), strict=True))

        return {
            precision: score_embeddings(examples, store(firsts, precision), store(others, precision))
            for precision in PRECISIONS
        }

    def embed(
        self, predictor: Predictor, examples: Sequence[EmbeddingExample]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Computes the embeddings of the different first texts of examples, and those of their other texts."""

        def encode(column: int, texts: Iterable[str]) -> dict[str, np.ndarray]:
            unique = list(dict.fromkeys(texts))
            role = self._role(column, predictor.embedding, is_scored(examples) or self.settings.loss == "simcse")
            return dict(zip(unique, predictor.encode(unique, prompt_name=role), strict=True))

        firsts = encode(0, (example.texts[0] for example in examples))
        return firsts, encode(1, (text for example in examples for text in example.texts[1:]))

    def _role(self, column: int, embedding: EmbeddingSettings, is_symmetric: bool) -> str | None:
        """Returns the prompt of a column: first texts are queries and the others documents, if their sides differ.

        None stands for the default prompt, also if the checkpoint has no prompt of that name.
        """
        role = "document" if column else "query"
        return role if role in embedding.prompts and not is_symmetric else None


def _split(vectors: Tensor, batch: FlatBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The vectors of first texts, second texts and negatives."""
    count = batch.counts["loss"]
    return vectors[:count], vectors[count : 2 * count], vectors[2 * count :]


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Lists every module that has a dropout rate, with the name of its attribute."""
    names = {Dropout: "p", Attention: "dropout"}
    return [(module, name) for module in model.modules() for kind, name in names.items() if isinstance(module, kind)]
