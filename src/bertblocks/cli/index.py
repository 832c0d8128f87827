"""`bertblocks index`: documents on disk, ready to be searched."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertblocks.cli.model_options import FILES_HELP, ModelOptions, OnError, TableOptions
from bertblocks.cli.options import AsJson, with_options
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail
from bertblocks.core.log import logger


@dataclass(frozen=True)
class VectorOptions:
    """What an index keeps of its documents."""

    precision: Annotated[
        Literal["float32", "float16", "int8", "binary"] | None,
        typer.Option(help="The numbers that vectors are stored with; by default float32."),
    ] = None
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep this many leading dimensions.")] = None
    query_prompt: Annotated[str | None, typer.Option(help="Instead of the model's prompt for queries.")] = None
    document_prompt: Annotated[str | None, typer.Option(help="Instead of the model's prompt for documents.")] = None
    too_long: Annotated[
        Literal["error", "truncate", "window"] | None,
        typer.Option("--too-long", help="Texts beyond the model's length; by default windows are averaged."),
    ] = None
    sparse_terms: Annotated[int | None, typer.Option(min=1, help="Keep a document's heaviest terms only.")] = None
    approximate_from: Annotated[
        int | None, typer.Option(min=1, help="Documents from which on search is approximate; by default 200,000.")
    ] = None


@with_options
def index(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES",
            help=f"{FILES_HELP}; folders and patterns too.",
            show_default=False,
        ),
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder of the index.", show_default=False)
    ],
    model: Annotated[str | None, typer.Option(help="An embedder: a checkpoint folder or a hub id.")] = None,
    sparse: Annotated[str | None, typer.Option(help="A sparse encoder, instead of the embedder or with it.")] = None,
    vectors: VectorOptions,
    remove: Annotated[list[str] | None, typer.Option("--remove", metavar="ID", help="Remove a document.")] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="Write ids, texts, vectors and other columns.")
    ] = None,
    tables: TableOptions,
    on_error: OnError = "stop",
    running: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Make an index of documents, or change it. Repeating a command continues it after an interruption.

    A document with the id of another replaces it. A record without an id column gets its id from its content.
    """
    from bertblocks.cli.predict import BadInputs
    from bertblocks.cli.steps import StepBars
    from bertblocks.search.documents import read_documents
    from bertblocks.search.export import export_index
    from bertblocks.search.index import Changes, SearchIndex
    from bertblocks.text.inputs import Roles

    try:
        if not files and not remove and export is None:
            raise ValueError("Give FILES to index, --remove ID or --export FILE.parquet.")
        given = {name: value for name, value in asdict(vectors).items() if value is not None}
        bad = BadInputs(on_error)
        on_bad = bad.add if on_error == "skip" else None
        columns = tables.columns(Roles([("text", "id")]))
        documents = None
        if files:
            documents = read_documents(files, columns, tables.reading, on_bad)
            for note in documents.notes:
                logger.info(note)
        opened = SearchIndex.create(output, model=model, sparse=sparse, settings=given, **running.for_predictor())
        changes = Changes()
        with StepBars() as bars:
            if documents is not None:
                changes = opened.add(documents, on_bad=on_bad, on_step=bars.update)
        if remove:
            opened.remove(remove)
        exported = None if export is None else export_index(opened, export)
    except (OSError, ValueError) as error:
        fail(error)
    counts = {**asdict(changes), "skipped": bad.count, "removed": len(remove or []), "documents": len(opened)}
    if as_json:
        print_json({"folder": str(output), **counts, "exported": exported})
    else:
        _print_counts(output, counts, {} if exported is None else {f"in {export}": exported})


def _print_counts(folder: Path, counts: dict[str, int], others: dict[str, int]) -> None:
    table = make_table(["documents", "number"])
    rows = {name: count for name, count in counts.items() if count and name != "documents"}
    for name, count in {**rows, "in the index": counts["documents"], **others}.items():
        table.add_row(name, f"{count:,}")
    print_table(make_console(), str(folder), table)
