"""`bertblocks plan`: estimates the cost of a recipe on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bertblocks.cli.completion import complete_override, complete_recipe
from bertblocks.cli.options import AsJson

if TYPE_CHECKING:
    from bertblocks.training.estimate import RunEstimate


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="A recipe file (.yaml) or the name of a shipped recipe.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE", autocompletion=complete_override, help="Values that override the recipe's."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="The kind of GPU.")] = "h100",
    count: Annotated[int, typer.Option(help="The number of GPUs.")] = 8,
    utilization: Annotated[
        float | None, typer.Option(help="The share of peak FLOP/s reached (MFU). By default that of a published run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the hours and memory of a recipe on GPUs.

    The estimate is computed from parameters and FLOPs; nothing is downloaded or trained.
    """
    from bertblocks.cli.output import print_json
    from bertblocks.cli.source import fail
    from bertblocks.training.estimate import estimate_run
    from bertblocks.training.recipe import read_recipe

    try:
        estimate = estimate_run(read_recipe(recipe, overrides or []), gpu, count, utilization)
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({**asdict(estimate), "memory": estimate.memory, "fits": estimate.fits})
    else:
        _print(estimate)


def _print(estimate: RunEstimate) -> None:
    from rich.text import Text

    from bertblocks.cli.output import make_console, make_table, print_table, write_flops
    from bertblocks.core.console import write_bytes, write_number
    from bertblocks.training.estimate import GPUS

    console = make_console()
    console.print(
        f"{estimate.recipe} on {estimate.count} {estimate.gpu} at {estimate.utilization:.0%} of their peak: "
        f"{estimate.parameters:,} parameters, {estimate.flops:.3g} FLOPs, {estimate.hours:,.1f} hours"
    )
    console.print(Text(f"Expected MFU {estimate.utilization:.0%}: {estimate.source}.", style="dim"))
    table = make_table(["phase", "length", "steps", "tokens", "FLOPs per token", "tokens/s", "hours"])
    for phase in estimate.phases:
        numbers = (f"{phase.length:,}", f"{phase.steps:,}", write_number(phase.tokens))
        costs = (write_flops(phase.flops_per_token), f"{phase.tokens_per_second:,.0f}", f"{phase.hours:,.1f}")
        table.add_row(phase.name, *numbers, *costs)
    print_table(console, "Time", table)
    table = make_table(["phase", "micro-batch", "weights", "gradients", "optimizer", "activations", "total"])
    for phase in estimate.phases:
        parts = [write_bytes(size) for size in (*asdict(phase.memory).values(), phase.memory.total)]
        table.add_row(phase.name, f"{phase.micro_batch:,} x {phase.length:,}", *parts)
    print_table(console, "Memory per device", table)
    table = make_table(["part", "layers", "kernel", "reason"])
    for choice in estimate.kernels:
        table.add_row(choice.part, choice.layers, choice.kernel, choice.reason)
    print_table(console, "Kernels, with this torch and no further packages", table)
    available = write_bytes(GPUS[estimate.gpu].memory)
    verdict = (
        "which fits" if estimate.fits else "which does not fit: lower run.micro_batch_tokens, or set run.parallel=fsdp"
    )
    console.print(f"\nAt most {write_bytes(estimate.memory)} of {available}, {verdict}.")
    console.print(
        Text("Computed from the recipe, not measured; kernels and the allocator need more memory.", style="dim")
    )
