"""What distillation needs from a method: its texts, its batches and its losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from torch import Tensor, nn

from bertblocks.checkpoints.save import save_native
from bertblocks.checkpoints.sentence_transformers import save_embedder
from bertblocks.core.requirements import require_packages
from bertblocks.core.settings import read_section
from bertblocks.core.storage import atomic_entries
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.inference.hardware import choose_dtype
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.tasks.base import FineTuneTask, Scores
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.embed.task import EmbedTask, dropouts
from bertblocks.tasks.features import Feature
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.tag.task import TagTask
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.inputs import Roles, read_inputs
from bertblocks.text.tables import DataError
from bertblocks.text.tokenizers import save_tokenizer
from bertblocks.training.distillation.models import Student, Teacher
from bertblocks.training.distillation.teacher_cache import hash_teacher

#: The longest sequence in training, unless the settings give one.
DEFAULT_LENGTH = 256
#: An item of a batch: the index of an example, and its position in the run, which makes masks differ by epoch.
Item = tuple[int, int]
#: What scores a student on labelled examples, by the head that it has.
EVALUATORS: dict[str, type[FineTuneTask]] = {
    "base": EmbedTask,
    "sequence-classification": ClassifyTask,
    "token-classification": TagTask,
}


class Method(ABC):
    """One way to learn from a teacher.

    `examples` are what the files hold; after `prepare` they are known by index alone.
    """

    #: The head of both models, by its name in `bertblocks.load`; None: the teacher's own.
    task: ClassVar[str | None] = None
    #: What one example is called.
    noun: ClassVar[str] = "texts"

    def __init__(self, settings: Any, teacher: Teacher, student: Student, device: torch.device) -> None:
        self.settings, self.teacher, self.student, self.device = settings, teacher, student, device
        #: Remarks about the data and the models.
        self.notes: list[str] = []
        limit = min(teacher.max_length, student.max_length)
        if (settings.max_length or 0) > limit:
            raise ValueError(f"max_length is {settings.max_length}; the two models read at most {limit} tokens.")
        self.max_length = settings.max_length or min(DEFAULT_LENGTH, limit)
        self.tokenizer = TextTokenizer(student.tokenizer)
        self.features: list[Feature] = []
        #: In how many ways an example is learned.
        self.variants = 1
        for module, name in dropouts(student.model):
            setattr(module, name, settings.dropout)

    @cached_property
    def model(self) -> nn.Module:
        """What is trained: the student, with whatever else is only needed in training."""
        return self.student.model

    @abstractmethod
    def read(self, files: Sequence[str | Path]) -> list[Any]:
        """Reads examples."""

    @abstractmethod
    def prepare(self, examples: Sequence[Any], cache: Path, console: Console) -> None:
        """Makes features of the examples and, where they are cached, the teacher's outputs."""

    @abstractmethod
    def batch(self, items: Sequence[Item]) -> FlatBatch:
        """Joins examples into a flat batch, with the number of terms of each loss."""

    @abstractmethod
    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        """The sum of each loss over a batch, under the keys of `batch.counts`."""

    def measures(self, means: dict[str, float]) -> dict[str, float]:
        """Scores for people that follow from the mean losses on held-out examples."""
        return {}

    @abstractmethod
    def read_evaluation(self, source: str | Path) -> Sequence[Any]:
        """Reads the labelled examples of an evaluation file."""

    @abstractmethod
    def score(self, predictor: Predictor, examples: Sequence[Any]) -> Scores:
        """Scores a model on labelled examples."""

    @abstractmethod
    def inputs(self, examples: Sequence[Any]) -> list[Any]:
        """The inputs of a predictor that examples consist of, to measure the speed of both models with."""

    @abstractmethod
    def run(self, predictor: Predictor, inputs: list[Any]) -> None:
        """Runs a model on inputs."""

    @cached_property
    def teacher_predictor(self) -> Predictor:
        """The teacher as its users run it, except that long texts are truncated."""
        folder = self.teacher.folder
        return Predictor(folder, task=self.teacher.task, device=self.device, too_long="truncate")

    def cache_key(self, kind: str) -> str:
        """Names the cache of one kind of the teacher's outputs, which depend on its files and on how it is run."""
        return hash_teacher(self.teacher.folder, kind, str(choose_dtype(self.device)), self.teacher.max_length)

    def student_predictor(self) -> Predictor:
        """The student as its users will run it."""
        embedding, base = self.student.embedding, self.student.model.base_model
        own_head = base.embedding_head
        if own_head is None:
            base.embedding_head = EmbeddingHead(embedding.pooling, base.config.hidden_size, embedding.layers)
        try:  # the predictor runs a copy
            predictor = Predictor(
                self.student.model,
                self.student.tokenizer,
                device=self.device,
                dtype=choose_dtype(self.device),
                max_length=self.max_length,
            )
        finally:
            base.embedding_head = own_head
        predictor.embedding = embedding
        return predictor

    def save(self, folder: Path) -> None:
        """Writes the student in the format of its family, and as an embedding model if it is one."""
        student = self.student
        student.tokenizer.model_max_length = self.max_length  # users of the model get the length of training
        if student.is_embedder:
            embedding = replace(student.embedding, max_length=self.max_length)
            save_embedder(student.model, folder, student.tokenizer, embedding)  # type: ignore[arg-type]
            return
        with atomic_entries(folder) as scratch:
            save_native(student.model, scratch)
            save_tokenizer(student.tokenizer, scratch)


