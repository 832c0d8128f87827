"""The model that fine-tuning starts from, and which of its weights are trained at which learning rate."""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load_with_report
from bertblocks.checkpoints.sentence_transformers import find_kind
from bertblocks.checkpoints.sentence_transformers.any_kind import read_settings_of_any
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import find_encoder
from bertblocks.inference.splitting import max_sequence_length
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.heads import HEAD_PARTS
from bertblocks.models.sequence_classification import BertBlocksForSequenceClassification
from bertblocks.nn.linear import GroupedLinear, Linear
from bertblocks.tasks.base import FineTuneTask
from bertblocks.text.tokenizers import load_tokenizer_if_any
from bertblocks.training.optimizers import ADAM_EPS, RowAdamW, decay_groups, gradient_scale, rate_scales

#: The peak learning rate of the weights of query tokens: each is a single number, seen in few queries.
QUERY_WEIGHTS_RATE = 1e-3
#: Embedding tables with at least as many rows have sparse gradients.
LARGE_TABLE = 4096
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class StartingModel:
    """A model with the task's head, its tokenizer, and defaults that suit it."""

    model: BertBlocksPreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    #: The longest sequence that the model can read, and the one it was made for.
    max_length: int
    usual_length: int
    #: The number of parameters inside layers.
    parameters: int
    #: Whether the head comes from the checkpoint. False: it is new and random.
    has_trained_head: bool


@dataclass(frozen=True)
class Embedder:
    """What a checkpoint's files say about its embeddings."""

    pooling: str
    is_sentence_encoder: bool


def read_embedder(source: str | Path) -> Embedder:
    folder = find_checkpoint(source)
    return Embedder(read_settings_of_any(folder).pooling, find_kind(folder) in ("embedder", "multi-vector"))


def load_starting_model(source: str | Path, task: FineTuneTask) -> StartingModel:
    """Loads a checkpoint with the task's head. The head is new unless the checkpoint has one with the same labels."""
    folder = find_checkpoint(source)
    encoder = find_encoder(folder)
    loaded, report = load_with_report(encoder, task.head_of(folder), torch.float32)  # a new head is expected
    tokenizer = load_tokenizer_if_any(encoder)
    if tokenizer is None:
        raise ValueError(f"{source}: there is no tokenizer next to the model.")
    if loaded.config.quantization is not None:
        raise ValueError(
            f"{source} is quantized to {loaded.config.quantization}; fine-tune the original model instead."
        )
    model = with_config(loaded, task.config_changes())
    settings = read_settings_of_any(folder)
    # embeddings need no head; that of masked language modeling may be new
    has_trained_head = (task.starts_from_embeddings or not report.fresh) and model is loaded
    task.use_tokenizer(tokenizer, settings)
    task.use_model(model, settings)
    model = task.add_parts(model)
    size = sum(parameter.numel() for name, parameter in model.named_parameters() if _LAYER.search(name))
    max_length = model.config.max_position_embeddings - model.config.position_offset
    usual_length = max_sequence_length(model, tokenizer, settings.max_length)
    return StartingModel(model, tokenizer, max_length, usual_length, size, has_trained_head)


def with_config(model: BertBlocksPreTrainedModel, changes: dict[str, Any]) -> BertBlocksPreTrainedModel:
    """The model with a changed config. Heads whose shapes or labels change are initialized anew."""
    if all(getattr(model.config, key) == value for key, value in changes.items()):
        return model
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    changed = type(model)(config)
    own = changed.state_dict()
    kept = {
        name: value
        for name, value in model.state_dict().items()
        if name in own and own[name].shape == value.shape  # a model with another head may lack a part
    }
    if changes.get("id2label") != model.config.id2label:
        # different labels need a new head, even if their number is the same
        kept = {name: value for name, value in kept.items() if name.split(".")[0] not in ("classifier", "tagger")}
    missing = {name.split(".")[0] for name in set(own) - set(kept)}
    assert missing <= HEAD_PARTS, f"{missing - HEAD_PARTS} cannot change shape"
    changed.load_state_dict(kept, strict=False)
    return changed


def check_frozen_layers(model: nn.Module, layers: int) -> None:
    """Raises an error if the model has fewer layers than should be frozen."""
    count = len(_layers(model))
    if layers > count:
        raise ValueError(f"freeze_layers is {layers}; the model has {count} layers.")


def freeze(model: nn.Module, layers: int) -> None:
    """Freezes the embeddings and this many of the lowest layers."""
    if layers:
        for name, parameter in model.named_parameters():
            match = _LAYER.search(name)
            if "embedding" in name.split(".") or (match and int(match[1]) < layers):
                parameter.requires_grad_(False)


def _layers(model: nn.Module) -> set[int]:
    return {int(match[1]) for name, _ in model.named_parameters() if (match := _LAYER.search(name))}


def layered_optimizer(model: nn.Module, rate: float, weight_decay: float, layer_decay: float) -> torch.optim.Optimizer:
    """AdamW in which the learning rate of each layer is `layer_decay` times that of the layer above it."""
    top = len(_layers(model)) + 1
    by_depth: dict[int, list[nn.Parameter]] = {}
    weights: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("sparse_head.query_weights"):
            weights.append(parameter)
        elif parameter.requires_grad:
            match = _LAYER.search(name)
            depth = int(match[1]) + 1 if match else 0 if "embedding" in name.split(".") else top
            by_depth.setdefault(depth if layer_decay < 1 else top, []).append(parameter)
    scales = rate_scales(model)
    groups = [
        {**group, "rate_scale": layer_decay ** (top - depth) * group.get("rate_scale", 1.0)}
        for depth, parameters in by_depth.items()
        for group in decay_groups(parameters, weight_decay, scales)
    ]
    if weights:
        groups.append({"params": weights, "weight_decay": 0.0, "rate_scale": QUERY_WEIGHTS_RATE / rate})
    return RowAdamW(groups, lr=rate, eps=ADAM_EPS * gradient_scale(model), fused=True)


def train_used_rows(model: nn.Module) -> None:
    """Makes the gradients of embedding tables sparse, except those that the model also uses as matrices."""
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for module in model.modules():
        if isinstance(module, nn.Embedding) and uses[id(module.weight)] == 1:
            module.sparse = module.num_embeddings >= LARGE_TABLE


def add_lora(model: BertBlocksPreTrainedModel, rank: int) -> nn.Module:
    """Adds LoRA adapters to the matrices inside layers, and to a pooler that a classifier reads.

    The heads are trained in full.
    """
    from peft import LoraConfig, get_peft_model

    targets = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _takes_lora(name, module)})
    if isinstance(model, BertBlocksForSequenceClassification) and model.config.classifier_head == "pooler":
        targets.append("pooler.dense")
    tied = {name.split(".")[0] for name in model.all_tied_weights_keys}  # a copy of its own could not be saved
    heads = [
        name for name, part in model.named_children() if name in HEAD_PARTS and name not in tied and _is_trained(part)
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=heads)
    return get_peft_model(model, config)


def _is_trained(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())


def _takes_lora(name: str, module: nn.Module) -> bool:
    is_plain = isinstance(module, Linear) and not isinstance(module, GroupedLinear)  # LoRA's matrices have all columns
    return is_plain and _LAYER.search(name) is not None
