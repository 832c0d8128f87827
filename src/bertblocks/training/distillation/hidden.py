"""Hidden states and logits (DistilBERT; Sanh et al., 2019. TinyBERT; Jiao et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine, draw, uniform
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.training.distillation.losses import hidden_loss, logit_loss
from bertblocks.training.distillation.method import Item, TextMethod
from bertblocks.training.distillation.models import Student, Teacher, require_same_vocabulary
from bertblocks.training.distillation.settings import HiddenSettings

#: How the logits of each head are compared, see `logit_loss`; a classifier's depend on its problem.
TASKS = ("base", "masked-lm", "sequence-classification", "token-classification")
PROBLEMS = {"multi_label_classification": "multi", "regression": "regression"}


class HiddenMethod(TextMethod):
    """The embeddings and each layer of the student learn the teacher's states at the same relative depth.

    If the teacher has a head, the student gets one too and learns its logits: of masked tokens, of labels of texts, or
    of labels of tokens. Linear layers bring states to the teacher's width if it differs; they are not saved.
    """

    settings: HiddenSettings

    def __init__(self, settings: Any, teacher: Teacher, student: Student, device: torch.device) -> None:
        super().__init__(settings, teacher, student, device)
        require_same_vocabulary(teacher, student, "hidden")
        if teacher.task not in TASKS:
            raise ValueError(f"The teacher has a {teacher.task} head; method hidden learns {', '.join(TASKS)}.")
        self.is_masked = teacher.task == "masked-lm"
        self.has_logits = teacher.task != "base" and settings.logit_weight > 0
        mask = student.tokenizer.mask_token_id
        if self.is_masked and mask is None:
            raise ValueError("The tokenizer has no mask token, which method hidden needs for a masked language model.")
        self.mask = mask
        self.tokens = len(student.tokenizer)
        self.special = set(student.tokenizer.all_special_ids)
        config = teacher.model.config
        self.layers = match_layers(student.model.config.num_hidden_layers, config.num_hidden_layers)
        self.problem = "single"
        if teacher.task == "sequence-classification":
            one_label = "regression" if config.num_labels == 1 else "single_label_classification"
            self.problem = PROBLEMS.get(config.problem_type or one_label, "single")
        self.notes.append(f"the student's states 0 to {len(self.layers) - 1} learn the teacher's {self.layers}")
        pooler: Any = student.model.base_model.pooler
        if pooler is not None and teacher.task == "base":
            pooler.requires_grad_(False)

    @cached_property
    def model(self) -> nn.Module:
        return ProjectedStudent(self.student.model, self.teacher.model.config.hidden_size)

    def prepare(self, examples: Sequence[str], cache: Path, console: Console) -> None:
        self.teacher.model.to(self.device)
        self.features = self.tokenize(examples)

    def batch(self, items: Sequence[Item]) -> FlatBatch:
        batch = self.flat_batch(items, ["hidden"])
        if not self.has_logits:
            return batch
        texts = len(batch.cu_seqlens) - 1
        batch.counts["logits"] = texts if self.teacher.task == "sequence-classification" else batch.input_ids.numel()
        if not self.is_masked:
            return batch
        ids = batch.input_ids.numpy().copy()
        keys = np.concatenate([self._draws(index, position) for index, position in items])
        is_masked = (keys < self.settings.mask_rate) & ~np.isin(ids, list(self.special))
        if not is_masked.any():
            is_masked[np.argmin(np.where(np.isin(ids, list(self.special)), 1.0, keys))] = True
        batch.counts["logits"] = int(is_masked.sum())
        hidden_ids = torch.from_numpy(np.where(is_masked, self.mask, ids))
        return replace(batch, input_ids=hidden_ids, scored_tokens=torch.from_numpy(np.flatnonzero(is_masked)))

    def _draws(self, index: int, position: int) -> np.ndarray:
        """A number in [0, 1) for each token of an example, another one each time that it comes up."""
        size = len(self.features[index].ids)
        return uniform(draw(combine("mask", self.settings.seed, position), np.arange(size)))

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        chosen = batch.scored_tokens
        with torch.no_grad():
            theirs, their_logits = read_states(self.teacher.model, batch.inputs, chosen)
        states, logits = model(batch.inputs, chosen)
        pairs = [hidden_loss(own, theirs[layer]) for own, layer in zip(states, self.layers, strict=True)]
        losses = {"hidden": torch.stack(pairs).mean()}
        if self.has_logits:
            assert their_logits is not None
            if self.is_masked:  # a model may have rows for more tokens than the tokenizer has
                logits, their_logits = logits[:, : self.tokens], their_logits[:, : self.tokens]
            loss = logit_loss(logits, their_logits, self.settings.temperature, self.problem)
            losses["logits"] = self.settings.logit_weight * loss
        return losses


class ProjectedStudent(BertBlocksPreTrainedModel):
    """A student, and linear layers that bring its states to the teacher's width if that differs."""

    def __init__(self, student: BertBlocksPreTrainedModel, width: int) -> None:
        super().__init__(student.config)
        self.student = student
        own, states = student.config.hidden_size, student.config.num_hidden_layers + 1
        self.projections = nn.ModuleList(nn.Linear(own, width) for _ in range(states if own != width else 0))

    def forward(self, inputs: dict[str, Tensor], chosen: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """The states in the teacher's width, and the logits of all or of the chosen tokens, if there is a head."""
        states, logits = read_states(self.student, inputs, chosen)
        if self.projections:
            states = [project(state) for project, state in zip(self.projections, states, strict=True)]
        return states, logits


def read_states(
    model: BertBlocksPreTrainedModel, inputs: dict[str, Tensor], chosen: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """The hidden states of a flat batch, from the embeddings on, and its logits.

    A language model computes the logits of `chosen` tokens only.
    """
    if isinstance(model, LanguageModel):
        states = list(model.model.encode(**inputs, output_hidden_states=True).hidden_states or ())
        return states, None if chosen is None else model.logits(states[-1][chosen])
    out: Any = model(**inputs, output_hidden_states=True)
    return list(out.hidden_states), getattr(out, "logits", None)


def match_layers(student: int, teacher: int) -> list[int]:
    """For the embeddings (0) and each layer of the student, the teacher's layer at the same relative depth.

    Example:
        >>> match_layers(3, 6), match_layers(4, 6), match_layers(2, 2)
        ([0, 2, 4, 6], [0, 2, 3, 5, 6], [0, 1, 2])
    """
    return [int(layer * teacher / student + 0.5) for layer in range(student + 1)]
