"""The first line of a page: what was done, how well, for how long and when."""

from __future__ import annotations

from collections.abc import Mapping

from bertblocks.core.console import write_seconds
from bertblocks.reports.page import write_value
from bertblocks.reports.runs import Run


def write_verdict(run: Run, subject: str, baselines: Mapping[str, float], note: str = "") -> str:
    """One line: the subject, the best score against the start and the baselines, state, duration and date."""
    parts = [subject]
    if run.score is not None:
        interval = f" (95% {' to '.join(map(write_value, run.interval))})" if run.interval else ""
        others = dict(baselines)
        if run.start_score is not None and "untouched" not in others:
            others = {"start": run.start_score, **others}
        compared = ", ".join(f"{name} {write_value(value)}" for name, value in others.items())
        best = "" if run.state == "finished" else "best so far: "
        metric = run.metric.replace("held_out_", "held-out ")
        against = f" against {compared}" if compared else ""
        parts.append(f"{best}{metric} {write_value(run.score)}{interval}{against}{note}")
    parts.append(run.state)
    if run.seconds is not None:
        parts.append(f"{write_seconds(run.seconds)} in steps")
    parts.append(str(run.facts.get("started", ""))[:10])
    return " · ".join(part for part in parts if part)
