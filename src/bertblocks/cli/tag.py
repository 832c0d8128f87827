"""`bertblocks tag`: entities, words or tokens with their labels and positions."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command


@predict_command
def tag(
    level: Annotated[
        Literal["entities", "words", "tokens"] | None,
        typer.Option(help="What to label; by default entities if the model's labels mark them, else words."),
    ] = None,
) -> Prediction:
    """Find named entities, or label each word.

    Which of them depends on the labels of the model.
    """
    return Prediction(
        "tag",
        {"level": level},
        TASKS["tag"].roles,
        header={"place": 12, "score": 8, "label": 12, "text": 0},
        to_rows=lambda item, tags: [
            (f"{tag.start}-{tag.end}", f"{tag.score:.4f}", tag.label, tag.text) for tag in tags
        ],
        to_json=lambda item, tags: {"text": item, **TASKS["tag"].to_columns(tags)},
    )
