"""Self-attention: projections, query/key normalization and positions around a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.keys import Key
from bertblocks.core.registry import Registry
from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, AttentionPattern, repeat_kv
from bertblocks.nn.backends.cpu import CpuBackend, attend_in_kernel, find_attention_kernel
from bertblocks.nn.backends.eager import EagerBackend
from bertblocks.nn.convolution import SpanConvolution, get_span_convolution
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.gate import AttentionGate, get_gate
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.linear import Linear, is_untouched
from bertblocks.nn.norm import LayerNorm, RMSNorm
from bertblocks.nn.ops.cpu import is_half_slow
from bertblocks.nn.ops.linear import linear, not_cast
from bertblocks.nn.parametrization import get_attention_scale
from bertblocks.nn.position import BlockPosition, get_block_position
from bertblocks.nn.relative import RelativeVectors
from bertblocks.nn.rope import RotaryPosition
from bertblocks.nn.shortcut import ValueEmbedding, get_value_embedding
from bertblocks.nn.sink import AttentionSinks, get_attention_sinks

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

ATTENTION_FUNCTIONS: Registry[Any] = Registry("attention_fn", reserved=("softmax",))
register_attention_fn = ATTENTION_FUNCTIONS.register
QK_NORMS: Registry[Any] = Registry("qk_norm")


@QK_NORMS.register(True)
class QueryKeyNorm:
    """A learned norm without bias on queries and keys (Dehghani et al., 2023)."""

    keys: ClassVar[dict[str, Key]] = {
        "qk_norm_fn": Key(str, "rms", "rms (RMSNorm) or layer (LayerNorm).", choices=("rms", "layer"), per_layer=True),
        "qk_norm_across_heads": Key(
            bool,
            False,
            "Whether the norm covers all heads of a token together. Evidence: shipped in ESM C; BertBlocks has not "
            "compared it.",
            per_layer=True,
        ),
    }


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """What all layers share in one forward pass."""

    layout: SequenceLayout
    backend: AttentionBackend
    #: Return attention weights as well, which takes the eager backend.
    output_weights: bool = False
    #: The ids of all tokens, None if the batch has embeddings instead, and the input of the first layer.
    token_ids: Tensor | None = None
    start: Tensor | None = None
    #: What keys and values are computed from, one vector per token; None for the input of the layer itself.
    memory: Tensor | None = None


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads over flat tokens.

    `qk_norm_eps` turns on a learned norm over each head's queries and keys, or over all heads together. `weigh`
    replaces the softmax; the eager backend computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        dropout: float,
        out_dropout: float,
        position: BlockPosition,
        half_window: int | None = None,
        num_global_tokens: int = 0,
        qk_norm_eps: float | None = None,
        key_bias: bool | None = None,
        scale: float | None = None,
        qk_norm_weight: str = "scale",
        gate: AttentionGate | None = None,
        is_causal: bool = False,
        value_embedding: ValueEmbedding | None = None,
        weigh: nn.Module | None = None,
        sinks: AttentionSinks | None = None,
        span_convolution: SpanConvolution | None = None,
        qk_norm_fn: str = "rms",
        qk_norm_across_heads: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        key_bias = qkv_bias if key_bias is None else key_bias
        self.qkv = Linear(hidden_size, sum(self.sizes), key_bias, role="qkv", parts=self.sizes)
        self.query_bias, self.value_bias = (
            nn.Parameter(torch.zeros(size)) if qkv_bias and not key_bias else None for size in self.sizes[::2]
        )
        mixed_size = num_heads * head_dim * (1 if span_convolution is None else 2)
        self.out = Linear(mixed_size, hidden_size, out_bias, role="out")
        self.qk_norm_across_heads = qk_norm_across_heads
        norm = {"rms": RMSNorm, "layer": LayerNorm}[qk_norm_fn]
        self.query_norm, self.key_norm = (
            None
            if qk_norm_eps is None
            else norm(size if qk_norm_across_heads else head_dim, qk_norm_eps, bias=False, weight=qk_norm_weight)
            for size in self.sizes[:2]
        )
        if position.is_shared:
            object.__setattr__(self, "position", position)  # the encoder owns it, so it must not be a submodule here
        else:
            self.position = position
        self.pattern = AttentionPattern(half_window, num_global_tokens, position, is_causal, sinks is not None)
        self.scale = (head_dim**-0.5 if scale is None else scale) * position.score_scale
        self.gate = gate
        self.value_embedding = value_embedding
        self.weigh = weigh
        self.sinks = sinks
        self.span_convolution = span_convolution
        self.dropout = dropout
        self.out_dropout = Dropout(out_dropout)
        #: Called in training with the queries and keys of every call, such as to find the largest logit.
        self.observe: Callable[[Tensor, Tensor, AttentionContext], None] | None = None

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[tokens, heads, head_dim]`, and keys and values `[tokens, kv_heads, head_dim]`."""
        q, k, v = qkv.split(self.sizes, dim=-1)
        if self.query_bias is not None and self.value_bias is not None:
            q, v = q + self.query_bias.to(q.dtype), v + self.value_bias.to(v.dtype)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        return q, *(x.unflatten(-1, (self.num_kv_heads, self.head_dim)) for x in (k, v))

    def normalize_queries(self, q: Tensor) -> Tensor:
        return self._normalize(q, self.query_norm)

    def normalize_keys(self, k: Tensor) -> Tensor:
        return self._normalize(k, self.key_norm)

    def _normalize(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return x
        return norm(x.flatten(-2)).view_as(x) if self.qk_norm_across_heads else norm(x)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        for bias in (self.query_bias, self.value_bias):
            if bias is not None:
                init.zeros_(bias)

    def apply_positions(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Normalize queries and keys and encode their positions."""
        return self.position.rotate(self.normalize_queries(q), self.normalize_keys(k), layout)

    def relative_vectors(self, layout: SequenceLayout, dtype: torch.dtype) -> RelativeVectors | None:
        """Return the queries and keys of all distances that this layer needs, normalized like those of tokens."""
        if not self.pattern.is_relative:
            return None
        reach = max(layout.max_length - 1, 0)
        if self.pattern.half_window is not None and not self.pattern.num_global_tokens:
            reach = min(reach, self.pattern.half_window)
        queries, keys = self.position.relative(layout, reach, self.project_distances)
        if keys is not None:
            keys = repeat_kv(self.normalize_keys(keys), self.num_heads).to(dtype).flip(0)
            keys = keys.permute(1, 2, 0).contiguous()
        if queries is not None:
            queries = self.normalize_queries(queries).to(dtype).permute(1, 2, 0).contiguous()
        return RelativeVectors(keys, queries, reach)

    def project_distances(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project vectors of distances to queries and keys like tokens, if possible without their values."""
        size = self.sizes[0] + self.sizes[1]
        if is_untouched(self.qkv):
            qk = linear(x, self.qkv.weight[:size], None if self.qkv.bias is None else self.qkv.bias[:size])
        else:
            qk = self.qkv(x)[:, :size]
        q, k = qk.split(self.sizes[:2], dim=-1)
        if self.query_bias is not None:
            q = q + self.query_bias.to(q.dtype)
        return q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_kv_heads, -1))

    @property
    def is_plain(self) -> bool:
        """True for softmax over products of queries and keys, which are rotated at most: what the C kernel computes."""
        extras = (self.gate, self.value_embedding, self.weigh, self.sinks, self.span_convolution, self.query_norm)
        is_extended = type(self) is not Attention or any(extra is not None for extra in extras)
        if is_extended or not self.pattern.has_plain_scores:
            return False
        if type(self.position) is RotaryPosition:
            return not self.position.interleaved
        return type(self.position).rotate is BlockPosition.rotate

    def rotation(self, layout: SequenceLayout) -> tuple[Tensor, Tensor] | None:
        """Return the tables of cosines and sines that rotate queries and keys, if any do."""
        return self.position.tables(layout) if isinstance(self.position, RotaryPosition) else None

    def _attend_in_kernel(self, qkv: Tensor, context: ForwardContext) -> Tensor | None:
        """Rotate and attend in one call of the C kernel, or return None where it cannot."""
        is_special = context.output_weights or context.memory is not None or self.observe is not None
        if is_special or type(context.backend) is not CpuBackend or not self.is_plain:
            return None
        call = AttentionContext(context.layout, self.pattern, self.scale, self.dropout if self.training else 0.0)
        kernel = find_attention_kernel(qkv, self.head_dim, call)
        if kernel is None:
            return None
        whole = qkv if self.query_bias is None else None
        return attend_in_kernel(kernel, *self.split(qkv), call, self.rotation(context.layout), whole)

    def forward(
        self, x: Tensor, context: ForwardContext, token_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of all tokens or of `token_indices`, and the padded weights if the context asks."""
        qkv = self.qkv(x)
        attended = self._attend_in_kernel(qkv, context)
        if attended is not None:
            return self.out_dropout(self.out(index_tokens(attended, token_indices).flatten(1))), None
        dtype, in_fp32 = qkv.dtype, is_half_slow(qkv)
        q, k, v = self.split(qkv.float() if in_fp32 else qkv)
        convolved = None
        if self.span_convolution is not None:
            convolved = self.span_convolution(x, q.flatten(1).to(dtype), context.layout)
        if context.memory is not None:
            of_memory = self.qkv(context.memory)
            _, k, v = self.split(of_memory.float() if in_fp32 else of_memory)
        if self.value_embedding is not None:
            v = self.value_embedding(v, context.token_ids)
        q, k = (x.to(v.dtype) for x in self.apply_positions(q, k, context.layout))
        call = AttentionContext(
            context.layout,
            self.pattern,
            self.scale,
            self.dropout if self.training else 0.0,
            self.relative_vectors(context.layout, v.dtype),
            self.weigh,
            None if self.sinks is None else self.sinks.logits.to(v.dtype),
        )
        if self.observe is not None and self.training:
            self.observe(q, k, call)
        backend = context.backend if self.weigh is None else EagerBackend()
        weights = None
        with not_cast(q) if in_fp32 else contextlib.nullcontext():
            if context.output_weights:
                attended, weights = EagerBackend().attend_with_weights(q, k, v, call, dtype)
            else:
                attended = backend.attend(q, k, v, call)
        attended = index_tokens(attended, token_indices)  # [tokens, heads, head_dim]
        if self.gate is not None:
            attended = self.gate(attended, index_tokens(x, token_indices), index_tokens(v, token_indices))
        mixed = attended.flatten(1).to(dtype)
        if convolved is not None:
            mixed = torch.cat((mixed, index_tokens(convolved, token_indices)), dim=1)
        return self.out_dropout(self.out(mixed)), weights

    def extra_repr(self) -> str:
        window = "all" if self.pattern.half_window is None else f"+-{self.pattern.half_window}"
        parts = [
            f"heads={self.num_heads}",
            f"kv_heads={self.num_kv_heads}",
            f"head_dim={self.head_dim}",
            f"sees={window}",
        ]
        if self.pattern.num_global_tokens:
            parts.append(f"global_tokens={self.pattern.num_global_tokens}")
        if self.pattern.is_causal:
            parts.append("causal")
        return ", ".join(parts)


def get_attention_function(config: BertBlocksConfig) -> nn.Module | None:
    name = config.attention_fn
    return None if name == "softmax" else ATTENTION_FUNCTIONS[name].from_config(config)


AttentionT = TypeVar("AttentionT", bound=Attention)


def get_attention(
    attention_class: type[AttentionT],
    config: BertBlocksConfig,
    is_local: bool,
    shared_position: nn.Module | None = None,
) -> AttentionT:
    """Build the attention of one layer from the layer's config."""
    return attention_class(
        config.hidden_size,
        config.num_attention_heads,
        config.num_kv_heads,
        config.head_dim,
        qkv_bias=config.attention_qkv_bias,
        out_bias=config.attention_out_bias,
        dropout=config.attention_dropout,
        out_dropout=config.attention_output_dropout,
        position=get_block_position(config, is_local, shared_position),
        half_window=config.local_attention_window_size // 2 if is_local else None,
        num_global_tokens=config.num_global_tokens if is_local else 0,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        scale=get_attention_scale(config),
        qk_norm_weight=config.norm_weight,
        qk_norm_fn=config.qk_norm_fn,
        qk_norm_across_heads=config.qk_norm_across_heads,
        gate=get_gate(config),
        value_embedding=get_value_embedding(config),
        weigh=get_attention_function(config),
        sinks=get_attention_sinks(config),
        span_convolution=get_span_convolution(config),
        key_bias=config.attention_key_bias,
        is_causal=config.causal,
    )
