"""The parameters of RoPE in configs of transformers."""

from __future__ import annotations

from typing import Any

from bertblocks.config import BertBlocksConfig
from bertblocks.config.aliases import LAYER_TYPE_ALIASES, LAYER_TYPE_NAMES
from bertblocks.config.validation import ConfigError


def read_rope(parameters: Any) -> tuple[float, dict[str, Any] | None]:
    """The theta and the scaling of one entry of `rope_parameters`."""
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise ConfigError(f"rope_parameters holds {parameters!r}; it must give a rope_theta for every kind of layer.")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ConfigError(f"rope_parameters has partial_rotary_factor {share}; this family rotates whole heads.")
    if parameters.get("rope_type", "default") == "default":
        return parameters["rope_theta"], None
    # transformers has copied "type", the old name, to rope_type
    excluded = ("rope_theta", "partial_rotary_factor", "type")
    return parameters["rope_theta"], {key: value for key, value in parameters.items() if key not in excluded}


def write_rope(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_theta": theta, **(scaling or {"rope_type": "default"})}


def read_layers(theirs: Any) -> dict[str, Any]:
    """Our keys from `layer_types` and from `rope_parameters` by kind of layer, as in ModernBERT and UltraBERT."""
    layer_types = [LAYER_TYPE_ALIASES.get(kind, kind) for kind in theirs.layer_types]
    theta, scaling = _read_kind(theirs, "full_attention", "sliding_attention")
    local_theta, local_scaling = _read_kind(theirs, "sliding_attention", "full_attention")
    return {
        "layer_types": layer_types,
        "local_attention": "local" in layer_types,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
        "local_rope_scaling": local_scaling,
    }


def _read_kind(theirs: Any, kind: str, other: str) -> tuple[float, dict[str, Any] | None]:
    """RoPE of one kind of layer. The config may omit a kind that no layer has."""
    is_named = kind in theirs.layer_types or kind in theirs.rope_parameters
    return read_rope(theirs.rope_parameters.get(kind if is_named else other))


def write_layers(ours: BertBlocksConfig) -> dict[str, Any]:
    return {
        "layer_types": [LAYER_TYPE_NAMES[kind] for kind in ours.layer_types],
        "rope_parameters": {
            "full_attention": write_rope(ours.rope_theta, ours.rope_scaling),
            "sliding_attention": write_rope(ours.local_rope_theta, ours.local_rope_scaling),
        },
    }
