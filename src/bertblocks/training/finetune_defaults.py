"""What fine-tuning chooses where the settings leave it open: by task, kind of model and number of examples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from bertblocks.tasks.settings import FineTuneSettings

#: The version of these defaults. A run records it, and goes on with the defaults that it began with.
VERSION = 3
#: Learning rates by the number of parameters inside layers, close to published values. Small models need larger ones.
LEARNING_RATES = ((15e6, 2.5e-4), (60e6, 8e-5), (150e6, 5e-5), (float("inf"), 3e-5))
#: For weights that already do almost what the task asks: embeddings of a sentence encoder. The few-shot method, which
#: trains embeddings too, has the same learning rate.
GENTLE_RATE, GENTLE_EPOCHS = 2e-5, 3
#: Below this many examples, batches are smaller and learning rates are at most `FEW_RATE`.
FEW_EXAMPLES, FEW_RATE = 1000, 5e-5
#: Below this many examples, learning rates of sentence encoders are at most `MEDIUM_RATE`; since version 3.
MEDIUM_EXAMPLES, MEDIUM_RATE = 5000, 8e-5
#: Few examples are repeated until training has this many steps, but at most `MAX_EPOCHS` times (Mosbach et al., 2021).
MIN_STEPS, MAX_EPOCHS = 200, 20
#: A list of documents is several examples in one, so fewer make a batch and an epoch teaches more.
LIST_BATCH, LIST_EPOCHS = 16, 3


@dataclass(frozen=True)
class Choices:
    """The values that a run uses."""

    method: str
    epochs: float
    batch_size: int
    learning_rate: float
    warmup: float
    patience: int | None

    def describe(self, examples: int) -> str:
        """One line for people.

        Example:
            >>> Choices("full", 3, 32, 2e-5, 0.1, 5).describe(800)
            'Training: full, 3 epochs of 800 examples in batches of 32, learning rate 2e-05, warmup 0.1, patience 5.'
        """
        return (
            f"Training: {self.method}, {self.epochs:g} epochs of {examples:,} examples in batches of "
            f"{self.batch_size}, learning rate {self.learning_rate:g}, warmup {self.warmup:g}, "
            f"patience {self.patience}."
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose(
    settings: FineTuneSettings,
    method: str,
    examples: int,
    parameters: int,
    is_gentle: bool = False,
    is_sentence_encoder: bool = False,
    version: int | None = VERSION,
) -> Choices:
    """Fills in what the settings leave open.

    `parameters` counts the weights inside layers. `is_gentle` says that the starting weights already do almost what the
    task asks. A `version` of None means the defaults of 0.1.0.
    """
    rate = next(rate for limit, rate in LEARNING_RATES if parameters <= limit)
    epochs: float = default_epochs(examples)
    batch_size = 32
    if version is not None:
        is_small = examples < FEW_EXAMPLES
        batch_size = 16 if is_small and not is_gentle else 32
        if is_gentle or method == "few-shot":
            rate = min(rate, GENTLE_RATE)
        elif is_small:
            rate = min(rate, FEW_RATE)
        elif is_sentence_encoder and examples < MEDIUM_EXAMPLES and version >= 3:
            rate = min(rate, MEDIUM_RATE)
        if method == "lists":
            batch_size, epochs = LIST_BATCH, LIST_EPOCHS
        if is_gentle:
            epochs = GENTLE_EPOCHS
        else:
            wanted = math.ceil(MIN_STEPS * (settings.batch_size or batch_size) / examples)
            epochs = max(epochs, min(MAX_EPOCHS, wanted))
    return Choices(
        method=method,
        epochs=settings.epochs or epochs,
        batch_size=min(settings.batch_size or batch_size, examples),
        learning_rate=settings.learning_rate or rate,
        warmup=settings.warmup,
        patience=settings.patience,
    )


def default_epochs(examples: int) -> int:
    """Fewer epochs for more examples."""
    return 3 if examples >= 50_000 else 4 if examples >= 5_000 else 10
