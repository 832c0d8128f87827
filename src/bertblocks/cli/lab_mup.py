"""`bertblocks lab check-mup`: whether activations depend on the width of a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.completion import complete_recipe
from bertblocks.cli.options import AsJson

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig
    from bertblocks.lab.coordinate_check import CoordinateCheck
    from bertblocks.training.optimizer_sections import OptimizerSection


def check_mup(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_CONFIG",
            autocompletion=complete_recipe,
            help="A recipe (a .yaml file or the name of a shipped one), whose optimizer is used too, or a preset, a "
            "folder with a config.json, or a .json config file.",
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Config keys that override those of the source.")
    ] = None,
    widths: Annotated[str, typer.Option(help="Values of hidden_size, separated by commas.")] = "64,128,256,512",
    steps: Annotated[int, typer.Option(min=1, help="The number of training steps.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="The number of models of each width.")] = 2,
    optimizer: Annotated[str | None, typer.Option(help="The optimizer, if not the recipe's. Default: adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate, if not the optimizer's.")] = None,
    grow: Annotated[
        Literal["heads", "head-dim"], typer.Option(help="What grows with the width: the number of heads or head_dim.")
    ] = "heads",
    tolerance: Annotated[float, typer.Option(help="The exponent of the width that counts as drift.")] = 0.35,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a page with charts to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that activations and their changes in training do not depend on width, as muP promises.

    Models of every width take a few steps on the same random batch. The command exits with code 1 if an activation
    drifts, which under `parametrization: standard` is expected.
    """
    from bertblocks.cli.output import make_console, print_json
    from bertblocks.cli.source import fail
    from bertblocks.lab.coordinate_check import check_coordinates
    from bertblocks.lab.coordinate_page import write_coordinate_page

    console = make_console(stderr=as_json, quiet=as_json)
    try:
        config, section = _read(source, settings or [], optimizer, lr)
        with console.status("Training") as status:
            check = check_coordinates(
                config,
                section,
                _read_widths(widths),
                steps,
                seeds,
                grow,
                tolerance,
                on_model=lambda width, seed: status.update(f"Training width {width}, seed {seed}"),
            )
        facts = {
            "source": source,
            "parametrization": config.parametrization,
            "optimizer": section.kind,
            "lr": section.lr,
            "widths": check.widths,
            "steps": steps,
            "seeds": seeds,
            "grow": grow,
            "tolerance": tolerance,
        }
        if output is not None:
            write_coordinate_page(check, output, facts)
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({**facts, "passes": check.passes, "activations": _as_json(check)})
    else:
        _print(check, facts)
        if output is not None:
            console.print(f"Page: {output}")
    if not check.passes:
        raise typer.Exit(1)


def _read(
    source: str, settings: list[str], optimizer: str | None, lr: float | None
) -> tuple[BertBlocksConfig, OptimizerSection]:
    """Return the config of a recipe or another source with overrides, and the optimizer."""
    from bertblocks.cli.settings import parse_settings
    from bertblocks.cli.source import load_source
    from bertblocks.config import BertBlocksConfig
    from bertblocks.config.blocks import block_keys
    from bertblocks.config.validation import own_keys
    from bertblocks.core.registry import nearest
    from bertblocks.training.build import expected_config
    from bertblocks.training.recipe import read_recipe, recipe_names

    overrides = [] if lr is None else [f"optimizer.lr={lr}"]
    overrides = overrides if optimizer is None else [f"optimizer={{kind: {optimizer}}}", *overrides]
    is_recipe = source in recipe_names() or source.endswith((".yaml", ".yml"))
    if not is_recipe and optimizer is None:
        overrides = ["optimizer={kind: adamw}", *overrides]
    recipe = read_recipe(source if is_recipe else None, overrides)
    config = expected_config(recipe) if is_recipe else load_source(source).config
    changes = parse_settings(settings, takes_text=lambda key: False)
    known = [*own_keys(BertBlocksConfig), *block_keys()]
    if unknown := [key for key in changes if key not in known]:
        raise ValueError(f"{unknown[0]!r} is not a key of BertBlocksConfig{nearest(unknown[0], known)}.")
    return BertBlocksConfig.from_dict(config.to_dict(), **changes), recipe.optimizer


def _read_widths(text: str) -> list[int]:
    try:
        return [int(width) for width in text.split(",")]
    except ValueError:
        raise ValueError(f"--widths is {text!r}; write whole numbers such as 64,128,256.") from None


def _as_json(check: CoordinateCheck) -> list[dict[str, Any]]:
    """Return exponents and values; those that are not finite become null."""

    def write(value: Any) -> Any:
        if isinstance(value, list):
            return [write(part) for part in value]
        return value if math.isfinite(value) else None

    return [
        {
            "name": drift.name,
            "size_exponent": write(drift.size),
            "change_exponent": write(drift.change),
            "drifts": drift.is_beyond(check.tolerance),
            "sizes": write(activation.sizes),
            "changes": write(activation.changes),
        }
        for drift, activation in zip(check.drifts, check.activations, strict=True)
    ]


def _print(check: CoordinateCheck, facts: dict[str, Any]) -> None:
    from bertblocks.cli.output import make_console, make_table, print_table
    from bertblocks.lab.coordinate_page import verdict_of

    console = make_console()
    console.print(
        f"{facts['source']}: parametrization {facts['parametrization']}, {facts['optimizer']} with learning rate "
        f"{facts['lr']:g}, {facts['steps']} steps, {facts['seeds']} seeds."
    )
    table = make_table(["activation", *(f"change at {width}" for width in check.widths), "size", "change", ""])
    for drift, activation in zip(check.drifts, check.activations, strict=True):
        changes = [f"{value:.3g}" for value in activation.changes[-1]]
        mark = "drifts" if drift.is_beyond(check.tolerance) else ""
        table.add_row(drift.name, *changes, f"{drift.size:+.2f}", f"{drift.change:+.2f}", mark)
    print_table(console, "Changes after the last step, and exponents of the width", table)
    console.print(f"\n{verdict_of(check)}")
