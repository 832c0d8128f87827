"""Pooling and the layers between hidden states and a task's final linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.activation import get_activation
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.initialization import draw_normal
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import LayerNorm, get_norm

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: How the vectors of a text's tokens become one; `classifier_pooling` may be one of the first four.
POOLINGS = ("cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len")
#: Heads that score every token as the start and the end of an answer.
QA_HEADS: Registry[Any] = Registry("qa_head", reserved=("linear",))


def pool(x: Tensor, layout: SequenceLayout, kind: str) -> Tensor:
    """Pool the real tokens of each sequence: the first ("cls"), the "last", their "mean" or "max"; 0 for empty ones.

    "weighted_mean" weights tokens by their place, counted from 1, and "mean_sqrt_len" divides their sum by the root of
    their number, both as in sentence-transformers.

    Example:
        >>> import torch
        >>> layout = SequenceLayout.from_mask(torch.tensor([[1, 1], [1, 0]]))
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), layout, "mean").tolist()
        [[2.0], [5.0]]
    """
    if x.shape[0] == 0:
        return x.new_zeros(layout.num_sequences, x.shape[-1])
    if kind == "cls":
        return keep_firsts(x[layout.first_tokens], layout)
    if kind == "last":
        return keep_firsts(x[layout.last_tokens], layout)
    empty = x.new_zeros(layout.num_sequences, x.shape[-1])
    real = None if layout.key_mask is None else layout.key_mask.flatten()[:, None]
    if kind in ("mean", "weighted_mean", "mean_sqrt_len"):
        x = x if real is None else x.masked_fill(~real, 0.0)
        total = layout.length_tensor.clamp(min=1)[:, None].to(x.dtype)
        if kind == "weighted_mean":
            first = layout.positions[layout.first_tokens][layout.sequence_ids]
            weights = (layout.positions - first + 1)[:, None].to(x.dtype)
            weights = weights if real is None else weights.masked_fill(~real, 0.0)
            x, total = x * weights, empty[:, :1].index_add(0, layout.sequence_ids, weights).clamp(min=1)
        total = total.sqrt() if kind == "mean_sqrt_len" else total
        return empty.index_add(0, layout.sequence_ids, x) / total
    if kind == "max":
        x = x if real is None else x.masked_fill(~real, torch.finfo(x.dtype).min)
        index = layout.sequence_ids[:, None].expand_as(x)
        highest = empty.scatter_reduce(0, index, x, reduce="amax", include_self=False)
        return highest.masked_fill(_is_empty(layout), 0.0)
    raise ValueError(f"classifier_pooling is {kind!r}; it must be one of {', '.join(POOLINGS)}.")


def keep_firsts(firsts: Tensor, layout: SequenceLayout) -> Tensor:
    """Return `pool(x, layout, "cls")` from `layout.first_tokens`, or `"last"` from the last ones; 0 for empty rows."""
    if firsts.shape[0] == 0:
        return firsts.new_zeros(layout.num_sequences, firsts.shape[-1])
    return firsts.masked_fill(_is_empty(layout), 0.0)


def _is_empty(layout: SequenceLayout) -> Tensor:
    return (layout.length_tensor == 0)[:, None]


class Pooler(nn.Module):
    """BERT's pooler: a dense layer and tanh on the first token of each sequence."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, firsts: Tensor) -> Tensor:
        return torch.tanh(self.dense(firsts))


class ContactHead(nn.Module):
    """Predicts which residues of a protein touch by logistic regression on attention weights (Rao et al., 2021).

    It is fitted separately from the encoder, so its parameters are frozen.
    """

    def __init__(self, num_maps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, num_maps), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1), requires_grad=False)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        draw_normal(self.weight, config.initializer_range, config)
        init.zeros_(self.bias)

    def forward(self, maps: Tensor, keep: Tensor) -> Tensor:
        """`[rows, maps, length, length]` and tokens to keep `[rows, length]` -> `[rows, length - 2, length - 2]`."""
        maps = (maps * (keep[:, None, :, None] & keep[:, None, None]))[..., 1:-1, 1:-1]
        maps = maps + maps.transpose(-1, -2)
        # average product correction removes what two tokens share because both attend broadly
        total = maps.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)
        maps = maps - maps.sum(-1, keepdim=True) * maps.sum(-2, keepdim=True) / total
        return torch.sigmoid(torch.einsum("m,rmij->rij", self.weight[0], maps) + self.bias)


