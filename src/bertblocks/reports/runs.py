"""The files of a run, and what reports and tables read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from bertblocks.core.environment import describe_command, describe_machine, describe_versions
from bertblocks.core.messages import InputError
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.storage import is_locked, read_json, read_json_lines, write_json
from bertblocks.reports.page import flatten

#: What a run records about itself: how it was started, on which machine, and from which data.
FACTS, METRICS, PREDICTIONS = "run.json", "metrics.jsonl", "predictions.jsonl"
#: By kind of run: the file with its settings, and the file that completes it.
KINDS = {
    "finetune": ("finetune.json", "results.json"),
    "distill": ("distill.json", "results.json"),
    "pretrain": ("recipe.json", "result.json"),
    "evaluate": ("evaluation.json", "evaluation.json"),
}
#: Values of a line in metrics.jsonl that are not scores.
STEP_KEYS = {
    *("step", "tokens", "seconds", "epoch", "learning_rate", "tokens_per_second", "memory", "packing"),
    *("data_wait", "data_wait_process", "slowdown", "slowdown_process", "skipped_steps"),
}


@dataclass(frozen=True)
class Run:
    """A run, finished or not. Files that it has not written yet are empty here."""

    folder: Path
    kind: str
    #: finished, running, or stopped: the same command continues it.
    state: str
    settings: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    #: The runs of the other seeds, if this one is the summary of several.
    seeds: tuple[Run, ...] = ()

    @property
    def name(self) -> str:
        return self.facts.get("name") or self.folder.name

    @property
    def task(self) -> str:
        return self.settings.get("task", self.kind)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of evaluations, from step 0."""
        return [line for line in self.lines if "learning_rate" not in line]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of training steps."""
        return [line for line in self.lines if "learning_rate" in line]

    @property
    def metric(self) -> str:
        """The score that selects the best checkpoint."""
        if self.kind == "pretrain":
            return "held_out_loss"
        recorded = self.results.get("metric")
        return recorded or next((key for line in self.evaluations for key in line if key not in STEP_KEYS), "")

    @property
    def lower_is_better(self) -> bool:
        return "loss" in self.metric or "perplexity" in self.metric

    @property
    def score(self) -> float | None:
        """The score of the result or, of a run that goes on, the best so far."""
        scores = self.results.get("scores") or self.results.get("metrics") or {}
        if self.metric in scores:
            return scores[self.metric]
        found = [line[self.metric] for line in self.evaluations if self.metric in line]
        return None if not found else min(found) if self.lower_is_better else max(found)

    @property
    def start_score(self) -> float | None:
        """The score of the untrained model."""
        return next((line[self.metric] for line in self.evaluations if line["step"] == 0 and self.metric in line), None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the score: over seeds, or over the examples of the evaluation."""
        half = self.results.get("intervals", {}).get(self.metric)
        if half is not None and self.score is not None:
            return self.score - half, self.score + half
        low, high = self.results.get("confidence") or (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def speed(self) -> float | None:
        """Tokens per second in training steps."""
        last = next((line for line in reversed(self.steps) if "seconds" in line), None)
        if last is None:
            return next((seed.speed for seed in self.seeds), None)
        return last["tokens"] / max(last["seconds"], 1e-9)

    @property
    def last_step(self) -> int:
        """The last step that was recorded."""
        own = max((line["step"] for line in self.lines), default=0)
        return max([own, *(seed.last_step for seed in self.seeds)])

    @property
    def seconds(self) -> float | None:
        """Seconds in training steps."""
        own = next((line["seconds"] for line in reversed(self.steps) if "seconds" in line), None)
        return own if own is not None or not self.seeds else sum(seed.seconds or 0 for seed in self.seeds)

    def read_predictions(self) -> list[dict[str, Any]]:
        """The predictions of the returned model on the evaluation examples."""
        return read_json_lines(self.folder / PREDICTIONS)


def is_run(folder: Path) -> bool:
    return any((folder / settings).is_file() for settings, _ in KINDS.values())


def read_run(folder: Path) -> Run:
    """Reads the files of a run. A folder without one is an error."""
    kind = next((kind for kind, (settings, _) in KINDS.items() if (folder / settings).is_file()), None)
    if kind is None and folder.name.startswith("seed-") and is_run(folder.parent):
        whole = read_run(folder.parent)
        return _read_seed(folder, whole.state, whole.settings)
    if kind is None:
        names = ", ".join(settings for settings, _ in KINDS.values())
        raise InputError(f"{folder} does not hold a run: it has none of the files {names}.")
    settings_file, results_file = KINDS[kind]
    results = read_json(folder / results_file) if (folder / results_file).is_file() else {}
    facts = read_json(folder / FACTS) if (folder / FACTS).is_file() else {}
    children = sorted(path for path in folder.glob("seed-*") if (path / METRICS).is_file())
    settings = read_json(folder / settings_file)
    state = "finished" if results else "running" if is_locked(folder) else "stopped"
    seeds = tuple(_read_seed(path, state, settings) for path in children)
    return Run(folder, kind, state, settings, results, facts, read_metrics(folder / METRICS), seeds)


def _read_seed(folder: Path, state: str, settings: dict[str, Any]) -> Run:
    """The run of one seed, whose settings are in the folder above."""
    results = read_json(folder / "results.json") if (folder / "results.json").is_file() else {}
    facts = {**(read_json(folder / FACTS) if (folder / FACTS).is_file() else {}), "name": folder.name}
    own = {**settings, "seed": int(folder.name.removeprefix("seed-"))}
    return Run(
        folder, "finetune", "finished" if results else state, own, results, facts, read_metrics(folder / METRICS)
    )


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs in folders and their subfolders, sorted by path. A folder that does not exist is an error."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give folders that hold runs.")
        found += _walk(folder)
    return [read_run(path) for path in dict.fromkeys(found)]


def _walk(folder: Path) -> list[Path]:
    """Folders of runs. A run contains no other runs, apart from its seeds."""
    if is_run(folder):
        return [folder]
    return [run for path in sorted(folder.iterdir()) if path.is_dir() and path.name[:1] != "." for run in _walk(path)]


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with the value of each run: what it was given, or else what it chose.

    Files and folders of a run differ by nature, so they do not count.
    """
    values = []
    for run in runs:
        chosen = {key: run.results.get("chosen", {}).get(key) for key, value in run.settings.items() if value is None}
        values.append(flatten({**run.settings, **{key: value for key, value in chosen.items() if value is not None}}))
    keys = dict.fromkeys(key for found in values for key in found)
    listed = {key: [found.get(key) for found in values] for key in keys if key not in ("run.folder", "name", "task")}
    return {key: found for key, found in listed.items() if any(value != found[0] for value in found)}


def write_facts(folder: Path, name: str, data: Mapping[str, str], values: Mapping[str, Any] | None = None) -> None:
    """Records how a run was started, and the hash of each of its `data`. A run that continues keeps its first date."""
    path = folder / FACTS
    started = read_json(path).get("started") if path.is_file() else None
    facts = {
        "name": name,
        "started": started or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": describe_command(),
        **(values or {}),
        "versions": describe_versions(),
        "machine": describe_machine(),
        "data": dict(data),
    }
    write_json(path, facts)
