"""Incomplete and damaged checkpoints are ignored."""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bertblocks.training.checkpoints import MARKER, CheckpointError, CheckpointFolder, verify_checkpoint
from tests.training.helpers import train


def write(folder: CheckpointFolder, step: int, **options: Any) -> Path:
    def files(path: Path) -> None:
        (path / "numbers.json").write_text(f"[{step}]")
        (path / "part").mkdir()
        (path / "part" / "more.txt").write_text("more")

    return folder.write(step, files, **options)


def test_old_checkpoints_are_removed_except_milestones_and_protected_ones(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2, milestones=30)
    for step in range(10, 80, 10):
        write(folder, step, protected=20)
    assert folder.steps() == [20, 30, 60, 70]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_damaged_later_and_half_removed_checkpoints_are_ignored(tmp_path: Path) -> None:
    """Covers a damaged checkpoint of a later step, and one that was being removed."""
    folder = CheckpointFolder(tmp_path, keep=1, milestones=100)
    for step in (100, 400, 500):
        write(folder, step)
    damage_content(tmp_path / "step-00000500")
    (tmp_path / "step-00000050").mkdir()
    assert folder.find_latest().path == tmp_path / "step-00000400"
    write(folder, 450)
    assert folder.steps() == [100, 400, 450]


def test_the_marker_contains_the_checksums_of_all_files(tmp_path: Path) -> None:
    path = write(CheckpointFolder(tmp_path), 1)
    marker = json.loads((path / MARKER).read_text())
    assert marker["step"] == 1
    assert set(marker["sha256"]) == {"numbers.json", "part/more.txt"}
    # of "more", by sha256sum
    assert marker["sha256"]["part/more.txt"] == "187897ce0afcf20b50ba2b37dca84a951b7046f29ed5ab94f010619f69d6e189"


def damage_content(path: Path) -> None:
    (path / "numbers.json").write_text("[3]")


def damage_missing(path: Path) -> None:
    (path / "part" / "more.txt").unlink()


def damage_marker(path: Path) -> None:
    (path / MARKER).write_text('{"step": 2')


def damage_no_marker(path: Path) -> None:
    (path / MARKER).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_content, "is damaged: numbers.json has changed since it was written"),
        (damage_missing, "is damaged: part/more.txt is missing"),
        (damage_marker, f"is damaged: {MARKER} cannot be read"),
        (damage_no_marker, f"is incomplete: it has no {MARKER}"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path: Path, damage: Any, reason: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    first, second = write(folder, 1), write(folder, 2)
    damage(second)
    found = folder.find_latest()
    assert found.path == first
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{second} {reason}")
    assert write(folder, 2) == second  # written again over what was damaged
    assert verify_checkpoint(second) is None


def test_an_empty_folder_has_no_latest_checkpoint(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "none").find_latest().path is None


def test_a_failed_write_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    first = write(folder, 1)

    def full(path: Path) -> None:
        (path / "numbers.json").write_text("[")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-00000002 could not be written: .*No space left.* intact"):
        folder.write(2, full)
    assert folder.find_latest().path == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_a_finished_run_keeps_milestones_or_all(tmp_path: Path) -> None:
    for keep, left in ((2, [30, 60]), (None, [10, 20, 30, 40, 50, 60, 70])):
        folder = CheckpointFolder(tmp_path / str(keep), keep, milestones=30)
        for step in range(10, 80, 10):
            folder.write(step, lambda path: {} if (path / "numbers").write_bytes(b"x" * 1000) else None)
        for unfinished in (".step-00000080-x.partial", ".step-00000080.writing"):  # the second is of version 0.1.0
            (folder.path / unfinished).mkdir()
        sizes = folder.remove_finished()
        assert folder.steps() == left
        assert not list(folder.path.glob(".*")) or keep is None
        assert [size > 1000 for size in sizes] == ([True] if keep else []), "the second newest is a milestone"
    folder = CheckpointFolder(tmp_path / "none", keep=2)
    assert folder.remove_finished() == []
    folder.write(1, lambda path: None)
    folder.remove_finished()
    assert not folder.path.exists()


def test_a_real_full_disk_leaves_earlier_checkpoints_intact(tmp_path: Path) -> None:
    """With a limit of a few kilobytes per file, earlier checkpoints stay intact and the run continues later."""
    train(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000024" / MARKER).unlink()
    child = os.fork()
    if child == 0:
        sys.dont_write_bytecode = True  # Python does not notice that a file is cut
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        try:
            train(tmp_path / "run")
        except CheckpointError as error:
            (tmp_path / "message").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)
    message = (tmp_path / "message").read_text()
    assert "step-00000024 could not be written" in message
    assert "Earlier checkpoints are intact" in message
    found = CheckpointFolder(tmp_path / "run" / "checkpoints").find_latest()
    assert found.path is not None
    assert found.path.name == "step-00000020"
    assert train(tmp_path / "run").state.step == 24
