"""`bertblocks fill-mask`: tokens for the masks of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command

if TYPE_CHECKING:
    from bertblocks.tasks.fill_mask import Filling


@predict_command
def fill_mask(
    top_k: Annotated[int, typer.Option(min=1, help="How many tokens to show for each mask.")] = 5,
) -> Prediction:
    """Predict the tokens behind the masks of each text."""
    return Prediction(
        "fill_mask",
        {"top_k": top_k},
        TASKS["fill-mask"].roles,
        header={"mask": 4, "score": 8, "token": 16, "text": 0},
        to_rows=_to_rows,
        to_json=lambda item, masks: {"text": item, **TASKS["fill-mask"].to_columns(masks)},
    )


def _to_rows(text: str, masks: list[list[Filling]]) -> list[tuple[str, str, str, str]]:
    return [
        (str(number), f"{filling.score:.4f}", filling.token, text)
        for number, mask in enumerate(masks, start=1)
        for filling in mask
    ]