class DenseHead(nn.Module):
    """dropout -> dense -> activation -> norm. Dropout and norm are optional; `inner_size` puts a dense layer first.

    If `is_gated`, dense and activation are a gated linear unit.
    """

    def __init__(
        self,
        hidden_size: int,
        activation: str,
        bias: bool,
        norm: nn.Module | None,
        dropout: float = 0.0,
        out_size: int | None = None,
        inner_size: int | None = None,
        is_gated: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.inner = None if inner_size is None else Linear(hidden_size, inner_size, bias, role="head")
        parts = [out_size or hidden_size] * (2 if is_gated else 1)
        self.dense = Linear(inner_size or hidden_size, sum(parts), bias, role="head", parts=parts)
        self.is_gated = is_gated
        self.activation = get_activation(activation)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        if self.inner is not None:
            x = self.activation(self.inner(x))
        if self.is_gated:
            gate, value = self.dense(x).chunk(2, dim=-1)
            x = self.activation(gate) * value
        else:
            x = self.activation(self.dense(x))
        return x if self.norm is None else self.norm(x)


class DetectorHead(nn.Module):
    """act(dense(x)) on every token, as in ELECTRA; with a norm act(dense(N(x + first token))), as in DeBERTaV3."""

    def __init__(self, hidden_size: int, activation: str, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm
        self.dense = Linear(hidden_size, hidden_size, bias=True, role="head")
        self.activation = get_activation(activation)

    def forward(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        if self.norm is not None:
            x = self.norm(x + x[layout.first_tokens[layout.sequence_ids]])
        return self.activation(self.dense(x))


@QA_HEADS.register("question_aware")
class QuestionAwareHead(nn.Module):
    """Scores tokens by bilinear forms with the vector of a question token, as in Splinter (Ram et al., 2021)."""

    keys: ClassVar[dict[str, Key]] = {
        "question_token_id": Key(
            int,
            104,
            "The token that stands for the question; a text without it uses its first token.",
            least=0,
            most=2**24,
        )
    }

    def __init__(self, hidden_size: int, question_token_id: int) -> None:
        super().__init__()
        self.question_token_id = question_token_id
        self.question_start, self.question_end, self.start, self.end = (
            DenseHead(hidden_size, "gelu", True, LayerNorm(hidden_size, 1e-5, True)) for _ in range(4)
        )
        self.start_form, self.end_form = (Linear(hidden_size, hidden_size, False, role="head") for _ in range(2))

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        is_outside = config.question_token_id >= config.vocab_size
        yield "question_token_id", is_outside, f"it must lie within the vocabulary of {config.vocab_size}"

    def forward(self, x: Tensor, layout: SequenceLayout, token_ids: Tensor | None) -> Tensor:
        if x.shape[0] == 0:
            return x.new_zeros(0, 2)
        questions = x[self.find_questions(layout, token_ids)]  # [sequences, hidden]
        start = self.start_form(self.question_start(questions))[layout.sequence_ids] * self.start(x)
        end = self.end_form(self.question_end(questions))[layout.sequence_ids] * self.end(x)
        return torch.stack((start.sum(-1), end.sum(-1)), dim=-1)  # [tokens, 2]

    def find_questions(self, layout: SequenceLayout, token_ids: Tensor | None) -> Tensor:
        """Return the index of each sequence's first question token, or else of its first token."""
        if token_ids is None:
            return layout.first_tokens
        is_question = token_ids == self.question_token_id
        if layout.key_mask is not None:
            is_question = is_question & layout.key_mask.flatten()
        index = torch.arange(len(token_ids), device=token_ids.device).masked_fill(~is_question, len(token_ids))
        found = index.new_full((layout.num_sequences,), len(token_ids))
        found = found.scatter_reduce(0, layout.sequence_ids, index, reduce="amin")
        return torch.where(found < len(token_ids), found, layout.first_tokens)


def get_detector_head(config: BertBlocksConfig) -> DetectorHead:
    return DetectorHead(config.hidden_size, config.hidden_act, get_norm(config) if config.detector_norm else None)


def get_mlm_head(config: BertBlocksConfig) -> DenseHead | None:
    if not config.mlm_head_dense:
        return None
    size = config.decoder_size
    norm = get_norm(config, size) if config.mlm_head_norm else None
    return DenseHead(
        config.hidden_size,
        config.mlm_head_act,
        config.mlm_head_bias,
        norm,
        out_size=size,
        inner_size=config.mlm_head_size,
        is_gated=config.mlm_head_glu,
    )


def get_classifier_head(config: BertBlocksConfig) -> DenseHead | None:
    if config.classifier_head != "dense":
        return None
    norm = get_norm(config) if config.classifier_head_norm else None
    return DenseHead(
        config.hidden_size,
        config.classifier_head_act,
        config.classifier_head_bias,
        norm,
        dropout=config.classifier_head_dropout,
    )


def get_qa_head(config: BertBlocksConfig) -> Linear | QuestionAwareHead:
    if config.qa_head == "linear":
        return Linear(config.hidden_size, 2, config.token_classifier_bias, role="classifier")
    return QuestionAwareHead(config.hidden_size, config.question_token_id)
