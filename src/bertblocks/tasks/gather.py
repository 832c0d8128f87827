"""Tensors of all processes, for losses that compare the examples of a whole batch; gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, distributed


def rank() -> int:
    """The number of this process."""
    return distributed.get_rank() if _is_running() else 0


def gather(x: Tensor) -> Tensor:
    """Concatenates the rows of all processes, which have equally many."""
    if not _is_running() or distributed.get_world_size() == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(tuple(all_gather(x)))


def gather_ragged(x: Tensor) -> tuple[Tensor, int]:
    """Concatenates the rows of all processes, which may have different numbers, and says where this one's begin.

    The numbers of the others are read from the device.
    """
    if not _is_running() or distributed.get_world_size() == 1:
        return x, 0
    sizes = gather(torch.tensor([len(x)], device=x.device)).tolist()
    largest = max(sizes)
    padding = [0, 0] * (x.dim() - 1) + [0, largest - len(x)]
    parts = gather(F.pad(x, padding)).view(len(sizes), largest, *x.shape[1:])
    rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return rows, sum(sizes[: rank()])


def gather_numbers(numbers: Sequence[int], device: torch.device) -> tuple[list[int], int]:
    """Joins the numbers of all processes, by way of the device, and says where this one's begin."""
    if not _is_running() or distributed.get_world_size() == 1:
        return list(numbers), 0
    together, first = gather_ragged(torch.tensor(numbers, device=device))
    return together.tolist(), first


def _is_running() -> bool:
    return distributed.is_available() and distributed.is_initialized()
