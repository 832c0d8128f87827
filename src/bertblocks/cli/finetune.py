"""`bertblocks finetune`: train a model for a task, such as classify or rerank."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from bertblocks.cli.completion import complete_setting
from bertblocks.cli.options import Events
from bertblocks.cli.output import make_console, make_table, print_event, print_table
from bertblocks.cli.settings import read_settings
from bertblocks.cli.source import fail
from bertblocks.cli.training import run_to_end

if TYPE_CHECKING:
    from bertblocks.training.finetune import FinetuneResult


class FinetuneCommand(TyperCommand):
    """Lists the settings of the task in its help, and explains `--epochs 3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from bertblocks.tasks.settings import SETTINGS

        task = next((argument for argument in args if argument in SETTINGS), None)
        if task is not None and {"-h", "--help"} & {*args}:
            typer.echo(ctx.get_help())
            print_settings(SETTINGS[task])
            raise typer.Exit
        return super().parse_args(ctx, read_options(args, SETTINGS[task].model_fields) if task else args)


def read_options(arguments: list[str], keys: Collection[str]) -> list[str]:
    """Turns `--epochs 3` and `--epochs=3` into the setting `epochs=3`.

    Example:
        >>> read_options(["classify", "--epochs", "3", "--batch-size=8", "--model", "m"], ["epochs", "batch_size"])
        ['classify', 'epochs=3', 'batch_size=8', '--model', 'm']
    """
    result, rest = [], iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in keys:
            result.append(argument)
            continue
        result.append(f"{key}={value if equals else next(rest, '')}")
    return result


def finetune(
    task: Annotated[
        Literal["classify", "tag", "answer", "embed", "rerank", "sparse", "multi"],
        typer.Argument(help="What the model learns."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            autocompletion=complete_setting,
            help="Settings, such as epochs=3 or label=COLUMN; `list` shows all.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint folder of any family, or a hub id.")] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Examples: csv, tsv, json, jsonl or parquet tables, CoNLL and CoNLL-U for tag, SQuAD json for answer, "
            "or a datasets name (NAME, NAME:SPLIT, NAME:CONFIG:SPLIT). May be repeated for embed."
        ),
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option("--eval", help="Examples that select the best model; by default a part of --train."),
    ] = None,
    test: Annotated[
        list[str] | None, typer.Option(help="Examples on which the returned model is scored once, at the end.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="The output folder; by default runs/TASK-NAME.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing run in the folder.")] = False,
    as_json: Events = False,
) -> None:
    """Fine-tune a model on files. Run the same command again to resume a stopped run.

    `bertblocks finetune TASK --help` also lists the settings of a task; `--epochs 3` is the same as `epochs=3`.

    Several processes: torchrun --nproc-per-node N -m bertblocks finetune ...
    """
    from bertblocks.tasks.settings import SETTINGS

    if settings == ["list"]:
        print_settings(SETTINGS[task])
        return
    if model is None or not train:
        fail(f"--{'model' if model is None else 'train'} is missing; finetune {task} needs a model and examples.")
    from bertblocks.training.finetune import finetune as run

    options: dict[str, Any] = {"test": test or None, "overwrite": overwrite, "progress": not as_json}
    options["on_event"] = print_event if as_json else None
    files = train[0] if len(train) == 1 else train
    done = run_to_end(
        lambda: run(task, model, files, evaluation or None, output, **options, **read_settings(settings or [], task))
    )
    _print(done, as_json)


def _print(done: FinetuneResult, as_json: bool) -> None:
    if as_json:
        values: dict[str, Any] = {"folder": str(done.folder), "metric": done.metric, "scores": done.scores}
        values |= {"baselines": done.baselines, "test": done.test, "remarks": done.remarks}
        values |= {"runs": done.runs, "intervals": done.intervals, "confidence": done.confidence}
        print_event({"event": "result", **values})
        return
    console = make_console()
    others = [*done.baselines.values(), *([done.test] if done.test else [])]
    table = make_table(["score", *done.baselines, "result", *(["test"] if done.test else [])])
    for name, value in done.scores.items():
        interval = f" ± {done.intervals[name]:.4f}" if done.intervals else ""
        cells = [f"{scores[name]:.4f}" if name in scores else "" for scores in others]
        cells.insert(len(done.baselines), f"{value:.4f}{interval}")
        table.add_row(f"{name}{' (chosen by)' if name == done.metric else ''}", *cells)
    print_table(console, "Evaluation", table)
    for remark in done.remarks:
        console.print(f"\n{remark}", soft_wrap=True)
    folder = done.folder if len(done.runs) == 1 else f"{done.folder / 'seed-*'}, one folder per seed"
    console.print(f"\nModel and report: {folder}")


def print_settings(schema: Any) -> None:
    """Prints the keys of a section with their defaults and meanings."""
    console = make_console()
    table = make_table(["key", "default", "meaning"], text_columns=3)
    for name, field in schema.model_fields.items():
        table.add_row(name, str(field.default), field.description or "")
    print_table(console, "Settings", table)
