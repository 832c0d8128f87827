"""Losses of sparse vectors: contrast with the documents of a batch, and the FLOPS regularizer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def flops(vectors: Tensor) -> Tensor:
    """The sum over the vocabulary of the squared mean weight, which makes vectors sparse (Paria et al., 2020).

    Example:
        >>> import torch
        >>> flops(torch.tensor([[2.0, 0.0], [0.0, 4.0]])).item()  # 1^2 + 2^2
        5.0
    """
    return vectors.mean(dim=0).square().sum()


def contrast(queries: Tensor, documents: Tensor, own: Tensor, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """The sum over queries of the cross-entropy of finding the own document among all others that are not hidden.

    `own` has the number of each query's document, and `hidden`, `[queries, documents]`, those that may be relevant too.

    Example:
        >>> import torch
        >>> nothing = torch.zeros(2, 2, dtype=torch.bool)
        >>> round(contrast(torch.eye(2), torch.eye(2), torch.arange(2), nothing).item(), 4)  # 2 log(1 + 1/e)
        0.6265
    """
    scores = (queries @ documents.T) / temperature
    hidden = hidden.scatter(1, own[:, None], False)
    return F.cross_entropy(scores.masked_fill(hidden, float("-inf")), own, reduction="sum")


def warmed_up(weight: float, step: int, total_steps: int, warmup: float) -> float:
    """A weight that rises from 0 with the square of the step over a share of all steps, as in SPLADE.

    Example:
        >>> [warmed_up(4.0, step, 30, 1 / 3) for step in (0, 5, 10, 29)]
        [0.0, 1.0, 4.0, 4.0]
    """
    steps = max(1, int(total_steps * warmup + 1e-9))
    return weight * min(1.0, step / steps) ** 2
