"""The interface that fine-tuning and evaluation need from a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.save import save_native
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.core.storage import atomic_entries
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import UInt64
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tokenizers import save_tokenizer

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

#: Scores by the name of their metric.
Scores = dict[str, float]


@dataclass(frozen=True)
class Evaluated:
    """Scores, and the predictions behind them."""

    scores: Scores
    #: The task's metric on a subset of the examples, given their indices; used for confidence intervals.
    resample: Callable[[np.ndarray], float]
    #: JSON values for each example, as predictions.jsonl records them: the text, what is right, and what was predicted.
    #: `bertblocks.reports.predictions` makes charts and tables of them.
    predictions: list[dict[str, Any]] = field(default_factory=list)


class FineTuneTask(ABC):
    """A task from files to scores.

    Examples are what a person would recognize, features are what a model reads. Evaluation uses `Predictor`, so it
    measures what users of the model get.
    """

    #: What the task is called on the command line, and what a model card calls a model that does it, with an article.
    name: ClassVar[str]
    noun: ClassVar[str]
    settings_class: ClassVar[type[FineTuneSettings]]
    #: The head, by its name in `bertblocks.load`.
    model_task: str
    #: Optional packages that the task needs.
    packages: ClassVar[tuple[str, ...]] = ()
    #: The longest training sequence, unless the settings give one.
    default_length: ClassVar[int] = 512
    #: How the model is trained; see `for_examples`.
    method: ClassVar[str] = "full"
    #: Whether the loss compares the examples of a batch with each other, so that every batch must be full.
    compares_examples: ClassVar[bool] = False
    #: Whether some steps leave some weights without a gradient.
    has_unused_weights: bool = False
    #: Whether training leaves the head alone, which is fitted to the encoder before each evaluation instead.
    refits_head: ClassVar[bool] = False
    #: Whether a sentence encoder already does almost what the task asks.
    starts_from_embeddings: ClassVar[bool] = False
    #: Whether a checkpoint with the task's head already does almost what the task asks.
    starts_from_head: ClassVar[bool] = False
    #: What to say if the checkpoint lacks the head that the task trains.
    new_head_note: ClassVar[str | None] = None
    #: How token vectors are pooled, for tasks that make embeddings, and all that the start's files say about these.
    pooling: str = "mean"
    embedding: EmbeddingSettings = EmbeddingSettings()

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        #: Remarks about the data: the columns used, the tags repaired, the texts truncated.
        self.notes: list[str] = []

    @property
    @abstractmethod
    def metric(self) -> str:
        """The score that selects the best model; higher is better."""

    @abstractmethod
    def read(self, source: str | Path) -> list[Any]:
        """Reads the examples of a file. The first file determines the labels."""

    def read_held_out(self, source: str | Path) -> list[Any]:
        """Reads the examples of a file that is only evaluated on, which may have another form."""
        return self.read(source)

    def metric_of(self, examples: Sequence[Any]) -> str:
        """The score that selects the best model if it is evaluated on these examples."""
        return self.metric

    def group(self, example: Any) -> str:
        """Returns a key. Examples with the same key are never split between training and evaluation."""
        return example.place

    def stratum(self, example: Any) -> str | None:
        """Returns a key, such as the label. A held-out part has about the same share of examples with each key."""
        return None

    def adopt(self, config: Any) -> None:
        """Takes the labels from the config of a fine-tuned model, before any file is read."""
        return

    def head_of(self, folder: Path) -> str:
        """Returns the head to load from a checkpoint, by its name in `bertblocks.load`."""
        return self.model_task

    def config_changes(self) -> dict[str, Any]:
        """Returns the config keys that follow from the examples, such as the labels."""
        return {}

    def for_examples(self, examples: Sequence[Any], is_sentence_encoder: bool, pooling: str) -> FineTuneTask:
        """Returns the task with the method that suits the training examples and the starting model."""
        return self

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase, embedding: EmbeddingSettings) -> None:
        """Adds the tokens that the task needs to the tokenizer of the start, before the model is used."""
        return

    def use_model(self, model: Any, embedding: EmbeddingSettings) -> None:
        """Takes what follows from the model that training starts from, and how its checkpoint makes embeddings."""
        return

    def add_parts(self, model: Any) -> Any:
        """Returns the model with what only training needs."""
        return model

    def check(self, examples: Sequence[Any], tokenizer: TextTokenizer, max_length: int) -> None:
        """Raises an error if a held-out example cannot be evaluated."""
        return

    @abstractmethod
    def features(self, examples: Sequence[Any], tokenizer: TextTokenizer, max_length: int) -> list[Any]:
        """Converts examples to the items that batches are made of."""

    def add_partners(self, chosen: np.ndarray, keys: UInt64) -> np.ndarray:
        """Adds the examples that a batch needs next to the chosen ones, given by index; `keys` make it random."""
        return chosen

    def draw(self, items: Sequence[Any], keys: UInt64) -> Sequence[Any]:
        """Chooses at random, by a key for each item, what a step uses of the features in a batch."""
        return items

    def fit_head(self, model: Any, features: Sequence[Any]) -> bool:
        """Fits a new head to the frozen encoder. Returns False if the task does not do that."""
        return False

    def baselines(self, predictor: Predictor, train: Sequence[Any], held_out: Sequence[Any]) -> dict[str, Scores]:
        """Scores what can be predicted without training the model, by name."""
        return {}

    def before_step(self, step: int, total_steps: int) -> None:
        """Takes how far training is, for losses with a schedule."""
        return

    @abstractmethod
    def batch(self, features: Sequence[Any]) -> FlatBatch:
        """Joins features into a flat batch."""

    def collate(self, step: int, features: Sequence[Any]) -> FlatBatch:
        """Joins features into the batch of a step."""
        return self.batch(features)

    def is_side_step(self, step: int) -> bool:
        """Whether a step trains on another loss than the task's own."""
        return False

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        """Computes summed losses, to be divided by the batch's counts.

        A task that compares the examples of a batch implements `encode` and `compare` instead, so that a large batch
        can be encoded in parts (`bertblocks.training.backward`).
        """
        return self.compare([self.encode(model, batch)], [batch])

    def compares(self, batch: FlatBatch) -> bool:
        """Whether the loss of this batch compares its examples."""
        return self.compares_examples

    def encode(self, model: nn.Module, batch: FlatBatch) -> Tensor:
        """Computes what the loss compares, such as one vector for each sequence of the batch, or for each token."""
        raise NotImplementedError

    def compare(self, outputs: Sequence[Tensor], batches: Sequence[FlatBatch]) -> dict[str, Tensor]:
        """Computes summed losses from what `encode` returned for each of the batches that this process has.

        It may depend on the examples of other processes too (`bertblocks.tasks.gather`).
        """
        raise NotImplementedError

    @abstractmethod
    def evaluate(self, predictor: Predictor, examples: Sequence[Any]) -> Evaluated:
        """Scores a model's predictions on the examples."""

    def save(self, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Writes a model in the format of a family that transformers reads, or else in BertBlocks' own format."""
        with atomic_entries(folder) as scratch:
            save_native(model, scratch)
            save_tokenizer(tokenizer, scratch)

    def given_columns(self, *roles: str) -> dict[str, str]:
        """Returns the columns that the settings name, by role."""
        return {role: getattr(self.settings, role) for role in roles if getattr(self.settings, role) is not None}
