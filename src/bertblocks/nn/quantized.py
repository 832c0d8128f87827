"""Layers with int8 weights for inference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.nn.activation import get_activation
from bertblocks.nn.linear import Linear
from bertblocks.nn.mlp import GLU, MLP
from bertblocks.nn.ops.int8 import GELU, GELU_TANH, RELU, SILU, Kernel, PackedLayer, find_kernel

#: The kernel's code for every activation it supports.
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
    """Return the C kernel if it can run on this input; graph capture needs torch's operations."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    kernel = find_kernel()
    return kernel if isinstance(kernel, Kernel) else None


class QuantizedLinear(nn.Module):
    """A linear layer with int8 weights and one scale per output; each input row is quantized as it arrives.

    Every row has its own scale and zero point, so its result does not depend on other rows. Sums are exact integers;
    the C kernel and torch differ only in how they round the conversion back to floats.
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
        """Quantize a linear layer to the nearest int8 weights."""
        has_bias = linear.bias is not None
        role, parts = (linear.role, linear.parts) if isinstance(linear, Linear) else ("head", [linear.out_features])
        layer = cls(linear.in_features, linear.out_features, has_bias, role, parts)
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30)
        layer.weight = (weight / scale[:, None]).round().to(torch.int8)
        layer.weight_scale = scale
        layer.bias = linear.bias.detach().float() if has_bias else None
        return layer

    @property
    def packed(self) -> PackedLayer:
        """The weights in the kernel's memory order, packed at first use."""
        if self._packed is None:
            self._packed = PackedLayer(self.weight, self.weight_scale, self.bias)
        return self._packed

    def rows(self, x: Tensor) -> Tensor:
        """Return the input as contiguous fp32 rows."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("An int8 model cannot be trained; train the fp32 model, then quantize it.")
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

    # packed weights are derived from the buffers, so they are dropped whenever the buffers change

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the kernel's product with torch: `[rows, in]` and int8 `[out, in]` -> `[rows, out]`."""
    lowest = x.amin(dim=1, keepdim=True).clamp(max=0.0)
    spread = (x.amax(dim=1, keepdim=True).clamp(min=0.0) - lowest).clamp(min=1e-30)
    spread = spread.masked_fill(~spread.isfinite(), torch.nan)
    steps = torch.full_like(spread, 255.0) / spread
    zero = (-lowest * steps).round()
    bytes_ = (x * steps).round().add_(zero - 128).clamp_(-128, 127)  # the kernel's bytes minus 128
    if x.device.type == "cpu" and x.shape[1] > 1:  # with one input, _int_mm returns uninitialized memory
        sums = torch._int_mm(bytes_.to(torch.int8), weight.t())
        sums = sums - (zero - 128).int() * weight.sum(dim=1, dtype=torch.int32)
    else:
        sums = F.linear(bytes_ - (zero - 128), weight.float())
    out = sums.float() * (spread / 255.0 * scale)
    return out if bias is None else out + bias


class QuantizedMLP(nn.Module):
    """down(act(up(x))) or down(act(gate) * value), in one call of the C kernel where it runs."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down
        self.activation = mlp.activation
        self.gated = isinstance(mlp, GLU)

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """True for a quantized feed-forward network of a kind that the kernel computes."""
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
