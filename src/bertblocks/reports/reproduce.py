"""Everything that is needed to do a run again: the command, the settings, the versions, the machine and the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertblocks.reports.page import Html, code, join, paragraph, section, settings_table, table
from bertblocks.reports.runs import Run


def reproduce_section(run: Run) -> Html:
    """The last section of every page."""
    settings = {**run.settings, "chosen": run.results.get("chosen", {})} if run.kind != "evaluate" else {}
    notes = [paragraph(note, "quiet") for note in run.facts.get("notes", [])]
    return join(
        section("Reproduce", *reproduce(run.facts), *notes),
        section("Settings", settings_table(settings), is_folded=True),
        section("Model", settings_table(run.results.get("config", {})), is_folded=True),
    )


def reproduce(facts: Mapping[str, Any]) -> list[Html]:
    """The command, and tables of data, machine and versions."""
    where = {**facts.get("machine", {}), **({"threads": facts["threads"]} if "threads" in facts else {})}
    return [
        code(facts["command"]) if facts.get("command") else Html(""),
        _part("Data", table(["data", "hash"], facts.get("data", {}).items())),
        _part("Machine", table(["machine", "value"], where.items())),
        _part("Versions", table(["package", "version"], facts.get("versions", {}).items())),
    ]


def _part(title: str, body: Html) -> Html:
    return Html(f"<h3>{title}</h3>{body}") if body else body
