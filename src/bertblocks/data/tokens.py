"""Tokenized documents on disk. Opening them takes the same time and memory whatever their number.

The ids are in shards. For training and for held-out documents apart, two files of numbers say how long each document is
and where it starts in its shard. A document is found by its number: the shard by bisection, the rest by its place in
these files, which are read where they are needed and never as a whole.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.addresses import is_address, open_filesystem
from bertblocks.core.storage import atomic_file, read_json, write_json

#: The file that marks a folder as complete and describes its contents, and that of the tokenizer.
INFO, TOKENIZER = "tokens.json", "tokenizer.json"
#: In the local folder of a store that is elsewhere, the file with its address.
ORIGIN = "origin.json"
#: The environment variable with the folder for files of stores that are elsewhere. Default: ~/.cache/bertblocks.
CACHE = "BERTBLOCKS_CACHE"
#: An entry for each document of a shard, in order: its first id, counted in ids from the start of the file.
DOCUMENT = np.dtype([("start", "<u8"), ("length", "<u4"), ("held_out", "?")])
SPLITS = ("train", "held_out")
LENGTH, START = np.dtype("<u4"), np.dtype("<u8")
#: The names of files with the numbers of chunks in blocks of documents begin with this.
BLOCKS = "chunks-"
#: Shards that stay mapped into memory. Others are mapped again when they are needed.
MAPPED_SHARDS = 16
#: Up to this size, opening a store verifies all of it; `bertblocks data verify` does so at any size.
VERIFIED_BYTES = 2**30
_CHUNK = 2**20


class Numbers(Protocol):
    """An array in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> NDArray: ...


