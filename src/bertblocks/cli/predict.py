"""The commands that apply a model to texts: shared options, inputs, and results printed as they are computed."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys
import typing
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.source import fail
from bertblocks.core.log import logger
from bertblocks.text.inputs import Roles

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


@dataclass(frozen=True)
class PredictOptions:
    """The arguments and options that all of these commands share."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder of any family, or a hub id.")]
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT ... | -]", help="Texts; - reads lines from standard input.")
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            help="Lines of text, or a csv, tsv, jsonl, json, parquet, arrow or xlsx table, also with .gz or .zst. "
            "May be a folder or a quoted pattern, and may be repeated.",
        ),
    ] = None
    read: Annotated[
        list[str] | None,
        typer.Option(
            "--read",
            metavar="KEY=VALUE",
            help="How to read a file, if detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
        ),
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="ROLE=NAME", help="The column of a role, if the guess is wrong; a.b is a nested key."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False
    int8: Annotated[bool, typer.Option("--int8", help="Run linear layers in int8: faster, slightly less exact.")] = (
        False
    )
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the model; by default what suits the machine.")
    ] = None
    too_long: Annotated[
        Literal["error", "truncate", "window"],
        typer.Option("--too-long", help="How to handle texts beyond the model's length; windows overlap."),
    ] = "window"


#: The cells of one line of the printed table; the last may be long.
Row = Sequence[str]


@dataclass(frozen=True)
class Prediction:
    """What a command computes and how it shows a result."""

    #: A method of the predictor, and its options.
    method: str
    options: dict[str, Any]
    roles: Roles
    #: The columns of the printed table and their widths.
    header: Mapping[str, int]
    #: The lines of the table for an input and its result.
    to_rows: Callable[[Any, Any], Iterable[Row]]
    #: The JSON object for an input and its result.
    to_json: Callable[[Any, Any], dict[str, Any]]
    #: Makes the predictor's input from a text or the cells of a file.
    make_input: Callable[[Any], Any] = field(default=lambda item: item)


def predict_command(define: Callable[..., Prediction]) -> Callable[..., None]:
    """Turns a function from a command's own options to its `Prediction` into a command with the shared options.

    typer builds options from signatures, so the command gets a signature with the fields of `PredictOptions`: the
    arguments first, then the command's own options, then the shared ones.
    """
    own = inspect.signature(define, eval_str=True).parameters.values()
    types = typing.get_type_hints(PredictOptions, include_extras=True)
    shared = [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if entry.name == "model" else entry.default,
            annotation=types[entry.name],
        )
        for entry in fields(PredictOptions)
    ]
    parameters = [*shared[:3], *(entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own), *shared[3:]]

    @functools.wraps(define)
    def command(**values: Any) -> None:
        options = PredictOptions(**{entry.name: values.pop(entry.name) for entry in shared})
        _predict(options, define(**values))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return command


def _predict(options: PredictOptions, prediction: Prediction) -> None:
    """Runs the predictor over the inputs and prints each result as soon as it is computed."""
    try:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", UserWarning)
            inputs, total = get_inputs(options, prediction.roles)
            predictor = _open(options)
        for note in dict.fromkeys(str(note.message) for note in notes if note.category is UserWarning):
            logger.warning(note)
        # a bar and rows on the same terminal would overwrite each other
        progress = sys.stderr.isatty() and not sys.stdout.isatty()
        pending: deque[Any] = deque()
        results = predictor.stream(
            prediction.method,
            _remember(inputs, pending, prediction.make_input),
            progress=progress,
            total=total,
            **prediction.options,
        )
        if not options.as_json:
            _print_row(list(prediction.header), prediction.header)
        for result in results:
            item = pending.popleft()
            if options.as_json:
                print(json.dumps(prediction.to_json(item, result), ensure_ascii=False), flush=True)
                continue
            for row in prediction.to_rows(item, result):
                _print_row(row, prediction.header)
        logger.info(f"{predictor.stats}, {predictor.precision}, threads: {predictor.threads}")
    except (OSError, ValueError) as error:
        fail(error)


def _open(options: PredictOptions) -> Predictor:
    import transformers

    from bertblocks.tasks.predictor import Predictor

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Predictor(options.model, int8=options.int8, threads=options.threads, too_long=options.too_long)


def _remember(inputs: Iterable[Any], pending: deque[Any], make_input: Callable[[Any], Any]) -> Iterator[Any]:
    """Keeps inputs until their results are printed."""
    for item in inputs:
        made = make_input(item)
        pending.append(made)
        yield made


def _print_row(row: Row, header: Mapping[str, int]) -> None:
    *cells, last = row
    widths = list(header.values())
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    line = f"{line}  {' '.join(last.split())}" if cells else last
    if sys.stdout.isatty():
        line = line[: shutil.get_terminal_size().columns]
    print(line.rstrip(), flush=True)


# ---------------------------------------------------------------------- inputs


def get_inputs(options: PredictOptions, roles: Roles) -> tuple[Iterable[Any], int | None]:
    """Returns the inputs and, if it is known, their number."""
    from bertblocks.text.inputs import read_inputs
    from bertblocks.text.lines import Lines
    from bertblocks.text.records import ReadOptions

    texts, files = options.texts or [], options.file or []
    if bool(texts) == bool(files):
        raise ValueError("Give either texts, or --file FILE, or - to read lines from standard input.")
    columns = _parse_columns(options.column or [], roles)
    if not files:
        for option, values in (("--column", options.column), ("--read", options.read)):
            if values:
                raise ValueError(f"{option} requires --file.")
        return (Lines(None), None) if texts == ["-"] else (texts, len(texts))
    inputs = read_inputs(files, roles, columns, ReadOptions.parse(options.read or []))
    for note in inputs.notes:
        logger.info(note)
    return (record.value for record in inputs), inputs.total


def _parse_columns(columns: list[str], roles: Roles) -> dict[str, str]:
    from bertblocks.core.registry import nearest

    given = {}
    for column in columns:
        role, _, name = column.partition("=")
        if role not in roles.names or not name:
            hint = nearest(role, roles.names)
            raise ValueError(
                f"--column is {column!r}; it must be ROLE=NAME, where the role is {' or '.join(roles.names)}{hint}."
            )
        given[role] = name
    return given
