"""`bertblocks report`: the page of a run, or of several next to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertblocks.cli.output import echo
from bertblocks.cli.source import fail


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs: of finetune, pretrain or evaluate.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. Default: report.html in the run, or runs.html here."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Write the page of a run that is going once, instead of until it ends.")
    ] = False,
) -> None:
    """Write the page of a run again, or one page of several runs with the settings in which they differ.

    The page is made from the files of the runs. While a run is going, it is written every ten seconds, and the browser
    shows the new one by itself; Ctrl-C ends this and leaves the run alone.
    """
    import time

    from bertblocks.reports.report import REFRESH_SECONDS, write_report
    from bertblocks.reports.runs import read_run

    target = output or (None if len(runs) == 1 else Path("runs.html"))
    try:
        while True:
            found = [read_run(folder) for folder in runs]
            path = write_report(found, target)
            is_going = any(run.state == "running" for run in found)
            if once or not is_going:
                break
            echo(f"{path}: step {max((run.last_step for run in found), default=0):,}", err=True)
            time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        fail(error)
    echo(f"Report: {path}")
