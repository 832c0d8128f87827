"""`bertblocks tag`: entities, words or tokens with their labels and places."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

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
    from bertblocks.tasks.results import Tagged


def tag(
    model: Model,
    texts: Texts = None,
    file: File = None,
    level: Annotated[
        Literal["entities", "words", "tokens"] | None,
        typer.Option(help="What to label; by default entities where the model's labels mark them, else words."),
    ] = None,
    column: Columns = None,
    read: Read = None,
    as_json: JsonLines = False,
    int8: Int8 = False,
    threads: Threads = None,
    too_long: TooLongOption = "window",
) -> None:
    """Find what is named in texts, or the part of speech of each word, as the model was trained."""
    predict(
        Settings(model, texts, file, column, as_json, int8, threads, too_long, read),
        "tag",
        Roles([("words",), ("text",)]),
        header={"place": 12, "score": 8, "label": 12, "text": 0},
        write_rows=lambda item, result: [_row(one) for one in result],
        write_json=lambda item, result: {"text": item, "tags": [asdict(one) for one in result]},
        level=level,
    )


def _row(one: Tagged) -> tuple[str, str, str, str]:
    return f"{one.start}-{one.end}", f"{one.score:.4f}", one.label, one.text
