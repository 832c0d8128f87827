"""`bertblocks embed`: a vector for each text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.cli.predict import Prediction, predict_command
from bertblocks.text.inputs import Roles

if TYPE_CHECKING:
    import numpy as np


@predict_command
def embed(
    prompt: Annotated[
        str | None, typer.Option(help="Text to put in front of each text, or the name of one of the model's prompts.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Name of one of the model's prompts, such as query or document.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep this many leading dimensions.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not scale vectors to length 1.")] = False,
) -> Prediction:
    """Compute an embedding for each text.

    The table shows the first four numbers; --json and --output have whole vectors.
    """
    return Prediction(
        "encode",
        {"prompt": prompt, "prompt_name": prompt_name, "dimensions": dimensions, "normalize": not raw},
        Roles([("text",)]),
        header={"embedding": 36, "text": 0},
        to_rows=lambda item, vector: [(_abbreviate(vector), item)],
        to_json=lambda item, vector: {"text": item, "embedding": vector},
    )


def _abbreviate(vector: np.ndarray) -> str:
    return " ".join(f"{number:+.4f}" for number in vector[:4]) + " ..."
