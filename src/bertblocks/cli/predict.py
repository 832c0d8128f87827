"""The commands that apply a model to texts: shared options, inputs, and results printed as they are computed."""

from __future__ import annotations

import functools
import inspect
import itertools
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.cells import cell_len, set_cell_size

from bertblocks.cli.light_imports import without_unused
from bertblocks.cli.model_options import (
    FILES_HELP,
    Column,
    Device,
    DType,
    Int8,
    ModelOptions,
    OnError,
    Read,
    TableOptions,
    Threads,
)
from bertblocks.cli.options import field_parameters, set_parameters, take_fields
from bertblocks.cli.output import to_json_line
from bertblocks.cli.source import fail
from bertblocks.core.console import printable
from bertblocks.core.log import logger
from bertblocks.text.inputs import InputRecord, Roles, read_inputs

if TYPE_CHECKING:
    from bertblocks.cli.result_file import ResultFile
    from bertblocks.tasks.predictor import Predictor


@dataclass(frozen=True)
class PredictOptions:
    """The arguments and options that all of these commands share."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder of any family, or a hub id.")]
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; - reads lines from standard input.")
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            "-f",
            help=f"{FILES_HELP}. May be a folder or a quoted pattern, and may be repeated.",
        ),
    ] = None
    read: Read = None
    column: Column = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False
    int8: Int8 = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write results and the input's columns to FILE.jsonl, .csv, .parquet or .npy (embeddings only); an "
            "interrupted command resumes when run again.",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many inputs.")] = None
    on_error: OnError = "stop"
    device: Device = None
    dtype: DType = None
    threads: Threads = None
    too_long: Annotated[
        Literal["error", "truncate", "window"] | None,
        typer.Option(
            "--too-long",
            help="How to handle texts beyond the model's length: error, truncate (default of rerank and multi), or "
            "overlapping windows (default of all others).",
        ),
    ] = None


#: How many inputs that cannot be used are shown when they are skipped.
SHOWN_PROBLEMS = 10

#: The cells of one line of the printed table; the last may be long.
Row = Sequence[str]
#: Inputs and, if it is known, their number.
Input = tuple[Iterable[InputRecord], int | None]


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
    #: Reads the inputs, for commands whose arguments or files are not single texts.
    read: Callable[[PredictOptions, Roles, BadInputs], Input] | None = None
    #: Gets the predictor before the first result, for commands that show its tokens.
    on_open: Callable[[Predictor], None] = field(default=lambda predictor: None)


def predict_command(define: Callable[..., Prediction], texts: Any = None) -> Callable[..., None]:
    """Turns a function from a command's own options to its `Prediction` into a command with the shared options.

    typer builds options from signatures, so the command gets a signature with the fields of `PredictOptions`: the
    arguments first, then the command's own options, then the shared ones. `texts` replaces the type and help of the
    texts.
    """
    own = inspect.signature(define, eval_str=True).parameters.values()
    shared = field_parameters(PredictOptions)
    if texts is not None:
        shared = [entry.replace(annotation=texts) if entry.name == "texts" else entry for entry in shared]
    parameters = [*shared[:3], *(entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own), *shared[3:]]

    @functools.wraps(define)
    def command(**values: Any) -> None:
        options = take_fields(PredictOptions, values)
        _predict(options, define(**values))

    set_parameters(command, parameters)
    return command


def _predict(options: PredictOptions, prediction: Prediction) -> None:
    """Runs the predictor over the inputs, and prints or stores each result as soon as it is computed."""
    try:
        bad = BadInputs(options.on_error)
        records, total = (prediction.read or get_inputs)(options, prediction.roles, bad)
        file = _open_output(options, prediction) if options.output else None
        predictor = _open(options)
        prediction.on_open(predictor)
        done = file.done if file else 0
        if options.limit is not None:
            total = options.limit if total is None else min(total, options.limit)
        pending: deque[tuple[InputRecord, Any]] = deque()
        results = predictor.stream(
            prediction.method,
            _remember(itertools.islice(records, done, options.limit), pending, prediction.make_input),
            # a bar and rows on the same terminal would overwrite each other
            progress=sys.stderr.isatty() and (file is not None or not sys.stdout.isatty()),
            total=None if total is None else max(total - done, 0),
            return_exceptions=True,
            **(prediction.options if file is None else file.stream_options(prediction.options)),
        )
        if not options.as_json and file is None:
            _print_row(list(prediction.header), prediction.header)
        for index, result in enumerate(results, start=done):
            record, item = pending.popleft()
            if isinstance(result, Exception):
                bad.add(f"{record.location}: {result}" if record.location else str(result))
            elif file is not None:
                file.add(index, _make_record(index, record, prediction.to_json(item, result)))
            elif options.as_json:
                values = _make_record(index, record, prediction.to_json(item, result))
                print(to_json_line(values, digits=7), flush=True)
            else:
                for row in prediction.to_rows(item, result):
                    _print_row(row, prediction.header)
        logger.info(f"{predictor.stats}, {predictor.precision}, threads: {predictor.threads}")
        if bad.count:
            logger.warning(f"{bad.count:,} inputs were skipped")
        if file is not None:
            logger.info(f"{file.finish():,} results are in {options.output}")
    except (OSError, ValueError) as error:
        fail(error)


@dataclass
class BadInputs:
    """Inputs that cannot be used: the first ends the command, or all are counted and the first few are shown."""

    on_error: Literal["stop", "skip"]
    count: int = 0

    def add(self, problem: object) -> None:
        if self.on_error == "stop":
            raise ValueError(str(problem))
        self.count += 1
        if self.count <= SHOWN_PROBLEMS:
            logger.warning(f"skipped: {problem}")


def _make_record(index: int, record: InputRecord, values: dict[str, Any]) -> dict[str, Any]:
    """Joins an input's location, its other columns and its result; a column with the name of a result is renamed."""
    values = {"location": record.location or f"input {index + 1}", **values}
    columns = {
        f"input_{name}" if name in values else name: value
        for name, value in record.columns.items()
        if not (name in values and isinstance(value, str) and value == values[name])
    }
    return {"location": values.pop("location"), **columns, **values}


