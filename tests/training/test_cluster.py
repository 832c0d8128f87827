"""A small cluster that is disturbed trains the weights of one that is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bertblocks.training.watchdog import describe


def can_isolate() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    command = ["unshare", "--map-root-user", "--net", "ip", "link", "set", "lo", "up"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_isolate(), reason="network namespaces are not available")
def test_killed_stopped_and_cut_off_processes_train_the_same_bits(tmp_path: Path) -> None:
    """`python -m tests.training.cluster FOLDER --seconds 600 --steps 600` does so for ten minutes."""
    command = [sys.executable, "-m", "tests.training.cluster", str(tmp_path), "--seconds=120", "--steps=60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensors are equal after 60 steps" in done.stdout
    assert ": 0" not in done.stdout.splitlines()[-1], "each kind of event happens at least once"


def test_a_process_that_told_nothing_is_unknown() -> None:
    assert describe(None, 0.0) == "is unknown: it has told nothing, or the network is gone"
