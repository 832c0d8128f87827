"""From hidden states to one vector per token, for late interaction: a projection, and usually a scaling to length 1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast


class TokenHead(nn.Module):
    """Passes the hidden state of each token through modules. The result is in fp32.

    Example:
        >>> import torch
        >>> from bertblocks.nn.embedding_head import Dense, Normalize
        >>> head = TokenHead(8, [Dense(8, 4, bias=False, activation="Identity"), Normalize()])
        >>> vectors = head(torch.randn(3, 8))
        >>> vectors.shape, torch.allclose(vectors.norm(dim=1), torch.ones(3))
        (torch.Size([3, 4]), True)
    """

    #: Tokens are not pooled.
    pooling = "none"

    def __init__(self, hidden_size: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        #: The number of dimensions of a vector.
        self.size = hidden_size
        for number, layer in enumerate(layers):
            in_size = getattr(layer, "in_size", self.size)
            if in_size != self.size:
                raise ValueError(
                    f"{type(layer).__name__} module {number} behind the encoder reads {in_size} numbers; it gets "
                    f"{self.size}."
                )
            self.size = getattr(layer, "out_size", self.size)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor, layout: SequenceLayout | None = None) -> Tensor:
        """Return `[tokens, size]`."""
        x = upcast(hidden)
        for layer in self.layers:
            weight = next(layer.parameters(), x)
            x = layer(x.to(weight.dtype))
        return upcast(x)
