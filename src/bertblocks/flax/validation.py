"""What the JAX side refuses: configs that name blocks which it has not, and ids that are no ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertblocks.config.validation import ConfigError
from bertblocks.flax.nn.activation import ACTIVATIONS
from bertblocks.flax.nn.mlp import MLPS
from bertblocks.flax.nn.norm import NORMS
from bertblocks.flax.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: What each key may name here. Blocks and backends that a user registers are torch's, and so is "xielu".
SUPPORTED: dict[str, list[str]] = {
    "norm_fn": list(NORMS),
    "mlp_type": list(MLPS),
    "hidden_act": list(ACTIVATIONS),
    "mlm_head_act": list(ACTIVATIONS),
    "classifier_head_act": list(ACTIVATIONS),
    "embd_pos_enc_kind": [*EMBEDDING_POSITIONS, "none"],
    "block_pos_enc_kind": [*BLOCK_POSITIONS, "none"],
    # they all give the same result, which is computed in JAX's own way here
    "attention_backend": ["auto", "cpu", "flash", "sdpa", "eager"],
}


def check_supported(config: BertBlocksConfig) -> None:
    """Refuses, by name, a config that needs a block which exists in torch only."""
    for layer in (config, *(config.for_layer(index) for index in config.layer_overrides or {})):
        for key, names in SUPPORTED.items():
            value = getattr(layer, key)
            if value not in names:
                raise ConfigError(
                    f"{key} is {value!r}, which exists in torch only; bertblocks.flax has {', '.join(names)}."
                )


def read_ids(name: str, ids: Any) -> np.ndarray:
    """Whole numbers as int32. Floats will do where they are whole."""
    values = np.asarray(ids)
    if not np.issubdtype(values.dtype, np.number):
        raise TypeError(f"{name} holds {values.dtype} values; it must hold whole numbers.")
    if not np.issubdtype(values.dtype, np.integer):
        with np.errstate(invalid="ignore"):
            broken = values[~(values == np.round(values)) | ~np.isfinite(values)]
        if broken.size:
            raise ValueError(f"{name} holds {broken[0]}; it must hold whole numbers.")
    return values.astype(np.int64)


def check_range(name: str, ids: np.ndarray, limit: int, limit_key: str) -> np.ndarray:
    """The ids as int32, if they are rows of a table that has `limit` of them."""
    wrong = ids[(ids < 0) | (ids >= limit)]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong[0]}; it must be at least 0 and less than {limit_key} = {limit}.")
    return ids.astype(np.int32)
