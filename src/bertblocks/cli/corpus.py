"""The arguments of commands that read a corpus."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class CorpusOptions:
    """Where texts come from and how files are read."""

    dataset: Annotated[
        str | None,
        typer.Option(
            help="Instead of files: a dataset of the `datasets` library, as NAME, NAME:CONFIG, NAME:SPLIT or "
            "NAME:CONFIG:SPLIT.",
            show_default=False,
        ),
    ] = None
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Read the dataset over the network as it is needed, without downloading it."),
    ] = False
    docstrings: Annotated[
        bool, typer.Option("--docstrings", help="Instead of files: the docstrings of Python and its packages.")
    ] = False
    column: Annotated[str, typer.Option(help="The column or key of the text; a.b is a key of an object.")] = "text"
    split: Annotated[str, typer.Option(help="The split of a dataset.")] = "train"
    one_per: Annotated[
        Literal["paragraph", "line", "file"],
        typer.Option(help="What a document of a text file is; blank lines end a paragraph."),
    ] = "paragraph"
    read: Annotated[
        list[str] | None,
        typer.Option(
            "--read",
            metavar="KEY=VALUE",
            help="How to read files, where detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
        ),
    ] = None
    workers: Annotated[int | None, typer.Option(min=1, help="The number of processes; by default one per core.")] = None

    def open(self, files: list[str] | None, cache: Path, held_out: float = 0.0) -> Corpus:
        """The corpus that the arguments name. Docstrings are collected into the file `cache`."""
        from bertblocks.data.corpus import FileCorpus, dataset_corpus
        from bertblocks.data.docstrings import docstring_corpus
        from bertblocks.text.records import ReadOptions

        if sum(map(bool, (files, self.dataset, self.docstrings))) != 1:
            raise ValueError("Give exactly one of FILES, --dataset and --docstrings.")
        if self.read and not files:
            raise ValueError("--read goes with FILES.")
        if self.stream and not self.dataset:
            raise ValueError("--stream goes with --dataset; files are never copied.")
        if files:
            options = ReadOptions.parse(self.read or [])
            return FileCorpus(tuple(files), self.column, self.one_per, held_out, options=options)
        if self.dataset:
            return dataset_corpus(self.dataset, self.split, self.column, held_out, self.stream)
        return docstring_corpus(cache, held_out, self.workers)
