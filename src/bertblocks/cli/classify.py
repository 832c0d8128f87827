"""`bertblocks classify`: labels or numbers for texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command

if TYPE_CHECKING:
    from bertblocks.tasks.classify.predictions import Classification


@predict_command
def classify(
    pair: Annotated[str | None, typer.Option(help="A second text to pair with each text.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="How many labels to score; by default all.")] = None,
    threshold: Annotated[float, typer.Option(help="The score from which a multi-label model assigns a label.")] = 0.5,
) -> Prediction:
    """Predict the label of each text, with its probability."""
    return Prediction(
        "classify",
        {"top_k": top_k, "threshold": threshold},
        TASKS["classify"].roles,
        header={"score": 8, "label": 24, "text": 0},
        to_rows=_to_rows,
        to_json=lambda item, result: {"text": item, **TASKS["classify"].to_columns(result)},
        make_input=lambda item: (item, pair) if pair is not None and isinstance(item, str) else item,
    )


def _to_rows(item: Any, result: Classification) -> list[tuple[str, str, str]]:
    text = item if isinstance(item, str) else " | ".join(item)
    labels = list(result.scores) if result.is_regression else result.labels
    rows = [(f"{result.scores[label]:.4f}", label, text) for label in labels]
    return rows or [("", "-", text)]  # a multi-label model may assign none
