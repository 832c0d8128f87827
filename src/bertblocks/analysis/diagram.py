"""The architecture as a Mermaid flowchart, for a README or the draft of a paper."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from bertblocks.analysis.tree import Node, module_tree, write_indexes
from bertblocks.models import BertBlocksForSequenceClassification, BertBlocksModel, BertBlocksPreTrainedModel
from bertblocks.nn.attention import Attention
from bertblocks.nn.block import Block, Residual
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.nn.position import LearnedPosition


def mermaid(model: BertBlocksPreTrainedModel) -> str:
    """Draws a flowchart from token ids to the output of the task.

    Equal layers are drawn once; arrows between the kinds of layers show which follows which.
    """
    base = model if isinstance(model, BertBlocksModel) else model.model
    assert isinstance(base, BertBlocksModel)
    chart = Chart()
    chart.node("ids", "token ids", "([", "])")
    chart.node("embedding", _embedding_label(base))
    chart.edge("ids", "embedding")
    last = _layers(chart, base, "embedding")
    if base.encoder.final_norm is not None:
        last = chart.after(last, "final_norm", f"final {_kind(base.encoder.final_norm)}")
    for key, label in _head_labels(model, base):
        last = chart.after(last, key, label)
    chart.node("output", "scores" if model is not base else "vectors", "([", "])")
    chart.edge(last, "output")
    return chart.text()


class Chart:
    """The lines of a flowchart. Labels are quoted and never begin like a Markdown list item, which Mermaid rejects."""

    def __init__(self) -> None:
        self.lines = ["flowchart TD"]
        self.indent = 1

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def node(self, key: str, label: str, opening: str = "[", closing: str = "]") -> str:
        self.line(f'{key}{opening}"{label}"{closing}')
        return key

    def edge(self, start: str, end: str, label: str = "") -> None:
        self.line(f'{start} -->|"{label}"| {end}' if label else f"{start} --> {end}")

    def after(self, start: str, key: str, label: str) -> str:
        """Adds a node with an arrow to it and returns its key."""
        self.node(key, label)
        self.edge(start, key)
        return key

    def text(self) -> str:
        return "\n".join(self.lines)


# ---------------------------------------------------------------------- layers


def _layers(chart: Chart, base: BertBlocksModel, start: str) -> str:
    """Draws every kind of layer and the arrows between kinds; returns the key of the last layer's output."""
    encoder = next(node for node in module_tree(base).children if node.name == "encoder")
    groups = next(node for node in encoder.children if node.name == "layers").children
    kind_of = {index: number for number, group in enumerate(groups) for index in group.layers}
    ends = [_layer(chart, f"layer{number}", group, base) for number, group in enumerate(groups)]
    chart.edge(start, "layer0_in")
    order = [kind_of[index] for index in base.encoder.order]
    for kind, next_kind in dict.fromkeys(itertools.pairwise(order)):
        if kind != next_kind:
            chart.edge(ends[kind], f"layer{next_kind}_in")
    return ends[order[-1]]


def _layer(chart: Chart, key: str, group: Node, base: BertBlocksModel) -> str:
    block: Any = base.encoder.layers[group.layers[0]]
    layers = [layer for layer, index in enumerate(base.encoder.order) if index in group.layers]
    count = "layer" if len(layers) == 1 else f"{len(layers)} layers:"
    note = "" if len(layers) == len(group.layers) else ", sharing weights"
    chart.line(f'subgraph {key}["{count} {write_indexes(layers)}{note}"]')
    chart.indent += 1
    end = chart.node(f"{key}_in", "x", "((", "))")
    attention = ("attention", _attention_label(block.attention))
    mlp = ("mlp", _mlp_label(block.mlp))
    if not isinstance(block, Block):
        for sublayer in (attention, mlp):
            end = _step_on_sphere(chart, key, end, *sublayer)
    elif block.mlp_residual is None:
        end = _join(chart, key, end, [attention, mlp], block.attention_residual)
    else:
        end = _join(chart, key, end, [attention], block.attention_residual)
        end = _join(chart, key, end, [mlp], block.mlp_residual)
    chart.indent -= 1
    chart.line("end")
    return end


