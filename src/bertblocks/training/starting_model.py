"""Where fine-tuning starts: a model with the right head, and which of its weights learn how fast."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load_with_report
from bertblocks.checkpoints.sentence_transformers import read_settings
from bertblocks.inference.splitting import max_sequence_length
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.heads import HEAD_PARTS
from bertblocks.nn.linear import Linear
from bertblocks.tasks.base import FineTuneTask
from bertblocks.text.tokenizers import load_tokenizer_if_any

#: Learning rates by the number of weights inside layers: small models learn faster. Published ones lie near these.
LEARNING_RATES = ((15e6, 2.5e-4), (60e6, 8e-5), (150e6, 5e-5), (float("inf"), 3e-5))
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Started:
    model: BertBlocksPreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    #: Tokens that the model reads at most, and at a time in what it was made for.
    longest: int
    usual_length: int
    #: What suits a model of this size.
    learning_rate: float
    #: How the checkpoint pools embeddings.
    pooling: str


def start_model(source: str | Path, task: FineTuneTask) -> Started:
    """The model of a checkpoint with the task's head, which is fresh unless the checkpoint has the same labels."""
    folder = find_checkpoint(source)
    loaded, _ = load_with_report(folder, task.model_task, torch.float32)  # a fresh head is what training needs
    tokenizer = load_tokenizer_if_any(folder)
    if tokenizer is None:
        raise ValueError(f"{source}: there is no tokenizer beside the model.")
    if loaded.config.quantization is not None:
        raise ValueError(
            f"{source} is quantised to {loaded.config.quantization}; fine-tune the model that it was made of."
        )
    model = with_config(loaded, task.config_changes())
    settings = read_settings(folder)
    size = sum(one.numel() for name, one in model.named_parameters() if _LAYER.search(name))
    rate = next(rate for limit, rate in LEARNING_RATES if size <= limit)
    longest = model.config.max_position_embeddings - model.config.position_offset
    usual_length = max_sequence_length(model, tokenizer, settings.max_length)
    return Started(model, tokenizer, longest, usual_length, rate, settings.pooling)


def with_config(model: BertBlocksPreTrainedModel, changes: dict[str, Any]) -> BertBlocksPreTrainedModel:
    """The model under a changed config: heads for which the shapes differ are made fresh, all else is kept."""
    if all(getattr(model.config, key) == value for key, value in changes.items()):
        return model
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    changed = type(model)(config)
    own = changed.state_dict()
    kept = {name: value for name, value in model.state_dict().items() if own[name].shape == value.shape}
    if changes.get("id2label") != model.config.id2label:
        # the same number of other labels is another head all the same
        kept = {name: value for name, value in kept.items() if name.split(".")[0] not in ("classifier", "tagger")}
    missing = {name.split(".")[0] for name in set(own) - set(kept)}
    assert missing <= HEAD_PARTS, f"{missing - HEAD_PARTS} cannot change shape"
    changed.load_state_dict(kept, strict=False)
    return changed


def freeze(model: nn.Module, layers: int) -> None:
    """The embeddings and so many of the lowest layers are not trained."""
    count = sum(1 for _ in _layers(model))
    if layers > count:
        raise ValueError(f"freeze_layers is {layers}; the model has {count} layers.")
    if layers:
        for name, one in model.named_parameters():
            match = _LAYER.search(name)
            if "embedding" in name.split(".") or (match and int(match[1]) < layers):
                one.requires_grad_(False)


def _layers(model: nn.Module) -> set[int]:
    return {int(match[1]) for name, _ in model.named_parameters() if (match := _LAYER.search(name))}


def layered_optimizer(model: nn.Module, rate: float, weight_decay: float, layer_decay: float) -> torch.optim.Optimizer:
    """AdamW in which every layer below the head learns by `layer_decay` slower than the one above it."""
    top = len(_layers(model)) + 1
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, one in model.named_parameters():
        if one.requires_grad:
            match = _LAYER.search(name)
            depth = int(match[1]) + 1 if match else 0 if "embedding" in name.split(".") else top
            groups.setdefault((depth if layer_decay < 1 else top, one.dim() >= 2), []).append(one)
    return torch.optim.AdamW(
        [
            {
                "params": group,
                "weight_decay": weight_decay if decays else 0.0,
                "rate_scale": layer_decay ** (top - depth),
            }
            for (depth, decays), group in groups.items()
        ],
        lr=rate,
        fused=True,
    )


def add_lora(model: BertBlocksPreTrainedModel, rank: int) -> nn.Module:
    """Low-rank additions to the matrices inside layers, trained in place of them; heads are trained whole."""
    from peft import LoraConfig, get_peft_model

    targets = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _takes_lora(name, module)})
    heads = [name for name, part in model.named_children() if name in HEAD_PARTS and _is_trained(part)]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=heads)
    return get_peft_model(model, config)


def _is_trained(part: nn.Module) -> bool:
    return any(one.requires_grad for one in part.parameters())


def _takes_lora(name: str, module: nn.Module) -> bool:
    return isinstance(module, Linear) and _LAYER.search(name) is not None
