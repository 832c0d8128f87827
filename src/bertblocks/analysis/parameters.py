"""Models on the meta device and the number of parameters in each of their parts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.nn.moe import MixtureOfExperts

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

PARTS = ("token embedding", "position and type embedding", "attention", "feed-forward", "norms", "head")


def build(config: BertBlocksConfig, task: str) -> BertBlocksPreTrainedModel:
    """Builds the model of a task on the meta device, with plain kernels and layers regardless of the config.

    int8 layers do the same work as those that they replace.
    """
    config = copy.copy(config)
    config.attention_backend, config.kernel_backend, config.quantization = "eager", "torch", None
    with torch.device("meta"):
        return TASK_MODELS[task](config)


def count_parameters(model: BertBlocksPreTrainedModel) -> dict[str, int]:
    """Counts parameters by part and in total.

    A tied decoder counts once, as the token embedding; layers that share weights count once too. The projection of
    factorized embeddings counts as token embedding, the norm of a head as head. With mixtures of experts,
    "active" counts the parameters that one token uses.
    """
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        counts[part_of(name)] += parameter.numel()
    total = sum(counts.values())
    idle = sum(module.num_idle_parameters() for module in model.modules() if isinstance(module, MixtureOfExperts))
    return {**counts, "total": total, **({"active": total - idle} if idle else {})}


def part_of(name: str) -> str:
    """Returns the part that a parameter or module belongs to, by its name in the model."""
    path = name.removeprefix("model.").split(".")
    if path[0] not in ("embedding", "encoder"):
        return "head"
    if any(step.endswith("norm") for step in path):
        return "norms"
    if path[0] == "embedding":
        return "token embedding" if path[1] in ("token", "projection") else "position and type embedding"
    if path[1] == "position":
        return "attention"  # a position table that all layers share
    if path[1] == "convolution":
        return "feed-forward"
    # encoder.layers.<index>.<part of the block>
    return "attention" if path[3].startswith("attention") else "feed-forward"
