"""Linear layers of several experts in one product, in which the number of rows of each stays on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.ops.gpu import Gpu
from bertblocks.nn.ops.linear import cast_dtype

#: The compute capabilities for which torch has a kernel. On other GPUs it reads the numbers of rows and loops.
CAPABILITIES = (9, 10)


def runs_grouped(x: Tensor, sizes: Sequence[int], gpu: Gpu | None) -> bool:
    """True if torch has a kernel for matrices of these numbers of rows and columns: bf16, aligned to 16 bytes."""
    if gpu is None or gpu.is_rocm or gpu.capability[0] not in CAPABILITIES or not hasattr(F, "grouped_mm"):
        return False
    return (cast_dtype(x) or x.dtype) == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def grouped_linear(x: Tensor, experts: Tensor, layers: Sequence[torch.nn.Linear]) -> Tensor:
    """`[rows, in]` -> `[rows, out]`: each row by the layer of its expert; `experts`, one for each row, are in order.

    Example:
        >>> layers = [torch.nn.Linear(8, 16) for _ in range(2)]
        >>> x = torch.randn(3, 8)
        >>> expected = torch.cat([layers[0](x[:1]), layers[1](x[1:])])
        >>> torch.allclose(grouped_linear(x, torch.tensor([0, 1, 1]), layers), expected, atol=1e-6)
        True
    """
    dtype = cast_dtype(x) or x.dtype
    weight = torch.stack([layer.weight for layer in layers]).to(dtype)  # [experts, out, in]
    ends = torch.searchsorted(experts, torch.arange(len(layers), device=x.device), right=True, out_int32=True)
    y = F.grouped_mm(x.to(dtype), weight.transpose(1, 2), offs=ends)
    if layers[0].bias is None:
        return y
    return y + torch.stack([layer.bias for layer in layers]).to(dtype).index_select(0, experts)
