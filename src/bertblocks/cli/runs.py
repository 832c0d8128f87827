"""`bertblocks runs`: a table of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertblocks.cli.options import AsJson
from bertblocks.cli.output import make_console, make_table, print_json, print_table
from bertblocks.cli.source import fail


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Folders that hold runs. Default: runs.")
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a csv table.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table, for booktabs.")] = False,
) -> None:
    """List runs with their tasks, the settings in which they differ, scores, speeds and states."""
    from bertblocks.reports.run_table import run_rows, write_cells, write_csv, write_latex
    from bertblocks.reports.runs import find_runs

    if as_json + as_csv + as_latex > 1:
        fail("Give only one of --json, --csv and --latex.")
    try:
        rows = run_rows(find_runs(folders or [Path("runs")]))
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json(rows)
    elif as_csv:
        typer.echo(write_csv(rows), nl=False)
    elif as_latex:
        typer.echo(write_latex(rows), nl=False)
    elif not rows:
        fail(f"There are no runs in {', '.join(map(str, folders or [Path('runs')]))}.")
    else:
        columns, cells = write_cells(rows)
        table = make_table(columns, text_columns=3)
        for line in cells:
            table.add_row(*line)
        print_table(make_console(), f"{len(rows)} runs", table)
