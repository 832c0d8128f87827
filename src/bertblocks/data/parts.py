"""A corpus tokenized part by part while it is used, so that neither its texts nor its tokens need to fit on a disk."""

from __future__ import annotations

import contextlib
import shutil
import threading
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bertblocks.core.storage import read_json, write_json
from bertblocks.data.corpus import Corpus, CorpusPart
from bertblocks.data.hashing import combine, permute
from bertblocks.data.prepare import prepare
from bertblocks.data.tokens import TokenDocuments, TokenStore
from bertblocks.text.records import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARDS = "stream.json"


class PartOrder:
    """Which shards of a corpus are in which part: those of an epoch in a random order, `size` in each part.

    A part is a function of the seed and its number, and parts go on through all epochs.

    Example:
        >>> order = PartOrder(shards=3, size=2, seed=0)
        >>> sorted(order.shards_of(0) + order.shards_of(1)), order.epoch_and_rank(3)
        ([0, 1, 2], (1, 1))
    """

    def __init__(self, shards: int, size: int, seed: int) -> None:
        self.shards, self.size, self.seed = shards, size, seed
        self.per_epoch = -(-shards // size)

    def epoch_and_rank(self, part: int) -> tuple[int, int]:
        """The epoch of a part, and its number in the epoch."""
        return divmod(part, self.per_epoch)

    def shards_of(self, part: int) -> tuple[int, ...]:
        epoch, rank = self.epoch_and_rank(part)
        places = np.arange(rank * self.size, min((rank + 1) * self.size, self.shards))
        return tuple(permute(places, self.shards, combine("parts", self.seed, epoch)).tolist())


class TokenParts:
    """The training tokens of a corpus, a part at a time: written when they are needed, deleted when they are used.

    Any process can write any part, and each part is written by one. `folder` has the first part, which stays: its
    held-out documents serve for evaluation. Held-out documents of other parts are left out.
    """

    def __init__(
        self,
        name: str,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        size: int,
        seed: int,
        max_bad_share: float = 0.01,
    ) -> None:
        self.name, self.corpus, self.tokenizer, self.folder = name, corpus, tokenizer, folder
        self.max_bad_share = max_bad_share
        self.order = PartOrder(_check_shards(corpus, folder), size, seed)

    @cached_property
    def first(self) -> TokenStore:
        return TokenStore(self.folder)

    def open(self, part: int) -> TokenDocuments:
        """The training documents of a part. The next part is written in the meantime."""
        documents = (self._store(part) if part else self.first).train
        threading.Thread(target=self._write_ahead, args=(part + 1,), daemon=True).start()
        return documents

    def _store(self, part: int) -> TokenStore:
        """The tokens of a part after the first, which are written if they are not there."""
        corpus = CorpusPart(self.corpus, self.order.shards_of(part))
        return prepare(corpus, self.tokenizer, self._path(part), 1, self.max_bad_share, wait=True)

    def _write_ahead(self, part: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever opens the part gets the error
            self._store(part)

    def delete_before(self, part: int) -> None:
        """Deletes the parts before `part`, except the first."""
        for path in self.folder.glob("part-*"):
            if path.name < self._path(part).name:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:08d}"


def clear_parts(folder: Path) -> None:
    """Deletes what an earlier run streamed into a folder, except the first part."""
    (folder / SHARDS).unlink(missing_ok=True)
    for path in folder.glob("part-*"):
        shutil.rmtree(path)


def _check_shards(corpus: Corpus, folder: Path) -> int:
    """The number of shards. Raises if the corpus differs from the one that was streamed into the folder before."""
    shards = len(corpus.shards())
    if not shards:
        raise DataError(f"{corpus.name_source()}: there are no shards to stream.")
    found = {"shards": shards, "corpus": blake2b(repr(corpus.describe()).encode(), digest_size=16).hexdigest()}
    if not (folder / SHARDS).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SHARDS, found)
    elif read_json(folder / SHARDS) != found:
        raise DataError(
            f"{corpus.name_source()}: the texts have changed since {folder} was begun; restore them or start a new "
            "run. A dataset on the hub keeps its version as NAME@REVISION."
        )
    return shards
