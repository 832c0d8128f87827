"""Masked-LM training: forward and backward of a small encoder with a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM, PreTrainedModel

import bertblocks
from benchmarks.inputs import IGNORE, Batch, make_masked_batch, ragged_lengths
from benchmarks.workload import Contender, Goal, Settings, Unavailable, Workload
from bertblocks import BertBlocksPreTrainedModel
from bertblocks.analysis import count_flops

PLAIN, SPARSE, OURS = "transformers sdpa, padded", "transformers sdpa, padded, sparse_prediction", "BertBlocks"
GRAPHS = "ONNX Runtime, OpenVINO"
LONGEST = 128
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4}
#: No dropout, so that results can be compared.
BERT: dict[str, Any] = {"intermediate_size": 1024, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERNBERT: dict[str, Any] = {"intermediate_size": 384}


class MaskedLMs:
    """One model in transformers, with sparse prediction if it has that option, and in BertBlocks."""

    def __init__(self, name: str, layers: int) -> None:
        self.name, self.layers = name, layers

    def _build(self, sparse: bool) -> PreTrainedModel:
        torch.manual_seed(0)
        sizes = {**SIZES, "num_hidden_layers": self.layers}
        if self.name == "bert":
            return BertForMaskedLM(BertConfig(**sizes, **BERT)).train()
        return ModernBertForMaskedLM(ModernBertConfig(**sizes, **MODERNBERT, sparse_prediction=sparse)).train()

    @cached_property
    def plain(self) -> PreTrainedModel:
        return self._build(sparse=False)

    @cached_property
    def sparse(self) -> PreTrainedModel:
        return self._build(sparse=True)

    @cached_property
    def ours(self) -> BertBlocksPreTrainedModel:
        return bertblocks.from_huggingface(self.plain).train()

    def flops(self, lengths: list[int], labelled: int) -> float:
        """Forward and backward, three times the forward; head and last feed-forward see labelled tokens only."""
        others = sum(count_flops(self.ours, length, scored=0)["total"] for length in lengths)
        without, with_one = (count_flops(self.ours, 1, scored)["total"] for scored in (0, 1))
        return 3.0 * (others + labelled * (with_one - without))


@cache
def get_masked_lms(name: str, layers: int) -> MaskedLMs:
    return MaskedLMs(name, layers)


def train_step(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the token embeddings, which depends on all others."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), cast(Any, model.get_input_embeddings()).weight.grad


def compared(result: tuple[Tensor, Tensor]) -> Tensor:
    """Loss and gradient in one row; the gradient is scaled to the size of the loss."""
    loss, gradient = result
    return torch.cat([loss.view(1), gradient.flatten() * (loss / gradient.abs().max())])[None]


def masked_lm(name: str, full: bool, settings: Settings) -> Workload:
    models = get_masked_lms(name, settings.layers or 4)
    lengths = [LONGEST] * 32 if full else ragged_lengths(32, LONGEST)
    batch = make_masked_batch(lengths, 30000)

    def graphs() -> Callable[[], tuple[Tensor, Tensor]]:
        raise Unavailable("its graphs have no backward pass")

    contenders = [
        Contender(PLAIN, lambda: lambda: train_step(models.plain, batch)),
        Contender(GRAPHS, graphs),
        Contender(OURS, lambda: lambda: train_step(models.ours, batch)),
    ]
    if name == "modernbert":
        contenders.insert(1, Contender(SPARSE, lambda: lambda: train_step(models.sparse, batch)))
    labelled = int((batch["labels"] != IGNORE).sum())
    shape = f"full-length 32 x {LONGEST}" if full else f"ragged 32 x <={LONGEST}"
    goals = [Goal(OURS, PLAIN, 2.4)] if full else [Goal(OURS, PLAIN, 4.4), Goal(OURS, PLAIN, 4, "memory")]
    vocabulary = models.plain.config.vocab_size
    return Workload(
        f"masked LM forward and backward, {name} of {models.layers} layers x {SIZES['hidden_size']}, "
        f"vocabulary {vocabulary:,}, {shape}, 30 % masked",
        contenders,
        compared,
        goals,
        flops=lambda: models.flops(lengths, labelled),
        memory=[contender.name for contender in contenders if contender.name != GRAPHS],
        facts={
            "model": name,
            "layers": models.layers,
            "tokens": sum(lengths),
            "padding": round(32 * LONGEST / sum(lengths), 2),
            "labelled": labelled,
        },
    )
