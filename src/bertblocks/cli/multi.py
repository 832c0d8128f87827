"""`bertblocks multi`: a vector for each token of each text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


@predict_command
def multi(
    role: Annotated[
        Literal["query", "document"], typer.Option(help="What the texts are: queries are filled up with mask tokens.")
    ] = "document",
    pool_factor: Annotated[
        float | None, typer.Option(min=1.0, help="Merge similar tokens of documents into a share of 1/FACTOR.")
    ] = None,
) -> Prediction:
    """Compute a vector for each token of each text, with a multi-vector model (ColBERT).

    The table shows the number of vectors, their dimensions, and the tokens; --json and --output have the vectors too.
    """
    shown = _Tokens(role)
    return Prediction(
        "encode_multi",
        {"role": role, "pool_factor": pool_factor},
        TASKS["multi"].roles,
        header={"vectors": 7, "dimensions": 10, "text": 32, "tokens": 0},
        to_rows=lambda item, vectors: [
            (str(len(vectors)), str(vectors.shape[1]), _cut(item), " ".join(shown.of(item)))
        ],
        to_json=lambda item, vectors: {"text": item, "tokens": shown.of(item), **TASKS["multi"].to_columns(vectors)},
        on_open=shown.open,
    )


class _Tokens:
    """The tokens of texts, by the predictor that computes their vectors."""

    def __init__(self, role: str) -> None:
        self._role = role

    def open(self, predictor: Predictor) -> None:
        self._tokenizer = predictor.role_tokenizer(self._role)

    def of(self, text: str) -> list[str]:
        return self._tokenizer.tokens(text)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 32 else f"{text[:29]}..."
