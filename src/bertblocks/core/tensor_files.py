"""Safetensors files that carry checksums, and folders of them whose index cannot lead outside."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertblocks.core.storage import atomic_entries, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The folder of a training checkpoint in which each process wrote its parts of tensors, if the model was sharded.
PARTS = "shards"
#: The key of a header under which torch.distributed.checkpoint says where each part of a tensor starts.
OFFSETS = "DCP_SHARDING_INFO"
#: The key of a checksum in the metadata of a safetensors file. Other libraries that rewrite the file leave it out.
CHECKSUM = "bertblocks_sha256"
#: The environment variable that turns the writing and the verification of checksums off if it is 0.
VERIFY = "BERTBLOCKS_VERIFY"


def find_safetensors(folder: Path, variant: str | None = None) -> list[Path]:
    """The files that hold a folder's weights: one, the shards that its index names, or none."""
    if (single := folder / _name(SINGLE, variant)).is_file():
        files = [single]
    elif (index := folder / _name(INDEX, variant)).is_file():
        files = read_index(index)
    else:
        files = []
    for path in files:
        if not os.access(path, os.R_OK):
            raise PermissionError(f"{path} cannot be read: permission denied.")
    return files


def _name(name: str, variant: str | None) -> str:
    """transformers' name of a variant: model.fp16.safetensors, model.safetensors.index.fp16.json."""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def read_index(index: Path) -> list[Path]:
    """The files that an index names, all of which are in its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is not a file in that folder.")
    return [index.parent / name for name in names]


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. If it carries a checksum, they are verified."""
    tensors, metadata = _open(path)
    expected = metadata.get(CHECKSUM)
    if expected is not None and _is_verifying() and checksum_of(tensors) != expected:
        raise OSError(f"{path} is damaged: its checksum is wrong. Set {VERIFY}=0 to load it anyway.")
    return tensors


def read_names(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    return list(_open(path)[0])


def read_parts(folder: Path) -> dict[str, Tensor]:
    """Full tensors from the parts that processes wrote."""
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors, metadata = _open(path)
        offsets = json.loads(metadata[OFFSETS])
        for name, tensor in tensors.items():
            parts.setdefault(name, []).append((offsets[name]["saved_offsets"], tensor))
    return {name: _join(placed) for name, placed in parts.items()}


def _join(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    ends = [[start + size for start, size in zip(offset, part.shape, strict=True)] for offset, part in parts]
    full = torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    for (offset, part), end in zip(parts, ends, strict=True):
        full[tuple(slice(*bounds) for bounds in zip(offset, end, strict=True))] = part
    return full


def verify_weights(folder: Path, variant: str | None = None) -> None:
    """Raises an error if a file of a folder's weights is damaged or outside the folder."""
    for path in find_safetensors(folder, variant):
        read_safetensors(path)


def add_checksums(folder: Path, variant: str | None = None) -> None:
    """Adds checksums to those files of a folder's weights that have none, and flushes them to disk."""
    if not _is_verifying():
        return
    with atomic_entries(folder) as scratch:
        for path in find_safetensors(folder, variant):
            tensors, metadata = _open(path)
            if CHECKSUM not in metadata:
                save_tensors(tensors, scratch / path.name, {**metadata, CHECKSUM: checksum_of(tensors)})


def _is_verifying() -> bool:
    return os.environ.get(VERIFY) != "0"


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, whose values are read from disk when they are used, and the metadata of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path} is damaged: {error}.") from error


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the names, types, shapes and values of tensors."""

    def hash_tensor(name: str) -> bytes:
        tensor = tensors[name]
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    # hashing releases the GIL
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(hash_tensor, sorted(tensors)))).hexdigest()


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file. A failed write is an OSError that names the file."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}.") from error
