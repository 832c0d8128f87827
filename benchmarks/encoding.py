"""Encoder workloads: ragged, long and uniform batches through BERT, ModernBERT, DeBERTa-v3 and stacks of one kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
)

import bertblocks
from benchmarks.inputs import Batch, make_batch, ragged_lengths, sorted_batches
from benchmarks.peers import Graphs, need_bf16
from benchmarks.workload import PROBE, Contender, Goal, Settings, Unavailable, Workload
from bertblocks import BertBlocksPreTrainedModel
from bertblocks.analysis import count_flops

PADDED = "transformers sdpa, padded"
SORTED = "transformers sdpa, sorted batches of 8"
#: transformers has no other attention for DeBERTa.
EAGER, EAGER_SORTED = "transformers eager, padded", "transformers eager, sorted batches of 8"
ONNX, ONNX_INT8 = "ONNX Runtime fp32, padded", "ONNX Runtime int8 (dynamic), padded"
OPENVINO, OPENVINO_INT8 = "OpenVINO fp32, padded", "OpenVINO int8 (static), padded"
OURS, OURS_BF16, OURS_INT8 = "BertBlocks fp32", "BertBlocks bf16", "BertBlocks int8"

#: Layers of each model. The last three show how cost grows with length.
DEPTHS = {"bert-base": 12, "modernbert-base": 22, "deberta-v3-base": 12, "local": 3, "global": 3, "mixed": 3}
#: Fewer layers for long texts and uniform shapes, where full depth would take many minutes.
LONG_DEPTH, SWEEP_DEPTH = 6, 4
#: Other runtimes do not run longer texts: 8,192 tokens took more than 24 GB.
GRAPH_LENGTH = 4096
#: What deberta-v3-base changes in the defaults of transformers' DebertaV2Config.
DEBERTA_V3: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def build_reference(name: str, layers: int) -> PreTrainedModel:
    """A transformers model with random weights, the same every time."""
    torch.manual_seed(0)
    if name == "bert-base":
        return BertModel(BertConfig(num_hidden_layers=layers), add_pooling_layer=False).eval()
    if name == "deberta-v3-base":
        return DebertaV2Model(DebertaV2Config(num_hidden_layers=layers, **DEBERTA_V3)).eval()
    kinds = {"local": ["sliding_attention"] * layers, "global": ["full_attention"] * layers}.get(name)
    options: dict[str, Any] = {} if kinds is None else {"layer_types": kinds}
    return ModernBertModel(ModernBertConfig(num_hidden_layers=layers, **options)).eval()


class Encoders:
    """One model in the form that each contender needs, made on first use."""

    def __init__(self, name: str, layers: int, settings: Settings) -> None:
        self.name, self.layers, self.settings = name, layers, settings

    @cached_property
    def theirs(self) -> PreTrainedModel:
        return build_reference(self.name, self.layers)

    @cached_property
    def ours(self) -> BertBlocksPreTrainedModel:
        return bertblocks.from_huggingface(self.theirs).eval()

    @cached_property
    def ours_bf16(self) -> BertBlocksPreTrainedModel:
        need_bf16()
        return copy.deepcopy(self.ours).to(torch.bfloat16)

    @cached_property
    def ours_int8(self) -> BertBlocksPreTrainedModel:
        model = copy.deepcopy(self.ours)
        model.quantize("int8")
        return model

    @cached_property
    def graphs(self) -> Graphs:
        label = f"{self.name}-{self.layers}"
        return Graphs(self.theirs, label, self.settings.scratch, self.settings.threads)

    def flops(self, lengths: list[int]) -> float:
        counts = {length: count_flops(self.ours, length)["total"] for length in set(lengths)}
        return float(sum(counts[length] for length in lengths))


@lru_cache(maxsize=2)
def get_encoders(name: str, layers: int, settings: Settings) -> Encoders:
    """Consecutive workloads of one model share it."""
    return Encoders(name, settings.layers or layers, settings)


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model(**batch).last_hidden_state.float()


def in_sorted_batches(model: PreTrainedModel, batch: Batch, size: int) -> Tensor:
    """What a careful user of transformers does: sort, run small batches, and restore the order of the input."""
    target = torch.zeros(*batch["input_ids"].shape, model.config.hidden_size)
    for rows, part in sorted_batches(batch, size):
        target[rows, : part["input_ids"].shape[1]] = hidden_states(model, part)
    return target


def encoder_workload(
    models: Encoders,
    lengths: list[int],
    title: str,
    names: Sequence[str] | None = None,
    goals: Sequence[Goal] = (),
    memory: Sequence[str] = (),
) -> Workload:
    """One padded batch for all contenders, or for the given ones."""
    batch = make_batch(lengths, 30000)
    real = batch["attention_mask"].bool()

    def on_graph(kind: str) -> Callable[[], Callable[[], Tensor]]:
        def prepare() -> Callable[[], Tensor]:
            if max(lengths) > GRAPH_LENGTH:
                raise Unavailable(
                    f"its graph holds whole attention matrices: too much memory at {max(lengths):,} tokens"
                )
            graph = getattr(models.graphs, kind)
            return lambda: graph(batch)

        return prepare

    is_eager = models.name == "deberta-v3-base"
    contenders = [
        Contender(EAGER if is_eager else PADDED, lambda: lambda: hidden_states(models.theirs, batch)),
        Contender(ONNX, on_graph("onnxruntime")),
        Contender(ONNX_INT8, on_graph("onnxruntime_int8"), exact=False),
        Contender(OPENVINO, on_graph("openvino")),
        Contender(OPENVINO_INT8, on_graph("openvino_int8"), exact=False),
        Contender(OURS, lambda: _bound(models.ours, batch)),
        Contender(OURS_BF16, lambda: _bound(models.ours_bf16, batch), exact=False),
        Contender(OURS_INT8, lambda: _bound(models.ours_int8, batch), exact=False),
    ]
    if len(set(lengths)) > 1:
        label = EAGER_SORTED if is_eager else SORTED
        contenders.insert(1, Contender(label, lambda: lambda: in_sorted_batches(models.theirs, batch, 8)))
    facts = {
        "model": models.name,
        "layers": models.layers,
        "rows": len(lengths),
        "length": max(lengths),
        "tokens": sum(lengths),
        "padding": round(real.numel() / sum(lengths), 2),
    }
    return Workload(
        f"{title}, {models.layers} layers",
        [contender for contender in contenders if names is None or contender.name in names],
        compared=lambda hidden: hidden[real],
        flops=lambda: models.flops(lengths),
        goals=goals,
        memory=memory,
        facts=facts,
    )


def _bound(model: PreTrainedModel, batch: Batch) -> Callable[[], Tensor]:
    return lambda: hidden_states(model, batch)


def ragged(name: str, settings: Settings) -> Workload:
    goals = [
        Goal(OURS, PADDED, 4.8),
        Goal(OURS_INT8, PADDED, 11),
        Goal(OURS, SORTED, 1.7),
        Goal(OURS_INT8, SORTED, 4),
        Goal(OURS_BF16, OURS, 1.6),
    ]
    if name == "bert-base":
        goals.insert(1, Goal(OURS, PROBE, 0.8, "sgemm"))
    lengths = ragged_lengths()
    title = f"{name}, one batch of {len(lengths)} ragged texts of up to {max(lengths)} tokens"
    return encoder_workload(get_encoders(name, DEPTHS[name], settings), lengths, title, goals=goals)


def deberta(rows: int | None, settings: Settings) -> Workload:
    """DeBERTa-v3-base with ragged texts, or with some of 128 tokens."""
    name = "deberta-v3-base"
    lengths = ragged_lengths() if rows is None else [128] * rows
    shape = f"one batch of {len(lengths)} ragged texts of up to {max(lengths)} tokens"
    title = f"{name}, {shape}" if rows is None else f"{name}, uniform {rows} x 128"
    models = get_encoders(name, DEPTHS[name], settings)
    contenders = [EAGER, EAGER_SORTED, OURS, OURS_INT8]
    return encoder_workload(models, lengths, title, contenders, [Goal(OURS, EAGER, 3.0 if rows is None else 1.5)])


def long_text(length: int, at_least: float, int8_at_least: float | None, settings: Settings) -> Workload:
    models = get_encoders("modernbert-base", LONG_DEPTH, settings)
    title = f"modernbert-base, one text of {length:,} tokens"
    goals = [Goal(OURS, PADDED, at_least)]
    if int8_at_least is not None:
        goals.append(Goal(OURS_INT8, PADDED, int8_at_least))
    return encoder_workload(models, [length], title, goals=goals, memory=[PADDED, OURS])


def uniform(name: str, rows: int, length: int, settings: Settings) -> Workload:
    goals = [
        Goal(OURS, PADDED, 1.05),
        Goal(OURS_BF16, OURS, 1.6),
        Goal(OURS_INT8, PADDED, 4.2),
        Goal(OURS_INT8, OPENVINO_INT8, 1.0),
    ]
    models = get_encoders(name, DEPTHS[name], settings)
    return encoder_workload(models, [length] * rows, f"{name}, uniform {rows} x {length}", goals=goals)


def any_uniform(name: str, rows: int, length: int, settings: Settings) -> Workload:
    """One uniform shape; the sweep over them looks for slowdowns."""
    models = get_encoders(name, SWEEP_DEPTH, settings)
    title = f"{name}, uniform {rows} x {length}"
    return encoder_workload(models, [length] * rows, title, [PADDED, OURS], [Goal(OURS, PADDED, 0.95)])


def stack(kind: str, length: int, settings: Settings) -> Workload:
    """How cost grows with length, for layers of ModernBERT-base: local, global, or every third global."""
    models = get_encoders(kind, DEPTHS[kind], settings)
    memory = [PADDED, OURS] if kind == "mixed" and length >= 2048 else []
    title = f"{kind} stack, one text of {length:,} tokens"
    return encoder_workload(models, [length], title, [PADDED, OURS], memory=memory)
