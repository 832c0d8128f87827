"""Inputs of a predictor from files of every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from bertblocks.text.arrow import count_parquet
from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.files import bad_characters, find_sources, format_by_name, is_compressed
from bertblocks.text.headers import KNOWN_NAMES
from bertblocks.text.lines import Lines
from bertblocks.text.readers import RecordStream, open_records
from bertblocks.text.records import BadRecord, DataError, ReadOptions, Record, Slice, find_key, get_value
from bertblocks.text.squad import read_squad
from bertblocks.text.tables import Records

#: Records that decide which column of a table has which role.
SAMPLE_RECORDS = 1000


@dataclass(frozen=True)
class Roles:
    """The columns that make an input: the first set that a file has, and optional ones."""

    sets: Sequence[Sequence[str]]
    optional: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*(role for group in self.sets for role in group), *self.optional]))


@dataclass(frozen=True)
class InputRecord:
    """An input (a text, a list of words, or a tuple of texts), its location, and all columns of its record."""

    value: Any
    location: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """Inputs as they are read; `total` is their number where it is known without reading them.

    `notes` say how each file is read and which columns are used; a file's note is there once its first input is.
    """

    records: Iterator[InputRecord]
    total: int | None
    notes: list[str]

    def __iter__(self) -> Iterator[InputRecord]:
        return self.records


def read_inputs(
    files: Sequence[str | Path],
    roles: Roles,
    columns: Mapping[str, str] | None = None,
    options: ReadOptions | None = None,
    on_bad: Callable[[BadRecord], None] | None = None,
) -> Inputs:
    """Reads inputs from files, folders, glob patterns and pipes, one by one.

    `columns` names the column of a role where a guess would be wrong, and `options` what is detected otherwise. A file
    whose format neither its ending nor its content tells has a text per line. A record that cannot be used is passed
    to `on_bad` and skipped; without `on_bad` it raises `DataError`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "texts.csv"
        ...     _ = path.write_text("id;review\\n7;fine, really\\n")
        ...     inputs = list(read_inputs([path], Roles([("text",)])))
        >>> inputs[0].value, inputs[0].columns["id"]
        ('fine, really', '7')
    """
    sources = find_sources(files)
    notes: list[str] = []
    reader = _Reader(roles, dict(columns or {}), options or ReadOptions(), notes)
    # the first input is read now, so that its notes and errors come before a model is loaded
    records = _report_bad(reader.read(sources), on_bad)
    first = list(islice(records, 1))
    return Inputs(chain(first, records), count_rows(sources, reader.options), notes)


def _report_bad(
    rows: Iterable[InputRecord | BadRecord | None], on_bad: Callable[[BadRecord], None] | None
) -> Iterator[InputRecord]:
    for row in rows:
        if isinstance(row, InputRecord):
            yield row
        elif isinstance(row, BadRecord):
            if on_bad is None:
                raise DataError(f"{row}.")
            on_bad(row)


def read_rows(
    sources: Sequence[str],
    roles: Roles,
    columns: Mapping[str, str] | None = None,
    options: ReadOptions | None = None,
    wanted: Callable[[int], bool] = lambda number: True,
    notes: list[str] | None = None,
) -> Iterator[InputRecord | BadRecord | None]:
    """Yields all rows of files, also those that cannot be used, so that their numbers depend on the files alone.

    A row whose number, counted from 0, is not `wanted` is None, without a look at its content. `notes` receives those
    of `Inputs`.
    """
    reader = _Reader(roles, dict(columns or {}), options or ReadOptions(), [] if notes is None else notes)
    return reader.read(sources, wanted)


def count_rows(sources: Iterable[str], options: ReadOptions) -> int | None:
    """The number of rows where it is known without parsing the files."""
    counts = [_count(source, options) for source in sources]
    return None if None in counts else sum(count for count in counts if count is not None)


def _count(source: str, options: ReadOptions) -> int | None:
    path = Path(source)
    form = options.format or format_by_name(path)
    if form == "parquet" and path.is_file() and not is_compressed(path):
        return count_parquet(path)
    return Lines(path).count() if form in ("text", "jsonl") and path.is_file() else None


@dataclass(frozen=True)
class _Reader:
    roles: Roles
    given: dict[str, str]
    options: ReadOptions
    notes: list[str]

    def read(
        self, sources: Iterable[str], wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[InputRecord | BadRecord | None]:
        numbers = count()
        for source in sources:
            questions = read_squad(source) if "question" in self.roles.names else None
            if questions is not None:
                for question in questions:
                    values = {"id": question.id, "question": question.question, "context": question.context}
                    row = InputRecord((question.question, question.context), question.place, values)
                    yield row if wanted(next(numbers)) else None
                continue
            stream = open_records(Slice(source), self.options, keep_blank=True, expected=self.given.values())
            records, choose = self._open_stream(stream)
            for record in records:
                if not wanted(next(numbers)):
                    yield None
                elif isinstance(record, BadRecord):
                    yield record
                else:
                    yield _make_input(record, choose)

    def _open_stream(self, stream: RecordStream) -> tuple[Iterator[Record | BadRecord], Callable[[Record], list[Any]]]:
        """The records of a file, and what finds the values of an input in one of them."""
        records = stream.records
        if stream.format in ("text", "jsonl"):
            if format_by_name(Path(stream.path)) is None and self.options.format is None:
                self.notes.append(f"{stream.path}: read as {stream.format}; name another format with format=csv")
            return records, self._choose_keys
        sample = list(islice(records, SAMPLE_RECORDS))
        good = [_values(record) for record in sample if isinstance(record, Record)]
        if not sample:
            raise DataError(f"{stream.path}: the file has no records.")
        if not good and len(sample) == SAMPLE_RECORDS:
            raise DataError(f"{sample[0]}; none of the first {SAMPLE_RECORDS:,} records can be used.")
        used = self._choose_columns(stream, good) if good else []
        return chain(sample, records), lambda record: [get_value(_values(record), column) for column in used]

    def _choose_columns(self, stream: RecordStream, rows: list[dict[str, Any]]) -> list[str]:
        """The columns of a table, by its first rows."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        sample = Records(
            stream.path,
            names,
            [{name: row.get(name) for name in names} for row in rows],
            [0] * len(rows),
            has_header=stream.has_header,
            details=stream.details,
        )
        for group in self.roles.sets:
            try:
                chosen = choose_columns(sample, group, self.roles.optional, self.given)
            except DataError:
                if group is self.roles.sets[-1]:
                    raise
                continue
            break
        self.notes.append(f"{stream.path}: {write_columns(chosen, sample)}")
        return [chosen[role] for role in (*group, *self.roles.optional) if role in chosen]

    def _choose_keys(self, record: Record) -> list[Any]:
        """The values of an object by given or well-known names, because objects of a file may differ."""
        values = _values(record)
        found = {role: self._find_value(values, role) for role in self.roles.names}
        group = next((group for group in self.roles.sets if all(found[role] for role in group)), None)
        if group is None:
            named = [" and ".join(self.given.get(role, role) for role in group) for group in self.roles.sets]
            raise DataError(f"the keys are {', '.join(values)}; {' or '.join(named)} must be among them")
        return [value for role in (*group, *self.roles.optional) for value in found[role]]

    def _find_value(self, values: dict[str, Any], role: str) -> list[Any]:
        """The value of a role in a list, which is empty if there is none."""
        if role in self.given:
            try:
                return [get_value(values, self.given[role])]
            except KeyError:
                return []
        keys = (find_key(name, values) for name in KNOWN_NAMES[role])
        return [values[key] for key in keys if key is not None][:1]


def _make_input(record: Record, choose: Callable[[Record], list[Any]]) -> InputRecord | BadRecord:
    try:
        values = [record.values] if isinstance(record.values, str) else choose(record)
    except KeyError as error:
        return BadRecord(record.location, f"there is no {error.args[0]!r}")
    except DataError as error:
        return BadRecord(record.location, str(error))
    problem = next(filter(None, map(_find_problem, values)), None)
    if problem:
        return BadRecord(record.location, problem)
    columns = record.values if isinstance(record.values, dict) else {}
    return InputRecord(values[0] if len(values) == 1 else tuple(values), str(record.location), columns)


def _values(record: Record) -> dict[str, Any]:
    return record.values if isinstance(record.values, dict) else {"text": record.values}


def _find_problem(value: Any) -> str | None:
    """Why a value is neither a text nor a list of words."""
    if isinstance(value, str):
        return None if value.isascii() else bad_characters(value)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return f"{str(value)[:100]} is not a text"
    return next(filter(None, map(bad_characters, value)), None)