def _open_output(options: PredictOptions, prediction: Prediction) -> ResultFile:
    from bertblocks.cli.result_file import ResultFile

    assert options.output is not None
    if options.output.suffix.lower() == ".npy" and prediction.method != "encode":
        raise ValueError(f"--output is {options.output}; a .npy file holds embeddings only.")
    changeable = ("output", "as_json", "threads", "on_error", "limit")
    shared = {name: value for name, value in asdict(options).items() if name not in changeable}
    return ResultFile(options.output, {"method": prediction.method, **prediction.options, **shared})


def _open(options: PredictOptions) -> Predictor:
    with without_unused():
        from bertblocks.tasks.predictor import Predictor

    model = ModelOptions(options.device, options.dtype, options.int8, options.threads)
    return Predictor(options.model, too_long=options.too_long, **model.for_predictor())


def _remember(
    records: Iterable[InputRecord], pending: deque[tuple[InputRecord, Any]], make_input: Callable[[Any], Any]
) -> Iterator[Any]:
    """Keeps inputs until their results are there."""
    for record in records:
        item = make_input(record.value)
        pending.append((record, item))
        yield item


def _print_row(row: Row, header: Mapping[str, int]) -> None:
    *cells, last = row
    widths = list(header.values())
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    line = printable(f"{line}  {' '.join(last.split())}" if cells else last)
    if sys.stdout.isatty():
        line = set_cell_size(line, min(cell_len(line), shutil.get_terminal_size().columns))
    print(line.rstrip(), flush=True)


# ---------------------------------------------------------------------- inputs


def get_inputs(options: PredictOptions, roles: Roles, bad: BadInputs) -> Input:
    """Reads texts from arguments, standard input or files."""
    from bertblocks.text.lines import Lines

    texts, files = options.texts or [], options.file or []
    if bool(texts) == bool(files):
        raise ValueError("Give either texts, or --file FILE, or - to read lines from standard input.")
    if not files:
        for option, values in (("--column", options.column), ("--read", options.read)):
            if values:
                raise ValueError(f"{option} requires --file.")
        if texts == ["-"]:
            return (InputRecord(text, "") for text in Lines(None)), None
        return (InputRecord(text, "") for text in texts), len(texts)
    return read_files(options, roles, bad)


def read_files(options: PredictOptions, roles: Roles, bad: BadInputs) -> Input:
    """Reads inputs from the files of the command."""
    tables = TableOptions(options.column, options.read)
    on_bad = bad.add if options.on_error == "skip" else None
    inputs = read_inputs(options.file or [], roles, tables.columns(roles), tables.reading, on_bad)
    for note in inputs.notes:
        logger.info(note)
    return inputs, inputs.total
