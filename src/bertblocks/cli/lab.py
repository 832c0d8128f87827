"""`bertblocks lab`: studies that compare variants of a recipe and end in a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.lab_mup import check_mup
from bertblocks.cli.options import AsJson
from bertblocks.cli.output import echo, make_console, make_table, print_json, print_table, write_flops
from bertblocks.cli.source import fail

if TYPE_CHECKING:
    from rich.console import Console

    from bertblocks.lab.forecast import Forecast
    from bertblocks.lab.plan import StudyPlan

app = typer.Typer(help="Compare variants of a recipe: equal budgets, several seeds, a verdict.", no_args_is_help=True)
app.command("check-mup")(check_mup)

StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file (.yaml), a study folder, or a shipped study.")
]
Folder = Annotated[
    Path | None, typer.Option("--folder", help="The study's folder. Default: studies/NAME.", show_default=False)
]


@app.callback()
def root() -> None:
    pass


def _read(source: str, folder: Path | None) -> tuple[StudyPlan, Path]:
    from bertblocks.lab.plan import make_plan
    from bertblocks.lab.study import read_study

    plan = make_plan(read_study(source))
    own = Path(source) if (Path(source) / "study.yaml").is_file() else Path("studies") / plan.source.study.name
    return plan, folder or own


@app.command()
def run(
    study: StudyArgument,
    folder: Folder = None,
    on: Annotated[
        Literal["ray"] | None, typer.Option(help="Run trials on a Ray cluster, not in processes of this machine.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a trial. Default: the cores, shared by all trials.")
    ] = None,
) -> None:
    """Run a study, or what is missing of it, and write its report.

    Trials are resumable runs in the study's folder. SIGTERM and Ctrl-C save them and exit with code 128 + the signal's
    number; the same command continues. A finished trial never runs again: more variants or seeds add only theirs.
    """
    from bertblocks.lab.local import run_in_processes
    from bertblocks.lab.ray import run_on_ray
    from bertblocks.lab.run import run_study

    console = make_console()
    try:
        plan, place = _read(study, folder)
        console.print(f"{plan.source.study.name}: {plan.scale}", highlight=False)
        outcome = run_study(plan, place, run_on_ray if on else run_in_processes, threads, console)
    except (OSError, ValueError) as error:
        fail(error)
    if outcome.signal is not None:
        echo("Stopped and saved; run the same command to resume.", err=True)
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        name, line = next(iter(outcome.failed.items()))
        fail(f"{len(outcome.failed)} of the trials failed; run the same command to try them again. {name}: {line}")
    _report(place, console)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study's folder.")],
    as_json: AsJson = False,
) -> None:
    """Write the report of a study, finished or not: a page, and tables as Markdown, LaTeX and CSV."""
    from bertblocks.lab.report import summarize
    from bertblocks.lab.results import StudyResults

    try:
        if as_json:
            print_json(summarize(StudyResults.load(folder)))
        else:
            _report(folder, make_console())
    except (OSError, ValueError) as error:
        fail(error)


def _report(folder: Path, console: Console) -> None:
    """Writes the report and prints the verdicts."""
    from bertblocks.lab.report import compared_with, headline, write_study_report
    from bertblocks.lab.report_tables import comparison_rows, name_of, write_p
    from bertblocks.lab.results import StudyResults
    from bertblocks.lab.statistics.verdicts import judge

    results = StudyResults.load(folder)
    comparisons = judge(results, results.settings["level"])
    page, *_ = write_study_report(results, folder)
    deciding = next(iter(results.measures.values()))
    table = make_table(["variant", "verdict", "difference", "95% interval", "Holm's p"], text_columns=2)
    for row in comparison_rows(results, comparisons):
        if row["measure"] == deciding.name:
            interval = "" if row["low"] is None else f"{row['low']:+.3g} to {row['high']:+.3g}"
            difference = "" if row["difference"] is None else f"{row['difference']:+.3g}"
            p = "" if row["holm_p"] is None else write_p(row["holm_p"])
            table.add_row(name_of(row), row["verdict"], difference, interval, p)
    console.print(f"\n{headline(results, comparisons)}", highlight=False)
    print_table(
        console, f"{deciding.name} ({deciding.unit}) against {compared_with(results)}, at {results.scale}", table
    )
    console.print(f"\nReport: {page}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    study: StudyArgument,
    folder: Folder = None,
    gpu: Annotated[
        str | None, typer.Option(help="Estimate the time on a GPU of this kind, not on this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a study will run: variants within the budget, FLOPs, time, memory, minimum detectable effect."""
    from dataclasses import asdict

    from bertblocks.core.registry import nearest
    from bertblocks.lab.forecast import forecast
    from bertblocks.training.estimate import GPUS

    if gpu is not None and gpu not in GPUS:
        fail(f"--gpu is {gpu!r}; it must be one of {', '.join(GPUS)}{nearest(gpu, GPUS)}.")
    try:
        planned, place = _read(study, folder)
        expected = forecast(planned, place, gpu)
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json({"name": planned.source.study.name, **asdict(expected), "variants": _variants(planned)})
    else:
        _print_plan(planned, expected, gpu)


