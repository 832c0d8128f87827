"""Self-attention: projections, query/key normalisation and rotation around a backend."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from bertblocks.nn.backends.base import AttentionBackend, AttentionPattern
from bertblocks.nn.backends.eager import EagerBackend
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import RMSNorm
from bertblocks.nn.ops.cpu import is_half_slow
from bertblocks.nn.ops.linear import not_cast
from bertblocks.nn.position import BlockPosition


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads over flat tokens.

    `qk_norm_eps` asks for a learned RMSNorm over each head's queries and keys (Dehghani et al., 2023).
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
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.qkv = Linear(hidden_size, sum(self.sizes), qkv_bias, role="qkv", parts=self.sizes)
        self.out = Linear(num_heads * head_dim, hidden_size, out_bias, role="out")
        self.query_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.key_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        if position.is_shared:
            object.__setattr__(self, "position", position)  # the encoder's, and so no module of this one
        else:
            self.position = position
        self.pattern = AttentionPattern(half_window, num_global_tokens, position)
        self.scale = head_dim**-0.5
        self.dropout = dropout
        self.out_dropout = Dropout(out_dropout)

    def place(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Normalises queries and keys and gives them their positions."""
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return self.position.rotate(q, k, layout)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        backend: AttentionBackend,
        output_weights: bool = False,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """For all tokens or, with `rows`, for those; and every sequence's weights if asked for."""
        qkv = self.qkv(x)
        dtype, in_fp32 = qkv.dtype, is_half_slow(qkv)
        if in_fp32:
            qkv = qkv.float()
        q, k, v = qkv.split(self.sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))  # [tokens, heads, head_dim]
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        q, k = (one.to(v.dtype) for one in self.place(q, k, layout))
        options = (layout, self.pattern, self.scale, self.dropout if self.training else 0.0)
        weights = None
        with not_cast(q) if in_fp32 else contextlib.nullcontext():
            if output_weights:
                attended, weights = EagerBackend().attend_with_weights(q, k, v, *options)
                weights = [one.to(dtype) for one in weights]
            else:
                attended = backend.attend(q, k, v, *options)
        return self.out_dropout(self.out(take(attended.flatten(1), rows).to(dtype))), weights

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
        return ", ".join(parts)


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def pad_weights(weights: list[Tensor], layout: SequenceLayout, num_heads: int) -> Tensor:
    """Weights of every sequence as one `[rows, heads, length, length]` tensor, 0 at padding.

    Rows are those of a padded batch or, for packed input, the sequences.
    """
    length = layout.max_length if layout.is_packed else layout.shape[-1]
    if not weights:  # a batch of padding only
        return torch.zeros(layout.num_sequences, num_heads, length, length, device=layout.device)
    if layout.slots is None or layout.is_packed:
        columns = torch.cat([torch.arange(weight.shape[-1], device=layout.device) for weight in weights])
    else:
        columns = layout.slots % length
    rows = [row for row, n in enumerate(layout.lengths) if n] or range(layout.num_sequences)
    padded = weights[0].new_zeros(layout.num_sequences, weights[0].shape[0], length, length)
    for row, place, weight in zip(rows, columns.split([weight.shape[-1] for weight in weights]), weights, strict=True):
        padded[row][:, place[:, None], place] = weight
    return padded