class FileNumbers:
    """A file of numbers, of which a slice is read when it is asked for, so that none of it stays in memory."""

    def __init__(self, path: Path, kind: np.dtype, count: int) -> None:
        self.kind, self.count = kind, count
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file).st_size
        if found != count * self.kind.itemsize:
            raise ValueError(f"{path} has {found:,} bytes, not {count * self.kind.itemsize:,}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> NDArray:
        start, stop, _ = part.indices(self.count)
        size = self.kind.itemsize
        content = bytearray()
        while missing := max(stop - start, 0) * size - len(content):  # one call reads at most 2 GiB
            content += os.pread(self._file, missing, start * size + len(content))
        return np.frombuffer(content, self.kind)


class TokenDocuments:
    """The training or held-out documents of a store, as ids without special tokens, in the order of the corpus."""

    def __init__(self, store: TokenStore, split: str, counts: Sequence[int], lengths: Numbers, starts: Numbers) -> None:
        """`counts` are the numbers of documents in each shard."""
        self.store, self.split, self.lengths = store, split, lengths
        self._starts = starts
        self._first = np.array([0, *accumulate(counts)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"{self.store.folder} has {len(self):,} documents of {self.split}, none of number {index}."
            )
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        start, length = int(self._starts[index : index + 1][0]), int(self.lengths[index : index + 1][0])
        path = self.store.local(self.store.shards[shard])
        try:
            ids = self.store.map_shard(path)[start : start + length]
        except (OSError, ValueError) as error:
            raise damaged_shard(path, str(error)) from error
        if len(ids) != length:
            raise damaged_shard(path, "it is too short")
        return ids


class TokenStore:
    """The documents of a folder that `prepare` wrote: `train`, and `held_out` for evaluation.

    The folder may be at an fsspec address such as `s3://bucket/tokens`. Its files then come into a local folder when
    they are first used, are compared with their checksums, and stay there.

    `counts` has the numbers of documents, tokens, bad records and so on. `verify` compares every shard with its
    checksum, which reads all of it once; None does so up to `VERIFIED_BYTES`.
    """

    def __init__(self, folder: Path | str, verify: bool | None = None) -> None:
        self.folder = cache_store(folder) if is_address(folder) else Path(folder)
        if not (self.folder / INFO).is_file():
            raise FileNotFoundError(f"{folder} has no {INFO}; write it with `bertblocks data prepare`.")
        info = read_json(self.folder / INFO)
        self.map_shard = lru_cache(maxsize=MAPPED_SHARDS)(_map)
        try:
            self.counts: dict[str, int] = info["counts"]
            self.bad_records: list[str] = info["bad_records"]
            self.fingerprint: str = info["fingerprint"]
            self.shards: list[str] = list(info["shards"])
            self.checksums: dict[str, int] = info.get("checksums", {})  # older folders have none
            origin = self.folder / ORIGIN
            self.origin: str | None = read_json(origin)["address"] if origin.is_file() else None
            is_small = 4 * self.counts.get("tokens", 0) <= VERIFIED_BYTES
            if is_small if verify is None else verify:
                self.verify()
            self.train, self.held_out = self._open(info.get("documents"))
        except (KeyError, TypeError, AttributeError) as error:
            raise self._damaged(INFO, repr(error)) from error

    def _open(self, counts: dict[str, list[int]] | None) -> list[TokenDocuments]:
        if counts is None:  # an earlier version wrote no index
            tables = [self._index_shard(name) for name in self.shards]
            return [_in_memory(self, split, tables) for split in SPLITS]
        documents = []
        for split in SPLITS:
            files = []
            kinds: tuple[np.dtype, ...] = (LENGTH, START)
            for name, kind in zip(index_names(split), kinds, strict=True):
                try:
                    files.append(FileNumbers(self.local(name), kind, sum(counts[split])))
                except (OSError, ValueError) as error:
                    raise self._damaged(name, str(error)) from error
            documents.append(TokenDocuments(self, split, counts[split], *files))
        return documents

    def _index_shard(self, name: str) -> NDArray:
        try:
            return index_shard(self.local(name))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged_shard(self.folder / name, str(error)) from error

    def local(self, name: str) -> Path:
        """A file of the store, which is fetched if the store is elsewhere and it is not here yet."""
        path = self.folder / name
        if self.origin is None or path.is_file():
            return path
        system, root = open_filesystem(self.origin)
        value = 0
        with system.open(f"{root}/{name}", "rb") as source, atomic_file(path) as file:
            while chunk := source.read(_CHUNK):
                value = zlib.crc32(chunk, value)
                file.write(chunk)
            if value != self.checksums.get(name):
                raise ValueError(f"{self.origin}/{name} does not have the checksum that {INFO} names.")
        return path

    def verify(self, part: tuple[int, int] = (0, 1)) -> int:
        """Compares files with their checksums; `part` i of n takes every n-th file. Returns how many it has read."""
        number, count = part
        names = list(self.checksums)[number::count]
        for name in names:
            path = self.folder / name
            if self.origin is not None and not path.is_file():
                continue  # it is verified when it comes
            problem = None
            try:
                if crc32(path) != self.checksums[name]:
                    problem = "its checksum differs"
            except OSError as error:
                problem = str(error)
            if problem:
                raise damaged_shard(path, problem) if name in self.shards else self._damaged(name, problem)
        return len(names)

    def _damaged(self, name: str, problem: str) -> ValueError:
        return ValueError(
            f"{self.folder / name} is damaged ({problem}); delete {INFO} and run `bertblocks data prepare` again."
        )

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)


def cache_store(address: str) -> Path:
    """The local folder for the files of a store at an address; another version of the store has another folder."""
    system, root = open_filesystem(address)
    try:
        info = json.loads(system.cat_file(f"{root.rstrip('/')}/{INFO}"))
        tokenizer = json.loads(system.cat_file(f"{root.rstrip('/')}/{TOKENIZER}"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{address} has no {INFO}; write it with `bertblocks data prepare`.") from error
    except ValueError as error:
        raise ValueError(f"{address}/{INFO} is not valid JSON: {error}.") from error
    digest = blake2b(f"{address} {info.get('fingerprint')}".encode(), digest_size=8).hexdigest()
    root_folder = os.environ.get(CACHE) or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bertblocks"
    )
    folder = Path(root_folder) / f"tokens-{digest}"
    for name, value in ((ORIGIN, {"address": address.rstrip("/")}), (TOKENIZER, tokenizer), (INFO, info)):
        if not (folder / name).is_file():
            write_json(folder / name, value)
    return folder


def _in_memory(store: TokenStore, split: str, tables: Sequence[NDArray]) -> TokenDocuments:
    chosen = [select(table, split) for table in tables]
    joined = np.concatenate([np.zeros(0, DOCUMENT), *chosen])
    return TokenDocuments(store, split, list(map(len, chosen)), joined["length"], joined["start"])


def select(table: NDArray, split: str) -> NDArray:
    """The entries of a shard's table that belong to a split."""
    return table[table["held_out"] == (split == "held_out")]


def index_names(split: str) -> tuple[str, str]:
    """The files of the lengths and of the starts of a split."""
    return f"{split}.lengths", f"{split}.starts"


def index_shard(path: Path) -> NDArray:
    """The table of a shard's documents, by reading the Arrow file; of its ids only the places."""
    import pyarrow

    tables = [np.zeros(0, DOCUMENT)]
    with pyarrow.memory_map(str(path)) as file:
        origin = file.read_buffer(file.size()).address
        file.seek(0)
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate()
            ids = batch.column("ids")
            offsets = np.asarray(ids.offsets).astype(np.int64)
            first, remainder = divmod(ids.values.buffers()[1].address - origin, 4)
            if remainder:
                raise ValueError("its ids are not aligned")
            table = np.zeros(len(ids), DOCUMENT)
            table["start"], table["length"] = first + ids.values.offset + offsets[:-1], np.diff(offsets)
            table["held_out"] = batch.column("held_out").to_numpy(zero_copy_only=False)
            tables.append(table)
    return np.concatenate(tables)


def _map(path: Path) -> NDArray[np.int32]:
    return np.memmap(path, dtype="<i4", mode="r", shape=(path.stat().st_size // 4,))


def damaged_shard(path: Path, problem: str) -> ValueError:
    """The error for a damaged shard, which says how to write it again."""
    marker = Path(path.name).with_suffix(".json")
    return ValueError(
        f"{path} is damaged ({(problem or 'unreadable').splitlines()[0]}); delete it and {marker}, and run "
        "`bertblocks data prepare` again."
    )


def crc32(path: Path) -> int:
    """The CRC-32 of a file: fast enough to check often, and certain to change with any damaged byte."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
