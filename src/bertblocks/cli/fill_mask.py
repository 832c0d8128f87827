"""`bertblocks fill-mask`: tokens for the masks of texts."""

from __future__ import annotations

from dataclasses import asdict
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
    from bertblocks.tasks.results import Filling


def fill_mask(
    model: Model,
    texts: Texts = None,
    file: File = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many tokens for each mask.")] = 5,
    column: Columns = None,
    read: Read = None,
    as_json: JsonLines = False,
    int8: Int8 = False,
    threads: Threads = None,
    too_long: TooLongOption = "window",
) -> None:
    """Say which tokens the masks of each text stand for."""
    predict(
        Settings(model, texts, file, column, as_json, int8, threads, too_long, read),
        "fill_mask",
        Roles([("text",)]),
        header={"mask": 4, "score": 8, "token": 16, "text": 0},
        write_rows=_rows,
        write_json=lambda item, masks: {"text": item, "masks": [[asdict(one) for one in mask] for mask in masks]},
        top_k=top_k,
    )


def _rows(text: str, masks: list[list[Filling]]) -> list[tuple[str, str, str, str]]:
    return [
        (str(number), f"{one.score:.4f}", one.token, text) for number, mask in enumerate(masks, start=1) for one in mask
    ]
