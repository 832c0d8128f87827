"""Corpora: documents one by one, from files or from `datasets`, with every bad record counted and named.

A corpus is divided into *shards* of similar size, which any process can read on their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bertblocks.core.addresses import is_address, open_filesystem
from bertblocks.core.registry import nearest
from bertblocks.data.hashing import combine, uniform
from bertblocks.text.files import find_sources, format_by_name, unknown_ending
from bertblocks.text.hub_datasets import dataset_errors, is_saved_dataset, load_dataset, stream_dataset
from bertblocks.text.readers import TextUnit, cut, open_records
from bertblocks.text.records import BadRecord, DataError, Location, ReadOptions, Record, Slice, find_key, get_value

#: The approximate size of a shard. A compressed file is never divided.
SHARD_BYTES = 64 * 2**20
#: Rows of a dataset in a shard.
SHARD_ROWS = 20_000
#: How far the last document of a shard may exceed the sample for a tokenizer, in bytes.
SAMPLE_EXCESS = 2**16
#: Bad records whose location and reason are kept; all are counted.
NAMED = 20


@dataclass(frozen=True)
class Document:
    """A text, and whether it is held out for evaluation."""

    text: str
    held_out: bool = False


@dataclass(frozen=True)
class Duplicate:
    """A document that is left out because it is nearly the same as an earlier one."""


@dataclass
class RecordCounts:
    """How many records are good, bad and duplicates, and which the first bad ones are."""

    good: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    duplicates: int = 0

    def add(self, other: RecordCounts) -> None:
        self.good += other.good
        self.bad += other.bad
        self.duplicates += other.duplicates
        self.named = (self.named + other.named)[:NAMED]

    def count(self, records: Iterable[Document | BadRecord | Duplicate]) -> Iterator[Document]:
        """Yields the documents and counts all records."""
        for record in records:
            if isinstance(record, Document):
                self.good += 1
                yield record
            elif isinstance(record, Duplicate):
                self.duplicates += 1
            else:
                self.bad += record.records
                if len(self.named) < NAMED:
                    self.named.append(str(record))

    def check(self, max_bad_share: float, source: str) -> None:
        """Raises if `source` has no document, or more bad records than allowed."""
        total = self.good + self.bad
        if self.bad > max_bad_share * total:
            named = "; ".join(self.named[:3]) + ("; and so on" if len(self.named) > 3 else "")
            raise DataError(
                f"{self.bad:,} of {total:,} records cannot be used, more than max_bad_share = {max_bad_share} allows: "
                f"{named}."
            )
        if not self.good:
            reason = f": {self.named[0]}" if self.named else ""
            raise DataError(f"{source}: there are no documents among {total:,} records{reason}.")


class Corpus(ABC):
    """Documents in shards. Their text alone decides whether they are held out, or a column says so."""

    column: str
    held_out: float
    held_out_column: str | None

    @abstractmethod
    def shards(self) -> list[Any]:
        """The shards in a fixed order, each a JSON value."""

    @abstractmethod
    def records(self, shard: Any) -> Iterator[Record | BadRecord]:
        """The records of a shard."""

    @abstractmethod
    def name_source(self) -> str:
        """The files or the dataset, for error messages."""

    @abstractmethod
    def describe(self) -> Any:
        """A JSON value that changes when the documents may have changed."""

    def read(self, shard: Any) -> Iterator[Document | BadRecord | Duplicate]:
        """The documents of a shard and its bad records, in order."""
        for record in self.records(shard):
            yield record if isinstance(record, BadRecord) else self._document(record)

    def _document(self, record: Record) -> Document | BadRecord:
        values = record.values if isinstance(record.values, dict) else {self.column: record.values}
        try:
            text = get_value(values, self.column)
            held_out = bool(get_value(values, self.held_out_column)) if self.held_out_column else None
        except KeyError as error:
            key = str(error.args[0])
            return BadRecord(record.location, f"there is no {key!r}{nearest(key, values)}")
        if text is None or (isinstance(text, str) and not text.strip()):
            return BadRecord(record.location, "the text is empty")
        if not isinstance(text, str):
            return BadRecord(record.location, f"{self.column!r} holds {type(text).__name__}, not text")
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            return BadRecord(record.location, "the text is not UTF-8")
        if held_out is None:
            held_out = self.held_out > 0 and _fraction(encoded) < self.held_out
        return Document(text, held_out)

    def documents(self, counts: RecordCounts) -> Iterator[Document]:
        """All documents in order."""
        for shard in self.shards():
            yield from counts.count(self.read(shard))

    def sample(self, max_bytes: int) -> Iterator[str]:
        """About `max_bytes` of texts for training a tokenizer, spread over all shards; none of them is held out."""
        shards = self.shards()
        counts = RecordCounts()
        for number, shard in enumerate(shards):
            room = max_bytes * (number + 1) // len(shards) - max_bytes * number // len(shards)
            for document in counts.count(self.read(shard)):
                if room <= 0:
                    break
                if not document.held_out:
                    encoded = document.text.encode()[: room + SAMPLE_EXCESS]
                    room -= len(encoded)
                    yield encoded.decode(errors="ignore")
        counts.check(1.0, self.name_source())


def _fraction(text: bytes) -> float:
    """A number in [0, 1) that depends only on the text, so that all copies of a text are on the same side."""
    digest = int.from_bytes(blake2b(text.strip(), digest_size=8).digest(), "little")
    return float(uniform(combine("held out", digest))[0])


# ---------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileCorpus(Corpus):
    """Files, glob patterns, folders with all readable files inside, and addresses such as `s3://bucket/*.jsonl`.

    `one_per` says what a document of a text file is: a paragraph (blank lines end it), a line, or the file.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "One."}\\n{"text": ""}\\n')
        ...     counts = RecordCounts()
        ...     texts = [document.text for document in FileCorpus((folder,)).documents(counts)]
        >>> texts, counts.bad
        (['One.'], 1)
    """

    files: tuple[str, ...]
    column: str = "text"
    one_per: TextUnit = "paragraph"
    held_out: float = 0.0
    held_out_column: str | None = None
    shard_bytes: int = SHARD_BYTES
    options: ReadOptions = field(default_factory=ReadOptions)

    def sources(self) -> list[str]:
        """The files and addresses in order. A missing file and a file in an unknown format are errors."""
        sources = find_sources(self.files)
        for source in sources:
            if not is_address(source) and not Path(source).is_file():
                raise DataError(f"{source} is a pipe, and a corpus is read more than once; save it to a file first.")
            if self.options.format is None and format_by_name(Path(source)) is None:
                raise unknown_ending(Path(source))
        return sources

    def shards(self) -> list[list[list[Any]]]:
        shards: list[list[list[Any]]] = [[]]
        room = self.shard_bytes
        for source in self.sources():
            for part in _cut(source, self.one_per, self.shard_bytes):
                if shards[-1] and part.size > room:
                    shards.append([])
                    room = self.shard_bytes
                shards[-1].append([part.path, part.start, part.stop, part.size])
                room -= part.size
        return shards

    def records(self, shard: list[list[Any]]) -> Iterator[Record | BadRecord]:
        header = True if self.options.header is None else self.options.header
        options = replace(self.options, header=header, encoding=self.options.encoding or "utf-8")
        for values in shard:
            part = Slice(*values)
            yield from open_records(part, options, self.one_per, strict=False, needed=self.column).records

    def name_source(self) -> str:
        return ", ".join(self.files[:3]) + (" and more" if len(self.files) > 3 else "")

    def describe(self) -> Any:
        described = {
            "files": [_describe_file(source) for source in self.sources()],
            "column": self.column,
            "one_per": self.one_per,
            "held_out": self.held_out_column or self.held_out,
        }
        return described if self.options == ReadOptions() else described | {"options": asdict(self.options)}


def _cut(source: str, unit: TextUnit, slice_bytes: int) -> list[Slice]:
    """Slices of a file. One at an address is read as a whole."""
    if not is_address(source):
        return cut(Path(source), unit, slice_bytes)
    system, path = open_filesystem(source)
    return [Slice(source, 0, None, int(system.size(path) or 0))]


def _describe_file(source: str) -> list[Any]:
    if is_address(source):
        system, path = open_filesystem(source)
        return [source, system.size(path), system.ukey(path)]
    stat = Path(source).stat()
    return [source, stat.st_size, stat.st_mtime_ns]


# ---------------------------------------------------------------------- datasets


@dataclass(frozen=True)
class DatasetCorpus(Corpus):
    """A dataset of the `datasets` library, named as in `load_dataset`; also a folder that it saved."""

    name: str
    split: str = "train"
    column: str = "text"
    held_out: float = 0.0
    held_out_column: str | None = None

    def shards(self) -> list[Any]:
        rows = len(load_dataset(self.name, self.split))
        return [[start, min(start + SHARD_ROWS, rows)] for start in range(0, rows, SHARD_ROWS)]

    def records(self, shard: Any) -> Iterator[Record | BadRecord]:
        dataset = load_dataset(self.name, self.split)
        names = dataset.column_names
        needed = [self.column, *([self.held_out_column] if self.held_out_column else [])]
        columns = [find_key(name, names) or find_key(name.split(".")[0], names) for name in needed]
        for name, column in zip(needed, columns, strict=True):
            if column is None:
                reason = f"there is no column {name!r}{nearest(name, names)}"
                yield BadRecord(Location(self.name, "row", shard[0] + 1), reason, records=shard[1] - shard[0])
                return
        for number, row in enumerate(dataset.select_columns(columns).select(range(*shard)), start=shard[0] + 1):
            yield Record(Location(self.name, "row", number), row)

    def name_source(self) -> str:
        return f"The dataset {self.name}"

    def describe(self) -> Any:
        return {
            "dataset": self._version(),
            "column": self.column,
            "held_out": self.held_out_column or self.held_out,
        }

    def _version(self) -> Any:
        return load_dataset(self.name, self.split)._fingerprint


class StreamedCorpus(DatasetCorpus):
    """A dataset that is read over the network as it is needed. Each file of the dataset is a shard."""

    def shards(self) -> list[Any]:
        dataset, _ = stream_dataset(self.name, self.split)
        return list(range(dataset.num_shards))

    def records(self, shard: Any) -> Iterator[Record | BadRecord]:
        dataset, _ = stream_dataset(self.name, self.split)
        with dataset_errors(self.name):
            for number, row in enumerate(dataset.shard(dataset.num_shards, shard), start=1):
                yield Record(Location(f"{self.name} file {shard + 1}", "row", number), row)

    def _version(self) -> Any:
        return stream_dataset(self.name, self.split)[1]


def dataset_corpus(name: str, split: str, column: str, held_out: float, is_streamed: bool) -> Corpus:
    """A dataset, downloaded or streamed. A folder that `datasets` saved is on this machine already."""
    kind = StreamedCorpus if is_streamed and not is_saved_dataset(name.split(":")[0]) else DatasetCorpus
    return kind(name, split, column, held_out)


@dataclass(frozen=True)
class CorpusPart(Corpus):
    """Some shards of a corpus, by their numbers."""

    whole: Corpus
    numbers: tuple[int, ...]

    def shards(self) -> list[Any]:
        shards = self.whole.shards()
        return [shards[number] for number in self.numbers]

    def records(self, shard: Any) -> Iterator[Record | BadRecord]:
        return self.whole.records(shard)

    def read(self, shard: Any) -> Iterator[Document | BadRecord | Duplicate]:
        return self.whole.read(shard)

    def name_source(self) -> str:
        return self.whole.name_source()

    def describe(self) -> Any:
        return {"whole": self.whole.describe(), "shards": self.numbers}
