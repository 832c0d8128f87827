"""The coordinate check of muP (Yang et al., 2022): do activations, and their changes in training, depend on width?

Small models of several widths take a few steps on the same batch. An activation that a parametrization keeps under
control has the same mean absolute value, and the same mean absolute change since the first step, at every width. What
theory predicts are powers of the width with multiples of 1/2 as exponents, so an exponent is clear from few widths.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import own_keys
from bertblocks.models import BertBlocksForMaskedLM
from bertblocks.nn.backends.base import AttentionContext, repeat_kv
from bertblocks.training.optimizer_sections import OptimizerSection

#: The batch that the models train on: rows, their length, and the share of tokens that is masked.
ROWS, LENGTH, MASKED = 8, 64, 0.3
#: The number of different tokens in the batch, as frequent as words are by Zipf's law.
IDS = 1000
#: Between the exponents 0 and 1/2, nearer to the latter because any of many noisy activations fails the check.
TOLERANCE = 0.35
#: What the check measures in every layer, after the layer's number.
LAYER_PARTS = ("attention logits", "attention", "feed-forward", "output")
#: By what grows with the width, how many heads or how wide they are, the keys that grow.
GROWING = {"heads": ("num_attention_heads", "num_kv_heads"), "head-dim": ("head_dim",)}


@dataclass(frozen=True)
class Activation:
    """The mean absolute value of one activation and of its change since step 0, by step and width."""

    name: str
    sizes: list[list[float]]
    changes: list[list[float]]


@dataclass(frozen=True)
class Drift:
    """The exponents with which an activation and its change follow the width, on average over the steps."""

    name: str
    size: float
    change: float

    def is_beyond(self, tolerance: float) -> bool:
        """Whether the activation grows with width, or its change grows or vanishes.

        Logits of tokens and of attention, and their changes, may be smaller in wide models: by design they are at the
        start, until the vectors whose products they are have aligned.
        """
        vanishes = self.change < -tolerance and not self.name.endswith("logits")
        return not (self.size <= tolerance and self.change <= tolerance) or vanishes


@dataclass(frozen=True)
class CoordinateCheck:
    widths: list[int]
    activations: list[Activation]
    tolerance: float

    @property
    def drifts(self) -> list[Drift]:
        return [
            Drift(
                activation.name,
                _mean([fit_exponent(self.widths, values) for values in activation.sizes[1:]]),
                _mean([fit_exponent(self.widths, values) for values in activation.changes[1:]]),
            )
            for activation in self.activations
        ]

    @property
    def drifting(self) -> list[Drift]:
        return [drift for drift in self.drifts if drift.is_beyond(self.tolerance)]

    @property
    def passes(self) -> bool:
        return not self.drifting


def check_coordinates(
    config: BertBlocksConfig,
    optimizer: OptimizerSection,
    widths: Sequence[int] = (64, 128, 256, 512),
    steps: int = 3,
    seeds: int = 2,
    grow: str = "heads",
    tolerance: float = TOLERANCE,
    on_model: Callable[[int, int], None] = lambda width, seed: None,
) -> CoordinateCheck:
    """Train a masked language model of each width for a few steps and record its activations.

    Every seed has its own batch and initial weights, and results are geometric means over seeds. `grow` says what
    grows with the width inside attention, the number of "heads" or "head-dim".

    Example:
        >>> from bertblocks.training.optimizer_sections import AdamW
        >>> shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> config = BertBlocksConfig(**shape, vocab_size=200)
        >>> check_coordinates(config, AdamW(lr=1e-2), widths=[32, 128], steps=1, seeds=1).passes
        False
    """
    if len(set(widths)) < 2 or list(widths) != sorted(set(widths)):
        raise ValueError(f"widths are {', '.join(map(str, widths))}; they must be at least two, in rising order.")
    configs = [at_width(config, width, grow) for width in widths]
    records: list[list[Record]] = []
    for sized in configs:
        records.append([])
        for seed in range(seeds):
            on_model(sized.hidden_size, seed)
            records[-1].append(_train(sized, optimizer, steps, seed))

    def values(name: str, number: int) -> list[list[float]]:
        return [
            [_geometric_mean([record[step][name][number] for record in of_width]) for of_width in records]
            for step in range(steps + 1)
        ]

    activations = [Activation(name, values(name, 0), values(name, 1)) for name in records[0][0][0]]
    return CoordinateCheck(list(widths), activations, tolerance)


def at_width(config: BertBlocksConfig, width: int, grow: str = "heads") -> BertBlocksConfig:
    """Return the config with another hidden_size, all sizes that follow it, and no dropout."""
    config, changed = copy.deepcopy(config), sizes_at(config, width, grow)
    changed |= {key: 0.0 for key, kind in own_keys(type(config)).items() if key.endswith("dropout") and kind is float}
    for key, value in changed.items():
        setattr(config, key, value)
    config.validate()
    return config


def sizes_at(config: BertBlocksConfig, width: int, grow: str = "heads") -> dict[str, Any]:
    """Return hidden_size and the keys that follow it at another width."""
    factor = width / config.hidden_size
    attention = {key: getattr(config, key) for key in ("num_attention_heads", "num_kv_heads", "head_dim")}
    sizes = {"intermediate_size": config.intermediate_size, **attention}
    changed: dict[str, Any] = {"hidden_size": width, **_scaled(sizes, factor, grow, width)}
    if config.layer_overrides:
        changed["layer_overrides"] = {
            layer: {**values, **_scaled({key: values[key] for key in sizes if key in values}, factor, grow, width)}
            for layer, values in config.layer_overrides.items()
        }
    return changed


def _scaled(sizes: dict[str, int], factor: float, grow: str, width: int) -> dict[str, int]:
    """Return the sizes times the factor, except those inside attention that do not grow."""
    scaled = dict(sizes)
    for key in (key for key in sizes if key == "intermediate_size" or key in GROWING[grow]):
        scaled[key] = round(sizes[key] * factor)
        if key != "intermediate_size" and scaled[key] != sizes[key] * factor:
            raise ValueError(
                f"width {width} would make {key} {sizes[key] * factor:g}; choose widths that keep it whole."
            )
    return scaled


# ---------------------------------------------------------------------- one model

#: By step and name, the mean absolute value of an activation and of its change.
Record = list[dict[str, tuple[float, float]]]


def _train(config: BertBlocksConfig, optimizer: OptimizerSection, steps: int, seed: int) -> Record:
    torch.manual_seed(seed)
    model = BertBlocksForMaskedLM(config).train()
    optimizers = optimizer.build(model)
    ids, labels = _make_batch(config, seed)
    record: Record = []
    first: dict[str, Tensor] = {}
    for step in range(steps + 1):
        if step:
            model(ids, labels=labels).loss.backward()
            for part in optimizers:
                for group in part.param_groups:
                    group["lr"] = optimizer.lr * group.get("rate_scale", 1.0)
                part.step()
                part.zero_grad()
        seen = _observe(model, ids)
        first = first or seen
        record.append({name: (_size(x), _size(x - first[name])) for name, x in seen.items()})
    return record


def _size(x: Tensor) -> float:
    return x.abs().mean().item()


def _make_batch(config: BertBlocksConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids with masks, and labels, which do not depend on the width."""
    generator = torch.Generator().manual_seed(seed)
    length = min(LENGTH, config.max_position_embeddings - config.position_offset)
    ranks = torch.arange(1, min(config.vocab_size, IDS) + 1)
    drawn = torch.multinomial(1 / ranks, ROWS * length, replacement=True, generator=generator)
    ids = (config.vocab_size - 1 - drawn).view(ROWS, length)  # special tokens come first in a vocabulary
    is_masked = torch.rand(ids.shape, generator=generator) < MASKED
    mask = config.mask_token_id if config.mask_token_id is not None else 1
    return ids.masked_fill(is_masked, mask), ids.masked_fill(~is_masked, -100)


