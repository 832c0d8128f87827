"""Options of commands that run a model but are not predict commands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

Column = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="ROLE=NAME", help="The column of a role, if the guess is wrong."),
]
Read = Annotated[
    list[str] | None,
    typer.Option(
        "--read",
        metavar="KEY=VALUE",
        help="How to read files, if detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
    ),
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; by default a GPU if there is one.")]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="The numbers to compute with; by default what suits the hardware."),
]
Int8 = Annotated[bool, typer.Option("--int8", help="Run linear layers in int8: faster, slightly less exact.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the model; by default what suits the machine.")]
OnError = Annotated[
    Literal["stop", "skip"], typer.Option("--on-error", help="How to handle records that cannot be used.")
]


def predictor_options(device: str | None, dtype: str | None, int8: bool, threads: int | None) -> dict[str, Any]:
    """The options of `Predictor` that the command's options stand for."""
    import torch
    import transformers

    from bertblocks.cli.predict import check_device

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    number_type = None if dtype is None else getattr(torch, dtype)
    return {"device": check_device(device), "dtype": number_type, "int8": int8, "threads": threads}
