"""Config keys that a building block declares in its own file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bertblocks.core.registry import nearest

#: A key, whether its value is a mistake, and the reason, as the end of a sentence.
Problem = tuple[str, Any, str]


@dataclass(frozen=True)
class Key:
    """A config key of one or several blocks. It exists in a config that chooses one of them.

    A block lists its keys in the class attribute `keys`, by name. Blocks that share a key share one `Key`.

    Example:
        >>> Key(int, 32, "Number of channel groups.", least=1, most=2**20).problem(0)
        'it must be at least 1'
    """

    #: The annotated type, such as `int` or `float | None`.
    type: Any
    default: Any
    #: One or two sentences for docs/config.md.
    doc: str
    #: The smallest and the largest value, both included. Sizes need a largest one against typos.
    least: float | None = None
    most: float | None = None
    #: An excluded lower limit; then infinity is not allowed either.
    above: float | None = None
    choices: tuple[str, ...] = ()
    #: Whether `layer_overrides` can set it for a single layer.
    per_layer: bool = False
    #: "local" or "global" if the key affects only such layers.
    layer_type: str | None = None
    #: True if the key affects how a model runs or trains, but not what it computes.
    runtime: bool = False
    #: Computes the default from other keys of the config; `default` is None then.
    implied: Callable[[Any], Any] | None = None
    #: Replaces other spellings of a value.
    read: Callable[[Any], Any] | None = None
    #: Returns what is wrong with a value, for rules that the other fields cannot express.
    check: Callable[[Any], str | None] | None = None

    def default_for(self, config: Any) -> Any:
        return self.default if self.implied is None else self.implied(config)

    def problem(self, value: Any) -> str | None:
        """Return why a value of the right type is not allowed, as the end of a sentence, or None if it is."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"it must be one of {', '.join(self.choices)}{nearest(value, self.choices)}"
        if self.above is not None and not self.above < value < float("inf"):
            return f"it must be greater than {self.above:g}" + self._upper()
        if self.least is not None and not value >= self.least:
            return "it must not be negative" if self.least == 0 else f"it must be at least {self.least:,}"
        if self.most is not None and not value <= self.most:
            return (
                f"it must be greater than {self.above:g}{self._upper()}"
                if self.above is not None
                else (f"it must be at most {self.most:,}")
            )
        return None if self.check is None else self.check(value)

    def _upper(self) -> str:
        return "" if self.most is None else f" and at most {self.most:g}"


def keys_of(block: Any) -> dict[str, Key]:
    """Return the config keys that a block declares."""
    keys = getattr(block, "keys", None)
    return keys if isinstance(keys, dict) else {}
