"""What the commands that use a model share: texts in, rows or JSON lines out as they come, counts on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.source import fail
from bertblocks.text.inputs import Roles

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder of any family, or a hub id.")]
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT ... | -]", help="Texts; - reads lines from standard input.")
]
File = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        help="Lines of text, or a csv, tsv, jsonl, json, parquet, arrow or xlsx table, also with .gz or .zst. It may "
        "be a folder or a quoted pattern, and there may be several.",
    ),
]
Read = Annotated[
    list[str] | None,
    typer.Option(
        "--read",
        metavar="KEY=VALUE",
        help="How to read a file, where detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="ROLE=NAME", help="The column of a role, where a guess is wrong; a.b is a key of an object."
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print a JSON object per line and nothing else.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Run with int8 linear layers: faster, and slightly rounded.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the model; by default what suits the machine.")]
TooLongOption = Annotated[
    Literal["error", "truncate", "window"],
    typer.Option("--too-long", help="What becomes of texts beyond the model's length: windows overlap and are merged."),
]


@dataclass(frozen=True)
class Settings:
    """The options that all of these commands have."""

    model: str
    texts: list[str] | None
    files: list[str] | None
    columns: list[str] | None
    as_json: bool
    int8: bool
    threads: int | None
    too_long: Literal["error", "truncate", "window"]
    read: list[str] | None = None


#: A row of the printed table: its cells, the last of which may be long.
Row = Sequence[str]


def predict(
    settings: Settings,
    method: str,
    roles: Roles,
    header: Mapping[str, int],
    write_rows: Callable[[Any, Any], Iterable[Row]],
    write_json: Callable[[Any, Any], dict[str, Any]],
    change: Callable[[Any], Any] = lambda item: item,
    **options: Any,
) -> None:
    """Runs a method of the predictor over the inputs and prints each result when it is there.

    `header` gives the columns of the printed table and their widths; `change` makes a predictor's input of a text.
    """
    try:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", UserWarning)
            inputs, total = get_inputs(settings, roles)
            predictor = _open(settings)
        for note in dict.fromkeys(str(note.message) for note in notes if note.category is UserWarning):
            typer.echo(f"bertblocks: note: {note}", err=True)
        # a bar and rows on one terminal would overwrite each other
        progress = sys.stderr.isatty() and not sys.stdout.isatty()
        taken: deque[Any] = deque()
        results = predictor.stream(method, _remember(inputs, taken, change), progress=progress, total=total, **options)
        if not settings.as_json:
            _print_row(list(header), header)
        for result in results:
            item = taken.popleft()
            if settings.as_json:
                print(json.dumps(write_json(item, result), ensure_ascii=False), flush=True)
                continue
            for row in write_rows(item, result):
                _print_row(row, header)
        typer.echo(f"bertblocks: {predictor.meter}, {predictor.numbers}, threads: {predictor.threads}", err=True)
    except (OSError, ValueError) as error:
        fail(error)


def _open(settings: Settings) -> Predictor:
    import transformers

    from bertblocks.tasks.predictor import Predictor

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return Predictor(settings.model, int8=settings.int8, threads=settings.threads, too_long=settings.too_long)


def _remember(inputs: Iterable[Any], taken: deque[Any], change: Callable[[Any], Any]) -> Iterator[Any]:
    """Keeps inputs until their results are printed beside them."""
    for item in inputs:
        changed = change(item)
        taken.append(changed)
        yield changed


def _print_row(row: Row, header: Mapping[str, int]) -> None:
    *cells, last = row
    widths = list(header.values())
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
    line = f"{line}  {' '.join(last.split())}" if cells else last
    if sys.stdout.isatty():
        line = line[: shutil.get_terminal_size().columns]
    print(line.rstrip(), flush=True)


# ---------------------------------------------------------------------- inputs


def get_inputs(settings: Settings, roles: Roles) -> tuple[Iterable[Any], int | None]:
    """The inputs and, where it is known, their number."""
    from bertblocks.text.inputs import read_inputs
    from bertblocks.text.lines import Lines
    from bertblocks.text.records import ReadOptions

    texts, files = settings.texts or [], settings.files or []
    if bool(texts) == bool(files):
        raise ValueError("Give texts, or --file FILE, or - to read lines from standard input: one of these.")
    columns = _parse_columns(settings.columns or [], roles)
    if not files:
        for option, values in (("--column", settings.columns), ("--read", settings.read)):
            if values:
                raise ValueError(f"{option} goes with --file.")
        return (Lines(None), None) if texts == ["-"] else (texts, len(texts))
    inputs = read_inputs(files, roles, columns, ReadOptions.parse(settings.read or []))
    for note in inputs.notes:
        typer.echo(f"bertblocks: {note}", err=True)
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
