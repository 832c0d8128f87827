"""`bertblocks tokenizer`: trains tokenizers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from bertblocks.cli.corpus import CorpusOptions, Files
from bertblocks.cli.options import with_options
from bertblocks.cli.output import echo
from bertblocks.cli.source import fail

app = typer.Typer(help="Train tokenizers.", no_args_is_help=True)


@app.callback()
def root() -> None:
    pass


@app.command()
@with_options
def train(
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write. It must be new or empty.")],
    files: Files = None,
    *,
    source: CorpusOptions,
    kind: Annotated[
        Literal["wordpiece", "bpe"], typer.Option(help="WordPiece as in BERT's uncased models, or byte-level BPE.")
    ] = ("wordpiece"),
    vocab_size: Annotated[int, typer.Option(min=16, help="The number of entries, including special tokens.")] = 30_000,
    max_megabytes: Annotated[
        int, typer.Option(min=1, help="How much text to use at most, spread over the corpus.")
    ] = 32,
) -> None:
    """Train a tokenizer on a corpus and write it for `AutoTokenizer`."""
    from bertblocks.core.storage import atomic_folder, require_new_folder
    from bertblocks.text.tokenizer_training import train_tokenizer
    from bertblocks.text.tokenizers import save_tokenizer

    with TemporaryDirectory() as folder:
        try:
            corpus = source.open(files, Path(folder, "docstrings.jsonl"))
            require_new_folder(target)
            tokenizer = train_tokenizer(kind, vocab_size, corpus.sample(max_megabytes * 10**6))
            with atomic_folder(target) as scratch:
                save_tokenizer(tokenizer, scratch)
        except (OSError, ValueError) as error:
            fail(error)
    echo(f"{target}: a {kind} tokenizer of {len(tokenizer):,} entries.")
