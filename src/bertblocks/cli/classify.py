"""`bertblocks classify`: labels or numbers for texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

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
    from bertblocks.tasks.results import Classification


def classify(
    model: Model,
    texts: Texts = None,
    file: File = None,
    pair: Annotated[str | None, typer.Option(help="A second text that each text makes a pair with.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="How many labels to score; by default all.")] = None,
    threshold: Annotated[float, typer.Option(help="From which score a label of a multi-label model holds.")] = 0.5,
    column: Columns = None,
    read: Read = None,
    as_json: JsonLines = False,
    int8: Int8 = False,
    threads: Threads = None,
    too_long: TooLongOption = "window",
) -> None:
    """Say which label each text has, and how sure that is."""
    predict(
        Settings(model, texts, file, column, as_json, int8, threads, too_long, read),
        "classify",
        Roles([("text",)], optional=("text_pair",)),
        header={"score": 8, "label": 24, "text": 0},
        write_rows=_rows,
        write_json=lambda item, result: {"text": item, **asdict(result)},
        change=lambda item: (item, pair) if pair is not None and isinstance(item, str) else item,
        top_k=top_k,
        threshold=threshold,
    )


def _rows(item: Any, result: Classification) -> list[tuple[str, str, str]]:
    text = item if isinstance(item, str) else " | ".join(item)
    labels = list(result.scores) if result.is_regression else result.labels
    rows = [(f"{result.scores[label]:.4f}", label, text) for label in labels]
    return rows or [("", "-", text)]  # no label of several holds
