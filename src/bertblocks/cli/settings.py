"""Settings on the command line: KEY=VALUE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def read_settings(assignments: Sequence[str], task: str | None) -> dict[str, Any]:
    """Parses values as YAML; settings of a task that name columns stay text.

    Example:
        >>> read_settings(["epochs=3", "label=2", "dimensions=[64, 128]"], "embed")
        {'epochs': 3, 'label': '2', 'dimensions': [64, 128]}
    """
    from bertblocks.core.settings import parse_value
    from bertblocks.tasks.settings import SETTINGS

    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"{assignment!r} is not a setting; write KEY=VALUE.")
        is_text = task in SETTINGS and SETTINGS[task].takes_text(key)
        values[key] = text if is_text else parse_value(text, assignment)
    return values
