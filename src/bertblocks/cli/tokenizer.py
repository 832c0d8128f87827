"""`bertblocks tokenizer`: trains tokenizers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from bertblocks.cli.corpus import (
    Column,
    Dataset,
    Docstrings,
    Files,
    OnePer,
    Read,
    Split,
    Stream,
    Workers,
    choose_corpus,
)
from bertblocks.cli.output import echo
from bertblocks.cli.source import fail

app = typer.Typer(help="Train tokenizers.", no_args_is_help=True)


@app.callback()
def root() -> None:
    pass


@app.command()
def train(
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write. It must be new or empty.")],
    files: Files = None,
    dataset: Dataset = None,
    stream: Stream = False,
    docstrings: Docstrings = False,
    kind: Annotated[
        Literal["wordpiece", "bpe"], typer.Option(help="WordPiece as in BERT's uncased models, or byte-level BPE.")
    ] = ("wordpiece"),
    vocab_size: Annotated[int, typer.Option(min=16, help="The number of entries, including special tokens.")] = 30_000,
    column: Column = "text",
    split: Split = "train",
    one_per: OnePer = "paragraph",
    read: Read = None,
    max_megabytes: Annotated[
        int, typer.Option(min=1, help="How much text to use at most, spread over the corpus.")
    ] = 32,
    workers: Workers = None,
) -> None:
    """Train a tokenizer on a corpus and write it for `AutoTokenizer`."""
    from bertblocks.core.storage import atomic_folder, require_new_folder
    from bertblocks.text.tokenizer_training import train_tokenizer
    from bertblocks.text.tokenizers import save_tokenizer

    with TemporaryDirectory() as folder:
        cache = Path(folder, "docstrings.jsonl") if docstrings else None
        try:
            corpus = choose_corpus(files, dataset, cache, column, split, one_per, 0.0, workers, read, stream)
            require_new_folder(target)
            tokenizer = train_tokenizer(kind, vocab_size, corpus.sample(max_megabytes * 10**6))
            with atomic_folder(target) as scratch:
                save_tokenizer(tokenizer, scratch)
        except (OSError, ValueError) as error:
            fail(error)
    echo(f"{target}: a {kind} tokenizer of {len(tokenizer):,} entries.")
