"""Tensors that every process writes and reads its own part of, by torch.distributed.checkpoint.

torch plans which process writes what, and what a process of another number of them reads. The parts are safetensors
files whose headers say where each belongs, so no pickle is written or read.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bertblocks.core.storage import checksum, flush_folder


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies this process's parts to memory that training does not change."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return stager.stage(tensors)  # type: ignore[return-value]
    finally:
        stager.close()


def write_parts(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """Writes the parts of all processes. Returns the checksums of all files, by name, in every process."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)  # it flushes each file
    except CheckpointException as error:
        raise OSError(_first_failure(error)) from error
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = {file.name: checksum(file) for file in sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))}
    flush_folder(folder)
    found: list[dict[str, str]] = [{} for _ in range(size)]
    dist.all_gather_object(found, own, group=group)
    checksums = {name: value for part in found for name, value in part.items()}
    if missing := checksums.keys() - {path.name for path in folder.iterdir()}:
        raise OSError(f"process {rank} does not see {min(missing)}; run.folder must be a folder that all nodes share")
    return checksums


def read_kinds(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and type of each tensor in a folder of parts."""
    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_parts(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fills tensors, sharded over any number of processes or not, from the parts in a folder."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process
            dcp.load(
                tensors,  # type: ignore[arg-type]
                storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise OSError(f"{folder} cannot be read: {_first_failure(error)}") from error


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"process {rank}: {str(cause).strip() or type(cause).__name__}"
