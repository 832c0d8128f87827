"""Shell completion of names and settings. It runs at every press of Tab, so nothing here imports torch."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bertblocks


def complete_preset(incomplete: str) -> list[str]:
    """Presets; the shell adds files if none matches."""
    folder = Path(bertblocks.__file__).parent / "config" / "presets"
    return sorted(file.stem for file in folder.glob(f"{glob.escape(incomplete)}*.json"))


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes, and the keys that override one."""
    from bertblocks.training.recipe import recipe_names

    return [*(name for name in recipe_names() if name.startswith(incomplete)), *complete_override(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    from bertblocks.training.recipe import Recipe

    return [key for key in _keys(Recipe) if key.startswith(incomplete)]


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a section and of the sections in it, as KEY.SUB=."""
    for name, field in section.model_fields.items():
        default = field.default
        if hasattr(type(default), "model_fields"):
            yield from _keys(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}="


def complete_setting(ctx: Any, incomplete: str) -> list[str]:
    """Settings of the fine-tuning task that has been typed."""
    from bertblocks.tasks.settings import SETTINGS

    schema = SETTINGS.get(ctx.params.get("task"))
    return [] if schema is None else [f"{key}=" for key in schema.model_fields if key.startswith(incomplete)]


def complete_distill_setting(ctx: Any, incomplete: str) -> list[str]:
    """Settings of the method of distillation that has been typed."""
    from bertblocks.training.distillation.settings import SETTINGS

    schema = SETTINGS[ctx.params.get("method") or "embeddings"]
    return [f"{key}=" for key in schema.model_fields if key.startswith(incomplete)]
