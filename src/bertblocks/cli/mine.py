"""`bertblocks mine`: hard negatives for a file of pairs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertblocks.cli.model_options import ModelOptions, OnError, TableOptions
from bertblocks.cli.options import AsJson, with_options
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail

if TYPE_CHECKING:
    from bertblocks.search.mining import MiningSettings


@dataclass(frozen=True)
class NegativeOptions:
    """Which documents are hard negatives of a query."""

    ranks: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Places in the ranking, without the query's positives.")
    ] = "1-100"
    negatives: Annotated[int, typer.Option(min=1, help="Negatives per query.")] = 5
    margin: Annotated[float | None, typer.Option(help="How far below the positive a negative must score.")] = None
    relative_margin: Annotated[
        float | None, typer.Option(help="The same as a share of the positive's score; 0.05 is a good value.")
    ] = None
    max_score: Annotated[float | None, typer.Option(help="The highest score of a negative.")] = None
    min_score: Annotated[float | None, typer.Option(help="The lowest score of a negative.")] = None
    rerank_margin: Annotated[float, typer.Option(help="The margin to the positive by the reranker's scores.")] = 0.0
    sampling: Annotated[Literal["top", "random"], typer.Option(help="Take the best candidates, or random ones.")] = (
        "top"
    )
    seed: Annotated[int, typer.Option(help="Of random sampling.")] = 0

    def to_settings(self) -> MiningSettings:
        from bertblocks.search.mining import MiningError, MiningSettings

        first, _, last = self.ranks.partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            raise MiningError(f"--ranks is {self.ranks!r}; it must be FIRST-LAST, such as 10-100.")
        return MiningSettings(**{**asdict(self), "ranks": (int(first), int(last))})


@with_options
def mine(
    pairs: Annotated[str, typer.Argument(metavar="PAIRS", help="A table of queries and relevant documents.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.jsonl, .csv or .parquet.", show_default=False)],
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Files of documents, or the folder of an index; by default all relevant documents."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The embedder, unless the corpus is an index.")] = None,
    rerank: Annotated[str | None, typer.Option(help="A reranker that rejects documents it finds relevant.")] = None,
    choice: NegativeOptions,
    layout: Annotated[
        Literal["columns", "triplets", "lists"],
        typer.Option(help="negative_1, negative_2, ...; a row per negative; or a list in the column negatives."),
    ] = "columns",
    tables: TableOptions,
    on_error: OnError = "stop",
    running: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Find hard negatives in a corpus. Repeating the command continues it after an interruption."""
    from bertblocks.cli.predict import BadInputs
    from bertblocks.cli.steps import StepBars
    from bertblocks.search.mining import REASONS
    from bertblocks.search.mining_run import mine as run
    from bertblocks.text.inputs import Roles

    try:
        bad = BadInputs(on_error)
        with StepBars() as bars:
            result = run(
                pairs,
                output,
                model=model,
                corpus=corpus or (),
                settings=choice.to_settings(),
                reranker=rerank,
                layout=layout,
                read=tables.reading,
                columns=tables.columns(Roles([("query", "document", "label")])),
                on_bad=bad.add if on_error == "skip" else None,
                on_step=bars.update,
                **running.for_predictor(),
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
