"""`bertblocks sparse`: the tokens of the vocabulary that a text is about, with weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import Prediction, predict_command

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor
    from bertblocks.tasks.sparse.vectors import SparseVector

#: Tokens of a text that the table shows.
SHOWN = 10


@predict_command
def sparse(
    role: Annotated[
        Literal["query", "document"] | None,
        typer.Option(help="What the texts are: it decides the prompt, and whether queries need the encoder."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Keep the largest entries; by default as many as the model says.")
    ] = None,
) -> Prediction:
    """Compute a sparse vector for each text (SPLADE).

    The table shows the ten tokens with the largest weights; --json and --output have all, as lists of index and value.
    """
    tokens = _Tokens()
    return Prediction(
        "encode_sparse",
        {"role": role, "top_k": top_k},
        TASKS["sparse"].roles,
        header={"active": 6, "weight": 7, "token": 16, "text": 0},
        to_rows=tokens.to_rows,
        to_json=lambda item, vector: {"text": item, **TASKS["sparse"].to_columns(vector)},
        on_open=tokens.open,
    )


class _Tokens:
    """Shows vectors with the tokens of a predictor."""

    def open(self, predictor: Predictor) -> None:
        self.tokenizer: Any = predictor.tokenizer

    def to_rows(self, text: str, vector: SparseVector) -> list[tuple[str, str, str, str]]:
        order = (-vector.values).argsort(kind="stable")[:SHOWN]
        names = self.tokenizer.convert_ids_to_tokens(vector.indices[order].tolist())
        rows = [
            (str(len(vector)), f"{value:.4f}", name, text)
            for name, value in zip(names, vector.values[order].tolist(), strict=True)
        ]
        return rows or [("0", "", "", text)]
