"""Convolutions over the tokens of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bertblocks.core.keys import Key
from bertblocks.core.registry import Registry
from bertblocks.nn.activation import get_activation
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import get_norm

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class InputConvolution(nn.Module):
    """N(y + act(conv(x))) of the embeddings x and the first layer's output y, as in DeBERTa v2 (He et al., 2021)."""

    def __init__(
        self, hidden_size: int, kernel_size: int, groups: int, activation: str, norm: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(hidden_size, hidden_size, kernel_size, groups=groups)
        self.activation = get_activation(activation)
        self.norm = norm
        self.dropout = Dropout(dropout)

    def flops(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.conv.weight.numel()

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]
        y: Tensor,  # [token_indices, hidden], or all tokens
        layout: SequenceLayout,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        convolved = index_tokens(self.convolve(x, layout), token_indices)
        return self.norm(y + self.activation(self.dropout(convolved)))

    def convolve(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Convolve all sequences in one row, with zeros between them."""
        gap = self.conv.kernel_size[0] // 2
        starts = _starts(layout, gap)
        return self.conv(_spread(x, layout, starts, gap).t()[None])[0].t().index_select(0, starts)


SPAN_CONVOLUTION: Registry[Any] = Registry("span_convolution")


@SPAN_CONVOLUTION.register(True)
class SpanConvolution(nn.Module):
    """The span-based dynamic convolution of ConvBERT (Jiang et al., 2020), as many heads as attention has next to it.

    Each head of a token averages the values around it. The weights are a softmax over a projection of q * s, where q is
    the token's query and s a separable convolution of the layer's input.
    """

    keys: ClassVar[dict[str, Key]] = {
        "span_conv_size": Key(
            int,
            9,
            "Number of tokens that the convolution next to attention sees; odd, so that as many precede as follow.",
            1,
            2**12,
            per_layer=True,
            check=lambda size: None if size % 2 else "it must be odd",
        )
    }
    requires: ClassVar[dict[str, tuple[Any, str]]] = {
        "causal": (False, "the convolution sees later tokens"),
        "ngpt": (False, "the convolution has matrices that nGPT does not normalise"),
    }

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, kernel_size: int) -> None:
        super().__init__()
        size = num_heads * head_dim
        self.num_heads = num_heads
        self.depthwise = nn.Conv1d(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)
        self.pointwise = Linear(hidden_size, size, bias=True, role="gate")
        self.kernel = Linear(size, num_heads * kernel_size, bias=True, role="gate")
        self.value = Linear(hidden_size, size, bias=True, role="up")

    def flops(self, num_tokens: int) -> int:
        linears = (self.pointwise, self.kernel, self.value)
        products = sum(linear.weight.numel() for linear in linears) + self.depthwise.weight.numel()
        return 2 * num_tokens * (products + self.value.out_features * self.depthwise.kernel_size[0])

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]
        queries: Tensor,  # [tokens, heads * head_dim]
        layout: SequenceLayout,
    ) -> Tensor:
        gap = self.depthwise.kernel_size[0] // 2
        starts = _starts(layout, gap)
        spans = self.depthwise(_spread(x, layout, starts, gap).t()[None])[0].t().index_select(0, starts)
        weights = self.kernel(self.pointwise(spans) * queries).unflatten(-1, (self.num_heads, -1)).softmax(dim=-1)
        return self.average(self.value(x), weights, layout, starts, gap)

    def average(self, values: Tensor, weights: Tensor, layout: SequenceLayout, starts: Tensor, gap: int) -> Tensor:
        """Sum the values around each token by its weights `[tokens, heads, kernel]`.

        Values and weights stay in rows with gaps, so that the products of all offsets read views of them.
        """
        row = _spread(values, layout, starts, gap).unflatten(-1, (self.num_heads, -1))  # [places, heads, head_dim]
        size = row.shape[0] - 2 * gap
        spread = weights.new_zeros(size, *weights.shape[1:]).index_copy(0, starts, weights)
        total = row.new_zeros(size, *row.shape[1:])
        for offset in range(2 * gap + 1):
            total = torch.addcmul(total, row[offset : offset + size], spread[:, :, offset, None])
        return total.index_select(0, starts).flatten(1)


def _starts(layout: SequenceLayout, gap: int) -> Tensor:
    """Return the first place that a kernel at each token covers, in a row with `gap` zeros around every sequence."""

    def compute() -> Tensor:
        ids = layout.sequence_ids
        return torch.arange(ids.shape[0], device=ids.device) + gap * ids

    return layout.memo(("convolution", gap), compute)


def _spread(x: Tensor, layout: SequenceLayout, starts: Tensor, gap: int) -> Tensor:
    """Put tokens into a row with `gap` zeros around every sequence, and 0 for padding."""
    if layout.key_mask is not None:
        x = x.masked_fill(~layout.key_mask.flatten()[:, None], 0.0)
    size = x.shape[0] + gap * (layout.num_sequences + 1)
    return x.new_zeros(size, x.shape[1]).index_copy(0, starts + gap, x)


def get_span_convolution(config: BertBlocksConfig) -> SpanConvolution | None:
    if not config.span_convolution:
        return None
    return SpanConvolution(config.hidden_size, config.num_attention_heads, config.head_dim, config.span_conv_size)


def get_input_convolution(config: BertBlocksConfig) -> InputConvolution | None:
    if not config.input_conv_size:
        return None
    return InputConvolution(
        config.hidden_size,
        config.input_conv_size,
        config.input_conv_groups,
        config.input_conv_act,
        get_norm(config),
        config.mlp_output_dropout,
    )
