"""int8 inference: 8-bit weights and activations, multiplied by the CPU's integer instructions.

The linear layers of the encoder, the masked-LM head and its decoder are quantized. Embedding tables, norms, the
attention products, BERT's pooler, routers, grouped layers and the small output layer of a classifier keep their
precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bertblocks.core.registry import nearest
from bertblocks.models.quantization_accuracy import Accuracy, collect_outputs, compare_outputs
from bertblocks.nn.linear import GroupedLinear, Linear
from bertblocks.nn.ops.kernels import describe
from bertblocks.nn.quantized import QuantizedBlock, QuantizedLinear, QuantizedMLP

METHODS = ("int8",)
#: The lowest accepted mean cosine between the token vectors of the quantized and of the original model.
MIN_COSINE = 0.98

__all__ = ["METHODS", "MIN_COSINE", "Accuracy", "QuantizationError", "describe", "quantize", "replace_layers"]


class QuantizationError(ValueError):
    """Raised if a model cannot be quantized, or not accurately enough; the model stays unchanged."""


def quantize(
    model: Any, method: str = "int8", samples: Mapping[str, Tensor] | None = None, min_cosine: float = MIN_COSINE
) -> Accuracy:
    """Quantizes a model in place and returns how far its outputs moved on `samples`.

    `samples` is a padded batch of the model's inputs with its `attention_mask`, by default random ids. If the mean
    cosine of the token vectors is below `min_cosine`, the model stays unchanged and `QuantizationError` is raised.

    Example:
        >>> from bertblocks import BertBlocksConfig, BertBlocksModel
        >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini"))
        >>> quantize(model).mean_cosine > 0.99, model.config.quantization
        (True, 'int8')
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}{nearest(method, METHODS)}.")
    if model.config.quantization is not None:
        raise QuantizationError(f"This model is already quantized to {model.config.quantization}.")
    for name, tensor in model.named_parameters():
        if not tensor.isfinite().all():
            raise QuantizationError(f"{name} holds values that are not finite; such a model cannot be quantized.")
    was_training, batch = model.training, _random_batch(model) if samples is None else samples
    model.eval()
    before = collect_outputs(model, batch)
    replaced = replace_layers(model)
    accuracy = compare_outputs(before, collect_outputs(model, batch))
    if not accuracy.mean_cosine >= min_cosine:
        for parent, name, module in reversed(replaced):
            setattr(parent, name, module)
        model.train(was_training)
        raise QuantizationError(f"min_cosine is {min_cosine}, but int8 gives {accuracy}; the model is unchanged.")
    model.config.quantization = method
    # the decoder now has int8 weights of its own
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
    model.requires_grad_(False)
    return accuracy


def replace_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replaces linear layers by int8 layers and returns the replaced modules with their parents, in order."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, name: str, module: nn.Module) -> None:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_decoder = name == "decoder" and isinstance(child, nn.Linear)
            is_layer = isinstance(child, Linear) and not isinstance(child, GroupedLinear)
            if is_decoder or (is_layer and child.role not in ("classifier", "router")):
                put(parent, name, QuantizedLinear.from_linear(child))  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if QuantizedMLP.replaces(child):
                put(parent, name, QuantizedMLP(child))  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if QuantizedBlock.replaces(child):
                put(parent, name, QuantizedBlock(child))  # type: ignore[arg-type]
    return replaced


def _random_batch(model: Any) -> dict[str, Tensor]:
    """Returns sixteen sequences of random ids, up to 64 tokens long."""
    config = model.config
    room = config.max_position_embeddings - config.position_offset if config.embd_pos_enc_kind == "learned" else 64
    lengths = torch.linspace(1, min(64, room), 16).long()
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(0, config.vocab_size, mask.shape, generator=generator)
    padding = config.pad_token_id or 0
    ids = torch.where(ids == padding, (ids + 1) % config.vocab_size, ids).masked_fill(mask == 0, padding)
    device = model.get_input_embeddings().weight.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
