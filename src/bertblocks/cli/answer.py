"""`bertblocks answer`: the span of a text that answers a question."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

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


def answer(
    model: Model,
    texts: Texts = None,
    file: File = None,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="What to ask of each text; a table may have its own.")
    ] = None,
    n_best: Annotated[int, typer.Option(min=1, help="How many answers JSON lists.")] = 5,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 30,
    no_answer_threshold: Annotated[
        float | None, typer.Option(help="Give no answer where its score is higher by more than this.")
    ] = None,
    column: Columns = None,
    read: Read = None,
    as_json: JsonLines = False,
    int8: Int8 = False,
    threads: Threads = None,
    too_long: TooLongOption = "window",
) -> None:
    """Answer questions from texts; answers are exact spans, with their places."""

    def ask(item: Any) -> tuple[str, str]:
        if isinstance(item, tuple):
            return item
        if question is None:
            raise ValueError("There is no question; say --question, or give a table with question and context.")
        return question, item

    predict(
        Settings(model, texts, file, column, as_json, int8, threads, too_long, read),
        "answer",
        Roles([("question", "context")] if question is None else [("context",), ("text",)]),
        header={"place": 12, "score": 8, "answer": 32, "question": 0},
        write_rows=lambda item, result: [
            (f"{result.start}-{result.end}", f"{result.score:.3f}", result.text or "-", item[0])
        ],
        write_json=lambda item, result: {"question": item[0], **asdict(result)},
        change=ask,
        n_best=n_best,
        max_answer_tokens=max_answer_tokens,
        no_answer_threshold=no_answer_threshold,
    )
