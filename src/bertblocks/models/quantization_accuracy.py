"""How far quantization moves the outputs of a model: token vectors and the predictions of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Drift:
    """One measure of how far a head's output moved."""

    output: str
    meaning: str
    value: float


@dataclass(frozen=True)
class Accuracy:
    """A quantized model compared with the original: cosines of token vectors, and the drift of heads."""

    #: The number of tokens compared.
    tokens: int
    mean_cosine: float
    lowest_cosine: float
    drift: list[Drift]

    def __str__(self) -> str:
        drift = "".join(f"; {item.output}: {item.meaning} {item.value:.4f}" for item in self.drift)
        return (
            f"token cosine mean {self.mean_cosine:.4f}, lowest {self.lowest_cosine:.4f} ({self.tokens} tokens){drift}"
        )


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for a batch, without padding."""

    hidden: Tensor  # [tokens, hidden]
    texts: Tensor  # [texts, hidden], the mean of each text's tokens
    heads: dict[str, Tensor]  # logits by name, with the choices in the last dimension


@torch.inference_mode()
def collect_outputs(model: Any, batch: Mapping[str, Tensor]) -> Outputs:
    """Runs one forward pass over a padded batch with its `attention_mask`."""
    # a head that reads only some tokens skips the last layer for the others unless all hidden states are requested
    output = model(**batch, output_hidden_states=True)
    mask = batch["attention_mask"].bool()
    hidden = output.hidden_states[-1][mask]
    text_of_token = mask.nonzero()[:, 0]
    texts = hidden.new_zeros(len(mask), hidden.shape[1]).index_add(0, text_of_token, hidden) / mask.sum(1, keepdim=True)
    heads = {}
    for name, value in output.items():
        if isinstance(value, Tensor) and name.endswith("logits"):
            if name in ("start_logits", "end_logits"):
                heads[name] = value  # a choice among tokens
            else:
                heads[name] = value[mask] if value.dim() == 3 else value
    return Outputs(hidden.float(), texts.float(), heads)


def compare_outputs(before: Outputs, after: Outputs) -> Accuracy:
    """Returns the accuracy of `after` with `before` as the reference."""
    cosines = F.cosine_similarity(before.hidden.double(), after.hidden.double(), dim=-1).clamp(max=1.0)
    # two zero vectors are equal, though their cosine is 0
    cosines = cosines.masked_fill((before.hidden == after.hidden).all(dim=-1), 1.0)
    drift = [item for name in before.heads for item in _head_drift(name, before.heads[name], after.heads[name])]
    if not drift:
        first, second = (F.normalize(outputs.texts, dim=-1) for outputs in (before, after))
        moved = (first @ first.T - second @ second.T).abs().max().item()
        drift = [Drift("mean vectors", "largest change of a similarity", moved)]
    return Accuracy(len(cosines), cosines.mean().item(), cosines.min().item(), drift)


def _head_drift(name: str, before: Tensor, after: Tensor) -> list[Drift]:
    if before.shape[-1] == 1:
        size = before.abs().max().clamp(min=1e-6)
        return [Drift(name, "largest change of a score by its size", ((before - after).abs().max() / size).item())]
    same = (before.argmax(-1) == after.argmax(-1)).float().mean().item()
    moved = (before.float().softmax(-1) - after.float().softmax(-1)).abs().max().item()
    return [Drift(name, "same first choice", same), Drift(name, "largest change of a probability", moved)]
