"""Training by two libraries in turns: rates, their ratio per round, and the goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measure import Spread, ratios

OURS = "BertBlocks"


def race(title: str, unit: str, theirs: tuple[str, Sequence[float]], ours: Sequence[float], goal: float) -> Any:
    """The result of a race: what each side does in a second, and how many times as fast BertBlocks is.

    Example:
        >>> race("Counting", "numbers/s", ("theirs", [2.0, 4.0]), [4.0, 8.0], goal=1.5)["ratio"]["median"]
        2.0
    """
    rates = {theirs[0]: theirs[1], OURS: ours}
    return {
        "title": title,
        "unit": unit,
        "rates": {name: asdict(Spread.of(found)) for name, found in rates.items()},
        "ratio": asdict(ratios(ours, theirs[1])),
        "goal": goal,
    }
