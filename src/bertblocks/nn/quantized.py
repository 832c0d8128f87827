"""Layers with int8 weights for inference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.nn.activation import KERNEL_ACTIVATIONS
from bertblocks.nn.attention import Attention, ForwardContext
from bertblocks.nn.backends.cpu import CpuBackend
from bertblocks.nn.block import Block, Residual
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.mlp import GLU, MLP
from bertblocks.nn.ngpt import LayerOutput
from bertblocks.nn.norm import LayerNorm, RMSNorm
from bertblocks.nn.ops.cpu import has_fast_bf16_products
from bertblocks.nn.ops.kernel_arguments import AttentionCall, NormParts, PackedEncoderLayer, PackedLayer
from bertblocks.nn.ops.kernels import MAX_HEAD_SIZE, Kernel, kernel_for


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

    def packed(self, kernel: Kernel) -> PackedLayer:
        """Return the weights in the kernel's memory order, packed at first use."""
        if self._packed is None:
            self._packed = kernel.pack(self.weight, self.weight_scale, self.bias)
        return self._packed

    def rows(self, x: Tensor) -> Tensor:
        """Return the input as contiguous fp32 rows."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("An int8 model cannot be trained; train the fp32 model, then quantize it.")
        return x.reshape(-1, x.shape[-1]).float().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x)
        kernel = kernel_for(rows)
        if kernel is None:
            out = multiply(rows, self.weight, self.weight_scale.float(), self.bias)
        else:
            out = kernel.linear(rows, self.packed(kernel))
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
        rows = up.rows(x)
        kernel = kernel_for(rows)
        if kernel is None:
            hidden = up(x)
            if self.gated:
                gate, value = hidden.chunk(2, dim=-1)
                return down(self.activation(gate) * value)
            return down(self.activation(hidden))
        activation = KERNEL_ACTIVATIONS[type(self.activation)]
        out = kernel.mlp(rows, up.packed(kernel), down.packed(kernel), activation, self.gated)
        return out.view(*x.shape[:-1], down.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"gated={self.gated}"


class QuantizedBlock(Block):
    """A quantized encoder layer in one call of the C kernel, which takes as long as the products do.

    Attention computes in bf16 where the CPU has fast products for it: their error is smaller than that of int8.
    """

    def __init__(self, block: Block) -> None:
        super().__init__(block.attention, block.mlp, block.attention_residual, block.mlp_residual, block.input_mixing)
        self.training = block.training
        self._packed: tuple[tuple[object, ...], PackedEncoderLayer] | None = None

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """True for an encoder layer with quantized sublayers, without anything that the kernel cannot compute."""
        if type(module) is not Block or type(module.attention) is not Attention:
            return False
        attention, residuals = module.attention, (module.attention_residual, module.mlp_residual)
        if attention.query_bias is not None or module.input_mixing is not None or attention.head_dim > MAX_HEAD_SIZE:
            return False
        is_quantized = isinstance(attention.qkv, QuantizedLinear) and isinstance(module.mlp, QuantizedMLP)
        return is_quantized and attention.is_plain and all(_is_plain(residual) for residual in residuals)

    def forward(self, x: Tensor, context: ForwardContext, token_indices: Tensor | None = None) -> LayerOutput:
        kernel = kernel_for(x) if self._is_fusible(x, context) else None
        packed = None if kernel is None else self._pack(kernel)
        if packed is None or kernel is None:
            return super().forward(x, context, token_indices)
        if token_indices is not None:
            token_indices = token_indices.contiguous()
            if len(token_indices) and not 0 <= int(token_indices.min()) <= int(token_indices.max()) < len(x):
                raise IndexError(f"token_indices reach outside the {len(x)} tokens.")
        return kernel.layer(x.contiguous(), packed, self._call(context.layout), token_indices), None, None

    def _is_fusible(self, x: Tensor, context: ForwardContext) -> bool:
        if self.training or x.dtype != torch.float32 or context.layout.key_mask is not None:
            return False
        if context.output_weights or context.memory is not None or type(context.backend) is not CpuBackend:
            return False
        return not (x.requires_grad and torch.is_grad_enabled())

    def _pack(self, kernel: Kernel) -> PackedEncoderLayer | None:
        """Return the layer for the kernel, packed again after its weights were replaced; None if hooks want to run."""
        attention, mlp = self.attention, self.mlp
        layers = attention.qkv, attention.out, mlp.up, mlp.down
        norms = [norm for residual in (self.attention_residual, self.mlp_residual) for norm in residual.norms]  # type: ignore[union-attr]
        modules = (attention, mlp, *layers, *norms)
        if any(module._forward_hooks or module._forward_pre_hooks for module in modules):  # type: ignore[union-attr]
            return None
        if not all(type(layer) is QuantizedLinear for layer in layers):
            return None
        described = [_describe_norm(norm) for norm in norms]
        parts = [layer.packed(kernel) for layer in layers]  # type: ignore[union-attr,operator]
        key = (*parts, *(value for norm in described for value in norm[:2]))
        if self._packed is None or any(old is not new for old, new in zip(self._packed[0], key, strict=True)):
            activation = KERNEL_ACTIVATIONS[type(mlp.activation)]  # type: ignore[index,arg-type]
            self._packed = key, PackedEncoderLayer(parts, activation, mlp.gated, described)  # type: ignore[arg-type]
        return self._packed[1]

    def _call(self, layout: SequenceLayout) -> AttentionCall:
        """Return what the kernel needs to know about the sequences; layers with equal attention share it."""
        attention, tables = self.attention, self.attention.rotation(layout)
        sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale
        key = ("int8 layer", sizes, attention.pattern.half_window, None if tables is None else tables[0].data_ptr())

        def compute() -> AttentionCall:
            half_window = attention.pattern.half_window
            call = AttentionCall(layout.read_lengths(), *sizes, half_window, has_fast_bf16_products(), tables)
            call.memory = layout.memo("int8 memory", dict)
            return call

        return layout.memo(key, compute)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def _is_plain(residual: Residual | None) -> bool:
    """True for x + f(x) with norms before or after it that the kernel computes."""
    if residual is None or residual.combine is not None or residual.norm_inside:
        return False
    scales = residual.skip_scale, residual.branch_scale, residual.norm_scale
    return scales == (1.0, 1.0, 1.0) and all(
        isinstance(norm, nn.Identity) or (type(norm) in (LayerNorm, RMSNorm) and not norm.is_one_plus)
        for norm in residual.norms
    )


def _describe_norm(norm: nn.Module) -> NormParts:
    """Return weight, bias, epsilon and whether the mean stays; all None for no norm."""
    if isinstance(norm, nn.Identity):
        return None, None, None, False
    return norm.weight, norm.bias, norm.eps, isinstance(norm, RMSNorm)  # type: ignore[return-value]
