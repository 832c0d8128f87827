"""A convolution over the embeddings, next to the first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bertblocks.nn.activation import get_activation
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import SequenceLayout, index_tokens
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
        if layout.key_mask is not None:
            x = x.masked_fill(~layout.key_mask.flatten()[:, None], 0.0)
        starts = torch.arange(len(x), device=x.device) + gap * layout.sequence_ids
        size = len(x) + gap * (layout.num_sequences + 1)
        row = x.new_zeros(size, x.shape[1]).index_copy(0, starts + gap, x)
        return self.conv(row.t()[None])[0].t().index_select(0, starts)


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
