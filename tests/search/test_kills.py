"""Whatever kills a writer, the index is complete, and repeating the call gives what an undisturbed one gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.search.kill_worker import change, dying_at, run_in_child, state


def test_an_index_survives_kills(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertblocks.search.adding.SEGMENT_DOCUMENTS", 7)
    monkeypatch.setattr("bertblocks.search.writer.SMALL_SEGMENTS", 4)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    change(straight, fake)
    kills = [not run_in_child(dying_at(flush, lambda: change(killed, fake))) for flush in (1, 8, 13, 18)]
    assert all(kills)
    change(killed, fake)
    assert state(killed) == state(straight)


@pytest.mark.slow
def test_an_index_survives_kills_at_every_flush_and_at_random_times(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.search.kill_worker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["same"] == [True, True]
    assert result["kills"] >= 10
    assert result["timely"] >= 5
    assert result["extra"] == []
