"""SWAG (Zellers et al., 2018): which of four endings continues a description."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertblocks.evaluation.pair_tasks import FALSE, TRUE, Item, PairTask, choice_scores, get, run_pair_tasks
from bertblocks.evaluation.suite import SuiteResult
from bertblocks.text.tables import DataError

NUM_ENDINGS = 4


def _read(row: Mapping[str, Any], place: str) -> list[Item]:
    label = row.get("label")
    if label not in [str(index) for index in range(NUM_ENDINGS)]:
        raise DataError(f"{place}: the label is {label!r}; it must be a number from 0 to {NUM_ENDINGS - 1}.")
    begin = get(row, place, "sent2")
    pairs = [
        (get(row, place, "sent1"), f"{begin} {get(row, place, f'ending{index}')}".strip())
        for index in range(NUM_ENDINGS)
    ]
    return [Item(place, pairs, [TRUE if str(index) == label else FALSE for index in range(NUM_ENDINGS)])]


TASK = PairTask("swag", lambda split: f"{split}.csv", _read, choice_scores, ("accuracy",))


def run_swag(
    model: str | Path,
    data: str | Path,
    output: str | Path = "runs/swag",
    train: bool = True,
    progress: bool = False,
    **settings: Any,
) -> list[SuiteResult]:
    """Fine-tunes a model on SWAG's train.csv and scores it on val.csv; without `train`, it is scored as it is."""
    return run_pair_tasks("SWAG", [TASK], model, data, Path(output), train, progress, **settings)
