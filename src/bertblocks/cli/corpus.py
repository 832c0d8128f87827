"""The arguments of commands that read a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from bertblocks.data.corpus import Corpus

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILES",
        help="Files, folders or patterns of text, jsonl, csv, tsv, json, parquet, arrow or xlsx, or their .gz or .zst.",
        show_default=False,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="Instead of files: a dataset of the `datasets` library, as NAME, NAME:CONFIG, NAME:SPLIT or "
        "NAME:CONFIG:SPLIT.",
        show_default=False,
    ),
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Read the dataset over the network as it is needed, without downloading it.")
]
Docstrings = Annotated[
    bool, typer.Option("--docstrings", help="Instead of files: the docstrings of Python and its packages.")
]
Column = Annotated[str, typer.Option(help="The column or key of the text; a.b is a key of an object.")]
Split = Annotated[str, typer.Option(help="The split of a dataset.")]
OnePer = Annotated[
    Literal["paragraph", "line", "file"],
    typer.Option(help="What a document of a text file is; blank lines end a paragraph."),
]
Read = Annotated[
    list[str] | None,
    typer.Option(
        "--read",
        metavar="KEY=VALUE",
        help="How to read files, where detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="The number of processes; by default one per core.")]


def choose_corpus(
    files: list[str] | None,
    dataset: str | None,
    docstrings: Path | None,
    column: str,
    split: str,
    one_per: Literal["paragraph", "line", "file"],
    held_out: float,
    workers: int | None,
    read: list[str] | None = None,
    stream: bool = False,
) -> Corpus:
    """The corpus that the arguments name. Docstrings are collected into the file `docstrings`."""
    from bertblocks.data.corpus import FileCorpus, dataset_corpus
    from bertblocks.data.docstrings import docstring_corpus
    from bertblocks.text.records import ReadOptions

    if sum(map(bool, (files, dataset, docstrings))) != 1:
        raise ValueError("Give exactly one of FILES, --dataset and --docstrings.")
    if read and not files:
        raise ValueError("--read goes with FILES.")
    if stream and not dataset:
        raise ValueError("--stream goes with --dataset; files are never copied.")
    if files:
        return FileCorpus(tuple(files), column, one_per, held_out, options=ReadOptions.parse(read or []))
    if dataset:
        return dataset_corpus(dataset, split, column, held_out, stream)
    assert docstrings is not None
    return docstring_corpus(docstrings, held_out, workers)
