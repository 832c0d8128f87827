"""Known architectures, one small JSON file each: the keys in which it differs from BERT-base or from another preset."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from bertblocks.core.registry import nearest


def preset_names() -> list[str]:
    """The architectures that `BertBlocksConfig.from_preset` knows."""
    folder = resources.files("bertblocks.config.presets")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_preset(name: str) -> dict[str, Any]:
    """A preset's file: its description and its keys."""
    if name not in preset_names():
        raise ValueError(
            f"{name!r} is no preset{nearest(name, preset_names())}; there are {', '.join(preset_names())}."
        )
    preset = json.loads((resources.files("bertblocks.config.presets") / f"{name}.json").read_text(encoding="utf-8"))
    if "base" in preset:
        preset["config"] = {**read_preset(preset["base"])["config"], **preset["config"]}
    return preset
