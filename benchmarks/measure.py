"""How all benchmarks measure time, the machine's speed, peak memory and growth."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

#: The least number of rounds, even if they exceed the time limit.
FEWEST_ROUNDS = 3
PROBE_SIZE = 2048
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Quartiles include the ends, so a single number is its own spread.

        Example:
            >>> Spread.of([4.0, 1.0, 2.0, 3.0, 9.0])
            Spread(median=3.0, low=2.0, high=4.0)
            >>> Spread.of([2.0])
            Spread(median=2.0, low=2.0, high=2.0)
        """
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


def ratios(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """The speed-up in each round: whatever slows the machine for a while slows both sides of a ratio.

    Example:
        >>> ratios([2.0, 4.0, 6.0], [1.0, 2.0, 2.0]).median
        2.0
    """
    return Spread.of([one / other for one, other in zip(slow, fast, strict=True)])


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every function in every round.

    Each round starts with another function, so that none always follows the same one. The caller warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
    return times


def fitting_rounds(rounds: int, seconds_per_round: float, seconds: float) -> int:
    """`rounds`, fewer if they would take longer than `seconds`, or up to five times as many within one second.

    Short rounds are the noisiest.

    Example:
        >>> [fitting_rounds(7, one_round, 60.0) for one_round in (40.0, 12.0, 1.0, 0.05, 0.001)]
        [3, 5, 7, 20, 35]
    """
    fitting = min(rounds, int(seconds / seconds_per_round))
    return max(min(rounds, FEWEST_ROUNDS), fitting, min(5 * rounds, int(1 / seconds_per_round)))


def sgemm_probe() -> Callable[[], object]:
    """A large fp32 matrix product by MKL or oneDNN, whichever is faster: the best rate of this machine."""
    left, right = torch.rand(PROBE_SIZE, PROBE_SIZE), torch.rand(PROBE_SIZE, PROBE_SIZE)
    target = torch.empty(PROBE_SIZE, PROBE_SIZE)
    candidates: dict[str, Callable[[], object]] = {"mm": lambda: torch.mm(left, right, out=target)}
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        candidates["oneDNN"] = lambda: linear(left, right, None, "none", [], "")
    times = interleaved(candidates, FEWEST_ROUNDS)
    return candidates[min(times, key=lambda name: min(times[name]))]


PROBE_FLOPS = 2 * PROBE_SIZE**3


def fitted_exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The least-squares slope of log cost over log size: 1 is linear, 2 is quadratic.

    Example:
        >>> round(fitted_exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]), 6)
        2.0
    """
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return slope


def can_measure_memory() -> bool:
    """Only Linux lets a process reset its peak."""
    return STATUS.exists()


def peak_bytes(function: Callable[[], object]) -> int:
    """The peak memory that a call adds.

    Measure in a new process: memory that the allocator kept from earlier work would be reused and not counted.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
