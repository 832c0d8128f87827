"""Time, speed of the machine, peak memory and growth, as all benchmarks measure them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

#: Rounds that are measured even where they take longer than the time that was set aside.
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
        """Quartiles include the ends, so that a single number is its own spread.

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
    """How many times as fast, round by round: what slows the machine for a while slows both sides of a quotient.

    Example:
        >>> ratios([2.0, 4.0, 6.0], [1.0, 2.0, 2.0]).median
        2.0
    """
    return Spread.of([one / other for one, other in zip(slow, fast, strict=True)])


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every function in every round; each round starts with another one, so that none always has the same
    one before it. Warming up is the caller's."""
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
    """As many rounds as asked for, fewer if they would take longer than `seconds`, and up to five times as many within
    one second, since short rounds are the noisiest.

    Example:
        >>> [fitting_rounds(7, one_round, 60.0) for one_round in (40.0, 12.0, 1.0, 0.05, 0.001)]
        [3, 5, 7, 20, 35]
    """
    fitting = min(rounds, int(seconds / seconds_per_round))
    return max(min(rounds, FEWEST_ROUNDS), fitting, min(5 * rounds, int(1 / seconds_per_round)))


def sgemm_probe() -> Callable[[], object]:
    """A large fp32 matrix product by the faster of the two libraries that torch has for it: the rate at which this
    machine multiplies at best. On CPUs that MKL was not written for, oneDNN is the faster one."""
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
    """The slope of log cost against log size by least squares: 1 is linear, 2 quadratic.

    Example:
        >>> round(fitted_exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]), 6)
        2.0
    """
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs])
    return slope


def can_measure_memory() -> bool:
    """Linux alone lets a process forget its past peak."""
    return STATUS.exists()


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that the process held during a call beyond what it held before. For a fresh process: memory that
    earlier work has left to the allocator would be used again and not be seen."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
