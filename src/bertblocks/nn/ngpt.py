"""nGPT: hidden states that move along the unit sphere (Loshchilov et al., 2024), in NeoBERT's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.attention import Attention, ForwardContext
from bertblocks.nn.initialization import NGPT_BASE_SCALE
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.numerics import add_epsilon, upcast

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

NGPT: Registry[Any] = Registry("ngpt")
#: The hidden states, the attention weights if requested, and the logits of the layer's router if it has one.
LayerOutput = tuple[Tensor, Tensor | None, Tensor | None]
#: Initial step size along the sphere.
NGPT_ALPHA = 0.05


def unit(x: Tensor) -> Tensor:
    """Scale vectors to unit length."""
    precise = upcast(x)
    return (precise / add_epsilon(precise.norm(dim=-1, keepdim=True), 1e-8)).to(x.dtype)


class NGPTAttention(Attention):
    """Attention between unit queries and keys with a learned scale."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sqk = nn.Parameter(torch.full((self.sizes[0],), NGPT_BASE_SCALE))

    def normalize_queries(self, q: Tensor) -> Tensor:
        scale = (self.sqk / NGPT_BASE_SCALE).view(self.num_heads, self.head_dim)
        return (scale * unit(q)).to(q.dtype)

    def normalize_keys(self, k: Tensor) -> Tensor:
        return self.normalize_queries(k)  # they share their scale

    def init_parameters(self, config: BertBlocksConfig) -> None:
        super().init_parameters(config)
        init.constant_(self.sqk, NGPT_BASE_SCALE)

    def apply_positions(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        q, k = self.position.rotate(q, k, layout)
        return self.normalize_queries(q), self.normalize_keys(k)


@NGPT.register(True)
class NGPTBlock(GradientCheckpointingLayer):
    """Moves along the unit sphere towards each sublayer's output, by a learned step per hidden unit.

    Queries and keys share their scale, so there are as many key/value heads as query heads.
    """

    keys: ClassVar[dict[str, Key]] = {
        "ngpt_renormalize": Key(
            bool,
            True,
            "Whether training renormalises weight matrices after each step, with `renormalize_weights()`.",
            runtime=True,
        ),
        "ngpt_logit_scale": Key(bool, False, "Whether the masked-LM head has a learned scale on its logits."),
    }
    requires: ClassVar[dict[str, tuple[Any, str]]] = {
        "norm_pos": ("none", "its blocks project onto the unit sphere instead"),
        "attention_norm_pos": ("none", "its blocks project onto the unit sphere instead"),
        "mlp_norm_pos": ("none", "its blocks project onto the unit sphere instead"),
        "final_norm": (False, "its last hidden state is already on the unit sphere"),
        "parallel_block": (False, "its two steps along the sphere are sequential"),
        "mlp_type": ("glu", "its feed-forward network is a scaled GLU"),
        "qk_norm": (False, "its queries and keys are already unit vectors"),
        "input_mixing": (False, "a mixture leaves the unit sphere"),
        "residual_scale": (1.0, "its steps along the sphere have learned sizes"),
        "residual_fn": ("add", "its steps along the sphere replace the sum"),
        "tie_word_embeddings": (False, "its output matrix is normalised separately from the embeddings"),
    }

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        heads = config.num_attention_heads
        why = f"ngpt requires {heads}, because queries and keys share their scale"
        yield "num_kv_heads", config.num_kv_heads != heads, why

    def __init__(self, hidden_size: int, attention: NGPTAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_alpha = nn.Parameter(torch.full((hidden_size,), NGPT_BASE_SCALE))
        self.mlp_alpha = nn.Parameter(torch.full((hidden_size,), NGPT_BASE_SCALE))

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init.constant_(self.attention_alpha, NGPT_BASE_SCALE)
        init.constant_(self.mlp_alpha, NGPT_BASE_SCALE)

    @staticmethod
    def step(x: Tensor, branch: Tensor, alpha: Tensor) -> Tensor:
        start = unit(x)
        rate = (alpha * (NGPT_ALPHA / NGPT_BASE_SCALE)).abs()
        return unit(start + rate * (unit(branch) - start))

    def forward(self, x: Tensor, context: ForwardContext, token_indices: Tensor | None = None) -> LayerOutput:
        branch, weights = self.attention(x, context, token_indices)
        x = self.step(index_tokens(x, token_indices), branch, self.attention_alpha)
        return self.step(x, self.mlp(x), self.mlp_alpha), weights, None
