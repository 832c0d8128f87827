"""`bertblocks distill`: train a student to do what a teacher does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from bertblocks.cli.completion import complete_distill_setting
from bertblocks.cli.finetune import print_settings, read_options
from bertblocks.cli.options import Events
from bertblocks.cli.output import make_console, make_table, print_event, print_table
from bertblocks.cli.settings import parse_settings
from bertblocks.cli.source import fail
from bertblocks.cli.training import run_to_end

if TYPE_CHECKING:
    from bertblocks.training.distillation.run import DistillResult


class DistillCommand(TyperCommand):
    """Lists the settings of the method in its help, and explains `--epochs 3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from bertblocks.training.distillation.settings import SETTINGS

        schema = SETTINGS[_find_method(args, SETTINGS)]
        if {"-h", "--help"} & {*args}:
            typer.echo(ctx.get_help())
            print_settings(schema)
            raise typer.Exit
        return super().parse_args(ctx, read_options(args, schema.model_fields))


def distill(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            autocompletion=complete_distill_setting,
            help="Settings, such as epochs=3 or text=COLUMN; `list` shows all.",
        ),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="A checkpoint folder of any family, or a hub id.")] = None,
    student: Annotated[
        str | None,
        typer.Option(help="A checkpoint folder or hub id, or a preset or .json config, whose weights are random."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="In place of --student: how many of the teacher's layers the student has.")
    ] = None,
    method: Annotated[
        Literal["embeddings", "relations", "hidden", "scores"],
        typer.Option(
            help="What the student learns: embeddings (LEAF), attention relations (MiniLM), hidden states and logits "
            "(DistilBERT, TinyBERT), or the scores of a reranker."
        ),
    ] = "embeddings",
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Texts in any format: lines, csv, tsv, json, jsonl or parquet; for scores, a table of queries and "
            "documents. Repeat it for several files."
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--eval", help="Labelled examples, such as scored pairs; teacher, start and student are scored."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="The output folder; by default runs/distill-TEACHER.")] = None,
    cache: Annotated[
        str | None, typer.Option(help="The folder of the teacher's outputs; by default teacher-cache next to --output.")
    ] = None,
    as_json: Events = False,
) -> None:
    """Distill a teacher into a smaller or faster student. Run the same command again to resume a stopped run.

    `bertblocks distill --method METHOD --help` lists the settings of a method; `--epochs 3` is the same as `epochs=3`.

    Several processes: torchrun --nproc-per-node N -m bertblocks distill ...
    """
    from bertblocks.training.distillation.settings import SETTINGS

    if settings == ["list"]:
        print_settings(SETTINGS[method])
        return
    if teacher is None or not train:
        fail(f"--{'teacher' if teacher is None else 'train'} is missing; distill needs a teacher and texts.")
    from bertblocks.training.distillation.distill import distill as run

    done = run_to_end(
        lambda: run(
            teacher,
            student,
            train=train,
            layers=layers,
            method=method,
            eval=evaluation,
            output=output,
            cache=cache,
            progress=not as_json,
            on_event=print_event if as_json else None,
            **parse_settings(settings or [], SETTINGS[method].takes_text),
        )
    )
    _print(done, as_json)


def _find_method(words: list[str], methods: Collection[str]) -> str:
    """The method that the words of a command name."""
    named = (word.removeprefix("--method=") for word in words)
    return next((word for word in named if word in methods), "embeddings")


def _print(done: DistillResult, as_json: bool) -> None:
    if as_json:
        print_event({"event": "result", **asdict(done), "folder": str(done.folder), "speedup": done.speedup})
        return
    console = make_console()
    table = make_table(["", "teacher", "start", "student"])
    for name in done.scores:
        cells = [f"{found[name]:.4f}" if name in found else "" for found in (done.teacher, done.start, done.scores)]
        table.add_row(name.replace("_", " "), *cells)
    table.add_row("parameters", f"{done.parameters['teacher']:,}", "", f"{done.parameters['student']:,}")
    table.add_row("texts/s", f"{done.speeds['teacher']:,.0f}", "", f"{done.speeds['student']:,.0f}")
    print_table(console, "Distillation", table)
    console.print(f"\nThe student is {done.speedup:.2f} times as fast as its teacher.")
    for remark in done.remarks:
        console.print(f"\n{remark}", soft_wrap=True)
    console.print(f"\nModel and report: {done.folder}")
