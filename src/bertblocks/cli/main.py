"""The `bertblocks` command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from bertblocks import __version__
from bertblocks.cli import data, lab, light_imports, tokenizer
from bertblocks.cli.answer import answer
from bertblocks.cli.bulk import bulk
from bertblocks.cli.classify import classify
from bertblocks.cli.compare import compare
from bertblocks.cli.convert import convert
from bertblocks.cli.describe import describe
from bertblocks.cli.distill import DistillCommand, distill
from bertblocks.cli.embed import embed
from bertblocks.cli.evaluate import evaluate
from bertblocks.cli.families import families
from bertblocks.cli.fill_mask import fill_mask
from bertblocks.cli.finetune import FinetuneCommand, finetune
from bertblocks.cli.generate import generate
from bertblocks.cli.index import index
from bertblocks.cli.merge import merge
from bertblocks.cli.mine import mine
from bertblocks.cli.multi import multi
from bertblocks.cli.output import show_log
from bertblocks.cli.plan import plan
from bertblocks.cli.presets import presets
from bertblocks.cli.pretrain import pretrain
from bertblocks.cli.quantize import quantize
from bertblocks.cli.report import report
from bertblocks.cli.rerank import rerank
from bertblocks.cli.runs import runs
from bertblocks.cli.schema import schema
from bertblocks.cli.search import search
from bertblocks.cli.serve import serve
from bertblocks.cli.sparse import sparse
from bertblocks.cli.tag import tag

app = typer.Typer(
    help="Build, load, pretrain, fine-tune and run any BERT-like encoder from one config.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help has room for text at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (embed, sparse, multi, classify, tag, answer, rerank, fill_mask, generate, bulk):
    app.command()(command)
app.command(cls=FinetuneCommand)(finetune)
app.command(cls=DistillCommand)(distill)
for command in (evaluate, runs, report):
    app.command()(command)
for command in (index, search, mine, serve):
    app.command()(command)
for command in (pretrain, plan, schema, convert, quantize, merge, families, presets, describe, compare):
    app.command()(command)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(data.app, name="data")
app.add_typer(lab.app, name="lab")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bertblocks {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    show_log()


def _leave_out_other_commands() -> None:
    """Keeps the command that is called: typer reads the signatures of all commands before it runs one."""
    called = [c for c in app.registered_commands if c.callback and c.callback.__name__.replace("_", "-") == sys.argv[1]]
    if called:
        app.registered_commands, app.registered_groups = called, []


def main() -> None:
    if sys.stdout is None:  # the caller closed it
        sys.exit("bertblocks: standard output is closed; redirect it to a file or to /dev/null.")
    light_imports.is_own_process = True
    if len(sys.argv) > 1:
        _leave_out_other_commands()
    code: int | str | None = 0
    try:
        app()
    except SystemExit as ending:
        code = ending.code
    except OSError as error:  # commands report their own; this is standard output
        code = f"bertblocks: standard output could not be written: {error.strerror}."
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if not isinstance(error, BrokenPipeError) and not code:
            code = f"bertblocks: standard output could not be written: {error.strerror}."
    sys.exit(code)