def _variants(planned: StudyPlan) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        {
            "variant": arm.variant.name,
            "size": arm.size,
            "changes": arm.variant.changes,
            "solved": arm.solved,
            **asdict(arm.cost),
        }
        for arm in planned.arms
    ]


def _print_plan(planned: StudyPlan, expected: Forecast, gpu: str | None) -> None:
    from bertblocks.core.console import write_bytes, write_number, write_seconds

    study, console = planned.source.study, make_console()
    budget = study.budget
    console.print(f"{study.name}: {study.description}".removesuffix(": "), highlight=False)
    table = make_table(["variant", "changes", "parameters", "steps", "tokens", "FLOPs"], text_columns=2)
    for arm in planned.arms:
        changes = [f"{key}={value}" for key, value in arm.variant.changes.items()]
        changes += [f"{key}={value} (solved)" for key, value in arm.solved.items()]
        cost = arm.cost
        numbers = [f"{cost.steps:,}", write_number(cost.tokens), write_flops(cost.flops)]
        if budget.equal == "seconds":  # as many as the time allows
            numbers = ["", "", ""]
        table.add_row(arm.name, "\n".join(changes) or "the recipe", write_number(cost.parameters), *numbers)
    by = "" if budget.equal == "seconds" else f", solved by {budget.solver}"
    print_table(console, f"Variants at equal {budget.equal}{by}", table)
    kind = f"a {gpu} at a quarter of its peak" if gpu else f"this machine, {expected.at_a_time} at a time"
    searches = f" and {study.search.runs * len(planned.arms)} short ones for learning rates" if study.search else ""
    if study.search and study.search.width:
        searches += f" at hidden size {study.search.width}"
    console.print(
        f"\n{len(planned.arms)} x {len(study.seed_list)} trials{searches}, {expected.done} done; "
        f"{write_flops(expected.flops)} FLOPs to go, about {write_seconds(expected.seconds)} on {kind}, "
        f"{write_bytes(expected.memory)} of memory and what the processes themselves take.",
        highlight=False,
    )
    deciding = next(iter(planned.infos.values()))
    effect = f"{expected.effect_in_deviations:.2g} standard deviations of paired differences between seeds"
    if expected.effect is not None:
        effect = f"{expected.effect:.2g} {deciding.unit} ({effect})"
    console.print(
        f"A difference in {deciding.name} of {effect} is found with a power of {study.power:.0%}.", highlight=False
    )


@app.command("list")
def list_studies(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Folders that hold studies. Default: studies.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped studies and those in folders, with their state."""
    from bertblocks.lab.results import STUDY_FILE, StudyResults
    from bertblocks.lab.study import read_study, study_names

    rows = []
    try:
        for name in study_names():
            rows.append({"study": name, "state": "shipped", "description": read_study(name).study.description})
        for folder in folders or [Path("studies")]:
            for file in sorted({*folder.glob(STUDY_FILE), *folder.glob(f"*/{STUDY_FILE}")}):
                results = StudyResults.load(file.parent)
                done, total = len(results.trials), len(results.trials) + len(results.missing)
                state = f"{done} of {total} trials" if total else "begun"
                rows.append({"study": str(file.parent), "state": state, "description": results.description})
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        print_json(rows)
        return
    table = make_table(["study", "state", "description"], text_columns=3)
    for row in rows:
        table.add_row(*row.values())
    print_table(make_console(), "Studies", table)


@app.command()
def archive(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A study's folder.")],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write (.tar.gz).")],
    models: Annotated[bool, typer.Option("--models", help="Include the trained models.")] = False,
) -> None:
    """Pack a study: its file, recipe, tokens, measurements and logs. `lab run DIR` continues an unpacked one."""
    from bertblocks.lab.archive import write_archive

    try:
        files = write_archive(folder, target, models)
    except (OSError, ValueError) as error:
        fail(error)
    echo(f"Wrote {files:,} files to {target}.")
