"""`bertblocks compare`: how two encoders differ, and what the difference costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertblocks.cli.completion import complete_preset
from bertblocks.cli.options import SOURCE_HELP, AsJson, Task

if TYPE_CHECKING:
    from bertblocks.cli.source import ConfigSource
    from bertblocks.config import BertBlocksConfig

#: By part of the model, the numbers of both models.
Pairs = dict[str, tuple[float, float]]


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=SOURCE_HELP, autocompletion=complete_preset)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="The other encoder, given the same way.", autocompletion=complete_preset)
    ],
    task: Task = "masked-lm",
    as_json: AsJson = False,
) -> None:
    """Compare two encoders: config keys, parameters and FLOPs."""
    from bertblocks.cli.source import load_source

    sources = load_source(first), load_source(second)

    from bertblocks.analysis import build, count_flops, count_parameters, usual_lengths
    from bertblocks.cli.output import print_json

    a, b = sources
    differences = _differences(a.config, b.config)
    models = build(a.config, task), build(b.config, task)
    counts = [count_parameters(model) for model in models]
    if any("active" in count for count in counts):
        counts = [{**count, "active": count.get("active", count["total"])} for count in counts]
    parameters = _pair(*counts)
    flops = {
        length: _pair(
            *({part: count / length for part, count in count_flops(model, length).items()} for model in models)
        )
        for length in usual_lengths(a.config, b.config)
    }
    if as_json:
        print_json(
            {
                "a": a.name,
                "b": b.name,
                "task": task,
                "config": {key: {"a": values[0], "b": values[1]} for key, values in differences.items()},
                "parameters": _with_ratios(parameters),
                "flops_per_token": {length: _with_ratios(pairs) for length, pairs in flops.items()},
            }
        )
    else:
        _print(sources, task, differences, parameters, flops)


def _differences(a: BertBlocksConfig, b: BertBlocksConfig) -> dict[str, tuple[Any, Any]]:
    keys = {**a.key_types(), **b.key_types(), "num_labels": int}
    pairs = {key: (getattr(a, key), getattr(b, key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _pair(a: dict[str, Any], b: dict[str, Any]) -> Pairs:
    return {part: (a[part], b[part]) for part in a if a[part] or b[part]}


def _ratio(a: float, b: float) -> float | None:
    """Returns b / a, or None if a is 0."""
    return b / a if a else None


def _with_ratios(pairs: Pairs) -> dict[str, dict[str, float | None]]:
    return {part: {"a": a, "b": b, "ratio": _ratio(a, b)} for part, (a, b) in pairs.items()}


def _print(
    sources: tuple[ConfigSource, ConfigSource],
    task: str,
    differences: dict[str, tuple[Any, Any]],
    parameters: Pairs,
    flops: dict[int, Pairs],
) -> None:
    from bertblocks.cli.output import make_console, make_table, print_table, write_flops

    console = make_console()
    a, b = sources
    if not differences:
        total = parameters["total"][0]
        console.print(f"Nothing differs: {a.name} and {b.name} are the same architecture of {total:,} parameters.")
        return
    for source in sources:
        console.print(f"{source.name}: {source.description}")
    table = make_table(["key", a.name, b.name], text_columns=3)
    for key, values in differences.items():
        table.add_row(key, *(_write_value(value) for value in values))
    print_table(console, "Config", table)

    columns = [a.name, b.name, "ratio"]
    table = make_table(["part", *columns])
    for part, pair in parameters.items():
        table.add_row(part, *(f"{count:,}" for count in pair), _write_ratio(pair))
    print_table(console, f"Parameters ({task})", table)

    table = make_table(["length", "part", *columns], text_columns=2)
    for length, pairs in flops.items():
        for part, pair in pairs.items():
            table.add_row(str(length), part, *(write_flops(count) for count in pair), _write_ratio(pair))
        table.add_section()
    print_table(console, "FLOPs per token", table)


def _write_ratio(pair: tuple[float, float]) -> str:
    ratio = _ratio(*pair)
    return "-" if ratio is None else f"{ratio:.2f}"


def _write_value(value: Any) -> str:
    """Formats a config value; a list of layer types becomes the layers of each type."""
    import json

    from bertblocks.analysis import write_indexes

    if isinstance(value, list):
        places = {kind: [index for index, other in enumerate(value) if other == kind] for kind in dict.fromkeys(value)}
        return "; ".join(f"{kind}: {write_indexes(indexes)}" for kind, indexes in places.items())
    return json.dumps(value)
