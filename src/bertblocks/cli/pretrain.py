"""`bertblocks pretrain`: trains a model on texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bertblocks.cli.completion import complete_override, complete_recipe
from bertblocks.cli.options import Events
from bertblocks.cli.output import make_console, make_table, print_event, print_table
from bertblocks.cli.training import run_to_end

if TYPE_CHECKING:
    from bertblocks.training.pretrain import PretrainResult


def pretrain(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="A recipe file (.yaml) or the name of a shipped recipe. Default: demo.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE", autocompletion=complete_override, help="Values that override the recipe's."
        ),
    ] = None,
    as_json: Events = False,
) -> None:
    """Train a model from a recipe. The same command continues an interrupted run.

    SIGTERM and Ctrl-C save a checkpoint and exit with code 128 + the signal's number (143 and 130). To use several
    processes: torchrun --nproc-per-node N -m bertblocks pretrain RECIPE.
    """
    from bertblocks.training.pretrain import pretrain as run
    from bertblocks.training.recipe import read_recipe

    changes = list(overrides or [])
    if recipe is not None and "=" in recipe:
        changes, recipe = [recipe, *changes], None
    console = make_console(stderr=as_json, quiet=as_json)
    result = run_to_end(lambda: run(read_recipe(recipe, changes), console, print_event if as_json else None))
    if result.is_main and as_json:
        print_event({"event": "result", "folder": str(result.folder), "metrics": result.metrics})
    elif result.is_main:
        _print(result, console)


def _print(result: PretrainResult, console: Console) -> None:
    metrics = result.metrics
    table = make_table(["on held-out texts", "model", "unigram"])
    predicted = "next-token" if "perplexity" in metrics else "masked"
    table.add_row(f"{predicted} accuracy", f"{metrics['held_out_accuracy']:.1%}", f"{metrics['unigram_accuracy']:.1%}")
    table.add_row(f"{predicted} loss", f"{metrics['held_out_loss']:.3f}", f"{metrics['unigram_loss']:.3f}")
    if "held_out_order_accuracy" in metrics:
        table.add_row("sentence-order accuracy", f"{metrics['held_out_order_accuracy']:.1%}", "50.0%")
    for key in ("perplexity", "pseudo_perplexity"):
        if key in metrics:
            table.add_row(key.replace("_", "-"), f"{metrics[key]:.1f}", "")
    print_table(console, "Evaluation", table)
    predictions = make_table(["masked word", "predictions", "text"], text_columns=3)
    for filled in result.filled:
        words = ", ".join(f"{word} {share:.0%}" for word, share in filled.guesses)
        predictions.add_row(filled.answer, words, filled.text)
    print_table(console, "Filled masks", predictions)
    console.print(f"\nModel: {result.folder / 'model'}\nReport: {result.folder / 'report.html'}")
