"""`bertblocks search`: the best documents of an index for queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertblocks.cli.light_imports import without_unused
from bertblocks.cli.model_options import ModelOptions, TableOptions
from bertblocks.cli.options import with_options
from bertblocks.cli.output import make_console, make_table, print_table, to_json_line
from bertblocks.cli.source import fail
from bertblocks.core.log import logger
from bertblocks.core.messages import shorten

if TYPE_CHECKING:
    from bertblocks.search.documents import Hit

#: Queries that are searched at once.
BATCH_QUERIES = 32
#: Characters of a document in the table; --json has all of them.
SHOWN_TEXT = 160


@with_options
def search(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an index.")],
    queries: Annotated[list[str] | None, typer.Argument(metavar="QUERY", help="What to search for.")] = None,
    *,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", help="Queries from lines of text or a table. May be repeated."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Documents per query.")] = 10,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Fuse the rankings of dense and sparse vectors by reciprocal rank.")
    ] = False,
    only_sparse: Annotated[bool, typer.Option("--only-sparse", help="Search sparse vectors only.")] = False,
    rerank: Annotated[str | None, typer.Option(help="A reranker that orders the best documents again.")] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Documents for fusion and for the reranker.")] = 100,
    exact: Annotated[bool, typer.Option("--exact", help="Search a large index exactly too.")] = False,
    model: Annotated[str | None, typer.Option(help="Where the index's embedder is now, if it moved.")] = None,
    sparse: Annotated[str | None, typer.Option(help="Where its sparse encoder is now, if it moved.")] = None,
    tables: TableOptions,
    running: ModelOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per query.")] = False,
) -> None:
    """Find the best documents for each query in an index that `bertblocks index` made."""
    with without_unused():
        from bertblocks.search.index import SearchIndex

    try:
        if hybrid and only_sparse:
            raise ValueError("--hybrid and --only-sparse exclude each other.")
        texts = _get_queries(queries or [], file or [], tables)
        index = SearchIndex.open(folder, model=model, sparse=sparse, **running.for_predictor())
        while batch := list(islice(texts, BATCH_QUERIES)):
            found = index.search(
                batch,
                top_k=top_k,
                mode="hybrid" if hybrid else "sparse" if only_sparse else None,
                exact=exact,
                rerank=rerank,
                candidates=candidates,
            )
            for query, hits in zip(batch, found, strict=True):
                _print_hits(query, hits, as_json)
    except (OSError, ValueError) as error:
        fail(error)


def _get_queries(queries: list[str], files: list[str], tables: TableOptions) -> Iterator[str]:
    from bertblocks.text.inputs import Roles, read_inputs

    if bool(queries) == bool(files):
        raise ValueError("Give either queries or --file FILE.")
    if queries:
        return iter(queries)
    roles = Roles([("query",)])
    inputs = read_inputs(files, roles, tables.columns(roles), tables.reading)
    for note in inputs.notes:
        logger.info(note)
    return (record.value for record in inputs)


def _print_hits(query: str, hits: Iterable[Hit], as_json: bool) -> None:
    if as_json:
        ranked: list[dict[str, Any]] = [
            {"rank": rank, "id": hit.id, "score": round(hit.score, 7), "text": hit.text, "columns": hit.columns}
            for rank, hit in enumerate(hits, start=1)
        ]
        print(to_json_line({"query": query, "hits": ranked}), flush=True)
        return
    table = make_table(["score", "id", "text"], text_columns=3)
    for hit in hits:
        table.add_row(f"{hit.score:.4f}", shorten(hit.id, 40), shorten(" ".join(hit.text.split()), SHOWN_TEXT))
    print_table(make_console(), query, table)
