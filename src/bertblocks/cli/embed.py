"""`bertblocks embed`: a vector for each text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.cli.predict import (
    Columns,
    File,
    Int8,
    JsonLines,
    Model,
    Read,
    Roles,
    Settings,
    Texts,
    Threads,
    TooLongOption,
    predict,
)

if TYPE_CHECKING:
    import numpy as np


def embed(
    model: Model,
    texts: Texts = None,
    file: File = None,
    prompt: Annotated[
        str | None, typer.Option(help="What to put in front of each text, or the name of one of the model's prompts.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep the first so many numbers.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not scale vectors to length 1.")] = False,
    column: Columns = None,
    read: Read = None,
    as_json: JsonLines = False,
    int8: Int8 = False,
    threads: Threads = None,
    too_long: TooLongOption = "window",
) -> None:
    """Make embeddings; --json gives all of their numbers, the table the first four."""
    predict(
        Settings(model, texts, file, column, as_json, int8, threads, too_long, read),
        "encode",
        Roles([("text",)]),
        header={"embedding": 36, "text": 0},
        write_rows=lambda item, vector: [(_start_of(vector), item)],
        write_json=lambda item, vector: {"text": item, "embedding": [round(float(x), 7) for x in vector]},
        prompt=prompt,
        dimensions=dimensions,
        normalize=not raw,
    )


def _start_of(vector: np.ndarray) -> str:
    return " ".join(f"{number:+.4f}" for number in vector[:4]) + " ..."
