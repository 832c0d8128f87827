"""Layers with int8 weights, for inference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.nn.activation import get_activation
from bertblocks.nn.linear import Linear
from bertblocks.nn.mlp import GLU, MLP
from bertblocks.nn.ops.int8 import GELU, GELU_TANH, RELU, SILU, Kernel, PackedLayer, find_kernel

#: The kernel's number of every activation that it knows.
KERNEL_ACTIVATIONS: dict[type[nn.Module], int] = {
    type(get_activation(name)): number
    for name, number in {
        "relu": RELU,
        "silu": SILU,
        "gelu": GELU,
        "gelu_new": GELU_TANH,
        "gelu_fast": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
    }.items()
}


def usable_kernel(x: Tensor) -> Kernel | None:
    """The C kernel if it can run on this input; a graph that is being captured needs torch's operations."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    kernel = find_kernel()
    return kernel if isinstance(kernel, Kernel) else None


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are bytes with a scale per output, and whose input becomes bytes row by row.

    Every row has its own scale and zero point, so that no row's result depends on another's. Sums are exact integers;
    the C kernel and torch differ by the rounding of the way back only.
    """

    weight: Tensor  # [out, in], int8
    weight_scale: Tensor  # [out]
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool, role: str, parts: list[int]) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.role, self.parts = role, parts
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self._packed: PackedLayer | None = None

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear) -> QuantizedLinear:
        """The nearest weights to those of a linear layer."""
        has_bias = linear.bias is not None
        role, parts = (linear.role, linear.parts) if isinstance(linear, Linear) else ("head", [linear.out_features])
        made = cls(linear.in_features, linear.out_features, has_bias, role, parts)
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30)
        made.weight = (weight / scale[:, None]).round().to(torch.int8)
        made.weight_scale = scale
        made.bias = linear.bias.detach().float() if has_bias else None
        return made

    @property
    def packed(self) -> PackedLayer:
        """The weights in the kernel's order, made when first used."""
        if self._packed is None:
            self._packed = PackedLayer(self.weight, self.weight_scale, self.bias)
        return self._packed

    def rows(self, x: Tensor) -> Tensor:
        """Input as fp32 rows in one piece."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("An int8 model has no gradients: train the fp32 model, then quantize it.")
        return x.reshape(-1, x.shape[-1]).float().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x)
        kernel = usable_kernel(x) if len(rows) else None
        if kernel is None:
            out = multiply(rows, self.weight, self.weight_scale.float(), self.bias)
        else:
            out = kernel.linear(rows, self.packed)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int8"

    # what is packed follows the buffers, and has no life of its own

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel's product in torch's operations: `[rows, in]` and int8 `[out, in]` -> `[rows, out]`."""
    lowest = x.amin(dim=1, keepdim=True).clamp(max=0.0)
    spread = (x.amax(dim=1, keepdim=True).clamp(min=0.0) - lowest).clamp(min=1e-30)
    spread = spread.masked_fill(~spread.isfinite(), torch.nan)
    steps = torch.full_like(spread, 255.0) / spread
    zero = (-lowest * steps).round()
    bytes_ = (x * steps).round().add_(zero - 128).clamp_(-128, 127)  # the kernel's, less 128
    if x.device.type == "cpu" and x.shape[1] > 1:  # for one input _int_mm returns memory that it has not written
        sums = torch._int_mm(bytes_.to(torch.int8), weight.t())
        sums = sums - (zero - 128).int() * weight.sum(dim=1, dtype=torch.int32)
    else:
        sums = F.linear(bytes_ - (zero - 128), weight.float())
    out = sums.float() * (spread / 255.0 * scale)
    return out if bias is None else out + bias


class QuantizedMLP(nn.Module):
    """down(act(up(x))) or down(act(gate) * value), in one call of the C kernel where that can run."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down
        self.activation = mlp.activation
        self.gated = isinstance(mlp, GLU)

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Whether a feed-forward network, its matrices quantized, is one of the two that the kernel computes."""
        if type(module) not in (MLP, GLU) or not isinstance(module.up, QuantizedLinear):
            return False
        return type(module.activation) in KERNEL_ACTIVATIONS

    def forward(self, x: Tensor) -> Tensor:
        up: QuantizedLinear = self.up  # type: ignore[assignment]
        down: QuantizedLinear = self.down  # type: ignore[assignment]
        kernel = usable_kernel(x) if len(x) else None
        if kernel is None:
            hidden = up(x)
            if self.gated:
                gate, value = hidden.chunk(2, dim=-1)
                return down(self.activation(gate) * value)
            return down(self.activation(hidden))
        activation = KERNEL_ACTIVATIONS[type(self.activation)]
        out = kernel.mlp(up.rows(x), up.packed, down.packed, activation, self.gated)
        return out.view(*x.shape[:-1], down.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"gated={self.gated}"
