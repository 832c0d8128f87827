"""Tokenized documents on disk, memory-mapped, so that opening them is fast whatever their size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.storage import read_json

#: The file that marks a folder as complete and describes its contents.
INFO = "tokens.json"
_CHUNK = 2**20


class TokenStore:
    """The documents of a folder that `prepare` wrote, as ids without special tokens.

    `counts` has the numbers of documents, tokens, bad records and so on; `held_out` tells for each document whether it
    is held out for evaluation. `verify` compares every shard with its checksum, which reads all of it once.
    """

    def __init__(self, folder: Path | str, verify: bool = True) -> None:
        self.folder = Path(folder)
        if not (self.folder / INFO).is_file():
            raise FileNotFoundError(f"{folder} has no {INFO}; write it with `bertblocks data prepare`.")
        info = read_json(self.folder / INFO)
        checksums = info.get("checksums", {})  # older folders have none
        self._offsets: list[NDArray] = []
        self._values: list[NDArray] = []
        held_out: list[NDArray] = []
        try:
            self.counts: dict[str, int] = info["counts"]
            self.bad_records: list[str] = info["bad_records"]
            self.fingerprint: str = info["fingerprint"]
            shards: list[str] = list(info["shards"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.folder / INFO} is damaged ({error!r}); delete it and run `bertblocks data prepare` again."
            ) from error
        for name in shards:
            try:
                if verify and name in checksums and crc32(self.folder / name) != checksums[name]:
                    raise ValueError("its checksum differs")
                held_out.extend(self._read_shard(self.folder / name))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                marker = Path(name).with_suffix(".json")
                raise ValueError(
                    f"{self.folder / name} is damaged ({str(error).splitlines()[0]}); delete it and {marker}, and run "
                    "`bertblocks data prepare` again."
                ) from error
        self.lengths: NDArray[np.int64] = _concatenate([np.diff(offsets) for offsets in self._offsets], np.int64)
        self.held_out: NDArray[np.bool_] = _concatenate(held_out, np.bool_)
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])

    def _read_shard(self, path: Path) -> Iterator[NDArray]:
        """Maps a shard into memory and yields whether its documents are held out, batch by batch."""
        import datasets

        for batch in datasets.Dataset.from_file(str(path)).data.to_batches():
            batch.validate()
            ids = batch.column("ids")
            self._offsets.append(np.asarray(ids.offsets))
            self._values.append(np.asarray(ids.values))
            yield np.asarray(batch.column("held_out").to_numpy(zero_copy_only=False))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        batch = int(np.searchsorted(self._first, index, side="right")) - 1
        offsets, within = self._offsets[batch], index - int(self._first[batch])
        return self._values[batch][offsets[within] : offsets[within + 1]]

    def split(self) -> tuple[TokenSubset, TokenSubset]:
        """The documents for training, and those held out for evaluation."""
        return TokenSubset(self, np.flatnonzero(~self.held_out)), TokenSubset(self, np.flatnonzero(self.held_out))


class TokenSubset:
    """Some documents of a store, in the order of their indices."""

    def __init__(self, store: TokenStore, indices: NDArray[np.int64]) -> None:
        self.store, self.indices = store, indices
        self.lengths = store.lengths[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.store[int(self.indices[index])]


def crc32(path: Path) -> int:
    """The CRC-32 of a file: fast enough to check every time, and certain to change with any damaged byte."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _concatenate(arrays: Sequence[NDArray], kind: Any) -> NDArray:
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind)