class TextMethod(Method):
    """A method that learns from plain texts."""

    def read(self, files: Sequence[str | Path]) -> list[str]:
        given = {role: getattr(self.settings, role) for role in ("text", "text_pair")}
        columns = {role: name for role, name in given.items() if name is not None}
        roles = Roles([("text",), ("question", "context")], ("text_pair",))
        inputs = read_inputs(files, roles, columns, self.settings.read_options)
        texts = [text for record in inputs for text in _texts_of(record.value)]
        unique = [text for text in dict.fromkeys(texts) if text.strip()]
        self.notes += inputs.notes
        if len(unique) < len(texts):
            self.notes.append(f"{len(texts) - len(unique):,} texts that are empty or occur twice are left out")
        if len(unique) < 2:
            named = ", ".join(str(file) for file in files)
            raise DataError(f"{named}: there are {len(unique)} different texts; at least 2 are needed.")
        return unique

    def read_evaluation(self, source: str | Path) -> Sequence[Any]:
        task = self.teacher.task
        if task not in EVALUATORS:
            raise ValueError(f"eval is {source}; a student with a {task} head is evaluated by its loss alone.")
        evaluator = EVALUATORS[task]
        self.evaluator = evaluator(read_section(evaluator.settings_class, {}, "eval"))
        require_packages(evaluator.packages, "distill with --eval")
        self.evaluator.adopt(self.teacher.model.config)
        return self.evaluator.read(source)

    def score(self, predictor: Predictor, examples: Sequence[Any]) -> Scores:
        return self.evaluator.evaluate(predictor, examples).scores

    def inputs(self, examples: Sequence[str]) -> list[str]:
        return list(examples)

    def run(self, predictor: Predictor, inputs: list[str]) -> None:
        predictor.encode(inputs)

    def tokenize(self, texts: Sequence[str]) -> list[Feature]:
        """The sequence of each text; long texts are truncated."""
        room = self.max_length - self.tokenizer.num_special()
        features, cut = [], 0
        for tokens in self.tokenizer.tokenize(texts):
            cut += len(tokens.ids) > room
            sequence = self.tokenizer.add_special_tokens(tokens.ids[:room])
            features.append(Feature(sequence.ids, sequence.types))
        if cut:
            self.notes.append(f"{cut:,} texts are truncated to {self.max_length} tokens; raise max_length to keep more")
        return features

    def flat_batch(self, items: Sequence[Item], terms: Sequence[str]) -> FlatBatch:
        """The sequences of items, with losses that are means over tokens."""
        features = [self.features[index] for index, _ in items]
        batch = FlatBatch.from_sequences([one.ids for one in features], [one.types for one in features])
        batch.counts.update({term: batch.input_ids.numel() for term in terms})
        return batch


def _texts_of(value: Any) -> list[str]:
    """The texts of an input: one, a pair, or a list of words."""
    if isinstance(value, list):
        return [" ".join(value)]
    return [text for part in value for text in _texts_of(part)] if isinstance(value, tuple) else [value]