@torch.no_grad()
def _observe(model: BertBlocksForMaskedLM, ids: Tensor) -> dict[str, Tensor]:
    """Return the activations of a batch by name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_scores(name: str) -> Callable[[Tensor, Tensor, AttentionContext], None]:
        def observe(q: Tensor, k: Tensor, context: AttentionContext) -> None:
            q, k = (x.unflatten(0, ids.shape) for x in (q, repeat_kv(k, q.shape[1])))
            seen[name] = torch.einsum("rqhd,rkhd->rhqk", q, k) * context.scale

        return observe

    with contextlib.ExitStack() as stack:
        stack.callback(model.model.embedding.register_forward_hook(keep("embeddings")).remove)
        for number, layer in enumerate(model.model.encoder.layers):
            scores, *parts = (f"layer {number} {part}" for part in LAYER_PARTS)
            for name, module in zip(parts, (layer.attention, layer.mlp, layer), strict=True):
                stack.callback(module.register_forward_hook(keep(name)).remove)
            attention: Any = layer.attention
            stack.callback(setattr, attention, "observe", attention.observe)
            attention.observe = keep_scores(scores)
        seen["logits"] = model(ids).logits
    names = [name for number in range(len(model.model.encoder.layers)) for name in _layer_names(number)]
    return {name: seen[name] for name in ("embeddings", *names, "logits")}


def _layer_names(number: int) -> Iterator[str]:
    return (f"layer {number} {part}" for part in LAYER_PARTS)


# ---------------------------------------------------------------------- numbers


def fit_exponent(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return e of values ~ width ** e by least squares on logarithms; infinity if a value is not finite.

    Example:
        >>> round(fit_exponent([64, 128, 256], [1.0, 2.0, 4.0]), 6)
        1.0
    """
    if not all(map(math.isfinite, values)):
        return math.inf
    xs, ys = [math.log(width) for width in widths], [math.log(max(value, 1e-30)) for value in values]
    x_mean, y_mean = _mean(xs), _mean(ys)
    products = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return products / sum((x - x_mean) ** 2 for x in xs)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _geometric_mean(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.inf
    return math.exp(_mean([math.log(max(value, 1e-30)) for value in values]))
