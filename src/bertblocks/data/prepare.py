"""Tokenizes a corpus once, in parallel, into Arrow shards. An interrupted run keeps its finished shards."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from dataclasses import asdict
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.ray_cluster import call_on_ray
from bertblocks.core.storage import atomic_file, claim_worker, lock_folder, read_json, remove_partial, write_json
from bertblocks.data.corpus import Corpus, Document, RecordCounts
from bertblocks.data.tokens import (
    BLOCKS,
    INFO,
    LENGTH,
    SPLITS,
    START,
    TOKENIZER,
    TokenStore,
    crc32,
    index_names,
    index_shard,
    select,
)
from bertblocks.data.workers import worker_pool
from bertblocks.text.records import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

#: The version of the shards, a part of the fingerprint.
FORMAT = 1
#: How many documents are tokenized together and share a batch of an Arrow file.
BATCH = 2000
PLAN = "plan.json"
#: What `bertblocks data prepare` may write into a folder before its tokens.
DOCSTRINGS, DUPLICATES = "docstrings.jsonl", "duplicates.json"

#: Called with the number of finished shards and of all shards.
OnShard = Callable[[int, int], None]


def prepare(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path | str,
    workers: int | None = None,
    max_bad_share: float = 0.01,
    on_shard: OnShard = lambda done, total: None,
    overwrite: bool = False,
    wait: bool = False,
) -> TokenStore:
    """Tokenizes a corpus into a folder, or opens the folder if it has the tokens of this corpus and tokenizer.

    Finished shards of an interrupted call are kept. `overwrite` replaces those of another corpus or tokenizer. With
    `wait`, several processes may call it: one works while the others wait for it. Raises `DataError` if more than
    `max_bad_share` of the records cannot be used.
    """
    write_shards(corpus, tokenizer, folder, workers, on_shard, overwrite, wait)
    return open_prepared(corpus, folder, max_bad_share)


def open_prepared(corpus: Corpus, folder: Path | str, max_bad_share: float = 0.01) -> TokenStore:
    """The tokens of a corpus in a complete folder. Raises `DataError` if too many records are bad."""
    store = TokenStore(folder)
    counts = RecordCounts(good=store.counts["documents"], bad=store.counts["bad_records"], named=store.bad_records)
    counts.check(max_bad_share, corpus.name_source())
    return store


def write_shards(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path | str,
    workers: int | None = None,
    on_shard: OnShard = lambda done, total: None,
    overwrite: bool = False,
    wait: bool = False,
    part: tuple[int, int] = (0, 1),
    on: Literal["ray"] | None = None,
) -> bool:
    """Tokenizes the missing shards of a corpus. Returns whether all shards are there, which completes the folder.

    `part` i of n writes every n-th shard, from shard i on, so that n machines that share a folder divide the work; the
    last to end completes it. With `on`, the shards are written by the nodes of a Ray cluster that see the folder.
    """
    folder = Path(folder)
    backend = describe_tokenizer(tokenizer)
    described = json.dumps([FORMAT, corpus.describe(), backend], sort_keys=True)
    fingerprint = blake2b(described.encode(), digest_size=16).hexdigest()
    shards = corpus.shards()
    read_plan(folder)  # before a lock leaves its file in a foreign folder
    try:
        claim = claim_worker(folder, *part, wait=wait)
    except BlockingIOError as error:
        who = "process" if part[1] == 1 else "worker"
        raise DataError(f"Another {who} is writing tokens to {folder} ({error}); wait until it ends.") from error
    try:
        with _locked(folder):
            claim_folder(folder, fingerprint, overwrite)
            if not (folder / PLAN).is_file():
                write_json(folder / PLAN, {"fingerprint": fingerprint, "shards": len(shards)})
            if not (folder / TOKENIZER).is_file():
                write_json(folder / TOKENIZER, backend)
        missing = _find_missing(folder, len(shards))
        own = [number for number in missing if number % part[1] == part[0]]
        before = len(shards) - len(missing)
        on_shard(before, len(shards))
        finished = _make_shards(corpus, shards, folder, own, workers or allowed_cpus(), on)
        for done, _ in enumerate(finished, start=before + 1):
            on_shard(done, len(shards))
        with _locked(folder):
            if _find_missing(folder, len(shards)):
                return False
            remove_partial(folder)  # what workers left that were killed, and whose shards others wrote
            if own or _read(folder / INFO).get("fingerprint") != fingerprint:
                write_json(folder / INFO, _summary(folder, len(shards), fingerprint))
        return True
    finally:
        os.close(claim)


def _find_missing(folder: Path, shards: int) -> list[int]:
    return [number for number in range(shards) if not _marker(folder, number).is_file()]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other workers from planning or completing a folder meanwhile."""
    descriptor = lock_folder(folder, wait=True)
    try:
        yield
    finally:
        os.close(descriptor)


