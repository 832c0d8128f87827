"""`bertblocks evaluate`: score models and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertblocks.cli.options import AsJson
from bertblocks.cli.output import echo, make_console, make_table, print_json, print_table
from bertblocks.cli.settings import read_settings
from bertblocks.cli.source import fail

Kind = Literal[
    "classify",
    "tag",
    "answer",
    "embed",
    "rerank",
    "sparse",
    "multi",
    "pppl",
    "needle",
    "beir",
    "glue",
    "superglue",
    "swag",
    "xtreme",
    "winogender",
    "mmlu",
]
#: Suites by name: the function that runs them, whether they fine-tune, and the title of their table.
SUITES = {
    "glue": ("bertblocks.evaluation.glue:run_glue", True, "GLUE, development sets"),
    "superglue": ("bertblocks.evaluation.superglue:run_superglue", True, "SuperGLUE, validation sets"),
    "swag": ("bertblocks.evaluation.swag:run_swag", True, "SWAG, validation set"),
    "xtreme": ("bertblocks.evaluation.xtreme:run_xtreme", True, "XTREME, mean over languages"),
    "winogender": ("bertblocks.evaluation.winogender:run_winogender", False, "Winogender"),
    "mmlu": ("bertblocks.evaluation.mmlu:run_mmlu", False, "MMLU, masked language models"),
}


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|KEY=VALUE",
            help="Checkpoint folders or hub ids, compared with the first of them; and settings.",
        ),
    ],
    task: Annotated[Kind, typer.Option(help="The task to measure.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples as for finetune; texts for pppl (lines of .txt, or a table with a text column) and, as "
            "filler, for needle; a folder in the format of BEIR; the folder of a suite's files, or GLUE's name for "
            "datasets."
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Run the models with int8 linear layers.")] = False,
    precisions: Annotated[
        bool, typer.Option("--precisions", help="Also score embeddings that are stored as float16, int8 and bits.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for report.html, with the predictions and the scores that it shows."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score models and compare them.

    Several models are compared with the first on the same examples, with a paired bootstrap.

    Settings of tasks that finetune has too are those of `bertblocks finetune TASK list` that say how a file is read.
    needle takes lengths=[512,1024], depths=[0,0.5,1] and samples=20. The suites glue, superglue, swag and xtreme
    fine-tune the model first; they take tasks=[rte,cb], output=FOLDER and settings of finetune, and all but glue take
    train=false. xtreme takes languages=[de,sw] and split=dev. winogender and mmlu need a masked-LM head;
    mmlu takes shots=5, score=text and subjects=[anatomy].

    beir ranks documents with embedders, sparse and multi-vector encoders, rerankers of what first=MODEL finds, models
    joined by + (reciprocal rank fusion), or run files. It takes split=test, metrics=[ndcg@10,recall@100],
    candidates=100, ignore_identical_ids=true, and output=FOLDER for run files.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = [argument for argument in models if "=" not in argument]
    try:
        settings = read_settings(
            [argument for argument in models if "=" in argument],
            None if task in SUITES or task == "needle" else task,
        )
        if not names:
            fail("MODEL is missing; give at least one model.")
        if int8 and (task in SUITES or task == "needle"):
            fail(f"--int8 works with tasks on files, not with {task}.")
        if precisions and task != "embed":
            fail(f"--precisions works with embed, not with {task}.")
        if report is not None:
            _prepare_report(report)
        if task == "needle":
            _needle(names, data, settings, as_json, report)
        elif data is None and task != "glue":
            fail(f"--data is missing; {task} needs a {'folder' if task in SUITES or task == 'beir' else 'file'}.")
        elif task in SUITES:
            _suite(task, names, data, settings, as_json, report)
        elif data is not None:
            _files(task, names, data, int8, precisions, settings, as_json, report)
    except (OSError, ValueError, TypeError) as error:
        fail(error)


def _prepare_report(folder: Path) -> None:
    """Ends the command before its work if the page could not be written."""
    from bertblocks.core.requirements import require_packages
    from bertblocks.evaluation.record import require_record_folder

    require_packages(["vl_convert"], "--report")
    require_record_folder(folder)


def _record(folder: Path, values: dict[str, Any], data: str | None, predictions: Sequence[list[Any]] = ()) -> None:
    from bertblocks.evaluation.record import record_evaluation

    echo(f"Report: {record_evaluation(folder, values, predictions, data)}", err=True)


def _files(
    task: str,
    names: list[str],
    data: str,
    int8: bool,
    precisions: bool,
    settings: dict[str, Any],
    as_json: bool,
    report: Path | None,
) -> None:
    from bertblocks.evaluation.beir import evaluate_beir
    from bertblocks.evaluation.evaluate import compare
    from bertblocks.evaluation.evaluate import evaluate as run

    if task == "beir":
        done = evaluate_beir(names, data, int8, progress=True, **settings)
    else:
        done = [run(task, name, data, int8, precisions, **settings) for name in names]
    differences = compare(done)
    scores: list[dict[str, Any]] = [
        {"model": result.model, "examples": result.examples, "scores": result.scores} for result in done
    ]
    for entry, result in zip(scores, done, strict=True):
        if result.precisions:
            entry["precisions"] = result.precisions
    values: dict[str, Any] = {"metric": done[0].metric, "models": scores}
    values["differences"] = [asdict(difference) for difference in differences]
    if report is not None:
        _record(report, {"task": task, "data": data, **values}, data, [result.predictions for result in done])
    if as_json:
        print_json(values)
        return
    console = make_console()
    table = make_table(["model", *done[0].scores])
    for result in done:
        table.add_row(result.model, *(f"{value:.4f}" for value in result.scores.values()))
    print_table(console, f"{data}: {done[0].examples:,} {'queries' if task == 'beir' else 'examples'}", table)
    for result in done if precisions else ():
        table = make_table(["stored as", *result.scores, f"{result.metric} kept"])
        for precision, own in result.precisions.items():
            kept = own[result.metric] / result.scores[result.metric]
            table.add_row(precision, *(f"{value:.4f}" for value in own.values()), f"{100 * kept:.1f} %")
        print_table(console, f"{result.model}: precisions of vectors", table)
    if differences:
        table = make_table(["model", "difference", "from", "to"])
        for other in differences:
            table.add_row(other.model, *(f"{value:+.4f}" for value in (other.difference, other.low, other.high)))
        print_table(console, f"{done[0].metric} against {names[0]}, with 95 % intervals", table)


def _needle(names: list[str], data: str | None, settings: dict[str, Any], as_json: bool, report: Path | None) -> None:
    from bertblocks.evaluation.evaluate import needle

    lengths, depths = settings.pop("lengths", [128, 256, 512]), settings.pop("depths", [0, 0.25, 0.5, 0.75, 1])
    samples = settings.pop("samples", 20)
    if settings:
        fail(f"{next(iter(settings))!r} is not a setting of needle; its settings are lengths, depths and samples.")
    done = {name: needle(name, lengths, depths, samples, data) for name in names}
    values = {name: {**asdict(result), "accuracy": result.accuracy.tolist()} for name, result in done.items()}
    if report is not None:
        _record(report, {"task": "needle", "needle": values}, data)
    if as_json:
        print_json(values)
        return
    console = make_console()
    for name, result in done.items():
        table = make_table(["length", *(f"depth {depth:g}" for depth in result.depths)])
        for length, row in zip(result.lengths, result.accuracy, strict=True):
            table.add_row(f"{length:,}", *(f"{value:.2f}" for value in row))
        print_table(console, f"{name}: facts found (by chance {result.chance:.2f})", table)


def _suite(
    task: str, names: list[str], data: str | None, settings: dict[str, Any], as_json: bool, report: Path | None
) -> None:
    from importlib import import_module

    from bertblocks.evaluation.suite import SuiteResult, mean_score

    target, finetunes, title = SUITES[task]
    module, _, function = target.partition(":")
    run = getattr(import_module(module), function)
    output = settings.pop("output", f"runs/{task}") if finetunes else None
    if data is not None:
        settings["data"] = data
    done: dict[str, list[SuiteResult]] = {}
    for name in names:
        extra = {"output": f"{output}/{name.strip('/').replace('/', '-')}", "progress": True} if finetunes else {}
        done[name] = run(name, **extra, **settings)
    lists = {name: [asdict(result) for result in results] for name, results in done.items()}
    models = [{"model": name, "mean": mean_score(done[name]), "tasks": tasks} for name, tasks in lists.items()]
    if report is not None:
        _record(report, {"task": task, "suite": title, "models": models}, data)
    if as_json:
        print_json(lists if task == "glue" else {"models": models})
        return
    console = make_console()
    has_mean = sum(result.in_mean for result in done[names[0]]) > 1
    table = make_table(["model", *(result.task for result in done[names[0]]), *(["mean"] if has_mean else [])])
    for name, results in done.items():
        means = [mean_score(results)] if has_mean else []
        table.add_row(name, *(f"{score:.1f}" for score in [*(result.score for result in results), *means]))
    print_table(console, title, table)
    for name, results in done.items():
        for result in filter(lambda result: result.parts, results):
            metrics = list(dict.fromkeys(metric for scores in result.parts.values() for metric in scores))
            table = make_table(["part", *metrics])
            for part, scores in result.parts.items():
                table.add_row(part, *(_written(scores[metric]) if metric in scores else "" for metric in metrics))
            print_table(console, f"{name}: {result.task}", table)


def _written(score: float) -> str:
    """A score, or a count, which is a whole number."""
    return f"{score:,}" if isinstance(score, int) else f"{score:.4f}"
