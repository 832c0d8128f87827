"""The fuzzer of `tests/fuzz`: a part of its cases here, all of them with the slow tests."""

import subprocess
from pathlib import Path

import pytest

from tests.fuzz.cases import KINDS

CASES, CHUNK = 5000, 500


def run(python: list[str], numbers: str) -> None:
    done = subprocess.run([*python, "-m", "tests.fuzz", numbers], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_damaged_and_hostile_input_gives_one_sentence(warm_python: list[str]) -> None:
    run(warm_python, f"0:{4 * len(KINDS)}")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_all_damaged_and_hostile_input_gives_one_sentence(start: int, warm_python: list[str]) -> None:
    run(warm_python, f"{start}:{start + CHUNK}")


def test_the_fuzzer_sees_what_is_wrong(tmp_path: Path, warm_python: list[str]) -> None:
    """A command that prints a traceback, leaves a file, exits with another code and starts a process fails."""
    script = """
import os, subprocess, sys
from pathlib import Path
import tests.fuzz.run as fuzz
from tests.fuzz.cases import Case
import bertblocks.cli.main as cli

def main():
    Path("left").write_text("")
    Path("model").write_text("changed")
    Path(os.environ["TMPDIR"], "rest").write_text("")
    subprocess.Popen(["sleep", "60"])
    print("x" * 600, file=sys.stderr)
    raise KeyError("a")

def make_case(number, seeds, folder):
    (folder / "model").write_text("")
    return Case(0, "own", ["a"])

cli.main, fuzz.make_case = main, make_case
folder = Path(sys.argv[1])
print("; ".join(fuzz.run_case(0, folder, folder).problems))
def main(): print("bertblocks: " + "x" * 600, file=sys.stderr); sys.exit(1)
cli.main = main
(folder / "again").mkdir()
print("; ".join(fuzz.run_case(0, folder, folder / "again").problems))
"""
    done = subprocess.run([*warm_python, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == (
        "ended with exit code 99; shows a traceback; changed model; left left; left rest in the folder for temporary "
        "files; left 1 processes"
    )
    assert second == "gives a message of 612 characters"
