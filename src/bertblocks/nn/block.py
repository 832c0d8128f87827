"""One encoder layer: residual connections and norms around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bertblocks.core.registry import Registry
from bertblocks.nn.attention import Attention, ForwardContext, get_attention
from bertblocks.nn.layout import index_tokens
from bertblocks.nn.mlp import get_mlp
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.nn.ngpt import LayerOutput, NGPTAttention, NGPTBlock
from bertblocks.nn.norm import add_norm, get_norm, get_norm_scale, get_skip_scale
from bertblocks.nn.shortcut import InputMixing

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

RESIDUALS: Registry[Any] = Registry("residual_fn", reserved=("add",))
register_residual = RESIDUALS.register

#: Whether each norm position has a norm before the sublayer, one after it, and the latter inside the residual branch.
NORM_POSITIONS: dict[str, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # x + f(N x)
    "post": (False, True, False),  # N(x + f(x))
    "pre_and_post": (True, True, False),  # N'(x + f(N x))
    "sandwich": (True, True, True),  # x + N'(f(N x))
    "none": (False, False, False),  # x + f(x)
}


class Residual(nn.Module):
    """The residual connection around one sublayer, with its norms.

    `norm_scale` is a factor on what the sublayer reads, after its norm. `combine` computes the sum of the residual
    stream and the sublayer's output in another way.
    """

    def __init__(
        self,
        norm_pos: str,
        make_norm: Callable[[], nn.Module],
        skip_scale: float = 1.0,
        branch_scale: float = 1.0,
        skip_pre_norm: bool = False,
        combine: nn.Module | None = None,
        norm_scale: float = 1.0,
    ) -> None:
        super().__init__()
        before, after, self.norm_inside = NORM_POSITIONS[norm_pos]
        self.pre_norm = make_norm() if before and not skip_pre_norm else nn.Identity()
        self.post_norm = make_norm() if after else nn.Identity()
        self.skip_scale, self.branch_scale = skip_scale, branch_scale
        self.combine = combine
        self.norm_scale = norm_scale if before else 1.0

    @property
    def norms(self) -> tuple[nn.Module, nn.Module]:
        return self.pre_norm, self.post_norm

    def enter(self, x: Tensor) -> Tensor:
        """Return what the sublayer reads."""
        return self._scale_norm(self.pre_norm(x))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return the residual stream behind the sublayer, which computed `branch`."""
        return self._add(x, branch, None if self.norm_inside else self.post_norm)[1]

    def join_and_enter(self, x: Tensor, branch: Tensor, following: Residual) -> tuple[Tensor, Tensor]:
        """Return the residual stream behind the sublayer, and what the following sublayer reads of it."""
        if not self.norm_inside and not isinstance(self.post_norm, nn.Identity):
            x = self.join(x, branch)
            return x, following.enter(x)
        x, normed = self._add(x, branch, following.pre_norm)
        return x, following._scale_norm(normed)

    def _add(self, x: Tensor, branch: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Return the new residual stream, and its norm."""
        residual = x if self.skip_scale == 1.0 else x * self.skip_scale
        if self.norm_inside:
            branch = self.post_norm(branch)
        branch = branch if self.branch_scale == 1.0 else branch * self.branch_scale
        if self.combine is None and norm is not None:
            return add_norm(residual, branch, norm)
        joined = residual + branch if self.combine is None else self.combine(residual, branch)
        return joined, joined if norm is None else norm(joined)

    def _scale_norm(self, normed: Tensor) -> Tensor:
        return normed if self.norm_scale == 1.0 else normed * self.norm_scale


class Block(GradientCheckpointingLayer):
    """Attention, then feed-forward; a parallel block (no `mlp_residual`) feeds both the same normalized input.

    With `token_indices` the block returns those tokens only: after attention, tokens do not depend on each other.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
        attention_residual: Residual,
        mlp_residual: Residual | None,
        input_mixing: InputMixing | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = attention_residual
        self.mlp = mlp
        self.mlp_residual = mlp_residual
        self.input_mixing = input_mixing

    def forward(self, x: Tensor, context: ForwardContext, token_indices: Tensor | None = None) -> LayerOutput:
        if self.input_mixing is not None:
            x = self.input_mixing(x, context.start)
        normed = self.attention_residual.enter(x)
        branch, weights = self.attention(normed, context, token_indices)
        x = index_tokens(x, token_indices)
        if self.mlp_residual is None:
            output, routed = self._feed_forward(index_tokens(normed, token_indices))
            return self.attention_residual.join(x, branch + output), weights, routed
        x, normed = self.attention_residual.join_and_enter(x, branch, self.mlp_residual)
        output, routed = self._feed_forward(normed)
        return self.mlp_residual.join(x, output), weights, routed

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output and, of a mixture of experts, the logits of its router."""
        return self.mlp(x) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(x), None)


def get_block(config: BertBlocksConfig, index: int, shared_position: nn.Module | None = None) -> Block | NGPTBlock:
    """Build layer `index` of the encoder."""
    is_local = config.layer_types[index] == "local"
    config = config.for_layer(index)
    if config.ngpt:
        ngpt_attention = get_attention(NGPTAttention, config, is_local, shared_position)
        return NGPTBlock(config.hidden_size, ngpt_attention, get_mlp(config))

    def residual(norm_pos: str, skip_pre_norm: bool = False) -> Residual:
        scales = get_skip_scale(config), config.residual_scale
        combine = None if config.residual_fn == "add" else RESIDUALS[config.residual_fn].from_config(config)
        norm_scale = get_norm_scale(config, index)
        return Residual(norm_pos, lambda: get_norm(config), *scales, skip_pre_norm, combine, norm_scale)

    attention = get_attention(Attention, config, is_local, shared_position)
    attention_residual = residual(config.attention_norm_pos, index == 0 and not config.first_attention_norm)
    mlp_residual = None if config.parallel_block else residual(config.mlp_norm_pos)
    input_mixing = InputMixing() if config.input_mixing else None
    return Block(attention, get_mlp(config), attention_residual, mlp_residual, input_mixing)
