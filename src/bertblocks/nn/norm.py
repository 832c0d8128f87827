"""Norms over the hidden units of each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.linear import is_untouched
from bertblocks.nn.numerics import add_epsilon, upcast
from bertblocks.nn.ops.gpu import own_kernels
from bertblocks.nn.ops.liger import liger

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig

NORMS: Registry[type[nn.Module]] = Registry("norm_fn")
register_norm = NORMS.register


#: The key of norms whose weight has several forms.
WEIGHT = Key(
    str,
    "scale",
    "The weight w: scale multiplies by w, one_plus by 1 + w as in Gemma, none has no weight. Norms of queries and keys "
    "follow.",
    choices=("scale", "one_plus", "none"),
    per_layer=True,
)


@register_norm("layer")
class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba et al., 2016)."""

    keys: ClassVar[dict[str, Key]] = {"norm_weight": WEIGHT}

    def __init__(self, size: int, eps: float, bias: bool, kernel_backend: str = "torch", weight: str = "scale") -> None:
        super().__init__(size, eps=eps, bias=bias)
        self.kernel_backend = kernel_backend
        self.is_one_plus = weight == "one_plus"
        if weight == "none":
            self.register_parameter("weight", None)
        elif self.is_one_plus:
            nn.init.zeros_(self.weight)

    @classmethod
    def from_config(cls, config: BertBlocksConfig, size: int) -> Self:
        return cls(size, config.norm_eps, config.norm_bias, config.kernel_backend, config.norm_weight)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.is_one_plus else self.weight
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)

    def add(self, kernels: Any, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm in one kernel, which autocast computes in fp32."""
        weight = 1 + self.weight if self.is_one_plus else self.weight
        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else None
        return kernels.add_norm(x, branch, weight, self.bias, self.eps, is_centred=True, dtype=dtype)


@register_norm("deep")
class DeepNorm(LayerNorm):
    """The LayerNorm of DeepNet (Wang et al., 2022), whose blocks multiply the residual stream by `skip_scale` first."""

    requires: ClassVar[dict[str, tuple[str, str]]] = dict.fromkeys(
        ("norm_pos", "attention_norm_pos", "mlp_norm_pos"),
        ("post", "DeepNet scales the residual stream in front of a norm"),
    )

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        overrides = (config.layer_overrides or {}).values()
        mixed = any(layer.get("norm_fn", config.norm_fn) != config.norm_fn for layer in overrides)
        yield "layer_overrides", mixed, "norm_fn 'deep' must apply to all layers, in position 'post', or to none"

    @staticmethod
    def skip_scale(num_layers: int) -> float:
        return (2 * num_layers) ** 0.25

    @staticmethod
    def weight_scale(num_layers: int) -> float:
        """Return the factor on value, attention-output and feed-forward weights at initialization."""
        return (8 * num_layers) ** -0.25


@register_norm("rms")
class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019), computed in at least fp32."""

    keys: ClassVar[dict[str, Key]] = {"norm_weight": WEIGHT}

    def __init__(
        self, size: int, eps: float, bias: bool = False, kernel_backend: str = "torch", weight: str = "scale"
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.kernel_backend = kernel_backend
        self.is_one_plus = weight == "one_plus"
        start = torch.zeros(size) if self.is_one_plus else torch.ones(size)
        self.weight = None if weight == "none" else nn.Parameter(start)
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    @classmethod
    def from_config(cls, config: BertBlocksConfig, size: int) -> RMSNorm:
        return cls(size, config.norm_eps, config.norm_bias, config.kernel_backend, config.norm_weight)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is not None and not self.is_one_plus and (kernels := liger(self.kernel_backend, x)) is not None:
            normed = kernels.rms_norm(x, weight, self.eps)
        elif (kernels := own_kernels(self.kernel_backend, x)) is not None:
            return self.add(kernels, x, None)[1]
        else:
            precise = upcast(x)
            normed = precise * torch.rsqrt(add_epsilon(precise.square().mean(-1, keepdim=True), self.eps))
            if weight is None:
                normed = normed.to(x.dtype)
            elif self.is_one_plus:
                normed = (normed * (1 + upcast(weight))).to(x.dtype)  # rounded once, as in Gemma
            else:
                normed = normed.to(x.dtype) * weight
        return normed if self.bias is None else normed + self.bias

    def add(self, kernels: Any, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm in one kernel."""
        weight = 1 + upcast(self.weight) if self.is_one_plus and self.weight is not None else self.weight
        rounds_first = not self.is_one_plus
        joined, normed = kernels.add_norm(x, branch, weight, None, self.eps, False, rounds_first=rounds_first)
        return joined, normed if self.bias is None else normed + self.bias

    def extra_repr(self) -> str:
        weight = ", weight=1 + w" if self.is_one_plus else ", weight=none" if self.weight is None else ""
        return f"({self.size},), eps={self.eps}, bias={self.bias is not None}{weight}"


@register_norm("group")
class GroupNorm(nn.GroupNorm):
    """Normalizes groups of a token's channels separately (Wu and He, 2018)."""

    keys: ClassVar[dict[str, Key]] = {
        "norm_num_groups": Key(int, 32, "Number of channel groups.", least=1, most=2**20, per_layer=True)
    }

    def __init__(self, size: int, eps: float, bias: bool, num_groups: int) -> None:
        super().__init__(num_groups, size, eps=eps)
        if not bias:
            self.register_parameter("bias", None)

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        yield from cls._check_size(config, "hidden_size")

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        if config.norm_fn == "group" and config.embedding_size != config.hidden_size:
            yield from cls._check_size(config, "embedding_size")

    @staticmethod
    def _check_size(config: BertBlocksConfig, name: str) -> Iterator[Problem]:
        size, groups = getattr(config, name), config.norm_num_groups
        uneven = size % groups or size == groups
        yield "norm_num_groups", uneven, f"it must divide {name} = {size} into groups of at least 2"

    @classmethod
    def from_config(cls, config: BertBlocksConfig, size: int) -> GroupNorm:
        return cls(size, config.norm_eps, config.norm_bias, config.norm_num_groups)


@register_norm("dynamic_tanh")
class DynamicTanhNorm(nn.Module):
    """weight * tanh(alpha x) + bias, which needs no statistics (Zhu et al., 2025)."""

    evidence = "Negative where data is not scarce: the loss gets worse (arXiv 2604.23434)."

    def __init__(self, size: int, eps: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init.constant_(self.alpha, 0.5)
        init_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        squashed = torch.tanh(self.alpha * x) * self.weight
        return squashed if self.bias is None else squashed + self.bias


def add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, in one pass over memory where a kernel computes both."""
    kernels = own_kernels(getattr(norm, "kernel_backend", "torch"), x)
    is_plain = kernels is not None and any(is_untouched(norm, kind) for kind in (LayerNorm, DeepNorm, RMSNorm))
    if is_plain and x.shape == branch.shape:
        return norm.add(kernels, x, branch)  # type: ignore[operator]
    joined = x + branch
    return joined, norm(joined)


def init_norm(norm: Any) -> None:
    """Start as the identity after normalization."""
    if norm.weight is not None:
        init.constant_(norm.weight, 0.0 if getattr(norm, "is_one_plus", False) else 1.0)
    if norm.bias is not None:
        init.zeros_(norm.bias)


def get_skip_scale(config: BertBlocksConfig) -> float:
    """Return the factor on the residual stream that the norm of a layer requires."""
    scale = getattr(NORMS[config.norm_fn], "skip_scale", None)
    return 1.0 if scale is None else scale(config.num_hidden_layers)


def get_norm_scale(config: BertBlocksConfig, index: int) -> float:
    """Return the factor on the norms in front of the sublayers of layer `index` (Sun et al., 2025)."""
    return (index + 1) ** -0.5 if config.norm_scaling else 1.0


def get_norm(config: BertBlocksConfig, size: int | None = None) -> nn.Module:
    """Build the norm that a config names, over `hidden_size` units unless `size` is given."""
    norm, size = NORMS[config.norm_fn], size or config.hidden_size
    if hasattr(norm, "from_config"):
        return norm.from_config(config, size)
    return norm(size, eps=config.norm_eps, bias=config.norm_bias)
