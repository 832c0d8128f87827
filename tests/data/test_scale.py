"""A corpus of 1.4 billion documents and 2 trillion tokens opens at once and costs a process little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertblocks.data import chunks as chunks_module
from bertblocks.data.chunks import ChunkIndex, ChunkSizes
from bertblocks.data.stream import PackedStream, Position, StreamSource
from bertblocks.data.tokens import TokenStore

DOCUMENTS, TOKENS, SHARDS = 1_400_000_000, 2_000_000_000_000, 125_000
#: Documents of the sparse store that are not empty: number in the whole store, and length.
WRITTEN = {0: 3000, 700_000_000: 9, DOCUMENTS - 1: 1500}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose files have the sizes of the real ones, and hardly any blocks on disk."""
    folder = tmp_path_factory.mktemp("trillions")
    per_shard = DOCUMENTS // SHARDS
    for name, size in (("train.lengths", 4 * DOCUMENTS), ("train.starts", 8 * DOCUMENTS)):
        with (folder / name).open("wb") as file:
            file.truncate(size)
            for number, length in WRITTEN.items():
                file.seek(number * (size // DOCUMENTS))
                value = np.array([length], "<u4") if name == "train.lengths" else np.array([number % 1000], "<u8")
                file.write(value.tobytes())
    for name in ("held_out.lengths", "held_out.starts"):
        (folder / name).write_bytes(b"")
    for number in WRITTEN:
        ids = np.arange(5000, dtype="<i4") + number % 1000
        (folder / f"shard-{number // per_shard:05d}.arrow").write_bytes(ids.tobytes())
    info = {
        "counts": {"documents": DOCUMENTS, "tokens": TOKENS},
        "bad_records": [],
        "fingerprint": "sparse",
        "shards": [f"shard-{number:05d}.arrow" for number in range(SHARDS)],
        "documents": {"train": [per_shard] * SHARDS, "held_out": [0] * SHARDS},
        "checksums": {},
    }
    (folder / "tokens.json").write_text(json.dumps(info))
    return folder


def test_a_document_is_found_without_reading_the_others(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread

    def count(*arguments: Any) -> bytes:
        content = pread(*arguments)
        read.append(len(content))
        return content

    monkeypatch.setattr("bertblocks.data.tokens.os.pread", count)
    documents = TokenStore(store).train
    assert len(documents) == DOCUMENTS
    for number, length in WRITTEN.items():
        start = 2 * (number % 1000)  # the place in the shard, and what the ids of the shard begin with
        assert documents[number].tolist() == list(range(start, start + length))
    assert len(documents[DOCUMENTS - 2]) == 0
    assert sum(read) == 12 * (len(WRITTEN) + 1)


OPEN = """
import resource, sys
from bertblocks.data.stream import PackedStream, Position, StreamSource
from bertblocks.data.tokens import TokenStore

stream = PackedStream([StreamSource(TokenStore(sys.argv[1]).train)], length=1024, overhead=2, seed=0)
rows, position = stream.take(Position(), 2000)
print(stream.sources[0].count, sum(len(chunk.ids) for row in rows for chunk in row), position.pool)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_process_that_trains_on_it_takes_under_2_gb(store: Path) -> None:
    """The first process counts chunks once; the second finds the counts and reads only what it trains on."""
    before = set(store.glob("chunks-*.npz"))
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", OPEN, str(store)], capture_output=True, text=True, check=True)
        (count, tokens, pool), (memory,) = (map(int, line.split()) for line in done.stdout.splitlines()[:2])
        # chunks of 1,022 tokens: 1022 + 1022 + 956, 9, and 1022 + 478
        assert count == 6
        assert tokens > 1024 * 1500
        assert pool > 0
        assert memory < 2048
    assert len(set(store.glob("chunks-*.npz")) - before) == 1


def test_with_kept_counts_only_blocks_of_drawn_chunks_are_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.zeros(-(-DOCUMENTS // chunks_module.BLOCK), dtype=np.int64)
    for number, length in WRITTEN.items():
        counts[number // chunks_module.BLOCK] += -(-length // 62)
    known = np.concatenate([[0], np.cumsum(counts)]), sum(WRITTEN.values())
    documents = TokenStore(store).train
    with monkeypatch.context() as patch:
        patch.setattr(chunks_module.ChunkIndex, "_count_blocks", lambda self: known)
        PackedStream([StreamSource(documents)], length=64, overhead=2, seed=0, pool_rows=8)
    monkeypatch.setattr(chunks_module.ChunkIndex, "_count_blocks", lambda self: pytest.fail("all lengths were read"))
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr("bertblocks.data.tokens.os.pread", lambda *args: read.append(args[1]) or pread(*args))  # type: ignore[func-returns-value]
    stream = PackedStream([StreamSource(documents)], length=64, overhead=2, seed=0, pool_rows=8)
    rows, _ = stream.take(Position(), 8)
    assert all(0 < len(chunk.ids) <= 62 for row in rows for chunk in row)
    assert stream.sources[0].count == sum(-(-length // 62) for length in WRITTEN.values())
    assert sum(read) < 100_000


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("smallest", [3, 5])
def test_chunks_are_found_in_blocks_as_in_a_list_of_all(
    monkeypatch: pytest.MonkeyPatch, least: int, smallest: int
) -> None:
    monkeypatch.setattr(chunks_module, "BLOCK", 4)
    monkeypatch.setattr(chunks_module, "READ_BLOCKS", 2)
    lengths = np.random.default_rng(0).integers(0, 13, 75)
    lengths[8:24] = 0  # whole blocks without a chunk

    class Texts:
        def __getitem__(self, index: int) -> Any:
            raise NotImplementedError

    Texts.lengths = lengths  # type: ignore[attr-defined]
    sizes = ChunkSizes(5, smallest, ("lengths", 0, 0, 0))
    capacities = sizes.draw(np.arange(75)).tolist()
    expected = [
        (document, start, min(capacity, length - start))
        for document, (length, capacity) in enumerate(zip(lengths.tolist(), capacities, strict=True))
        if length >= least
        for start in range(0, length, capacity)
    ]
    index = ChunkIndex(Texts(), least, sizes, "Source 0")  # type: ignore[arg-type]
    assert (index.count, index.tokens) == (len(expected), int(lengths[lengths >= least].sum()))
    order = np.random.default_rng(1).permutation(len(expected))
    assert list(zip(*map(np.ndarray.tolist, index.spans(order)), strict=True)) == [expected[number] for number in order]
