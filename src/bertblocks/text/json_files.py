"""Records of JSON files: an object per line, or a list of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bertblocks.text.files import BoundedLines, RecordTooLongError, open_file, read_whole
from bertblocks.text.records import BadRecord, DataError, Location, Record, Slice


def read_json_lines(lines: BoundedLines, part: Slice) -> Iterator[Record | BadRecord]:
    """An object or a text per line; blank lines are skipped."""
    while True:
        location = Location(part.path, "line", lines.number + 1, part.start)
        try:
            line = next(lines, None)
        except RecordTooLongError as error:
            yield BadRecord(location, str(error))
            continue
        if line is None:
            return
        if not line.strip():
            continue
        try:
            yield _to_record(json.loads(line), location)
        except ValueError as error:
            yield BadRecord(location, f"the line is not JSON ({error})")
        except RecursionError:
            yield BadRecord(location, "the JSON is nested too deeply")


def _to_record(value: Any, location: Location) -> Record | BadRecord:
    if isinstance(value, (dict, str)):
        return Record(location, value)
    return BadRecord(location, f"{str(value)[:100]} is not an object or a string")


def read_json_list(file: IO[bytes], source: str, encoding: str) -> Iterator[Record | BadRecord]:
    """The objects of a list, which may stand under the key `data`."""
    content = parse_json(read_whole(file, source), source, encoding)
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        raise DataError(
            f"{source}: a .json file must hold a list of objects, or one under 'data'; "
            "a file with an object per line ends with .jsonl."
        )
    for number, value in enumerate(content, start=1):
        yield _to_record(value, Location(source, "record", number))


def load_json(path: Path) -> Any:
    """The value in a JSON file, which may be compressed."""
    with open_file(path) as file:
        return parse_json(read_whole(file, path), str(path))


def parse_json(data: bytes, source: str, encoding: str = "utf-8") -> Any:
    try:
        text = data.decode("utf-8-sig" if encoding == "utf-8" else encoding)
        if not text.strip():
            raise DataError(f"{source}: the file is empty.")
        return json.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{source} line {line}: byte 0x{data[error.start]:02x} is not {encoding.upper()}; save the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{source} line {error.lineno}: the file is not JSON ({error.msg}).") from error
    except RecursionError as error:
        raise DataError(f"{source}: the JSON is nested too deeply.") from error
