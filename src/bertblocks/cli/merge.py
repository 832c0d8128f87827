"""`bertblocks merge` averages checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from bertblocks.cli.options import AsJson


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="CHECKPOINT", help="Checkpoint folders of the same model.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder to write. It must be new or empty.")],
    weights: Annotated[
        str | None,
        typer.Option(help="A weight for each checkpoint, such as 2,1,1. Equal by default.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Average checkpoints of one model."""
    from bertblocks.checkpoints import merge as merging
    from bertblocks.cli.output import make_console, make_table, print_json, print_table
    from bertblocks.cli.source import fail

    try:
        done = merging.merge(sources, output, None if weights is None else _read_weights(weights))
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json(asdict(done))
        return
    console = make_console()
    console.print(f"{output}: the mean of {len(done.shares)} checkpoints, {done.parameters:,} parameters")
    table = make_table(["checkpoint", "share"])
    for source, share in done.shares.items():
        table.add_row(source, f"{share:.4g}")
    print_table(console, "Averaged", table)


def _read_weights(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--weights is {text!r}; it must be a list of numbers such as 2,1,1.") from error
