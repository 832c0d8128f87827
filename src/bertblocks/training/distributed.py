"""One process or many: joining them, sharing a model among them, and whole tensors of sharded ones.

Processes are started by torchrun, which says by environment variables who is who. Under DDP each has a copy of the
model; under FSDP2 each has a shard of every tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

#: Others wait this long while the first process prepares the data.
PATIENCE = timedelta(hours=24)


class PeerFailedError(RuntimeError):
    """Another process has failed, and this one ends with it."""


@dataclass(frozen=True)
class World:
    """Which process this is, among how many, and its device."""

    rank: int
    size: int
    device: torch.device
    #: Where the others wait for the first, for hours if need be. All else has torch's shorter time to end.
    patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes, in double precision."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def part(self, count: int) -> range:
        """This process's share of `count` things: contiguous, and of any two processes' at most one apart."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def run_on_main(self, work: Callable[[], None]) -> None:
        """The first process works while the others wait; if it fails, they end too."""
        failed = 1.0
        try:
            if self.is_main:
                work()
            failed = 0.0
        finally:
            failures = torch.tensor(failed)
            if self.size > 1:
                dist.all_reduce(failures, group=self.patient)
        if failures:
            raise PeerFailedError("Another process of this run has failed and says why.")


def join(device: str = "auto") -> World:
    """This process's place among those that torchrun started, or alone."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', and torch sees no CUDA device; use 'auto' or 'cpu'.")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    if size > 1 and not dist.is_initialized():
        store, rank, size = next(dist.rendezvous("env://"))
        # processes that torchrun has started again must not read the addresses of those before them
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size)
        atexit.register(_leave)  # a program may train several times, and processes can join but once
    if size == 1:
        return World(0, 1, place)
    return World(dist.get_rank(), size, place, _patient_group())


@cache
def _patient_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=PATIENCE, backend="gloo")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share_model(model: nn.Module, world: World, parallel: str) -> nn.Module:
    """What to call in place of the model: itself, sharded or not, or DDP around it."""
    if world.size == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def gradients_shared(model: nn.Module, is_last: bool):
    """Processes add up their gradients in the last part of a batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        yield
    elif isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
    else:
        yield


def unshard(model: nn.Module) -> None:
    """Gathers the weights that a sharded model has outside of its layers, for calls of other methods than forward."""
    if isinstance(model, FSDPModule):
        model.unshard()


def reshard(model: nn.Module) -> None:
    """Frees whole weights that a forward pass without a backward pass has left in a sharded model."""
    if isinstance(model, FSDPModule):
        model.reshard()


# ---------------------------------------------------------------------- tensors


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, which every process must ask for together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def place_like(tensor: Tensor, like: Tensor, is_whole: bool = False) -> Tensor:
    """A tensor sharded as `like` is: from this process's part of it, or from all of it."""
    if not isinstance(like, DTensor):
        return tensor
    if is_whole:
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def put(values: Tensor, into: Tensor) -> None:
    """Copies a whole tensor into one that may be sharded."""
    local(into).copy_(local(place_like(values.to(into.device), into, is_whole=True)))
