"""`bertblocks embed`: a vector for each text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command
from bertblocks.cli.source import fail

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
    precision: Annotated[
        Literal["float32", "float16", "int8", "binary"],
        typer.Option(help="The numbers of the vectors; binary packs eight dimensions into a byte."),
    ] = "float32",
    ranges: Annotated[
        Path | None,
        typer.Option(
            help="The ranges of int8, FILE.ranges.npy of another --output; by default those of all vectors here, which "
            "--output writes next to its file."
        ),
    ] = None,
) -> Prediction:
    """Compute an embedding for each text.

    The table shows the first four numbers; --json and --output have whole vectors.
    """
    options: dict[str, Any] = {"prompt": prompt, "prompt_name": prompt_name, "dimensions": dimensions}
    options |= {"normalize": not raw, "precision": precision, "ranges": _read_ranges(ranges, precision)}
    return Prediction(
        "encode",
        options,
        TASKS["embed"].roles,
        header={"embedding": 36, "text": 0},
        to_rows=lambda item, vector: [(_abbreviate(vector), item)],
        to_json=lambda item, vector: {"text": item, **TASKS["embed"].to_columns(vector)},
    )


def _read_ranges(path: Path | None, precision: str) -> np.ndarray | None:
    if path is None:
        return None
    from bertblocks.tasks.embed.vectors import read_ranges

    if precision != "int8":
        fail(f"--ranges is {path}, which belongs to --precision int8.")
    try:
        return read_ranges(path)
    except (OSError, ValueError) as error:
        fail(error)


def _abbreviate(vector: np.ndarray) -> str:
    numbers = [f"{number:+.4f}" if vector.dtype.kind == "f" else f"{number:4d}" for number in vector[:4]]
    return " ".join(numbers) + " ..."
