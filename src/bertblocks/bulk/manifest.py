"""`manifest.json`: what a job computes from what. Workers that differ in any of it are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from bertblocks import __version__
from bertblocks.bulk.folder import BulkError, OutputFolder
from bertblocks.core.addresses import is_address
from bertblocks.core.messages import short_repr
from bertblocks.text.files import open_raw
from bertblocks.text.records import DataError

MANIFEST = "manifest.json"
FORMAT = 1
#: What may differ: the place of the model if its files do not, the tokens of a batch, which are those of the first
#: worker, and what is not known at the start.
FREE = ("model.source", "batch_tokens", "rows")
#: Larger inputs are hashed in part: this many blocks at equal distances, the first and the last among them.
BLOCKS, BLOCK_BYTES = 64, 2**20


def describe_inputs(sources: Sequence[str]) -> list[dict[str, Any]]:
    """The size and hash of each file. Files up to 64 MiB are hashed as a whole."""
    return [_describe(source) for source in sources]


def _describe(source: str) -> dict[str, Any]:
    if not is_address(source) and not Path(source).is_file():
        raise DataError(f"{source} is not a regular file; a job that may be continued must read its input again.")
    with open_raw(source) as file:
        size, digest = _hash(file)
    is_whole = size <= BLOCKS * BLOCK_BYTES
    hashed = "all bytes" if is_whole else f"{BLOCKS} blocks of 1 MiB at equal distances"
    return {"path": source, "bytes": size, "sha256": digest, "hashed": hashed}


def _hash(file: IO[bytes]) -> tuple[int, str]:
    size = file.seek(0, 2)
    digest = hashlib.sha256(str(size).encode())
    blocks = min(BLOCKS, max(1, -(-size // BLOCK_BYTES)))
    last = max(0, size - BLOCK_BYTES)
    for number in range(blocks):
        start = number * BLOCK_BYTES if size <= BLOCKS * BLOCK_BYTES else number * last // (blocks - 1)
        file.seek(start)
        digest.update(file.read(BLOCK_BYTES))
    return size, digest.hexdigest()


def read_manifest(folder: OutputFolder) -> dict[str, Any] | None:
    data = folder.read(MANIFEST)
    if data is None:
        return None
    try:
        return cast(dict[str, Any], dict(json.loads(data)))
    except (ValueError, TypeError) as error:
        raise BulkError(f"{folder.name}/{MANIFEST} is damaged ({error}); choose another output folder.") from error


def claim_folder(folder: OutputFolder, manifest: dict[str, Any]) -> dict[str, Any]:
    """Writes the manifest of a new job, or returns that of the same job; raises an error for another one."""
    known = check_folder(folder, manifest)
    if known is None:
        known = {**_complete(manifest), "rows": None}
        folder.write_json(MANIFEST, known)
    return known


def _complete(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "bertblocks": __version__, **manifest}


def check_folder(folder: OutputFolder, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest in a folder, None in an empty one; raises an error if the folder does not belong to the job."""
    known = read_manifest(folder)
    if known is None:
        others = sorted(folder.list_names())
        if others:
            raise BulkError(f"{folder.name} is not empty and has no {MANIFEST}: it holds {others[0]}.")
        return None
    different = _find_difference(known, _complete(manifest))
    if different is not None:
        name, before, now = different
        raise BulkError(
            f"{folder.name} belongs to another job: {name} is {short_repr(now)}, but its {MANIFEST} has "
            f"{short_repr(before)}; choose another output folder."
        )
    return known


def _find_difference(known: Any, found: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first key with different values, apart from `FREE`."""
    if isinstance(known, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*known, *found]):
            inner = f"{name}.{key}" if name else str(key)
            if inner not in FREE:
                different = _find_difference(known.get(key), found.get(key), inner)
                if different is not None:
                    return different
        return None
    if isinstance(known, list) and isinstance(found, list) and len(known) == len(found):
        pairs = enumerate(zip(known, found, strict=True))
        results = (_find_difference(before, now, f"{name}[{index}]") for index, (before, now) in pairs)
        return next((result for result in results if result is not None), None)
    return None if known == found else (name, known, found)
