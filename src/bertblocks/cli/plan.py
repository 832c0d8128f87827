"""`bertblocks plan`: estimate what a recipe costs on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.cli.options import AsJson

if TYPE_CHECKING:
    from bertblocks.training.estimate import Plan


def plan(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file (.yaml) or the name of a built-in recipe.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Values that override the recipe's.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="The kind of device.")] = "h100",
    count: Annotated[int, typer.Option(help="The number of devices.")] = 8,
    utilization: Annotated[
        float, typer.Option(help="The share of peak FLOPs reached; 0.25 is that of ModernBERT-base's published run.")
    ] = 0.25,
    as_json: AsJson = False,
) -> None:
    """Estimate the parameters, FLOPs, memory per device, tokens/s and hours of a recipe."""
    from bertblocks.cli.output import print_json
    from bertblocks.cli.source import fail
    from bertblocks.training.estimate import make_plan
    from bertblocks.training.recipe import read_recipe

    try:
        made = make_plan(read_recipe(recipe, overrides or []), gpu, count, utilization)
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({**asdict(made), "memory": made.memory, "fits": made.fits})
    else:
        _print(made)


def _print(made: Plan) -> None:
    from rich.text import Text

    from bertblocks.cli.output import make_console, make_table, print_table, write_bytes, write_flops
    from bertblocks.reports.charts import write_number
    from bertblocks.training.estimate import GPUS

    console = make_console()
    console.print(
        f"{made.recipe} on {made.count} {made.gpu} at {made.utilization:.0%} of peak: "
        f"{made.parameters:,} parameters, {made.flops:.3g} FLOPs, {made.hours:,.1f} hours"
    )
    table = make_table(["phase", "length", "steps", "tokens", "FLOPs per token", "tokens/s", "hours"])
    for phase in made.phases:
        numbers = (f"{phase.length:,}", f"{phase.steps:,}", write_number(phase.tokens))
        costs = (write_flops(phase.flops_per_token), f"{phase.tokens_per_second:,.0f}", f"{phase.hours:,.1f}")
        table.add_row(phase.name, *numbers, *costs)
    print_table(console, "Time", table)
    table = make_table(["phase", "micro-batch", "weights", "gradients", "optimizer", "activations", "total"])
    for phase in made.phases:
        parts = [write_bytes(size) for size in (*asdict(phase.memory).values(), phase.memory.total)]
        table.add_row(phase.name, f"{phase.micro_batch:,} x {phase.length:,}", *parts)
    print_table(console, "Memory per device", table)
    room = write_bytes(GPUS[made.gpu].memory)
    verdict = (
        "which fits" if made.fits else "which does not fit: lower run.micro_batch_tokens, or shard with run.parallel"
    )
    console.print(f"\nAt most {write_bytes(made.memory)} of {room}, {verdict}.")
    console.print(Text("Computed from the recipe, not measured; kernels and the allocator need more.", style="dim"))
