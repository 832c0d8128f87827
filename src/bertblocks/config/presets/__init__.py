"""Known architectures. Each JSON file lists the keys that differ from BERT-base or from another preset."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from bertblocks.core.registry import nearest


def preset_names() -> list[str]:
    """Return the names that `BertBlocksConfig.from_preset` accepts."""
    folder = resources.files("bertblocks.config.presets")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset's description and keys."""
    if name not in preset_names():
        raise ValueError(
            f"{name!r} is not a preset{nearest(name, preset_names())}; choose one of {', '.join(preset_names())}."
        )
    preset = json.loads((resources.files("bertblocks.config.presets") / f"{name}.json").read_text(encoding="utf-8"))
    if "base" in preset:
        preset["config"] = {**read_preset(preset["base"])["config"], **preset["config"]}
    return preset
