"""Corpora: documents one by one, from files or from `datasets`, with every bad record counted and named.

A corpus is divided into *shards*, pieces of work of similar size that can be read on their own, in any process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bertblocks.core.registry import nearest
from bertblocks.data.hashing import combine, uniform
from bertblocks.text.readers import KINDS, OnePer, Place, Problem, Record, Slice, cut, read_slice, readable_kind

#: Bytes of a shard, about; a compressed file is never divided.
SHARD_BYTES = 64 * 2**20
#: Rows of a dataset in a shard.
SHARD_ROWS = 20_000
#: Bad records whose place and reason are kept; all are counted.
NAMED = 20


class CorpusError(ValueError):
    """A corpus that cannot be used; says which file and record, what is there, and what would work."""


@dataclass(frozen=True)
class Document:
    """A text, and whether it is kept for evaluation."""

    text: str
    held_out: bool = False


@dataclass
class RecordCounts:
    """How many records were good and bad, and which the first bad ones were."""

    good: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, other: RecordCounts) -> None:
        self.good += other.good
        self.bad += other.bad
        self.named = (self.named + other.named)[:NAMED]

    def count(self, records: Iterable[Document | Problem]) -> Iterator[Document]:
        """The documents among these; problems are counted."""
        for record in records:
            if isinstance(record, Document):
                self.good += 1
                yield record
            else:
                self.bad += record.records
                if len(self.named) < NAMED:
                    self.named.append(str(record))

    def check(self, max_bad_share: float) -> None:
        """Raises if there is no document, or more bad records than allowed."""
        total = self.good + self.bad
        if self.bad > max_bad_share * total:
            named = "; ".join(self.named[:3]) + ("; and so on" if len(self.named) > 3 else "")
            raise CorpusError(
                f"{self.bad:,} of {total:,} records cannot be used, more than max_bad_share = {max_bad_share} allows: "
                f"{named}."
            )
        if not self.good:
            raise CorpusError(f"The corpus has no documents among its {total:,} records.")


class Corpus(ABC):
    """Documents in shards. Which ones are held out is a pure function of their text, or said by a column."""

    column: str
    held_out: float
    held_out_column: str | None

    @abstractmethod
    def shards(self) -> list[Any]:
        """Pieces of work in a fixed order, each a value that JSON can hold."""

    @abstractmethod
    def records(self, shard: Any) -> Iterator[Record | Problem]:
        """What stands in a shard."""

    @abstractmethod
    def describe(self) -> Any:
        """A JSON value that changes when the documents may have changed."""

    def read(self, shard: Any) -> Iterator[Document | Problem]:
        """The documents of a shard and its bad records, in order."""
        for record in self.records(shard):
            yield record if isinstance(record, Problem) else self._document(record)

    def _document(self, record: Record) -> Document | Problem:
        values = record.values if isinstance(record.values, dict) else {self.column: record.values}
        for key in (self.column, *([self.held_out_column] if self.held_out_column else [])):
            if key not in values:
                return Problem(record.place, f"there is no {key!r}{nearest(key, values)}")
        text = values[self.column]
        if text is None or (isinstance(text, str) and not text.strip()):
            return Problem(record.place, "the text is empty")
        if not isinstance(text, str):
            return Problem(record.place, f"{self.column!r} holds {type(text).__name__}, not text")
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return Problem(record.place, "the text is not UTF-8")
        if self.held_out_column is not None:
            return Document(text, bool(values[self.held_out_column]))
        return Document(text, self.held_out > 0 and _fraction(encoded) < self.held_out)

    def documents(self, tally: RecordCounts) -> Iterator[Document]:
        """All of them, in order."""
        for shard in self.shards():
            yield from tally.count(self.read(shard))

    def sample(self, max_bytes: int) -> Iterator[str]:
        """Texts for training a tokenizer: none that is held out, and about `max_bytes` spread over all shards."""
        shards = self.shards()
        for number, shard in enumerate(shards):
            room = max_bytes * (number + 1) // len(shards) - max_bytes * number // len(shards)
            for document in RecordCounts().count(self.read(shard)):
                if room <= 0:
                    break
                if not document.held_out:
                    room -= len(document.text.encode())
                    yield document.text


def _fraction(text: bytes) -> float:
    """A number in [0, 1) that follows from the text, so that copies of a text are on one side."""
    digest = int.from_bytes(blake2b(text.strip(), digest_size=8).digest(), "little")
    return float(uniform(combine("held out", digest))[0])


# ---------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """Files, globs and folders (with everything readable inside).

    Text files hold one document per paragraph (blank lines between them), per line, or per file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "One."}\\n{"text": ""}\\n')
        ...     tally = RecordCounts()
        ...     texts = [document.text for document in FileCorpus((folder,)).documents(tally)]
        >>> texts, tally.bad
        (['One.'], 1)
    """

    files: tuple[str, ...]
    column: str = "text"
    one_per: OnePer = "paragraph"
    held_out: float = 0.0
    held_out_column: str | None = None
    shard_bytes: int = SHARD_BYTES

    def paths(self) -> list[Path]:
        """The files in order; a pattern that matches nothing and a file of another kind are errors."""
        paths: list[Path] = []
        for pattern in self.files:
            paths.extend(_match(pattern))
        return list(dict.fromkeys(paths))

    def shards(self) -> list[list[list[Any]]]:
        shards: list[list[list[Any]]] = [[]]
        room = self.shard_bytes
        for path in self.paths():
            for one in cut(path, self.one_per, self.shard_bytes):
                if shards[-1] and one.size > room:
                    shards.append([])
                    room = self.shard_bytes
                shards[-1].append([one.path, one.start, one.stop, one.size])
                room -= one.size
        return shards

    def records(self, shard: list[list[Any]]) -> Iterator[Record | Problem]:
        for values in shard:
            yield from read_slice(Slice(*values), self.column, self.one_per)

    def describe(self) -> Any:
        stats = [(path, path.stat()) for path in self.paths()]
        return {
            "files": [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "column": self.column,
            "one_per": self.one_per,
            "held_out": self.held_out_column or self.held_out,
        }


def _match(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(one for one in path.rglob("*") if one.is_file() and readable_kind(one))
        if not found:
            raise CorpusError(f"The folder {pattern} holds no {', '.join(KINDS)} file.")
        return found
    if path.is_file():
        if readable_kind(path) is None:
            raise CorpusError(f"{pattern}: the ending is not one of {', '.join(KINDS)}, or these with .gz, .zst.")
        return [path]
    anchor = Path(path.anchor)
    found = sorted(one for one in anchor.glob(str(path.relative_to(anchor))) if one.is_file() and readable_kind(one))
    if not found:
        raise CorpusError(f"{pattern} is no file or folder, and as a pattern it matches no file that can be read.")
    return found


# ---------------------------------------------------------------------- datasets


@dataclass(frozen=True)
class DatasetCorpus(Corpus):
    """A dataset of the `datasets` library, `NAME` or `NAME:CONFIG`; also a folder that it saved."""

    name: str
    split: str = "train"
    column: str = "text"
    held_out: float = 0.0
    held_out_column: str | None = None

    def shards(self) -> list[list[int]]:
        rows = len(_load_dataset(self.name, self.split))
        return [[start, min(start + SHARD_ROWS, rows)] for start in range(0, rows, SHARD_ROWS)]

    def records(self, shard: list[int]) -> Iterator[Record | Problem]:
        dataset = _load_dataset(self.name, self.split)
        if self.column not in dataset.column_names:
            hint = nearest(self.column, dataset.column_names)
            reason = f"there is no column {self.column!r}{hint}"
            yield Problem(Place(self.name, "row", shard[0] + 1), reason, records=shard[1] - shard[0])
            return
        columns = [self.column, *([self.held_out_column] if self.held_out_column else [])]
        for number, row in enumerate(dataset.select_columns(columns).select(range(*shard)), start=shard[0] + 1):
            yield Record(Place(self.name, "row", number), row)

    def describe(self) -> Any:
        return {
            "dataset": _load_dataset(self.name, self.split)._fingerprint,
            "column": self.column,
            "held_out": self.held_out_column or self.held_out,
        }


@lru_cache(maxsize=4)
def _load_dataset(name: str, split: str) -> Any:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    try:
        if Path(name, "state.json").is_file() or Path(name, "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        path, _, config = name.partition(":")
        return datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, KeyError, RuntimeError, HfHubHTTPError) as error:
        raise CorpusError(f"The dataset {name!r} (split {split!r}) cannot be loaded: {error}") from error