def _join(chart: Chart, key: str, start: str, sublayers: list[tuple[str, str]], residual: Residual) -> str:
    """Draws one residual branch, or two in parallel, with the norms where the block has them."""
    stem = f"{key}_{sublayers[0][0]}"
    end = start
    has_post_norm = not isinstance(residual.post_norm, nn.Identity)
    if not isinstance(residual.pre_norm, nn.Identity):
        end = chart.after(end, f"{stem}_pre_norm", _kind(residual.pre_norm))
    branches = [chart.after(end, f"{key}_{name}", label) for name, label in sublayers]
    add = f"{stem}_add"
    if has_post_norm and residual.norm_inside:
        post_norm = chart.node(f"{stem}_post_norm", _kind(residual.post_norm))
        for branch in branches:
            chart.edge(branch, post_norm)
        branches = [post_norm]
    chart.node(add, "add", "((", "))")
    for branch in branches:
        chart.edge(branch, add, _times(residual.branch_scale))
    chart.edge(start, add, _times(residual.skip_scale))
    if has_post_norm and not residual.norm_inside:
        return chart.after(add, f"{stem}_post_norm", _kind(residual.post_norm))
    return add


def _times(scale: float) -> str:
    return "" if scale == 1.0 else f"times {scale:.3g}"


def _step_on_sphere(chart: Chart, key: str, start: str, name: str, label: str) -> str:
    branch = chart.after(start, f"{key}_{name}", label)
    step = chart.after(branch, f"{key}_{name}_step", "step towards it on the unit sphere")
    chart.edge(start, step)
    return step


# ---------------------------------------------------------------------- labels


def _embedding_label(base: BertBlocksModel) -> str:
    embedding = base.embedding
    lines = [f"token embedding {_shape(embedding.token)}"]
    if embedding.token_dropout is not None:
        lines.append(_kind(embedding.token_dropout))
    if embedding.token_type is not None:
        lines.append(f"token types {_shape(embedding.token_type)}")
    if isinstance(embedding.position, LearnedPosition):
        lines.append(f"learned positions {_shape(embedding.position.table)}")
    elif embedding.position is not None:
        lines.append(f"{_kind(embedding.position)}")
    if embedding.norm is not None:
        lines.append(_kind(embedding.norm))
    if embedding.projection is not None:
        lines.append(f"projection to {base.config.hidden_size}")
    return "<br/>".join(lines)


def _attention_label(attention: Attention) -> str:
    heads = f"{attention.num_heads} heads of {attention.head_dim}"
    if attention.num_kv_heads != attention.num_heads:
        heads += f", {attention.num_kv_heads} for keys and values"
    pattern = attention.pattern
    sees = "sees all" if pattern.half_window is None else f"sees {pattern.half_window} on either side"
    if pattern.num_global_tokens:
        sees += f" and {pattern.num_global_tokens} global"
    lines = ["Attention", heads, sees]
    if attention.query_norm is not None:
        lines.append("norm on queries and keys")
    if (kind := _kind(attention.position)) != "BlockPosition":
        lines.append(kind)
    return "<br/>".join(lines)


def _mlp_label(mlp: nn.Module) -> str:
    if isinstance(mlp, MixtureOfExperts):
        shared = "" if mlp.shared is None else ", one for all"
        count = f"{len(mlp.experts)} experts, {mlp.experts_per_token} per token{shared}"
        return "<br/>".join([count, _mlp_label(mlp.experts[0])])
    linears = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    sizes = [f"{linear.in_features} to {linear.out_features}" for linear in linears]
    activation = getattr(mlp, "activation", None)
    return "<br/>".join([_kind(mlp), *([_kind(activation)] if activation is not None else []), *sizes])


def _head_labels(model: BertBlocksPreTrainedModel, base: BertBlocksModel) -> list[tuple[str, str]]:
    """Returns the parts after the encoder, in the order in which they run."""
    labels = []
    if base.pooler is not None:
        labels.append(("pooler", "Pooler<br/>first token, dense, tanh"))
    elif isinstance(model, BertBlocksForSequenceClassification):
        labels.append(("pooling", f"pooling: {model.config.classifier_pooling}"))
    if model is base:
        return labels
    tied = model.get_output_embeddings() is not None and model.config.tie_word_embeddings
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            note = "<br/>tied to the token embedding" if name == "decoder" and tied else ""
            labels.append((name, f"{name}<br/>{module.in_features} to {module.out_features}{note}"))
        elif name == "head":
            parts = [_kind(part) for part in module.children() if not isinstance(part, nn.Dropout)]
            labels.append((name, "<br/>".join([name, *parts])))
    return labels


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _shape(embedding: nn.Embedding) -> str:
    return f"{embedding.num_embeddings} x {embedding.embedding_dim}"
