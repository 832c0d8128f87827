"""The structure and cost of an encoder: parameters, FLOPs, memory, and its modules as a tree and as a diagram.

Models are built on the meta device, which holds shapes without values, so even the largest takes no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertblocks.analysis.diagram import mermaid
from bertblocks.analysis.flops import count_flops
from bertblocks.analysis.memory import inference_bytes, training_bytes
from bertblocks.analysis.parameters import build, count_parameters
from bertblocks.analysis.tree import Node, module_tree, write_indexes
from bertblocks.config.validation import ConfigError

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: The sequence lengths for which costs are reported by default.
LENGTHS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Cost:
    """The cost of one sequence of `length` tokens."""

    length: int
    #: FLOPs of the whole sequence by part, with their sum as "total".
    flops: dict[str, int]
    #: Bytes of activations in fp32: the peak without gradients, and all that training keeps for the backward pass.
    inference_bytes: int
    training_bytes: int

    @property
    def flops_per_token(self) -> dict[str, float]:
        return {part: flops / self.length for part, flops in self.flops.items()}


@dataclass(frozen=True)
class Analysis:
    """Everything that `bertblocks describe` shows about a model."""

    task: str
    summary: str
    tree: Node
    #: By part, with their sum as "total". Tied weights count once.
    parameters: dict[str, int]
    costs: list[Cost]


def analyze(config: BertBlocksConfig, task: str = "masked-lm", lengths: list[int] | None = None) -> Analysis:
    """Analyzes the model that `config` describes, with the head of a task.

    Example:
        >>> from bertblocks import BertBlocksConfig
        >>> analyze(BertBlocksConfig.from_preset("modernbert-base")).parameters["total"]
        149655232
    """
    lengths = usual_lengths(config) if lengths is None else lengths
    limit = longest_sequence(config)
    for length in lengths:
        if length < 1 or (limit is not None and length > limit):
            allowed = "at least 1" if limit is None else f"from 1 to {limit}, the number of learned positions"
            raise ConfigError(f"The length is {length}; it must be {allowed}.")
    model = build(config, task)
    costs = [
        Cost(length, count_flops(model, length), inference_bytes(model, length), training_bytes(model, length))
        for length in lengths
    ]
    return Analysis(task, summarize(config), module_tree(model), count_parameters(model), costs)


def longest_sequence(config: BertBlocksConfig) -> int | None:
    """Returns the longest sequence that learned positions allow, or None if the length is not limited."""
    if config.embd_pos_enc_kind != "learned":
        return None
    return config.max_position_embeddings - config.position_offset


def usual_lengths(*configs: BertBlocksConfig) -> list[int]:
    """Returns those of `LENGTHS` that all configs allow, or the longest allowed length if that is shorter."""
    limits = [limit for config in configs if (limit := longest_sequence(config)) is not None]
    return [length for length in LENGTHS if length <= min(limits, default=length)] or [min(limits)]


def summarize(config: BertBlocksConfig) -> str:
    """Describes an architecture in one line."""
    heads = f"{config.num_attention_heads} heads"
    if config.num_kv_heads != config.num_attention_heads:
        heads += f" over {config.num_kv_heads} key/value heads"
    position = " and ".join(dict.fromkeys((config.attention_norm_pos, config.mlp_norm_pos)))
    norm = "nGPT" if config.ngpt else f"{position} norm ({config.norm_fn})"
    positions = [kind for kind in (config.embd_pos_enc_kind, config.block_pos_enc_kind) if kind != "none"]
    parts = [
        f"{config.num_hidden_layers} layers of {config.hidden_size}",
        heads,
        _summarize_mlp(config),
        norm,
        f"positions {' and '.join(positions) or 'none'}",
        f"vocabulary {config.vocab_size:,}",
    ]
    if config.num_hidden_groups < config.num_hidden_layers:
        parts.insert(1, f"with the weights of {config.num_hidden_groups}")
    if config.embedding_size != config.hidden_size:
        parts[-1] += f" of {config.embedding_size}"
    if local := config.layer_types.count("local"):
        window = f"window {config.local_attention_window_size}"
        parts.insert(
            1, f"{local} of them local ({window})" if local < config.num_hidden_layers else f"local ({window})"
        )
    return ", ".join(parts)


def _summarize_mlp(config: BertBlocksConfig) -> str:
    size = f"of {config.intermediate_size} ({config.hidden_act})"
    if config.mlp_type != "moe":
        return f"{config.mlp_type} {size}"
    return f"{config.experts_per_token} of {config.num_experts} experts, each {config.expert_type} {size}"


__all__ = [
    "LENGTHS",
    "Analysis",
    "Cost",
    "Node",
    "analyze",
    "build",
    "count_flops",
    "count_parameters",
    "inference_bytes",
    "longest_sequence",
    "mermaid",
    "module_tree",
    "summarize",
    "training_bytes",
    "usual_lengths",
    "write_indexes",
]
