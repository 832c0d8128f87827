"""A workload: one input, several contenders that compute the same output, and goals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import PROBE_FLOPS, Spread, fitting_rounds, interleaved, ratios, sgemm_probe

#: fp32 outputs may differ by this share of the reference's largest number.
TOLERANCE = 1e-4
#: The least mean cosine between rows of int8 outputs and of the reference.
LEAST_COSINE = 0.99
PROBE = "sgemm probe"


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    rounds: int
    #: There are fewer rounds if they would take longer than this.
    seconds: float
    threads: int
    #: Layers of every model; None for the workload's own number.
    layers: int | None
    #: The folder of exported graphs during the run.
    scratch: Path
    #: The folder of real texts, if there is one, and how many texts are embedded.
    data: Path | None = None
    texts: int = 1000


class Unavailable(RuntimeError):
    """Raised with the reason if a contender cannot run."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work. `prepare` builds what it needs and returns the function to time."""

    name: str
    prepare: Callable[[], Callable[[], Any]]
    #: False for int8, whose outputs are only close.
    exact: bool = True


@dataclass(frozen=True)
class Goal:
    """The least speed-up, or memory saving, of `contender` over `against`, or its share of the "sgemm" rate."""

    contender: str
    against: str
    at_least: float
    kind: str = "speed"


@dataclass(frozen=True)
class Workload:
    """The first contender is the reference. All others are compared with it before anything is timed."""

    title: str
    contenders: Sequence[Contender]
    #: Selects what is compared: a matrix with a row for each token, text or gradient.
    compared: Callable[[Any], Tensor]
    goals: Sequence[Goal] = ()
    #: FLOPs of real tokens, computed on demand because that needs a model. None if rates make no sense here.
    flops: Callable[[], float] | None = None
    #: Contenders whose peak memory is measured, each in a new process.
    memory: Sequence[str] = ()
    #: Facts about the input that a reader needs, such as its padding.
    facts: dict[str, Any] = field(default_factory=dict)


def agreement(result: Tensor, reference: Tensor, exact: bool) -> tuple[dict[str, float], bool]:
    """How close an output is to the reference, and whether that is close enough.

    Example:
        >>> agreement(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.5]]), exact=True)
        ({'difference': 0.2}, False)
    """
    if exact:
        difference = ((result - reference).abs().max() / reference.abs().max()).item()
        return {"difference": round(difference, 9)}, difference <= TOLERANCE  # false for NaN too
    cosines = F.cosine_similarity(result, reference, dim=-1)
    found = {"cosine_mean": cosines.mean().item(), "cosine_min": cosines.min().item()}
    return found, found["cosine_mean"] >= LEAST_COSINE


def run(workload: Workload, settings: Settings) -> dict[str, Any]:
    """Prepares all contenders, compares their outputs as a warm-up, and times those that agree, with the probe.

    Returns plain data.
    """
    functions: dict[str, Callable[[], Any]] = {PROBE: sgemm_probe()}
    results: dict[str, dict[str, Any]] = {}
    functions[PROBE]()
    reference, one_round = None, 0.0
    for contender in workload.contenders:
        try:
            function = contender.prepare()
        except Unavailable as reason:
            results[contender.name] = {"missing": str(reason)}
            continue
        start = time.perf_counter()
        compared = workload.compared(function())
        one_round += time.perf_counter() - start
        reference = compared if reference is None else reference
        near, agrees = agreement(compared, reference, contender.exact)
        results[contender.name] = near
        if agrees:
            functions[contender.name] = function
        else:
            results[contender.name]["missing"] = "its results differ from the reference's: not timed"
    times = interleaved(functions, fitting_rounds(settings.rounds, one_round, settings.seconds))
    return _report(workload, results, times)


def _report(workload: Workload, results: dict[str, dict[str, Any]], times: dict[str, list[float]]) -> dict[str, Any]:
    probe = times.pop(PROBE)
    baseline = workload.contenders[0].name
    flops = None if workload.flops is None else workload.flops()
    for name, seconds in times.items():
        results[name] |= {"seconds": asdict(Spread.of(seconds)), "speed": asdict(ratios(times[baseline], seconds))}
        if flops is not None:
            rate = Spread.of([flops / second for second in seconds])
            results[name]["gflops"] = rate.median / 1e9
            share = [flops / own / (PROBE_FLOPS / other) for own, other in zip(seconds, probe, strict=True)]
            results[name]["of_sgemm"] = asdict(Spread.of(share))
    return {
        "title": workload.title,
        "facts": workload.facts,
        "baseline": baseline,
        "rounds": len(probe),
        "sgemm_gflops": PROBE_FLOPS / Spread.of(probe).median / 1e9,
        "contenders": results,
        "goals": [asdict(goal) | {"reached": _reached(goal, results, times)} for goal in workload.goals],
    }


def _reached(goal: Goal, results: dict[str, dict[str, Any]], times: dict[str, list[float]]) -> dict[str, float] | None:
    """The result for a speed goal. None if a side is missing, and for memory, which is measured later."""
    if goal.kind == "memory" or goal.contender not in times or goal.against not in {*times, PROBE}:
        return None
    if goal.kind == "sgemm":
        return results[goal.contender]["of_sgemm"]
    return asdict(ratios(times[goal.against], times[goal.contender]))
