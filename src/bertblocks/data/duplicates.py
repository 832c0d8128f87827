"""Removes near-duplicates from a corpus by MinHash and locality-sensitive hashing (Broder, 1997; Lee et al., 2022).

Two texts are similar if the sets of their sequences of five words overlap: their Jaccard similarity is the size of the
intersection over that of the union. A document is removed if it is similar to an earlier one, so the first document of
each group of similar ones stays.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.requirements import require_packages
from bertblocks.core.storage import PARTIAL, read_json, write_json
from bertblocks.data.corpus import Corpus, Document, Duplicate, RecordCounts
from bertblocks.data.hashing import UInt64, combine
from bertblocks.data.workers import worker_pool
from bertblocks.text.records import BadRecord, Record

#: Words in a shingle, and hashes in a signature. Estimates of the similarity have a standard deviation below 0.045.
SHINGLE_WORDS, HASHES = 5, 128
#: What makes signatures comparable.
SCHEME: dict[str, Any] = {"seed": 1, "scheme": "affine32"}
#: The share of pairs at the threshold that are compared; of more similar pairs it is larger.
RECALL = 0.95
#: Pairs that are compared together.
PAIRS = 20_000
#: A character of a script without spaces (Thai to Khmer, kana, Han) counts as a word.
_WORD = re.compile(r"[฀-໿က-႟ក-៿぀-ヿ㐀-鿿豈-﫿]|[^\W฀-໿က-႟ក-៿぀-ヿ㐀-鿿豈-﫿]+")


def shingles(text: str) -> set[str]:
    """All sequences of five words, without regard to case and punctuation; shorter texts are one sequence.

    Example:
        >>> sorted(shingles("The cat sat on the mat, here."))
        ['cat sat on the mat', 'sat on the mat here', 'the cat sat on the']
    """
    words = _WORD.findall(text.lower())
    last = max(len(words) - SHINGLE_WORDS, 0)
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(last + 1)}


@dataclass(frozen=True)
class DistinctCorpus(Corpus):
    """A corpus without the near-duplicates that `find_duplicates` found."""

    whole: Corpus
    threshold: float
    #: The numbers of the removed documents, by shard.
    removed: tuple[tuple[int, ...], ...]

    def shards(self) -> list[Any]:
        return [list(pair) for pair in zip(self.whole.shards(), self.removed, strict=True)]

    def records(self, shard: Any) -> Iterator[Record | BadRecord]:
        return self.whole.records(shard[0])

    def read(self, shard: Any) -> Iterator[Document | BadRecord | Duplicate]:
        removed = frozenset(shard[1])
        number = 0
        for record in self.whole.read(shard[0]):
            is_document = isinstance(record, Document)
            yield Duplicate() if is_document and number in removed else record
            number += is_document

    def name_source(self) -> str:
        return self.whole.name_source()

    def describe(self) -> Any:
        return _describe(self.whole, self.threshold)


def remove_duplicates(corpus: Corpus, file: Path, threshold: float, workers: int | None = None) -> DistinctCorpus:
    """The corpus without near-duplicates. They are written to `file`, and read from it if the corpus is the same."""
    if not 0 < threshold <= 1:
        raise ValueError(f"dedup is {threshold}; it must be above 0 and at most 1.")
    require_packages(["datasketch"], "dedup")
    fingerprint = blake2b(json.dumps(_describe(corpus, threshold), sort_keys=True).encode()).hexdigest()
    found = read_json(file) if file.is_file() else {}
    if found.get("fingerprint") != fingerprint:
        found = {"fingerprint": fingerprint, "removed": find_duplicates(corpus, file.parent, threshold, workers)}
        write_json(file, found)
    return DistinctCorpus(corpus, threshold, tuple(tuple(numbers) for numbers in found["removed"]))


def _describe(corpus: Corpus, threshold: float) -> Any:
    return {"whole": corpus.describe(), "dedup": [threshold, SHINGLE_WORDS, HASHES]}


def find_duplicates(corpus: Corpus, folder: Path, threshold: float, workers: int | None = None) -> list[list[int]]:
    """The numbers of the documents to remove in each shard. The result does not depend on the number of workers.

    Workers compute signatures, 512 bytes per document, into files in `folder`, which are deleted at the end. One
    process compares them, in 50 to 200 bytes of memory per document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = corpus.shards()
    workers = min(workers or allowed_cpus(), len(shards))
    with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=folder) as scratch:
        files = [Path(scratch, f"{number}.npy") for number in range(len(shards))]
        if workers <= 1:
            for shard, file in zip(shards, files, strict=True):
                _write_signatures(corpus, shard, file)
        else:
            with worker_pool(workers) as pool:
                jobs = [pool.submit(_write_signatures, corpus, *pair) for pair in zip(shards, files, strict=True)]
                for job in as_completed(jobs):
                    job.result()
        return compare_signatures([np.load(file, mmap_mode="r") for file in files], threshold)


def _write_signatures(corpus: Corpus, shard: Any, target: Path) -> None:
    from datasketch import MinHash

    documents = RecordCounts().count(corpus.read(shard))
    texts = ([shingle.encode() for shingle in shingles(document.text)] for document in documents)
    signatures = [minhash.hashvalues for minhash in MinHash.generator(texts, num_perm=HASHES, **SCHEME)]
    np.save(target, np.array(signatures, dtype=np.uint32).reshape(-1, HASHES))


def compare_signatures(shards: list[NDArray[np.uint32]], threshold: float) -> list[list[int]]:
    """Compares signatures that agree in one of several bands, band by band, by sorting the bands."""
    first = np.cumsum([0, *map(len, shards)])
    is_removed = np.zeros(first[-1], dtype=np.bool_)
    width = _band_width(threshold)
    for start in range(0, HASHES - width + 1, width):
        bands = [combine(*(shard[:, column] for column in range(start, start + width))) for shard in shards]
        earlier, later = _neighbours(np.concatenate(bands))
        is_open = ~is_removed[later]
        for pairs in np.array_split(np.stack([earlier[is_open], later[is_open]]), len(later) // PAIRS + 1, axis=1):
            both = [_rows(shards, first, places) for places in pairs]
            is_removed[pairs[1][np.mean(both[0] == both[1], axis=1) >= threshold]] = True
    return [np.flatnonzero(part).tolist() for part in np.split(is_removed, first[1:-1])]


def _band_width(threshold: float) -> int:
    """The hashes in a band, as many as find 95 % of the pairs that are just similar enough, but at most half of all.

    A band of r hashes is equal in both of two texts with probability s^r, where s is their similarity.
    """
    widths = range(HASHES // 2, 0, -1)
    return next((width for width in widths if 1 - (1 - threshold**width) ** (HASHES // width) >= RECALL), 1)


def _neighbours(keys: UInt64) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of places with equal keys, earlier and later: each place with the one before it and with the first."""
    order = np.argsort(keys, kind="stable")
    is_same = np.concatenate([[False], keys[order[1:]] == keys[order[:-1]]])
    first = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(order))))
    same = np.flatnonzero(is_same)
    return order[np.concatenate([same - 1, first[same]])], order[np.concatenate([same, same])]


def _rows(shards: list[NDArray[np.uint32]], first: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The signatures at some places of all shards."""
    found = np.empty((len(places), HASHES), dtype=np.uint32)
    owner = np.searchsorted(first, places, side="right") - 1
    for shard in np.unique(owner).tolist():
        found[owner == shard] = shards[shard][places[owner == shard] - first[shard]]
    return found
