"""`bertblocks mine`: hard negatives for a file of pairs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertblocks.cli.model_options import Column, Device, DType, Int8, OnError, Read, Threads, predictor_options
from bertblocks.cli.options import AsJson
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail


def mine(
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A table of queries and relevant documents.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="FILE.jsonl, .csv or .parquet.", show_default=False)
    ] = ...,  # type: ignore[assignment]
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Files of documents, or the folder of an index; by default all relevant documents."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The embedder, unless the corpus is an index.")] = None,
    ranks: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Places in the ranking, without the query's positives.")
    ] = "1-100",
    negatives: Annotated[int, typer.Option(min=1, help="Negatives per query.")] = 5,
    margin: Annotated[float | None, typer.Option(help="How far below the positive a negative must score.")] = None,
    relative_margin: Annotated[
        float | None, typer.Option(help="The same as a share of the positive's score; 0.05 is a good value.")
    ] = None,
    max_score: Annotated[float | None, typer.Option(help="The highest score of a negative.")] = None,
    min_score: Annotated[float | None, typer.Option(help="The lowest score of a negative.")] = None,
    rerank: Annotated[str | None, typer.Option(help="A reranker that rejects documents it finds relevant.")] = None,
    rerank_margin: Annotated[float, typer.Option(help="The margin to the positive by the reranker's scores.")] = 0.0,
    sampling: Annotated[
        Literal["top", "random"], typer.Option(help="Take the best candidates, or random ones.")
    ] = "top",
    seed: Annotated[int, typer.Option(help="Of random sampling.")] = 0,
    layout: Annotated[
        Literal["columns", "triplets", "lists"],
        typer.Option(help="negative_1, negative_2, ...; a row per negative; or a list in the column negatives."),
    ] = "columns",
    column: Column = None,
    read: Read = None,
    on_error: OnError = "stop",
    device: Device = None,
    dtype: DType = None,
    int8: Int8 = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Find hard negatives in a corpus. Repeating the command continues it after an interruption."""
    from bertblocks.cli.predict import BadInputs, parse_columns
    from bertblocks.cli.steps import StepBars
    from bertblocks.search.mining import REASONS, MiningError, MiningSettings
    from bertblocks.search.mining_run import mine as run
    from bertblocks.text.inputs import Roles
    from bertblocks.text.records import ReadOptions

    try:
        first, _, last = ranks.partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            raise MiningError(f"--ranks is {ranks!r}; it must be FIRST-LAST, such as 10-100.")
        settings = MiningSettings(
            (int(first), int(last)),
            negatives,
            margin,
            relative_margin,
            max_score,
            min_score,
            rerank_margin,
            sampling,
            seed,
        )
        bad = BadInputs(on_error)
        with StepBars() as bars:
            result = run(
                pairs,
                output,
                model=model,
                corpus=corpus or (),
                settings=settings,
                reranker=rerank,
                layout=layout,
                read=ReadOptions.parse(read or []),
                columns=parse_columns(column or [], Roles([("query", "document", "label")])),
                on_bad=bad.add if on_error == "skip" else None,
                on_step=bars.update,
                **predictor_options(device, dtype, int8, threads),
            )
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({**asdict(result), "output": str(result.output), "skipped": bad.count})
        return
    total = sum(result.rejected.values()) + result.negatives
    table = make_table(["candidate", "number", "share"])
    table.add_row("is a negative", f"{result.negatives:,}", f"{result.negatives / total:.1%}")
    for reason in REASONS:
        if count := result.rejected.get(reason):
            table.add_row(reason, f"{count:,}", f"{count / total:.1%}")
    title = (
        f"{output}: {result.rows:,} rows, {result.queries:,} queries, {result.without_negatives:,} without a negative"
    )
    print_table(make_console(), title, table)
