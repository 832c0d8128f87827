"""`bertblocks convert` writes a checkpoint as another family and proves that the outputs are equal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bertblocks.cli.options import AsJson, TaskName
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail

if TYPE_CHECKING:
    from bertblocks.checkpoints.convert import Conversion


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder of any family, or a hub id.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The folder to write. It must be new or empty.")],
    to: Annotated[
        str,
        typer.Option(help="bertblocks, a family (see `bertblocks families`), or native: the first that can hold it."),
    ] = "bertblocks",
    tolerance: Annotated[
        float, typer.Option(help="The largest allowed difference, relative to an output's size (at least 1).")
    ] = 3e-5,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Also read .bin files. Only tensors are read, and no code runs.")
    ] = False,
    task: Annotated[
        TaskName | None, typer.Option(help="The head to convert, such as base or masked-lm. Default: the checkpoint's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as another family.

    The outputs of both are compared before the result gets its name.
    """
    import transformers

    from bertblocks.checkpoints import convert as conversions
    from bertblocks.core.console import progress_bar

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        bars: dict[str, TaskID] = {}

        def show(step: str, share: float) -> None:
            if step not in bars:
                bars[step] = progress.add_task(step, total=1.0)
            progress.update(bars[step], completed=share)

        try:
            done = conversions.convert(
                source, target, to, tolerance, allow_pickle=allow_pickle, task=task, on_progress=show
            )
        except (OSError, ValueError) as error:
            fail(error)
    if as_json:
        print_json(asdict(done))
    else:
        _print(done, target)


def _print(done: Conversion, target: str) -> None:
    console = make_console()
    console.print(f"{done.source_family} -> {done.target_family} ({done.task}): {target}")
    if done.refusal:
        console.print(f"Written as bertblocks. {done.refusal}")
    table = make_table(["output", "largest difference", "allowed"])
    for difference in done.differences:
        table.add_row(difference.output, f"{difference.largest:.1e}", f"{difference.tolerance:.1e}")
    print_table(console, "Source and result on ragged probes", table)
    if done.carried:
        console.print(f"\nCopied: {', '.join(done.carried)}")
