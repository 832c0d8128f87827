"""`bertblocks quantize` writes a checkpoint with int8 linear layers and measures its accuracy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.cli.options import AsJson, TaskName
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail
from bertblocks.core.console import write_bytes

if TYPE_CHECKING:
    from bertblocks.checkpoints.quantize import QuantizedFolder


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder of any family, or a hub id.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The folder to write. It must be new or empty.")],
    texts: Annotated[
        Path | None,
        typer.Option(help="A file of texts, one per line, to measure the accuracy on. Default: built-in samples."),
    ] = None,
    min_cosine: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Fail if the mean cosine of token vectors is below this.")
    ] = 0.98,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Also read .bin files. Only tensors are read, and no code runs.")
    ] = False,
    task: Annotated[
        TaskName | None,
        typer.Option(help="The head to quantize, such as base or masked-lm. Default: the checkpoint's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint with int8 weights, for CPUs.

    The command also measures how accurate the result is.
    """
    import transformers

    from bertblocks.checkpoints.quantize import SAMPLE_TEXTS, quantize_folder

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        samples = SAMPLE_TEXTS if texts is None else _read_lines(texts)
        done = quantize_folder(
            source, target, texts=samples, min_cosine=min_cosine, allow_pickle=allow_pickle, task=task
        )
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json(asdict(done))
    else:
        _print(done, target)


def _read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
    return [line.strip() for line in lines if line.strip()]


def _print(done: QuantizedFolder, target: str) -> None:
    console = make_console()
    console.print(f"{done.method} ({done.task}): {target}")
    console.print(f"{write_bytes(done.source_bytes)} -> {write_bytes(done.target_bytes)}")
    console.print(done.kernel)
    accuracy = done.accuracy
    table = make_table(["measure", "value"])
    table.add_row("token cosine, mean", f"{accuracy.mean_cosine:.4f}")
    table.add_row("token cosine, lowest", f"{accuracy.lowest_cosine:.4f}")
    for drift in accuracy.drift:
        table.add_row(f"{drift.output}: {drift.meaning}", f"{drift.value:.4f}")
    where = f"{done.texts} texts" if done.texts else "random ids, for lack of a tokenizer"
    print_table(console, f"Compared with the source on {where} ({accuracy.tokens} tokens)", table)
    if done.carried:
        console.print(f"\nCopied: {', '.join(done.carried)}")
