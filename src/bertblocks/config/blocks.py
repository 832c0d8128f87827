"""The config keys that building blocks declare, collected from the registries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import bertblocks.nn.disentangled
import bertblocks.nn.rope  # noqa: F401 - these two register positions
from bertblocks.core.keys import Key, keys_of
from bertblocks.core.registry import Registry
from bertblocks.nn.attention import ATTENTION_FUNCTIONS, QK_NORMS
from bertblocks.nn.block import RESIDUALS
from bertblocks.nn.convolution import SPAN_CONVOLUTION
from bertblocks.nn.embedding import TIMESTEP_EMBEDDING
from bertblocks.nn.gate import GATES
from bertblocks.nn.head import QA_HEADS
from bertblocks.nn.mlp import MLPS
from bertblocks.nn.ngpt import NGPT
from bertblocks.nn.norm import NORMS
from bertblocks.nn.parametrization import PARAMETRIZATIONS
from bertblocks.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS
from bertblocks.nn.sharing import SHARINGS
from bertblocks.nn.shortcut import INPUT_MIXING, VALUE_EMBEDDING
from bertblocks.nn.sink import ATTENTION_SINKS

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: The registries whose blocks can have keys, by the key that chooses a block.
SLOTS: dict[str, Registry[Any]] = {
    registry.key: registry
    for registry in (
        SHARINGS,
        NORMS,
        RESIDUALS,
        INPUT_MIXING,
        MLPS,
        EMBEDDING_POSITIONS,
        BLOCK_POSITIONS,
        ATTENTION_FUNCTIONS,
        ATTENTION_SINKS,
        GATES,
        SPAN_CONVOLUTION,
        VALUE_EMBEDDING,
        QK_NORMS,
        QA_HEADS,
        NGPT,
        TIMESTEP_EMBEDDING,
        PARAMETRIZATIONS,
    )
}


def block_keys() -> Mapping[str, Key]:
    """Return the keys of all registered blocks."""
    return _keys_of_all(*(block for registry in SLOTS.values() for block in registry.blocks()))


@lru_cache(maxsize=1)
def _keys_of_all(*blocks: Any) -> Mapping[str, Key]:
    """Collect the keys once: a config looks them up for every attribute."""
    return MappingProxyType({name: key for block in blocks for name, key in keys_of(block).items()})


def owners(name: str) -> list[tuple[str, Any]]:
    """Return the blocks that declare a key, each as the key that chooses it and its name."""
    return [(slot, block) for slot, registry in SLOTS.items() for block in registry if name in keys_of(registry[block])]


def chosen_blocks(config: BertBlocksConfig) -> Iterator[tuple[str, Any]]:
    """Yield the slot and the class of each block that one layer's config chooses; `layer_overrides` do not count."""
    for slot, registry in SLOTS.items():
        name = getattr(config, slot)
        if name in registry:
            yield slot, registry[name]


def chosen_keys(values: Mapping[str, Any], overrides: Any) -> dict[str, Key]:
    """Return the keys of the blocks that `values` or the overrides of any layer choose, in order of declaration."""
    layers = overrides.values() if isinstance(overrides, dict) else ()
    keys: dict[str, Key] = {}
    for slot, registry in SLOTS.items():
        names = [values.get(slot), *(layer.get(slot) for layer in layers if isinstance(layer, dict))]
        for name in registry:
            if name in names:
                keys.update(keys_of(registry[name]))
    return keys


def implied_choice(slot: str, choices: Mapping[str, Any]) -> Any:
    """Return the block of a slot whose default depends on another slot."""
    return {"mlp_type": "glu" if choices.get("ngpt") else "mlp"}[slot]


def why_unused(name: str, values: Mapping[str, Any]) -> str:
    """Say which block a key belongs to, as the end of a sentence."""
    slots = owners(name)
    blocks = " or ".join(f"{slot} {write_name(block)}" for slot, block in slots)
    actual = " and ".join(
        f"{slot} is {write_name(values.get(slot))}" for slot in dict.fromkeys(slot for slot, _ in slots)
    )
    return f"it belongs to {blocks}, but {actual}"


def write_name(name: Any) -> str:
    """Write the name of a block, or the value of a switch as in JSON."""
    return str(name).lower() if isinstance(name, bool) else repr(name)
