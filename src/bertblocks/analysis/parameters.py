"""Models without memory, and how many parameters each of their parts has."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

PARTS = ("token embedding", "position and type embedding", "attention", "feed-forward", "norms", "head")


def build(config: BertBlocksConfig, task: str) -> BertBlocksPreTrainedModel:
    """The model of a task on the meta device, with plain kernels whatever the config asks for."""
    config = copy.copy(config)
    config.attention_backend, config.kernel_backend = "eager", "torch"
    with torch.device("meta"):
        return TASK_MODELS[task](config)


def count_parameters(model: BertBlocksPreTrainedModel) -> dict[str, int]:
    """Parameters by part and in all.

    A tied decoder counts once, as the token embedding, and so do layers that share weights. The projection of narrow
    embeddings counts as token embedding, a head's norm as head.
    """
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    return {**counts, "total": sum(counts.values())}


def part_of(name: str) -> str:
    """The part that a parameter or module belongs to, by its name in the model."""
    path = name.removeprefix("model.").split(".")
    if path[0] not in ("embedding", "encoder"):
        return "head"
    if any(step.endswith("norm") for step in path):
        return "norms"
    if path[0] == "embedding":
        return "token embedding" if path[1] in ("token", "projection") else "position and type embedding"
    if path[1] == "position":
        return "attention"  # a table that all layers share
    # encoder.layers.<index>.<part of the block>
    return "attention" if path[3].startswith("attention") else "feed-forward"
