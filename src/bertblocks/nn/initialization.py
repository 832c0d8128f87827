"""The initialization of weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init  # skips weights that were loaded

from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import NORMS, DeepNorm, init_norm

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: Initial value of nGPT's learned scales, as in NeoBERT.
NGPT_BASE_SCALE = 960**-0.5


@torch.no_grad()
def init_module(module: nn.Module, config: BertBlocksConfig) -> None:
    """Initializes the parameters of `module`, not those of its children.

    A block with parameters of its own has `init_parameters(config)`. Linear layers are initialized by their role. A
    plain `nn.Linear`, such as the decoder, does not have one.
    """
    if callable(initialize := getattr(module, "init_parameters", None)):
        initialize(config)
    elif isinstance(module, nn.Linear):
        _init_linear(module, config)
    elif isinstance(module, nn.Embedding):
        scale = NGPT_BASE_SCALE if config.init_kind == "ngpt" else config.initializer_range
        draw_normal(module.weight, scale, config)
        if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
            init.zeros_(module.weight[module.padding_idx])
    elif isinstance(module, nn.Conv1d):
        draw_normal(module.weight, config.initializer_range, config)
        if module.bias is not None:
            init.zeros_(module.bias)
    elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        init_norm(module)
    elif type(module) in NORMS.blocks() and callable(reset := getattr(module, "reset_parameters", None)):
        reset()  # a registered norm initializes itself


def _init_linear(module: nn.Linear, config: BertBlocksConfig) -> None:
    if module.bias is not None:
        init.zeros_(module.bias)
    if getattr(module.weight, "_is_hf_initialized", False):
        return
    role, parts = (module.role, module.parts) if isinstance(module, Linear) else (None, [module.out_features])
    matrices = module.weight.split(parts)  # queries, keys, values and the halves of a GLU are separate
    for matrix in matrices:
        _draw_matrix(matrix, role, config)
    if config.norm_fn == "deep" or config.init_kind == "deepnet":
        # DeepNet scales down values, attention output and feed-forward, but not queries and keys
        small = {"qkv": matrices[-1:], "up": matrices, "out": matrices}.get(str(role), ())
        for matrix in small:
            matrix.mul_(DeepNorm.weight_scale(config.num_hidden_layers))


def _draw_matrix(weight: Tensor, role: str | None, config: BertBlocksConfig) -> None:
    kind = config.init_kind
    depth = math.sqrt(2 * config.num_hidden_layers)
    if kind in ("xavier", "deepnet"):
        init.xavier_normal_(weight)
    elif kind == "kaiming":
        init.kaiming_normal_(weight, nonlinearity="relu")
    elif kind == "ngpt":
        init.normal_(weight, std=NGPT_BASE_SCALE / depth if role == "out" else NGPT_BASE_SCALE)
    elif kind == "megatron":
        deep = config.initializer_range / depth
        scales = {"out": deep, "head": deep, "classifier": config.hidden_size**-0.5}
        draw_normal(weight, scales.get(str(role), config.initializer_range), config)
    else:
        draw_normal(weight, config.initializer_range, config)


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
