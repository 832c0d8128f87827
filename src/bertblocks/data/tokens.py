"""Tokenized documents on disk, memory-mapped, so that opening them is fast whatever their size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The file that marks a folder as complete and describes its contents.
INFO = "tokens.json"


class TokenStore:
    """The documents of a folder that `prepare` wrote, as ids without special tokens.

    `counts` has the numbers of documents, tokens, bad records and so on; `held_out` tells for each document whether it
    is held out for evaluation.
    """

    def __init__(self, folder: Path | str) -> None:
        import datasets

        from bertblocks.core.storage import read_json

        self.folder = Path(folder)
        if not (self.folder / INFO).is_file():
            raise FileNotFoundError(f"{folder} has no {INFO}; write it with `bertblocks data prepare`.")
        info = read_json(self.folder / INFO)
        self.counts: dict[str, int] = info["counts"]
        self.bad_records: list[str] = info["bad_records"]
        self.fingerprint: str = info["fingerprint"]
        self._offsets: list[NDArray] = []
        self._values: list[NDArray] = []
        held_out = []
        for name in info["shards"]:
            table = datasets.Dataset.from_file(str(self.folder / name)).data
            for batch in table.to_batches():
                ids = batch.column("ids")
                self._offsets.append(np.asarray(ids.offsets))
                self._values.append(np.asarray(ids.values))
                held_out.append(np.asarray(batch.column("held_out").to_numpy(zero_copy_only=False)))
        self.lengths: NDArray[np.int64] = _concatenate([np.diff(offsets) for offsets in self._offsets], np.int64)
        self.held_out: NDArray[np.bool_] = _concatenate(held_out, np.bool_)
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])

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


def _concatenate(arrays: Sequence[NDArray], kind: Any) -> NDArray:
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind)
