"""From the logits of a language model to one sparse vector per text, as in sentence-transformers' SparseEncoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.nn.ops.sparse_pooling import ACTIVATIONS, POOLINGS


class SparseHead(nn.Module):
    """How a text's logits are pooled (SPLADE; Formal et al., 2021), and the weights of queries that need no encoder.

    A query without an encoder has the weight of each of its different tokens (Geng et al., 2024). `query_weights` has
    one for each token of the tokenizer; they are trained unless they are frozen.
    """

    def __init__(
        self,
        pooling: str = "max",
        activation: str = "relu",
        query_weights: Tensor | None = None,
        is_frozen: bool = True,
    ) -> None:
        super().__init__()
        for name, value, known in (("pooling", pooling, POOLINGS), ("activation", activation, ACTIVATIONS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}.")
        self.pooling, self.activation = pooling, activation
        self.query_weights: nn.Parameter | None = None
        if query_weights is not None:
            self.query_weights = nn.Parameter(query_weights.detach().clone().float(), requires_grad=not is_frozen)

    def weigh(self, bags: Tensor, count: int, vocabulary: int) -> Tensor:
        """Return `[count, vocabulary]` from `[2, entries]`, the sequence and the token of each entry."""
        assert self.query_weights is not None
        sequences, tokens = bags
        is_there = torch.zeros(count, len(self.query_weights), device=bags.device)
        is_there = is_there.index_put((sequences, tokens), is_there.new_ones(()))
        return F.pad(is_there * self.query_weights, (0, vocabulary - len(self.query_weights)))
