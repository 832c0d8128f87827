"""int8 inference: byte weights and byte activations through the integer units of the CPU.

Linear layers of the encoder, the masked-LM head and its decoder are quantized. Embedding tables, norms, attention
itself, BERT's pooler and the small last layer of a classifier stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bertblocks.core.registry import nearest
from bertblocks.models.quantization_accuracy import Accuracy, compare, run
from bertblocks.nn.linear import Linear
from bertblocks.nn.ops.int8 import describe
from bertblocks.nn.quantized import QuantizedLinear, QuantizedMLP

METHODS = ("int8",)
#: A quantized model whose tokens' vectors have a lower mean cosine to the original's is refused.
MIN_COSINE = 0.98

__all__ = ["METHODS", "MIN_COSINE", "Accuracy", "QuantizationError", "describe", "quantize", "replace_layers"]


class QuantizationError(ValueError):
    """A model that cannot be quantized, or not well enough; it is left as it was."""


def quantize(
    model: Any, method: str = "int8", samples: Mapping[str, Tensor] | None = None, min_cosine: float = MIN_COSINE
) -> Accuracy:
    """Quantizes a model in place and tells how far its outputs moved on `samples`.

    Samples are a padded batch of the model's inputs with its `attention_mask`; by default random ids. Where the mean
    cosine of the tokens' vectors is below `min_cosine` the model is left as it was and `QuantizationError` is raised.

    Example:
        >>> from bertblocks import BertBlocksConfig, BertBlocksModel
        >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini"))
        >>> quantize(model).mean_cosine > 0.99, model.config.quantization
        (True, 'int8')
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}{nearest(method, METHODS)}.")
    if model.config.quantization is not None:
        raise QuantizationError(f"This model is {model.config.quantization} already.")
    for name, tensor in model.named_parameters():
        if not tensor.isfinite().all():
            raise QuantizationError(f"{name} holds numbers that are not finite; such a model cannot be quantized.")
    was_training, batch = model.training, _random_batch(model) if samples is None else samples
    model.eval()
    before = run(model, batch)
    replaced = replace_layers(model)
    accuracy = compare(before, run(model, batch))
    if not accuracy.mean_cosine >= min_cosine:
        for parent, name, module in reversed(replaced):
            setattr(parent, name, module)
        model.train(was_training)
        raise QuantizationError(f"Refused: a mean cosine of {min_cosine} was asked for, and int8 gives {accuracy}.")
    model.config.quantization = method
    model.config.tie_word_embeddings = False  # the decoder has bytes of its own
    model.requires_grad_(False)
    return accuracy


def replace_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Puts int8 layers in the place of linear ones; returns what was where, in order."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, name: str, module: nn.Module) -> None:
        replaced.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_decoder = name == "decoder" and isinstance(child, nn.Linear)
            if is_decoder or (isinstance(child, Linear) and child.role != "classifier"):
                put(parent, name, QuantizedLinear.from_linear(child))  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if QuantizedMLP.replaces(child):
                put(parent, name, QuantizedMLP(child))  # type: ignore[arg-type]
    return replaced


def _random_batch(model: Any) -> dict[str, Tensor]:
    """Sixteen texts of random ids, up to 64 tokens long."""
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
