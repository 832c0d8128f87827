"""`bertblocks describe`: the modules of an encoder and what it costs to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertblocks.cli.completion import complete_preset
from bertblocks.cli.options import SOURCE_HELP, AsJson, Task

if TYPE_CHECKING:
    from rich.tree import Tree

    from bertblocks.analysis import Analysis, Node
    from bertblocks.cli.source import ConfigSource

NOTES = (
    "FLOPs: matrix products of a forward pass (2 m n k each, windows in local layers); training takes 3 times this.",
    "Memory: activations in fp32, without weights, with fused attention. Inference: the peak.",
    "Training: what a forward pass keeps for the backward pass; 30 % of the tokens reach a masked-LM head.",
)


def describe(
    name_or_path: Annotated[
        str, typer.Argument(metavar="NAME_OR_PATH", help=SOURCE_HELP, autocompletion=complete_preset)
    ],
    task: Task = "masked-lm",
    length: Annotated[
        list[int] | None,
        typer.Option("--length", min=1, help="Sequence length to report; may be repeated.", show_default=False),
    ] = None,
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a mermaid diagram instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show modules, parameters, FLOPs and memory of an encoder."""
    if as_mermaid and as_json:
        raise typer.BadParameter("--mermaid and --json cannot be combined.")
    from bertblocks.cli.source import fail, load_source

    source = load_source(name_or_path)

    from bertblocks.analysis import analyze, build, mermaid
    from bertblocks.cli.output import print_json
    from bertblocks.config.validation import ConfigError

    if as_mermaid:
        typer.echo(mermaid(build(source.config, task)))
        return
    try:
        analysis = analyze(source.config, task, length or None)
    except ConfigError as error:
        fail(error)
    if as_json:
        print_json(_as_json(source, analysis))
    else:
        _print(source, analysis)


def _as_json(source: ConfigSource, analysis: Analysis) -> dict[str, Any]:
    import dataclasses

    config = source.config
    return {
        "name": source.name,
        "description": source.description,
        "summary": analysis.summary,
        "task": analysis.task,
        "config": {key: getattr(config, key) for key in config.key_types()},
        "parameters": analysis.parameters,
        "costs": [{**dataclasses.asdict(cost), "flops_per_token": cost.flops_per_token} for cost in analysis.costs],
        "tree": dataclasses.asdict(analysis.tree),
    }


def _print(source: ConfigSource, analysis: Analysis) -> None:
    from rich.text import Text

    from bertblocks.cli.output import make_console, make_table, print_table, write_flops
    from bertblocks.core.console import printable, write_bytes

    console = make_console()
    console.print(Text.assemble((printable(source.name), "bold"), f"  {printable(source.description)}"))
    console.print(analysis.summary)
    console.print()
    console.print(_rich_tree(analysis.tree))

    total = analysis.parameters["total"]
    table = make_table(["part", "parameters", "share"])
    for part, count in analysis.parameters.items():
        table.add_row(part, f"{count:,}", f"{count / total:.1%}", style="bold" if part == "total" else None)
    print_table(console, f"Parameters ({analysis.task})", table)

    lengths = [str(cost.length) for cost in analysis.costs]
    table = make_table(["length", *lengths])
    for part in analysis.costs[0].flops:
        if not any(cost.flops[part] for cost in analysis.costs):
            continue
        numbers = [write_flops(cost.flops_per_token[part]) for cost in analysis.costs]
        table.add_row(part, *numbers, style="bold" if part == "total" else None)
    print_table(console, "FLOPs per token", table)

    table = make_table(["length", *lengths])
    table.add_row("inference", *(write_bytes(cost.inference_bytes) for cost in analysis.costs))
    table.add_row("training", *(write_bytes(cost.training_bytes) for cost in analysis.costs))
    print_table(console, "Activation memory of one sequence", table)
    console.print()
    for note in NOTES:
        console.print(Text(note, style="dim"))


def _rich_tree(node: Node, parent: Tree | None = None) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    label = Text(node.label)
    branch = Tree(label) if parent is None else parent.add(label)
    for child in node.children:
        _rich_tree(child, branch)
    return branch
