"""One process or many: joining the process group, parallelizing a model, and working with sharded tensors.

torchrun starts the processes and tells each its rank in environment variables. Under DDP every process has a copy of
the model; under FSDP2 every process has a shard of each tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

#: How long the other processes wait while the main process prepares data.
MAIN_TIMEOUT = timedelta(hours=24)


class PeerFailedError(RuntimeError):
    """Another process of the run failed, so this one stops too."""


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of processes, and the device of this process."""

    rank: int
    size: int
    device: torch.device
    #: The group, on CPUs, in which processes exchange what the host knows, and wait for the main one, for hours if need
    #: be. What devices compute goes through torch's own group and has its timeout.
    main_group: dist.ProcessGroup | None = None
    #: What processes tell each other apart from collective operations.
    store: dist.Store | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, in double precision. No device is read, so a GPU goes on with its queue."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.main_group)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank. No device is read."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.main_group)
        return found

    def local_range(self, count: int) -> range:
        """The indices of `count` items that belong to this process: contiguous, and balanced to within one item."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def run_on_main(self, work: Callable[[], None]) -> None:
        """Runs `work` in the main process while the others wait. If it fails, all processes stop."""
        self.run_on_all(work if self.is_main else lambda: None)

    def run_on_all(self, work: Callable[[], None]) -> None:
        """Runs `work` in every process and waits for all. If it fails in one of them, all processes stop."""
        failed = 1.0
        try:
            work()
            failed = 0.0
        finally:
            failures = torch.tensor(failed)
            if self.size > 1:
                dist.all_reduce(failures, group=self.main_group)
        if failures:
            raise PeerFailedError("Another process of this run failed and reports the reason.")

    def from_main(self, find: Callable[[], T]) -> T:
        """What `find` returns in the main process, for all processes."""
        found: list[Any] = [None]
        self.run_on_main(lambda: found.__setitem__(0, find()))
        if self.size > 1:
            dist.broadcast_object_list(found, src=0, group=self.main_group)
        return found[0]


def join(device: str = "auto") -> World:
    """Joins the processes that torchrun started, if any."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device; use 'auto' or 'cpu'.")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own_device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own_device)
    if size > 1 and not dist.is_initialized():
        store, rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(_attempt(), store)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size)
        atexit.register(_leave)  # a program may train several times, but can join only once
    if size == 1:
        return World(0, 1, own_device)
    return World(dist.get_rank(), size, own_device, _main_group(), _store())


@cache
def _main_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=MAIN_TIMEOUT, backend="gloo")


@cache
def _store() -> dist.Store:
    """A connection of its own to the server of the processes, which also serves while an operation hangs."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(_attempt(), dist.TCPStore(host, port, is_master=False))


def _attempt() -> str:
    """Restarted processes must not read what those of the previous attempt told, unless each has a server of its own.

    Nodes that join a run later count attempts from 0, so elastic runs need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_shared else 'own'}"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def parallelize(
    model: nn.Module, world: World, parallel: str, has_unused_weights: bool = False, shard_over: int | None = None
) -> nn.Module:
    """The module whose forward is called in training: the model itself, sharded under FSDP2, or wrapped in DDP.

    "hybrid" shards over `shard_over` processes, by default those of a node, and every such group has a copy.
    """
    if world.size == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=has_unused_weights)
    if parallel == "hybrid":
        shards = shard_over or int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        if world.size % shards:
            raise ValueError(f"run.shard_over is {shards}; it must divide the number of processes, {world.size}.")
        mesh = init_device_mesh(
            world.device.type, (world.size // shards, shards), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(world.device.type, (world.size,))
    for module in reversed(list(model.modules())):  # experts before their layer
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Synchronizes gradients across processes in the last micro-batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
    else:
        yield


def unshard(model: nn.Module) -> None:
    """Gathers the root weights of a sharded model, for calls to methods other than forward."""
    if isinstance(model, FSDPModule):
        model.unshard()


def reshard(model: nn.Module) -> None:
    """Frees the full weights that a forward pass without a backward pass leaves in a sharded model."""
    if isinstance(model, FSDPModule):
        model.reshard()


# ---------------------------------------------------------------------- tensors


def to_local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this process holds, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """The full tensor. For a sharded tensor this is a collective operation."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shards a full tensor, which every process holds, in the way `like` is sharded."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def from_local_like(shard: Tensor, like: Tensor) -> Tensor:
    """Wraps this process's shard as a tensor that is sharded in the way `like` is."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def copy_full(full: Tensor, target: Tensor) -> None:
    """Copies a full tensor into one that may be sharded."""
    to_local(target).copy_(to_local(shard_like(full.to(target.device), target)))
