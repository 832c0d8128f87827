"""`bertblocks answer`: the span of a text that answers a question."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command
from bertblocks.text.inputs import Roles


@predict_command
def answer(
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="The question for each text; a table may have its own.")
    ] = None,
    n_best: Annotated[int, typer.Option(min=1, help="How many answers the JSON output lists.")] = 5,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 30,
    no_answer_threshold: Annotated[
        float | None, typer.Option(help="Give no answer if its score is higher by more than this.")
    ] = None,
) -> Prediction:
    """Answer questions with spans of texts."""

    def ask(item: Any) -> tuple[str, str]:
        if isinstance(item, tuple):
            return item
        if question is None:
            raise ValueError("The question is missing; give --question, or a table with question and context.")
        return question, item

    return Prediction(
        "answer",
        {"n_best": n_best, "max_answer_tokens": max_answer_tokens, "no_answer_threshold": no_answer_threshold},
        TASKS["answer"].roles if question is None else Roles([("context",), ("text",)]),
        header={"place": 12, "score": 8, "answer": 32, "question": 0},
        to_rows=lambda item, result: [
            (f"{result.start}-{result.end}", f"{result.score:.3f}", result.text or "-", item[0])
        ],
        to_json=lambda item, result: {"question": item[0], **TASKS["answer"].to_columns(result)},
        make_input=ask,
    )
