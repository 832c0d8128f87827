"""Profiles a few training steps: a trace for Chrome or Perfetto, and a table of operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import profiler

from bertblocks.core.log import logger
from bertblocks.core.storage import atomic_entries

#: Steps before the profiled ones, in which caches fill and kernels are chosen.
WARMUP = 2
#: Operations in the table.
NUM_ROWS = 50


@contextlib.contextmanager
def profile_steps(folder: Path, steps: int | None) -> Iterator[Callable[[], None]]:
    """Profiles `steps` steps after the first few and writes `trace.json` and `table.txt`.

    The caller calls the function after every step. Without `steps`, nothing is profiled.
    """
    if steps is None:
        yield lambda: None
        return

    def write(run: profiler.profile) -> None:
        if run.step_num <= WARMUP:
            logger.warning(f"run.profile: nothing was profiled, because the run took only {run.step_num} steps.")
            return
        averages = run.key_averages()
        on_device = any(event.self_device_time_total for event in averages)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        with atomic_entries(folder) as scratch:
            run.export_chrome_trace(str(scratch / "trace.json"))
            (scratch / "table.txt").write_text(averages.table(sort_by=order, row_limit=NUM_ROWS), encoding="utf-8")

    schedule = profiler.schedule(wait=0, warmup=WARMUP, active=steps, repeat=1)
    with profiler.profile(schedule=schedule, on_trace_ready=write, profile_memory=True) as run:
        yield run.step
