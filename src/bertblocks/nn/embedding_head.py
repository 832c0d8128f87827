"""From token vectors to the embedding of a text: pooling and the modules behind it, as in sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.nn.head import POOLINGS, keep_firsts, pool
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast

#: The activations of a dense module or of a score, by the class that sentence-transformers names.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish),
        *(nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardsigmoid),
    )
}


class Dense(nn.Module):
    """activation(x W + b), plus x, or x in the new size, if it has a residual connection."""

    def __init__(self, in_size: int, out_size: int, bias: bool, activation: str, has_residual: bool = False) -> None:
        super().__init__()
        self.in_size, self.out_size, self.has_residual = in_size, out_size, has_residual
        self.linear = nn.Linear(in_size, out_size, bias)
        self.activation = ACTIVATIONS[activation]()
        self.residual = nn.Linear(in_size, out_size, bias=False) if has_residual and in_size != out_size else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.linear(x))
        if self.has_residual:
            y = y + (x if self.residual is None else self.residual(x))
        return y


class EmbeddingNorm(nn.Module):
    """A LayerNorm of embeddings."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_size = self.out_size = size
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Normalize(nn.Module):
    """Scales embeddings to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class EmbeddingHead(nn.Module):
    """Pools the tokens of each text, and passes the result through modules.

    `pooling` is one of `POOLINGS`, or several joined by "+", whose vectors are concatenated. The result is in fp32.
    """

    def __init__(self, pooling: str, hidden_size: int, layers: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.pooling, self.kinds = pooling, pooling.split("+")
        if not all(kind in POOLINGS for kind in self.kinds):
            raise ValueError(
                f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}, or several of them joined by '+'."
            )
        #: The number of dimensions of an embedding.
        self.size = hidden_size * len(self.kinds)
        for number, layer in enumerate(layers):
            in_size = getattr(layer, "in_size", self.size)
            if in_size != self.size:
                raise ValueError(
                    f"{type(layer).__name__} module {number} behind the pooling reads {in_size} numbers; it gets "
                    f"{self.size}."
                )
            self.size = getattr(layer, "out_size", self.size)
        self.layers = nn.ModuleList(layers)

    @property
    def token_indices(self) -> Callable[[SequenceLayout], Tensor] | None:
        """The tokens that the pooling reads, as `BertBlocksModel.encode` takes them; None for all."""
        ends: dict[str, Callable[[SequenceLayout], Tensor]] = {
            "cls": lambda layout: layout.first_tokens,
            "last": lambda layout: layout.last_tokens,
        }
        return ends.get(self.pooling)

    def forward(self, hidden: Tensor, layout: SequenceLayout, token_indices: Tensor | None = None) -> Tensor:
        """Return `[sequences, size]` from all hidden states, or from those at `token_indices`."""
        hidden = upcast(hidden)
        if token_indices is None:
            x = torch.cat([pool(hidden, layout, kind) for kind in self.kinds], dim=-1)
        else:
            x = keep_firsts(hidden, layout)
        for layer in self.layers:
            weight = next(layer.parameters(), x)
            x = layer(x.to(weight.dtype))
        return upcast(x)
