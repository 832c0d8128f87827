"""Arguments that say what a corpus is, for the commands that read one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from bertblocks.data.corpus import Corpus

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILES]...",
        help="Files, folders and quoted patterns of .txt, .jsonl, .csv and .parquet, each also with .gz or .zst.",
        show_default=False,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(help="In place of files: a name of the `datasets` library, or NAME:CONFIG.", show_default=False),
]
Docstrings = Annotated[
    bool, typer.Option("--docstrings", help="In place of files: the documentation of Python and its packages.")
]
Column = Annotated[str, typer.Option(help="The column or key that holds the text.")]
Split = Annotated[str, typer.Option(help="The split of a dataset.")]
OnePer = Annotated[
    Literal["paragraph", "line", "file"],
    typer.Option(help="What is one document in a .txt file; blank lines end a paragraph."),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one for each core by default.")]


def choose_corpus(
    files: list[str] | None,
    dataset: str | None,
    docstrings: Path | None,
    column: str,
    split: str,
    one_per: Literal["paragraph", "line", "file"],
    held_out: float,
    workers: int | None,
) -> Corpus:
    """The corpus that the arguments name; docstrings are gathered into the given file."""
    from bertblocks.data.corpus import DatasetCorpus, FileCorpus
    from bertblocks.data.docstrings import docstring_corpus

    if sum(map(bool, (files, dataset, docstrings))) != 1:
        raise ValueError("Give exactly one of FILES, --dataset and --docstrings.")
    if files:
        return FileCorpus(tuple(files), column, one_per, held_out)
    if dataset:
        return DatasetCorpus(dataset, split, column, held_out)
    assert docstrings is not None
    return docstring_corpus(docstrings, held_out, workers)
