"""Scores of a reranker: the student learns the teacher's scores of query-document pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.checkpoints.sentence_transformers.cross_encoder import (
    CrossEncoderSettings,
    make_activation,
    save_cross_encoder,
)
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, permute
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.numerics import upcast
from bertblocks.tasks.base import Scores
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.rerank.task import RerankTask
from bertblocks.tasks.retrieval.examples import judge, read_retrieval_data
from bertblocks.tasks.retrieval.losses import margin_mse, squared_error
from bertblocks.tasks.settings import RerankSettings
from bertblocks.text.tables import DataError
from bertblocks.text.windows import cut_pair
from bertblocks.training.distillation.method import Item, Method
from bertblocks.training.distillation.models import Student, Teacher, is_scored_by_layers
from bertblocks.training.distillation.settings import ScoreSettings
from bertblocks.training.distillation.teacher_cache import TeacherCache

#: A query and its documents, relevant ones first.
Ranking = tuple[str, list[str]]
#: Separates a query from a document where a cache hashes them as one text.
SEPARATOR = "\x00"


class ScoreMethod(Method):
    """A cross-encoder learns the scores of another one, or the margins between them (MarginMSE).

    Scores are logits, before any activation; the student has the teacher's activation. The tokenizers may differ.
    Teacher's scores are cached.
    """

    task = "sequence-classification"
    noun = "queries"
    settings: ScoreSettings

    def __init__(self, settings: Any, teacher: Teacher, student: Student, device: torch.device) -> None:
        super().__init__(settings, teacher, student, device)
        theirs = teacher.embedding
        head = EmbeddingHead(theirs.pooling, teacher.model.config.hidden_size, theirs.layers)
        labels = head.size if is_scored_by_layers(theirs) else teacher.model.config.num_labels
        if labels != 1:
            raise ValueError(f"The teacher has {labels} labels; method scores needs a reranker, which has 1.")
        own = student.embedding if isinstance(student.embedding, CrossEncoderSettings) else CrossEncoderSettings()
        activation = type(make_activation(theirs, 1)).__name__
        self.student = replace(student, embedding=replace(own, activation=activation))
        self.has_layers = is_scored_by_layers(own)
        if self.has_layers:
            model: Any = student.model
            layers = [layer.requires_grad_(True) for layer in own.layers]
            model.embedding_head = EmbeddingHead(own.pooling, model.config.hidden_size, layers)
            if model.pooler is not None:
                model.pooler.requires_grad_(False)  # scores do not use it

    # ------------------------------------------------------------------ examples

    def read(self, files: Sequence[str | Path]) -> list[Ranking]:
        examples = []
        for file in files:
            given = {role: getattr(self.settings, role) for role in ("query", "document", "negative")}
            columns = {role: name for role, name in given.items() if name is not None}
            data = read_retrieval_data(file, self.settings.read_options, columns)
            self.notes.append(data.note)
            examples += data.examples
        rankings = [
            (query, sorted(gains, key=lambda document: -gains[document])) for query, gains in judge(examples).items()
        ]
        if len(rankings) < 2:
            raise DataError(f"{files[0]}: there are {len(rankings)} different queries; at least 2 are needed.")
        lonely = sum(len(documents) < 2 for _, documents in rankings)
        self.loss = self.settings.loss or ("mse" if lonely else "margin-mse")
        if lonely and self.loss == "margin-mse":
            raise DataError(f"loss is 'margin-mse', but {lonely:,} queries have one document; use loss=mse.")
        self.notes.append(f"the loss is {self.loss}")
        return rankings

    def prepare(self, examples: Sequence[Ranking], cache: Path, console: Console) -> None:
        pairs = [(query, document) for query, documents in examples for document in documents]
        self.starts = np.cumsum([0, *(len(documents) for _, documents in examples)])
        prompt = self.student.embedding.find_prompt(None, None)
        texts = list(dict.fromkeys(text for query, document in pairs for text in (prompt + query, document)))
        tokens = {text: found.ids for text, found in zip(texts, self.tokenizer.tokenize(texts), strict=True)}
        self.tokens = [(tokens[prompt + query], tokens[document]) for query, document in pairs]
        store = TeacherCache(cache / self.cache_key("scores"))

        def compute(missing: list[str]) -> Iterator[np.ndarray]:
            console.print(f"Running the teacher on {len(missing):,} pairs; {store.folder} keeps its scores.")
            split = (text.partition(SEPARATOR) for text in missing)
            inputs = [(query, [document]) for query, _, document in split]
            ranked = self.teacher_predictor.stream("rerank", inputs, progress=not console.quiet)
            return (np.array([found[0].score], dtype=np.float32) for found in ranked)

        self.targets = store.get([SEPARATOR.join(pair) for pair in pairs], compute)
        self.notes.append(f"{store.found:,} scores of the teacher were cached, {store.computed:,} were computed")

    # ------------------------------------------------------------------ training

    def batch(self, items: Sequence[Item]) -> FlatBatch:
        """Joins the pairs of all queries; the labels are the targets of pairs."""
        chosen = [self._choose(index, position) for index, position in items]
        rows = np.concatenate(chosen)
        room = self.max_length - self.tokenizer.num_special(pair=True)
        pairs = [cut_pair(query, document, room) for query, document in (self.tokens[row] for row in rows.tolist())]
        sequences = [self.tokenizer.add_special_tokens(*pair) for pair in pairs]
        batch = FlatBatch.from_sequences(
            [sequence.ids for sequence in sequences],
            [sequence.types for sequence in sequences],
            torch.from_numpy(self.targets[rows][:, 0]),
            {"loss": len(items) if self.loss == "margin-mse" else len(rows)},
        )
        return replace(batch, list_lengths=torch.tensor([len(own) for own in chosen]))

    def _choose(self, index: int, position: int) -> np.ndarray:
        """The pairs of a query: that of its first document, and of others at random if there are too many."""
        rows = np.arange(self.starts[index], self.starts[index + 1])
        if len(rows) <= self.settings.max_documents:
            return rows
        ranks = np.arange(self.settings.max_documents - 1)
        others = permute(ranks, len(rows) - 1, combine("documents", self.settings.seed, position))
        return rows[np.append(0, 1 + others)]

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        targets, lengths = batch.labels, batch.list_lengths
        assert targets is not None
        assert lengths is not None
        output = model(**batch.inputs)
        scores = upcast(output.pooler_output if self.has_layers else output.logits).flatten()
        if self.loss == "mse":
            return {"loss": squared_error(scores, targets)}
        return {"loss": margin_mse(scores, targets, lengths.tolist())}

    # ------------------------------------------------------------------ use

    @cached_property
    def teacher_predictor(self) -> Predictor:
        folder = self.teacher.folder
        predictor = Predictor(folder, task=self.teacher.task, device=self.device, too_long="truncate")
        predictor.embedding = _without_activation(predictor.embedding)
        return predictor

    def read_evaluation(self, source: str | Path) -> Sequence[Any]:
        self.evaluator = RerankTask(RerankSettings())
        examples = self.evaluator.read(source)
        self.evaluator.check(examples, self.tokenizer, self.max_length)
        return examples

    def score(self, predictor: Predictor, examples: Sequence[Any]) -> Scores:
        return self.evaluator.evaluate(predictor, examples).scores

    def inputs(self, examples: Sequence[Ranking]) -> list[Any]:
        return [(query, [document]) for query, documents in examples for document in documents]

    def run(self, predictor: Predictor, inputs: list[Any]) -> None:
        list(predictor.stream("rerank", inputs))

    def save(self, folder: Path) -> None:
        student = self.student
        student.tokenizer.model_max_length = self.max_length  # users of the model get the length of training
        settings: Any = replace(student.embedding, max_length=self.max_length)
        save_cross_encoder(student.model, folder, student.tokenizer, settings)


def _without_activation(settings: EmbeddingSettings) -> CrossEncoderSettings:
    """The same, with scores that are logits."""
    known = settings if isinstance(settings, CrossEncoderSettings) else CrossEncoderSettings()
    return replace(known, activation="Identity")
