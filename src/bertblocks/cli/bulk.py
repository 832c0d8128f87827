"""`bertblocks bulk`: a model over files of any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertblocks.cli.model_options import FILES_HELP, ModelOptions, TableOptions, check_device
from bertblocks.cli.options import parse_shard, with_options
from bertblocks.cli.output import echo, print_event
from bertblocks.cli.source import fail
from bertblocks.core.console import write_seconds

TaskName = Literal["embed", "sparse", "multi", "rerank", "classify", "tag", "answer", "fill-mask"]


@dataclass(frozen=True)
class ResultOptions:
    """Where results go, and what they consist of."""

    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The folder of the output shards, or an address.", show_default=False
        ),
    ]
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="COLUMN", help="A column to keep; by default all but the texts are kept."),
    ] = None
    output_format: Annotated[
        Literal["parquet", "npy"],
        typer.Option("--format", help="npy writes embeddings alone, and the kept columns to a parquet file each."),
    ] = "parquet"
    precision: Annotated[
        Literal["float32", "float16", "int8", "binary"] | None,
        typer.Option(help="The numbers of embeddings; by default float32."),
    ] = None
    ranges: Annotated[
        Path | None,
        typer.Option(help="The ranges of int8, from ranges.npy of another job; by default those of the first rows."),
    ] = None


@dataclass(frozen=True)
class JobOptions:
    """How the work is divided."""

    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Be worker I of N: write every N-th output shard, from shard I on.")
    ] = "0/1"
    rows_per_shard: Annotated[int, typer.Option(min=1, help="Input rows for each output shard.")] = 50_000
    window: Annotated[int, typer.Option(min=1, help="Rows that are sorted by length together.")] = 4096
    on: Annotated[
        Literal["ray"] | None, typer.Option(help="Compute shards on a Ray cluster: RAY_ADDRESS, or this machine.")
    ] = None
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option("--on-error", help="Whether to end at a row that cannot be used, or name it in bad-rows-*.jsonl."),
    ] = "skip"


@with_options
def bulk(
    task: Annotated[TaskName, typer.Argument(metavar="TASK", help="What to compute for each row.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder of any family, or a hub id.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help=f"{FILES_HELP}: files, folders, quoted patterns, or addresses such as s3://bucket/*.parquet.",
        ),
    ],
    *,
    results: ResultOptions,
    job: JobOptions,
    tables: TableOptions,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="An option of the task, such as prompt_name=document, dimensions=256, top_k=3 or level=words.",
        ),
    ] = None,
    running: ModelOptions,
    too_long: Annotated[
        Literal["error", "truncate", "window"] | None,
        typer.Option("--too-long", help="How to handle texts beyond the model's length; by default as the task does."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only JSON, a line for each event: start, shard and, last, result.")
    ] = False,
) -> None:
    """Apply a model to files of any size. Run again, the command continues where it was interrupted.

    Output shard K has input rows K * ROWS to (K + 1) * ROWS, in order. A shard is complete or absent, and its bytes do
    not depend on interruptions or on the number of workers.
    """
    from bertblocks.bulk.job import run_bulk
    from bertblocks.bulk.settings import BulkSettings
    from bertblocks.bulk.tasks import get_task
    from bertblocks.cli.steps import StepBars

    try:
        _quiet()
        settings = BulkSettings(
            task,
            model,
            inputs,
            results.output,
            shard=parse_shard(job.shard),
            keys=results.key,
            columns=tables.columns(get_task(task).roles),
            read=tables.reading,
            options=_parse_options(option or [], results.precision, results.ranges),
            format=results.output_format,
            rows_per_shard=job.rows_per_shard,
            window=job.window,
            on_error=job.on_error,
            device=check_device(running.device),
            dtype=running.dtype,
            int8=running.int8,
            threads=running.threads,
            too_long=too_long,
        )
        with StepBars() as bars:
            on_event = print_event if as_json else _print_line
            run_bulk(settings, on_event, lambda done, total: bars.update("rows", done, total), job.on)
    except (OSError, ValueError) as error:
        fail(error)


def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _parse_options(pairs: list[str], precision: str | None, ranges: Path | None) -> dict[str, Any]:
    import yaml

    from bertblocks.tasks.embed.vectors import read_ranges

    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--option is {pair!r}; it must be KEY=VALUE.")
        options[name] = yaml.safe_load(value) if value else ""
    if precision is not None:
        options["precision"] = precision
    if ranges is not None:
        options["ranges"] = read_ranges(ranges)
    return options


def _print_line(event: dict[str, Any]) -> None:
    """Shows an event to people: a line for each shard, and for the result."""
    kind = event["event"]
    if kind == "start":
        rows = "rows" if event["rows"] is None else f"{event['rows']:,} rows"
        echo(f"{rows} to do, {event['done_shards']} shards are there; writing to {event['folder']}")
    elif kind == "shard":
        for problem in event["problems"]:
            echo(f"bad row: {problem}")
        bad = f", {event['bad_rows']:,} bad" if event["bad_rows"] else ""
        left = "" if event["seconds_left"] is None else f", {write_seconds(event['seconds_left'])} left"
        echo(f"shard {event['shard']}: {event['rows']:,} rows{bad}, {event['rows_per_second']:,.0f} rows/s{left}")
    else:
        state = "the job is complete" if event["is_complete"] else "other workers have shards to write"
        bad = f" and {event['bad_rows']:,} bad rows" if event["bad_rows"] else ""
        echo(f"{event['rows']:,} rows{bad} in {event['shards']} shards, {event['seconds']:.1f} s; {state}")
