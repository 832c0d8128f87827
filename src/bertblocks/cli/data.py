"""`bertblocks data`: prepares corpora for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from bertblocks.cli.corpus import CorpusOptions, Files
from bertblocks.cli.options import AsJson, parse_shard, with_options
from bertblocks.cli.output import echo, make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail

app = typer.Typer(help="Prepare corpora.", no_args_is_help=True)


@app.callback()
def root() -> None:
    pass


@app.command()
@with_options
def prepare(
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write or to continue.")],
    files: Files = None,
    *,
    tokenizer: Annotated[str, typer.Option(help="A folder with a tokenizer, or a hub id.", show_default=False)],
    source: CorpusOptions,
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="The share of documents held out for evaluation.")
    ] = 0.0,
    max_bad_share: Annotated[
        float, typer.Option(min=0, max=1, help="The largest acceptable share of bad records.")
    ] = 0.01,
    dedup: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Remove texts with this Jaccard similarity to an earlier one, in sequences of 5 words; 0.8 is common.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace tokens of another corpus or tokenizer in the folder.")
    ] = False,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Be worker I of N on a shared folder: write every N-th shard.")
    ] = "0/1",
    on: Annotated[
        Literal["ray"] | None, typer.Option(help="Write shards on a Ray cluster: RAY_ADDRESS, or this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a corpus into memory-mapped Arrow files. Repeating the command resumes an interrupted run.

    Several machines divide the work with --shard, and the last of them to end completes the folder.
    """
    from bertblocks.core.console import progress_bar
    from bertblocks.data import prepare as preparation
    from bertblocks.data.duplicates import remove_duplicates
    from bertblocks.data.prepare import DOCSTRINGS, DUPLICATES
    from bertblocks.text.tokenizers import load_fast_tokenizer

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        bar = progress.add_task("shards", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        try:
            loaded = load_fast_tokenizer(tokenizer)
            preparation.read_plan(target)  # raises before docstrings are written into a folder with other contents
            corpus = source.open(files, target / DOCSTRINGS, held_out)
            if dedup is not None:
                corpus = remove_duplicates(corpus, target / DUPLICATES, dedup, source.workers)
            part = parse_shard(shard)
            if dedup is not None and part[1] > 1:
                raise ValueError("--dedup compares all texts in one process; run it without --shard.")
            is_complete = preparation.write_shards(
                corpus, loaded, target, source.workers, on_shard=show, overwrite=overwrite, part=part, on=on
            )
            store = preparation.open_prepared(corpus, target, max_bad_share) if is_complete else None
        except (OSError, ValueError) as error:
            fail(error)
    if store is None:
        if as_json:
            print_json({"folder": str(target), "worker": shard, "is_complete": False})
        else:
            echo(f"Worker {shard} has written its shards; the last worker to end completes {target}.")
        return
    counts = store.counts | ({} if dedup is None else {"duplicates": store.counts.get("duplicates", 0)})
    for problem in store.bad_records:
        echo(f"bertblocks: bad record: {problem}", err=True)
    if as_json:
        print_json({"folder": str(target), **counts, "named_bad_records": store.bad_records})
        return
    table = make_table(["count", "number"])
    for name, count in counts.items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    print_table(make_console(), str(target), table)


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `prepare` wrote.")],
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Read every N-th file, from file I on; N machines divide the work.")
    ] = "0/1",
    as_json: AsJson = False,
) -> None:
    """Compare all files of a folder of tokens with their checksums."""
    from bertblocks.data.tokens import TokenStore

    try:
        files = TokenStore(target, verify=False).verify(parse_shard(shard))
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({"folder": str(target), "files": files, "is_intact": True})
    else:
        echo(f"{target}: {files} files are intact.")
