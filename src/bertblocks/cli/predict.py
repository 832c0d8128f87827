"""What the commands that use a model share: texts in, rows or JSON lines out as they come, counts on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.source import fail

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder of any family, or a hub id.")]
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT ... | -]", help="Texts; - reads lines from standard input.")
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Lines of text, or a .jsonl, .json, .csv, .tsv or .parquet table."),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="ROLE=NAME", help="Which column of the file is what, where a guess is wrong."),
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
    file: Path | None
    columns: list[str] | None
    as_json: bool
    int8: bool
    threads: int | None
    too_long: Literal["error", "truncate", "window"]


@dataclass(frozen=True)
class Roles:
    """The columns of a file that make an input: the first set that is there, and what may come beside it."""

    sets: Sequence[Sequence[str]]
    optional: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*(role for group in self.sets for role in group), *self.optional]))


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
            inputs, total = read_inputs(settings, roles)
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


def read_inputs(settings: Settings, roles: Roles) -> tuple[Iterable[Any], int | None]:
    """The inputs and, where it is known, their number."""
    from bertblocks.text.lines import Lines

    texts, file = settings.texts or [], settings.file
    if bool(texts) == (file is not None):
        raise ValueError("Give texts, or --file FILE, or - to read lines from standard input: one of these.")
    given = _read_columns(settings.columns or [], roles)
    if file is None:
        if given:
            raise ValueError("--column goes with --file.")
        return (Lines(None), None) if texts == ["-"] else (texts, len(texts))
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist.")
    if file.suffix in (".csv", ".tsv", ".json", ".parquet"):
        rows = _read_table(file, roles, given)
        return rows, len(rows)
    lines = Lines(file)
    return (_read_json_lines(file, roles, given) if file.suffix == ".jsonl" else lines), lines.count()


def _read_columns(columns: list[str], roles: Roles) -> dict[str, str]:
    from bertblocks.core.registry import nearest

    given = {}
    for column in columns:
        role, _, name = column.partition("=")
        if role not in roles.names or not name:
            hint = nearest(role, roles.names)
            raise ValueError(
                f"--column is {column!r}; it must be ROLE=NAME, a role being {' or '.join(roles.names)}{hint}."
            )
        given[role] = name
    return given


def _read_table(file: Path, roles: Roles, given: Mapping[str, str]) -> list[Any]:
    """Inputs of a table, by columns that are guessed and said; questions also of SQuAD's json."""
    from bertblocks.text.columns import choose_columns, write_columns
    from bertblocks.text.squad import read_squad
    from bertblocks.text.tables import DataError, read_records

    if "question" in roles.names and (questions := read_squad(file)) is not None:
        return [(question.question, question.context) for question in questions]
    records = read_records(file)
    chosen: dict[str, str] = {}
    for group in roles.sets:
        try:
            chosen = choose_columns(records, group, roles.optional, given)
        except DataError:
            if group is roles.sets[-1]:
                raise
            continue
        break
    typer.echo(f"bertblocks: {file}: {write_columns(chosen, records)}", err=True)
    used = [chosen[role] for role in (*group, *roles.optional) if role in chosen]
    return [
        _make_input([row[column] for column in used], records.place(index)) for index, row in enumerate(records.rows)
    ]


def _read_json_lines(file: Path, roles: Roles, given: Mapping[str, str]) -> Iterator[Any]:
    """Inputs as they are read: a string per line, or an object with one of the sets of columns."""
    from bertblocks.text.lines import Lines
    from bertblocks.text.tables import KNOWN_NAMES

    names = {role: [given[role]] if role in given else KNOWN_NAMES[role] for role in roles.names}
    for number, line in enumerate(Lines(file), start=1):
        place = f"{file} line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place} is no valid JSON: {error}.") from error
        if isinstance(value, str):
            yield value
            continue
        if not isinstance(value, dict):
            raise ValueError(f"{place} holds {line[:50]}; it must be a string or an object.")
        found = {role: [value[name] for name in names[role] if name in value][:1] for role in roles.names}
        group = next((group for group in roles.sets if all(found[role] for role in group)), None)
        if group is None:
            wanted = " or ".join(" and ".join(group) for group in roles.sets)
            raise ValueError(f"{place} has the keys {', '.join(value)}; it must have {wanted}.")
        yield _make_input([cell for role in (*group, *roles.optional) for cell in found[role]], place)


def _make_input(values: list[Any], place: str) -> Any:
    """One text, a list of words, or a pair."""
    for value in values:
        is_words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        if not isinstance(value, str) and not is_words:
            raise ValueError(f"{place}: {value!r} is no text.")
    return values[0] if len(values) == 1 else tuple(values)
