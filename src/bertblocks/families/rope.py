"""RoPE's parameters as transformers' configs hold them."""

from __future__ import annotations

from typing import Any

from bertblocks.checks import ConfigError


def read_rope(parameters: Any) -> tuple[float, dict[str, Any] | None]:
    """The theta and the scaling of one entry of `rope_parameters`."""
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise ConfigError(f"rope_parameters holds {parameters!r}; every kind of layer must have its rope_theta there.")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ConfigError(f"rope_parameters has partial_rotary_factor {share}; this family turns whole heads.")
    if parameters.get("rope_type", "default") == "default":
        return parameters["rope_theta"], None
    # "type" is the old name of rope_type, which transformers has filled in
    apart = ("rope_theta", "partial_rotary_factor", "type")
    return parameters["rope_theta"], {key: value for key, value in parameters.items() if key not in apart}


def write_rope(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    return {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
