"""Settings on the command line: KEY=VALUE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def read_settings(assignments: Sequence[str], task: str | None) -> dict[str, Any]:
    """Parses values as YAML; settings of a task that name columns stay text.

    Example:
        >>> read_settings(["epochs=3", "label=2", "dimensions=[64, 128]"], "embed")
        {'epochs': 3, 'label': '2', 'dimensions': [64, 128]}
    """
    from bertblocks.tasks.settings import SETTINGS

    return parse_settings(assignments, SETTINGS[task].takes_text if task in SETTINGS else lambda key: False)


def parse_settings(assignments: Sequence[str], takes_text: Callable[[str], bool]) -> dict[str, Any]:
    """Parses values as YAML, except those of keys that take any text.

    Example:
        >>> parse_settings(["epochs=3", "text=2"], lambda key: key == "text")
        {'epochs': 3, 'text': '2'}
    """
    from bertblocks.core.settings import parse_value

    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"{assignment!r} is not a setting; write KEY=VALUE.")
        values[key] = text if takes_text(key) else parse_value(text, assignment)
    return values
