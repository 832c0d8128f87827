"""Progress is one live line on a terminal, and clean lines everywhere else."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bertblocks.training import progress as module
from bertblocks.training.progress import Progress
from bertblocks.training.trackers import EventStream

VALUES = {"loss": 2.5, "tokens_per_second": 12345.6, "seconds_left": 75}


def shown(is_terminal: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "LIVE_SECONDS", 0.0)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120, color_system=None, legacy_windows=False)
    with Progress(console, **options) as progress:
        progress.update(1, 10, VALUES)
        progress.show_evaluation(1, {"f1": 0.5, "accuracy": 0.75}, "accuracy")
        progress.update(2, 10, VALUES)
        if progress._bar:
            progress._bar.refresh()
    return file.getvalue()


def test_a_log_has_clean_lines_with_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False, monkeypatch).splitlines() == [
        "step 1/10 | loss 2.500 | 12,346 tokens/s | 1:15 left",
        "step 1 | f1 0.5  accuracy 0.75",
        "step 2/10 | loss 2.500 | 12,346 tokens/s | 1:15 left | accuracy 0.75",
    ]


def test_a_terminal_has_one_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(True, monkeypatch)
    assert "━" in text
    assert "step 2/10 | loss 2.500 | 12,346 tokens/s | 1:15 left | accuracy 0.75" in text
    assert text.count("step 1 | f1 0.5  accuracy 0.75") == 1  # a permanent line above the bar
    assert "\x1b[2K" in text  # the bar is erased


def test_nothing_is_printed_unless_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        assert shown(is_terminal, monkeypatch, is_shown=False) == ""


def test_events_tell_steps_from_evaluations() -> None:
    events: list[dict[str, Any]] = []
    stream = EventStream(events.append)
    stream.start({}, 3)
    stream.log(4, {"loss": 1.0, "learning_rate": 0.1})
    stream.log(4, {"accuracy": 0.5})
    stream.close()
    assert [(event["event"], event["step"]) for event in events] == [("start", 3), ("step", 4), ("evaluation", 4)]
