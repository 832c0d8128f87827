"""Losses of a model's scores for lists of documents, one list per query, laid end to end.

Every function returns a sum, over documents or over lists as it says. `lengths` are those of the lists, and the first
document of a list is relevant where a loss needs one that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.layout import to_device


def split_lists(values: Tensor, lengths: Sequence[int], fill: float) -> Tensor:
    """`[documents]` -> `[lists, longest]`; `fill` stands where a list has ended.

    Example:
        >>> split_lists(torch.tensor([1.0, 2.0, 3.0]), [2, 1], fill=0.0).tolist()
        [[1.0, 2.0], [3.0, 0.0]]
    """
    return torch.nn.utils.rnn.pad_sequence(values.split(list(lengths)), batch_first=True, padding_value=fill)


def binary_cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """The sum over documents of the cross-entropy between sigmoid(score) and a target from 0 to 1."""
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")


def squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    """The sum over documents of (score - target)^2."""
    return F.mse_loss(scores, targets, reduction="sum")


def list_cross_entropy(scores: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum over lists of the cross-entropy between softmax(scores) and the targets, scaled to sum to 1.

    With one relevant document and targets of 0 for the others, it is the cross-entropy of finding that document. A list
    without relevant documents counts 0.

    Example:
        >>> round(list_cross_entropy(torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0]), [4]).item(), 4)  # log 4
        1.3863
    """
    shares = split_lists(targets, lengths, 0.0)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1e-12)
    logs = split_lists(scores, lengths, float("-inf")).log_softmax(dim=1)
    return -(shares * logs.masked_fill(shares == 0, 0.0)).sum()


def margin_mse(scores: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum over lists of the mean squared difference between the model's and the teacher's margins.

    A margin is the score of the first document minus that of another one (MarginMSE; Hofstätter et al., 2020).

    Example:
        >>> margin_mse(torch.tensor([3.0, 1.0]), torch.tensor([5.0, 4.0]), [2]).item()  # (2 - 1)^2
        1.0
    """
    errors = split_lists(scores - targets, lengths, 0.0)
    sizes = to_device(torch.tensor(lengths), scores.device)
    is_real = torch.arange(errors.shape[1], device=scores.device) < sizes[:, None]
    squares = (errors[:, :1] - errors).square() * is_real
    return (squares.sum(dim=1) / (sizes - 1).clamp(min=1)).sum()


def kl_divergence(scores: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum over lists of the KL divergence of softmax(scores) from the teacher's softmax(targets)."""
    theirs = split_lists(targets, lengths, float("-inf")).log_softmax(dim=1)
    ours = split_lists(scores, lengths, float("-inf")).log_softmax(dim=1)
    terms = theirs.exp() * (theirs - ours)
    return terms.masked_fill(theirs == float("-inf"), 0.0).sum()
