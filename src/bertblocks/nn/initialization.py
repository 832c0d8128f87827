"""The initialization of weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import initialization as init  # skips weights that were loaded

from bertblocks.core.registry import Registry
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import NORMS, DeepNorm, init_norm
from bertblocks.nn.parametrization import initial_factor

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: Initial value of nGPT's learned scales, as in NeoBERT.
NGPT_BASE_SCALE = 960**-0.5


@torch.no_grad()
def init_module(module: nn.Module, config: BertBlocksConfig, is_decoder: bool = False) -> None:
    """Initializes the parameters of `module`, not those of its children.

    A block with parameters of its own has `init_parameters(config)`. Linear layers are initialized by their role. A
    plain `nn.Linear`, such as the decoder, does not have one.
    """
    if callable(initialize := getattr(module, "init_parameters", None)):
        initialize(config)
    elif isinstance(module, nn.Linear):
        _init_linear(module, config, is_decoder)
    elif isinstance(module, nn.Embedding):
        scale = NGPT_BASE_SCALE if config.init_kind == "ngpt" else config.embedding_initializer_range
        draw_normal(module.weight, scale, config)
        if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
            init.zeros_(module.weight[module.padding_idx])
    elif isinstance(module, nn.Conv1d):
        draw_normal(module.weight, config.initializer_range * initial_factor(module, config), config)
        if module.bias is not None:
            init.zeros_(module.bias)
    elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        init_norm(module)
    elif type(module) in NORMS.blocks() and callable(reset := getattr(module, "reset_parameters", None)):
        reset()  # a registered norm initializes itself


def _init_linear(module: nn.Linear, config: BertBlocksConfig, is_decoder: bool) -> None:
    if module.bias is not None:
        init.zeros_(module.bias)
    if getattr(module.weight, "_is_hf_initialized", False):
        return
    role, layer, parts = None, None, [module.out_features]
    if isinstance(module, Linear):
        role, layer, parts = module.role, module.layer, module.parts
    matrices = module.weight.split(parts)  # queries, keys, values and the halves of a GLU are separate
    for matrix in matrices:
        INITIALIZATIONS[config.init_kind](matrix, role, layer, config)
    if not is_decoder and (factor := initial_factor(module, config)) != 1.0:
        module.weight.mul_(factor)
    if config.norm_fn == "deep" or config.init_kind == "deepnet":
        # DeepNet scales down values, attention output and feed-forward, but not queries and keys
        small = {"qkv": matrices[-1:], "up": matrices, "out": matrices}.get(str(role), ())
        for matrix in small:
            matrix.mul_(DeepNorm.weight_scale(config.num_hidden_layers))


INITIALIZATIONS: Registry[Any] = Registry("init_kind")
#: Decorator that registers a function `draw(weight, role, layer, config)` under a name for `init_kind`. `role` is that
#: of a `Linear`, None for others; `layer` is the index of its layer, None outside of the encoder.
register_initialization = INITIALIZATIONS.register


@register_initialization("trunc_normal")
@register_initialization("normal")
def _draw_range(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    draw_normal(weight, config.initializer_range, config)


@register_initialization("megatron")
def _draw_megatron(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    deep = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    scales = {"out": deep, "head": deep, "classifier": config.hidden_size**-0.5}
    draw_normal(weight, scales.get(str(role), config.initializer_range), config)


@register_initialization("xavier")
@register_initialization("deepnet")
def _draw_xavier(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    init.xavier_normal_(weight)


@register_initialization("kaiming")
def _draw_kaiming(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    init.kaiming_normal_(weight, nonlinearity="relu")


@register_initialization("ngpt")
def _draw_ngpt(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    depth = math.sqrt(2 * config.num_hidden_layers) if role == "out" else 1.0
    init.normal_(weight, std=NGPT_BASE_SCALE / depth)


@register_initialization("fan_in")
def _draw_fan_in(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    draw_normal(weight, weight.shape[1] ** -0.5, config)


@register_initialization("uniform")
def _draw_uniform(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    limit = config.initializer_range * math.sqrt(3)
    init.uniform_(weight, -limit, limit)


@register_initialization("mitchell")
def _draw_mitchell(weight: Tensor, role: str | None, layer: int | None, config: BertBlocksConfig) -> None:
    depth = 2 * (layer + 1) if role == "out" and layer is not None else 1
    draw_normal(weight, (depth * weight.shape[1]) ** -0.5, config)


def draw_normal(weight: Tensor, scale: float, config: BertBlocksConfig) -> None:
    """Draws from the normal distribution of `init_kind`, truncated or not, with a standard deviation of `scale`."""
    if config.init_kind in ("normal", "ngpt"):
        init.normal_(weight, std=scale)
    else:
        _draw_truncated(weight, scale, config.initializer_cutoff_factor * scale)


def _draw_truncated(weight: Tensor, scale: float, cut: float) -> None:
    """Draws from a normal distribution and redraws what lies beyond the cut, much faster than by its inverse."""
    init.normal_(weight, std=scale)
    if weight.is_meta or getattr(weight, "_is_hf_initialized", False):
        return
    flat = weight.view(-1)
    outside = (flat.abs() > cut).nonzero().squeeze(1)
    while len(outside):
        flat[outside] = torch.randn(len(outside), dtype=flat.dtype, device=flat.device) * scale
        outside = outside[flat[outside].abs() > cut]
