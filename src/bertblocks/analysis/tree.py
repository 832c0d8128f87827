"""The modules of a model as a tree in which equal layers are merged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from bertblocks.nn.attention import Attention
from bertblocks.nn.position import BlockPosition


@dataclass(frozen=True)
class Node:
    """One module, or several equal modules of a list."""

    name: str
    kind: str
    #: The module's `extra_repr`.
    details: str
    #: The parameters of one such module.
    parameters: int
    children: tuple[Node, ...] = ()
    #: The indexes, in their list, of the modules that this node stands for.
    layers: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The node in one line, in the style of torch."""
        name = f"({self.name}): " if self.name else ""
        count = f"{len(self.layers)} x " if len(self.layers) > 1 else ""
        size = ""
        if self.children:
            size = f"  {self.parameters:,} parameters" + (" each" if len(self.layers) > 1 else "")
        return f"{name}{count}{self.kind}({self.details}){size}"


def module_tree(model: nn.Module) -> Node:
    """Returns the tree of a model, without modules that do nothing.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)])
        >>> [child.name for child in module_tree(model).children]
        ['0-1', '2']
    """
    return _node("", model) or Node("", type(model).__name__, "", 0)


def _node(name: str, module: nn.Module) -> Node | None:
    """Returns None for a module that does nothing or whose parts all do nothing."""
    if _is_idle(module):
        return None
    children = [node for key, child in module.named_children() if (node := _node(key, child)) is not None]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if not children and not parameters and any(True for _ in module.children()):
        return None
    if isinstance(module, nn.ModuleList):
        children = _group(children, _attention_kinds(module))
    return Node(name, type(module).__name__, module.extra_repr(), parameters, tuple(children))


def _is_idle(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Identity)
        or (isinstance(module, nn.Dropout) and module.p == 0)
        or type(module) is BlockPosition
    )


def _attention_kinds(layers: nn.ModuleList) -> list[str]:
    """Returns local or global for each layer, or empty strings if all layers are the same."""
    attentions = [getattr(layer, "attention", None) for layer in layers]
    kinds = [
        ("global" if attention.pattern.half_window is None else "local") if isinstance(attention, Attention) else ""
        for attention in attentions
    ]
    return kinds if len(set(kinds)) > 1 else [""] * len(kinds)


def _group(nodes: list[Node], notes: list[str]) -> list[Node]:
    """Merges nodes that differ only in their index, in order of first appearance."""
    groups: dict[Node, list[int]] = {}
    for node in nodes:
        index = int(node.name)
        details = ", ".join(filter(None, (notes[index], node.details)))
        groups.setdefault(replace(node, name="", details=details), []).append(index)
    return [replace(node, name=write_indexes(layers), layers=tuple(layers)) for node, layers in groups.items()]


def write_indexes(indexes: Sequence[int]) -> str:
    """Writes ascending numbers as runs, shortened where many runs are regular.

    Example:
        >>> write_indexes([0, 1, 2, 5]), write_indexes(range(3, 22, 3))
        ('0-2, 5', '3, 6, 9, ..., 21')
    """
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    steps = {following[0] - run[0] for run, following in itertools.pairwise(runs)}
    sizes = {last - first for first, last in runs}
    if len(runs) > 5 and len(steps) == len(sizes) == 1:
        texts[3:-1] = ["..."]
    return ", ".join(texts)
