"""The losses of distillation, each summed over texts or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.linear import not_cast


def embedding_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The squared distance between a student's embedding and the teacher's, both of length 1 (LEAF; Vujanic and
    Rueckstiess, 2025): twice one minus their cosine, summed over texts.

    Example:
        >>> float(embedding_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])))
        2.0
    """
    return (F.normalize(upcast(student), dim=-1) - upcast(teacher)).square().sum()


def relation_loss(student: Tensor, teacher: Tensor, heads: int, texts: Sequence[slice]) -> Tensor:
    """KL divergence of the student's relations from the teacher's (MiniLMv2; Wang et al., 2021), summed over tokens.

    The relations of a token are the softmax of its scaled dot products with all tokens of its text, in each of `heads`
    equal parts of the vectors `[tokens, size]`. So the two models may have different sizes and numbers of heads.
    """
    student, teacher = upcast(student), upcast(teacher)
    with not_cast(student):
        parts = [_divergence(_relations(teacher[text], heads), _relations(student[text], heads)) for text in texts]
    return torch.stack(parts).sum() / heads


def _relations(vectors: Tensor, heads: int) -> Tensor:
    """Log-probabilities `[heads, tokens, tokens]`."""
    parts = vectors.unflatten(-1, (heads, -1)).transpose(0, 1)
    return (parts @ parts.mT / math.sqrt(parts.shape[-1])).log_softmax(dim=-1)


def _divergence(target: Tensor, found: Tensor) -> Tensor:
    return (target.exp() * (target - found)).sum()


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """The squared distance of hidden states, relative to the squared length of the teacher's, summed over tokens.

    TinyBERT (Jiao et al., 2020) has the plain squared distance. Relative to the length, layers whose states differ in
    scale, as those of pre-norm models do, count alike.
    """
    student, teacher = upcast(student), upcast(teacher)
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=1e-12)).sum()


def logit_loss(student: Tensor, teacher: Tensor, temperature: float, problem: str = "single") -> Tensor:
    """How much logits differ, summed over rows.

    With one label per row it is the KL divergence of the softmax of logits divided by `temperature`, times its square,
    which keeps the size of gradients (Hinton et al., 2015). With several labels ("multi") it is the divergence of each
    label's probability, and of scores ("regression") the squared difference.
    """
    student, teacher = upcast(student), upcast(teacher)
    if problem == "regression":
        return (student - teacher).square().sum()
    student, teacher = student / temperature, teacher / temperature
    if problem == "multi":
        student, teacher = (torch.stack((F.logsigmoid(x), F.logsigmoid(-x))) for x in (student, teacher))
    else:
        student, teacher = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    return _divergence(teacher, student) * temperature**2
