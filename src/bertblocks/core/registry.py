"""Registries of the building blocks that a config can name and users can extend."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

Block = TypeVar("Block")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint such as `` (did you mean 'rms'?)``, or an empty string if nothing is close."""
    matches = difflib.get_close_matches(str(name)[:100], list(known), n=1, cutoff=cutoff)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


class Registry(Generic[Block]):
    """The building blocks that one config key can name."""

    def __init__(self, key: str, reserved: tuple[str, ...] = ()) -> None:
        self.key = key
        self.reserved = reserved
        self._blocks: dict[Any, Block] = {}

    def register(self, name: str | bool) -> Callable[[Block], Block]:
        """Decorator that registers a block under a name that is not taken, or under True if its key is a switch."""

        def add(block: Block) -> Block:
            if name in self._blocks or name in self.reserved:
                owner = self._blocks.get(name, "BertBlocks")
                raise ValueError(f"{self.key}: the name {name!r} is taken by {owner!r}; choose another one.")
            self._blocks[name] = block
            return block

        return add

    def describe_unknown(self, name: Any) -> str:
        """What is wrong with a name that is not registered, to follow the key in a message."""
        return f"is {name!r}{nearest(name, self)}; it must be one of {', '.join(self)}"

    def names(self) -> list[str]:
        return list(self._blocks)

    def choices(self) -> list[str]:
        """Return the names and the reserved values that a config accepts."""
        return [*self._blocks, *self.reserved]

    def blocks(self) -> list[Block]:
        return list(self._blocks.values())

    def __contains__(self, name: Any) -> bool:
        return name in self._blocks

    def __getitem__(self, name: str) -> Block:
        if name not in self._blocks:
            raise KeyError(f"{self.key} is {name!r}; it must be one of {', '.join(self.names())}{nearest(name, self)}.")
        return self._blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)