def describe_tokenizer(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Everything in a tokenizer that affects ids."""
    return json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}


def _make_shards(
    corpus: Corpus, shards: list[Any], folder: Path, missing: list[int], workers: int, on: Literal["ray"] | None
) -> Iterator[None]:
    """Writes the missing shards and yields after each."""
    if on == "ray":
        calls = ((corpus, shards[number], folder.resolve(), number) for number in missing)
        yield from call_on_ray(make_shard, calls, "--on ray")
        return
    workers = min(workers, len(missing))
    if workers <= 1:
        for number in missing:
            make_shard(corpus, shards[number], folder, number)
            yield
        return
    with worker_pool(workers) as pool:
        jobs = [pool.submit(make_shard, corpus, shards[number], folder, number) for number in missing]
        for job in as_completed(jobs):
            yield job.result()


def make_shard(corpus: Corpus, shard: Any, folder: Path, number: int) -> None:
    """Tokenizes one shard. Its counts are written last and mark it as complete."""
    from datasets import Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter

    tokenizer = _load(folder / TOKENIZER, (folder / TOKENIZER).stat().st_mtime_ns)
    records = RecordCounts()
    counts = dict.fromkeys(("tokens", "held_out_documents", "held_out_tokens"), 0)
    features = Features({"ids": Sequence(Value("int32")), "held_out": Value("bool")})
    with atomic_file(_arrow(folder, number)) as file:
        writer = ArrowWriter(features=features, stream=file)
        for documents in _in_batches(records.count(corpus.read(shard))):
            table, lengths = _tokenize(tokenizer, documents)
            held_out = np.array([document.held_out for document in documents])
            writer.write_table(table)
            counts["tokens"] += int(lengths.sum())
            counts["held_out_documents"] += int(held_out.sum())
            counts["held_out_tokens"] += int(lengths[held_out].sum())
        writer.finalize(close_stream=False)
    with atomic_file(_index(folder, number)) as file:
        np.save(file, index_shard(_arrow(folder, number)))
    write_json(
        _marker(folder, number), {"tally": asdict(records), "counts": counts, "crc32": crc32(_arrow(folder, number))}
    )


def _tokenize(tokenizer: Tokenizer, documents: list[Document]) -> tuple[Any, np.ndarray]:
    import pyarrow

    encodings = tokenizer.encode_batch_fast([document.text for document in documents], add_special_tokens=False)
    ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
    lengths = np.array([len(document_ids) for document_ids in ids])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {
        "ids": pyarrow.ListArray.from_arrays(offsets, np.concatenate(ids)),
        "held_out": pyarrow.array([document.held_out for document in documents]),
    }
    return pyarrow.table(columns), lengths


@lru_cache(maxsize=1)
def _load(path: Path, modified: int) -> Tokenizer:
    """The tokenizer of a file, cached until `modified`, its time of modification, changes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # "[MASK]" in a text is text
    return tokenizer


def _in_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, BATCH)):
        yield batch


# ---------------------------------------------------------------------- the folder


def _arrow(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.arrow"


def _index(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.npy"


def _marker(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of an earlier call; None for a new folder. Raises if the folder has other contents."""
    # names come first: another process may write its plan, and then other files, between the two
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    plan = _read(folder / PLAN)
    if isinstance(plan.get("fingerprint"), str) and isinstance(plan.get("shards"), int):
        return plan
    if foreign := sorted(name for name in names if name not in (DOCSTRINGS, DUPLICATES) and not name.startswith(".")):
        raise DataError(f"{folder} has other contents ({foreign[0]}); choose another folder.")
    return None


def claim_folder(folder: Path, fingerprint: str, overwrite: bool) -> None:
    """Makes a folder ready for a corpus. Raises if it has the tokens of another corpus, unless `overwrite` is set.

    Deletes only files of an earlier call, starting with those that mark it as complete.
    """
    plan = read_plan(folder)
    if plan is None or plan["fingerprint"] == fingerprint:
        return
    if not overwrite:
        raise DataError(
            f"{folder} has tokens of another corpus or tokenizer; choose another folder, or replace them with "
            "--overwrite (overwrite=True)."
        )
    indices = [folder / name for split in SPLITS for name in index_names(split)]
    for path in (folder / INFO, folder / PLAN, folder / TOKENIZER, *indices, *folder.glob(f"{BLOCKS}*.npz")):
        path.unlink(missing_ok=True)
    for number in range(plan["shards"]):
        for path in (_marker(folder, number), _arrow(folder, number), _index(folder, number)):
            path.unlink(missing_ok=True)


def _summary(folder: Path, shards: int, fingerprint: str) -> dict[str, Any]:
    records = RecordCounts()
    counts: dict[str, int] = {}
    checksums: dict[str, int] = {}
    for number in range(shards):
        marker = _read(_marker(folder, number))
        try:
            records.add(RecordCounts(**marker["tally"]))
            for key, count in marker["counts"].items():
                counts[key] = counts.get(key, 0) + count
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{_marker(folder, number)} is damaged; delete it and run the command again.") from error
        if "crc32" in marker:
            checksums[_arrow(folder, number).name] = marker["crc32"]
    duplicates = {"duplicates": records.duplicates} if records.duplicates else {}
    documents = _write_indices(folder, shards)
    checksums |= {name: crc32(folder / name) for split in SPLITS for name in index_names(split)}
    return {
        "fingerprint": fingerprint,
        "counts": {"documents": records.good, "bad_records": records.bad, **duplicates, **counts},
        "bad_records": records.named,
        "shards": [_arrow(folder, number).name for number in range(shards)],
        "documents": documents,
        "checksums": checksums,
    }


def _write_indices(folder: Path, shards: int) -> dict[str, list[int]]:
    """Joins the tables of all shards into the files of lengths and starts. Returns the documents of each shard."""
    counts: dict[str, list[int]] = {split: [] for split in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(atomic_file(folder / name)) for split in SPLITS for name in index_names(split)
        }
        for number in range(shards):
            table = _read_index(folder, number)
            for split in SPLITS:
                chosen = select(table, split)
                counts[split].append(len(chosen))
                lengths, starts = index_names(split)
                files[lengths].write(chosen["length"].astype(LENGTH).tobytes())
                files[starts].write(chosen["start"].astype(START).tobytes())
    return counts


def _read_index(folder: Path, number: int) -> np.ndarray:
    """The table of a shard's documents. Shards of an earlier version have no file of it."""
    try:
        return np.load(_index(folder, number), allow_pickle=False)
    except (OSError, ValueError):
        return index_shard(_arrow(folder, number))
