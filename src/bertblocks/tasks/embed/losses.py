"""Losses of embeddings: each compares the texts of a batch, over all processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bertblocks.nn.layout import to_device
from bertblocks.nn.ops.linear import not_cast
from bertblocks.tasks.gather import gather, gather_ragged, rank

#: Similarities are multiplied by this before the softmax, as in sentence-transformers.
SCALE = 20.0
#: Queries whose similarities are computed at once; those of more are computed again in the backward pass.
QUERIES = 512


@dataclass(frozen=True)
class Contrast:
    """The cross-entropy of finding each query's positive among all positives and hard negatives of the batch (InfoNCE).

    `temperature` divides the cosines. `negative_weight` multiplies the terms of a query's own hard negatives in the
    softmax, as in SimCSE (Gao et al., 2021). With a `margin`, negatives whose cosine exceeds that of the positive minus
    the margin are left out, because they may be positives without a label: GISTEmbed (Solatorio, 2024) with the model
    itself as its guide. A relative margin is a share of the positive's cosine, as in NV-Retriever (Moreira et al.,
    2024).

    Example:
        >>> vectors = torch.eye(2)
        >>> round(Contrast()(vectors, vectors).item(), 4)  # log(1 + exp(-20))
        0.0
        >>> own = torch.arange(2)
        >>> round(Contrast(negative_weight=3.0)(vectors, vectors, vectors, own).item(), 4)  # log(1 + 3)
        1.3863
        >>> Contrast(margin=0.1)(vectors, vectors, vectors, own).item()  # the negative equals the positive
        0.0
    """

    temperature: float = 1 / SCALE
    negative_weight: float = 1.0
    margin: float | None = None
    margin_kind: Literal["absolute", "relative"] = "absolute"

    def __call__(
        self, queries: Tensor, positives: Tensor, negatives: Tensor | None = None, owners: Tensor | None = None
    ) -> Tensor:
        """Computes the mean loss of vectors of length 1.

        `owners` has the row of the query of each hard negative, on the host.
        """
        targets = len(queries) * rank() + torch.arange(len(queries), device=queries.device)
        candidates = gather(positives)
        columns = torch.zeros(0, dtype=torch.long)
        if negatives is not None and owners is not None:
            others, first = gather_ragged(negatives)
            columns = len(candidates) + first + torch.arange(len(negatives))
            candidates = torch.cat((candidates, others))
        else:
            owners = columns
        losses = []
        for start in range(0, len(queries), QUERIES):
            part = slice(start, start + QUERIES)
            own = (owners >= start) & (owners < start + QUERIES)
            places = (to_device(index, queries.device) for index in (owners[own] - start, columns[own]))
            inputs = (queries[part], candidates, targets[part], *places)
            is_whole = len(queries) <= QUERIES
            losses.append(self._sum(*inputs) if is_whole else self._sum_again(*inputs))
        return torch.stack(losses).sum() / len(queries)

    def _sum_again(self, *inputs: Tensor) -> Tensor:
        """The same sum, without keeping the similarities for the backward pass."""
        return checkpoint(self._sum, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _sum(self, queries: Tensor, candidates: Tensor, targets: Tensor, owners: Tensor, columns: Tensor) -> Tensor:
        """The summed loss of some queries; their hard negatives are at `columns`, each of the query in `owners`."""
        with not_cast(queries):  # similarities in bf16 would be off by a tenth
            cosines = queries @ candidates.T
        scores = cosines * (1 / self.temperature)
        if self.negative_weight != 1 and len(columns):
            extra = scores.new_full((len(columns),), math.log(self.negative_weight))
            scores = scores.index_put((owners, columns), extra, accumulate=True)
        if self.margin is not None:
            found = cosines.detach()
            limits = found.gather(1, targets[:, None])
            margins = self.margin if self.margin_kind == "absolute" else self.margin * limits.abs()
            hidden = (found > limits - margins).scatter(1, targets[:, None], False)
            scores = scores.masked_fill(hidden, float("-inf"))
        return F.cross_entropy(scores, targets, reduction="sum")


def cosent(similarities: Tensor, scores: Tensor) -> Tensor:
    """Computes log(1 + sum of exp(SCALE (s_j - s_i))) over all i, j where example i has the higher score (Su, 2022).

    Example:
        >>> round(cosent(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).item(), 4)  # log 2
        0.6931
    """
    differences = (similarities[None, :] - similarities[:, None]) * SCALE  # [i, j]
    wrong = differences.masked_fill(scores[:, None] <= scores[None, :], float("-inf"))
    return torch.logsumexp(torch.cat((wrong.flatten(), wrong.new_zeros(1))), dim=0)
