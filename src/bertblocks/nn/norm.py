"""Norms over the hidden units of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bertblocks.core.registry import Registry
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.liger import liger

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

NORMS: Registry[type[nn.Module]] = Registry("norm_fn")
register_norm = NORMS.register


@register_norm("layer")
class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al., 2016)."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__(size, eps=eps, bias=bias)


@register_norm("deep")
class DeepNorm(LayerNorm):
    """The LayerNorm of DeepNet (Wang et al., 2022), whose blocks multiply the residual by `residual_scale` first."""

    @staticmethod
    def residual_scale(num_layers: int) -> float:
        return (2 * num_layers) ** 0.25

    @staticmethod
    def weight_scale(num_layers: int) -> float:
        """Return the factor on value, attention-output and feed-forward weights at initialization."""
        return (8 * num_layers) ** -0.25


@register_norm("rms")
class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019), computed in at least fp32."""

    def __init__(self, size: int, eps: float, bias: bool = False, kernel_backend: str = "torch") -> None:
        super().__init__()
        self.eps = eps
        self.kernel_backend = kernel_backend
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if (kernels := liger(self.kernel_backend, x)) is not None:
            normed = kernels.rms_norm(x, self.weight, self.eps)
        else:
            precise = upcast(x)
            scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
            normed = (precise * scale).to(x.dtype) * self.weight
        return normed if self.bias is None else normed + self.bias

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


@register_norm("group")
class GroupNorm(nn.GroupNorm):
    """Normalizes groups of a token's channels separately (Wu and He, 2018)."""

    def __init__(self, size: int, eps: float, bias: bool, num_groups: int) -> None:
        super().__init__(num_groups, size, eps=eps)
        if not bias:
            self.register_parameter("bias", None)


@register_norm("dynamic_tanh")
class DynamicTanhNorm(nn.Module):
    """weight * tanh(alpha x) + bias, which needs no statistics (Zhu et al., 2025)."""

    def __init__(self, size: int, eps: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        squashed = torch.tanh(self.alpha * x) * self.weight
        return squashed if self.bias is None else squashed + self.bias


def get_norm(config: BertBlocksConfig, size: int | None = None) -> nn.Module:
    """Build the norm that a config names, over `hidden_size` units unless `size` is given."""
    options: dict = {}
    if config.norm_fn == "group":
        options["num_groups"] = config.norm_num_groups
    elif config.norm_fn == "rms":
        options["kernel_backend"] = config.kernel_backend
    return NORMS[config.norm_fn](size or config.hidden_size, eps=config.norm_eps, bias=config.norm_bias, **options)
