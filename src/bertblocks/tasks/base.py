"""What fine-tuning has to be told of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn

from bertblocks.tasks.features import FeatureBatch
from bertblocks.tasks.metrics import Scores
from bertblocks.tasks.settings import FineTuneSettings
from bertblocks.text.encoding import TextTokenizer

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


#: Examples that a report shows because they went worst.
WORST = 20


@dataclass(frozen=True)
class Evaluated:
    """Scores, and what a report shows beside them: tables by title, as rows of which the first is the header."""

    scores: Scores
    #: The task's metric on some of the examples, by their numbers; for intervals.
    resample: Callable[[np.ndarray], float]
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)
    #: Of classifiers: how often each label (row) was taken for each (column), with the labels' names.
    confusion: tuple[list[list[int]], list[str]] | None = None


class FineTuneTask(ABC):
    """A task from files to scores.

    Examples are what a person would recognise, features are what a model reads. Evaluation goes through the predictor,
    so what is measured is what users of the model get.
    """

    settings_class: ClassVar[type[FineTuneSettings]]
    #: The head, as `bertblocks.load` names it.
    model_task: ClassVar[str]
    #: The longest sequence that is trained on unless the settings say otherwise.
    default_length: ClassVar[int] = 512
    #: How embeddings are pooled, where a task makes them.
    pooling: str = "mean"

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        #: What was noticed while reading: which columns were taken, what was repaired or cut.
        self.notes: list[str] = []

    @property
    @abstractmethod
    def metric(self) -> str:
        """The score by which the best model is chosen; higher is better."""

    @abstractmethod
    def read(self, source: str | Path) -> list[Any]:
        """The examples of a file. The first file that is read says what the labels are."""

    def group(self, example: Any) -> str:
        """Examples of one group are never split between training and evaluation."""
        return example.place

    def adopt(self, config: Any) -> None:
        """Takes over the labels of a model that is already fine-tuned, before any file is read."""
        return

    def config_changes(self) -> dict[str, Any]:
        """Keys of the model's config that follow from the examples."""
        return {}

    @abstractmethod
    def features(self, examples: Sequence[Any], tokenizer: TextTokenizer, max_length: int) -> list[Any]:
        """What is trained on, in items that a batch takes whole."""

    @abstractmethod
    def batch(self, features: Sequence[Any]) -> FeatureBatch: ...

    @abstractmethod
    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]: ...

    @abstractmethod
    def evaluate(self, predictor: Predictor, examples: Sequence[Any]) -> Evaluated: ...

    def given_columns(self, *roles: str) -> dict[str, str]:
        """Columns that the settings name."""
        return {role: getattr(self.settings, role) for role in roles if getattr(self.settings, role) is not None}
