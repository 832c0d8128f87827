"""Attention relations (MiniLM; Wang et al., 2020 and 2021)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.training.distillation.losses import relation_loss
from bertblocks.training.distillation.method import Item, TextMethod
from bertblocks.training.distillation.models import Student, Teacher, require_same_vocabulary
from bertblocks.training.distillation.settings import RelationSettings

#: The relations: between queries, between keys, and between values.
KINDS = ("query", "key", "value")
#: MiniLMv2 has 48 relation heads; parts of fewer numbers carry little.
MAX_HEADS, MIN_PART = 48, 8


class RelationMethod(TextMethod):
    """The last layer of the student relates tokens as a layer of the teacher does.

    Nothing behind the queries, keys and values of the student's last layer gets a gradient, so it stays as it is.
    """

    task = "base"
    settings: RelationSettings

    def __init__(self, settings: Any, teacher: Teacher, student: Student, device: torch.device) -> None:
        super().__init__(settings, teacher, student, device)
        require_same_vocabulary(teacher, student, "relations")
        depth = teacher.model.config.num_hidden_layers
        layer = settings.teacher_layer or (depth if depth <= 12 else round(depth * 7 / 8))
        if layer > depth:
            raise ValueError(f"teacher_layer is {layer}; the teacher has {depth} layers.")
        self.theirs = AttentionRecorder(teacher.model, layer - 1)
        self.own = AttentionRecorder(student.model, student.model.config.num_hidden_layers - 1)
        sizes = [*self.theirs.sizes, *self.own.sizes]
        self.heads = settings.relation_heads or choose_heads(sizes)
        wrong = next((size for size in sizes if size % self.heads), None)
        if wrong is not None:
            raise ValueError(
                f"relation_heads is {self.heads}, which does not divide {wrong}, the size of the queries, keys or "
                f"values of one model; {choose_heads(sizes)} would."
            )
        self.notes.append(f"layer {layer} of {depth} of the teacher, {self.heads} relation heads")
        self._freeze_unused(student.model)

    def _freeze_unused(self, model: BertBlocksPreTrainedModel) -> None:
        """Freezes what the loss does not depend on. Experts that a short text does not reach may be reached later."""
        ids = torch.tensor([1, 2, 3])
        model(input_ids=ids, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
        torch.stack([vectors.float().sum() for vectors in self.own.take()]).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None and ".experts." not in name:
                parameter.requires_grad_(False)
            parameter.grad = None

    def prepare(self, examples: Sequence[str], cache: Path, console: Console) -> None:
        self.teacher.model.to(self.device)
        self.features = self.tokenize(examples)

    def batch(self, items: Sequence[Item]) -> FlatBatch:
        return self.flat_batch(items, KINDS)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        with torch.no_grad():
            self.teacher.model(**batch.inputs)
        model(**batch.inputs)
        bounds = batch.cu_seqlens.tolist()
        texts = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        pairs = zip(KINDS, self.own.take(), self.theirs.take(), strict=True)
        return {kind: relation_loss(own, theirs, self.heads, texts) for kind, own, theirs in pairs}


class AttentionRecorder:
    """Keeps the queries, keys and values of one layer of a model, before positions, in each forward pass."""

    def __init__(self, model: BertBlocksPreTrainedModel, layer: int) -> None:
        encoder = model.base_model.encoder
        order = encoder.order
        self.attention: Any = encoder.layers[order[layer]].attention
        # layers that share their weights are one module, which runs several times
        self.turn = order[:layer].count(order[layer])
        self.recorded: list[list[Tensor]] = []
        encoder.register_forward_pre_hook(lambda *_: self.recorded.clear())
        self.attention.register_forward_pre_hook(self._record)

    @property
    def sizes(self) -> list[int]:
        return self.attention.sizes

    def _record(self, attention: nn.Module, inputs: tuple[Any, ...]) -> None:
        qkv = self.attention.split(self.attention.qkv(inputs[0]))
        self.recorded.append([vectors.flatten(-2) for vectors in qkv])

    def take(self) -> list[Tensor]:
        """Queries, keys and values of the last forward pass, each `[tokens, size]`."""
        vectors = self.recorded[self.turn]
        self.recorded = []
        return vectors


def choose_heads(sizes: Sequence[int]) -> int:
    """The most relation heads that divide all sizes and leave parts that are not too small.

    Example:
        >>> choose_heads([768, 384]), choose_heads([1024, 384]), choose_heads([32, 32])
        (48, 32, 4)
    """
    common, limit = math.gcd(*sizes), min(MAX_HEADS, min(sizes) // MIN_PART)
    return next((heads for heads in range(limit, 1, -1) if common % heads == 0), 1)
