"""The mixture of sources in pretraining."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from bertblocks.data.stream import Position
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.training_plan import TrainingPlan
from tests.training.helpers import make_recipe, make_vocabulary


class Texts:
    """Texts of 10 tokens."""

    def __init__(self, count: int) -> None:
        self.lengths = np.full(count, 10)

    def __getitem__(self, index: int) -> Any:
        return np.full(10, 5, dtype=np.int32)


@pytest.mark.parametrize(("temperature", "ratio"), [("null", 2.0), ("1", 32.0), ("2", 8.0), ("1e6", 2.0)])
def test_sources_are_drawn_by_size_to_the_power_of_one_over_temperature(temperature: str, ratio: float) -> None:
    """The large source has 16 times the tokens and twice the weight."""
    sources = "[{name: large, files: [x], weight: 2.0}, {name: small, files: [y]}]"
    recipe = make_recipe(f"corpus={{sources: {sources}, temperature: {temperature}}}")
    texts = {"large": Texts(1600), "small": Texts(100)}
    task = PretrainingTask(TrainingPlan(recipe), texts, [MaskedLanguageModeling(make_vocabulary())])
    rows, _ = task.streams[0].take(Position(), 4 * 1024)
    drawn = Counter(chunk.source for row in rows for chunk in row)
    assert drawn[0] / drawn[1] == pytest.approx(ratio, rel=0.02)
