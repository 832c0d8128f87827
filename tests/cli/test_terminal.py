"""With a terminal on stderr, output on stdout still reaches its file or pipe."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_predict import KINDS
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import make_bert

TEXTS = ["plain words", "two here", "leading words are here"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> dict[str, str]:
    """The folder of a model for each command, the folder of the inputs, and the words that start `bertblocks`."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for command, (kind, options) in KINDS.items():
        folder = root / command
        make_bert(kind, **options).save_pretrained(folder)
        wrap("wordpiece").save_pretrained(folder)
        found[command] = str(folder)
    (root / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (root / "masks.txt").write_text("".join(f"{text} [MASK]\n" for text in TEXTS))
    questions = [{"question": "two", "context": text} for text in TEXTS]
    (root / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return found | {"root": str(root), "bertblocks": shlex.join([*warm_python, "-m", "bertblocks"])}


def on_terminal(command: str) -> tuple[int, str]:
    """Runs a shell command with a terminal as stderr; returns its exit code and what the terminal shows."""
    parent, child = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:  # the last writer has closed the terminal
                return
            if not data:
                return
            shown.append(data)

    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
        env=environment,
    )
    os.close(child)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait(timeout=120)
    reader.join(timeout=10)
    os.close(parent)
    return code, b"".join(shown).decode()


def call(folders: dict[str, str], command: str, *options: str) -> str:
    file = {"answer": "questions.jsonl", "fill-mask": "masks.txt"}.get(command, "texts.txt")
    words = [command, folders[command], "--file", f"{folders['root']}/{file}", *options]
    return f"{folders['bertblocks']} {shlex.join(words)}"


@pytest.mark.parametrize("command", KINDS)
def test_json_reaches_a_file_and_a_pipe(folders: Any, tmp_path: Path, command: Any) -> None:
    file = tmp_path / "out.jsonl"
    code, shown = on_terminal(f"{call(folders, command, '--json')} | tee {tmp_path / 'piped'} > {file}")
    assert code == 0, shown
    assert len([json.loads(line) for line in file.read_text().splitlines()]) == len(TEXTS)
    assert (tmp_path / "piped").read_text() == file.read_text()
    assert "{" not in shown
    assert "3 texts" in shown


def test_a_redirected_table_has_every_row(folders: Any, tmp_path: Path) -> None:
    code, shown = on_terminal(f"{call(folders, 'classify')} > {tmp_path / 'table'}")
    assert code == 0, shown
    assert len((tmp_path / "table").read_text().splitlines()) == 1 + len(TEXTS)


def test_a_closed_pipe_ends_the_command_quietly(folders: Any) -> None:
    _, shown = on_terminal(f"{call(folders, 'classify', '--json')} | head -c 1 > /dev/null")
    assert "Broken pipe" not in shown
    assert "Traceback" not in shown


def test_a_closed_stdout_gives_one_sentence(folders: Any) -> None:
    code, shown = on_terminal(f"{call(folders, 'classify', '--json')} >&-")
    assert code == 1
    assert "Traceback" not in shown
    assert "bertblocks: standard output is closed" in " ".join(shown.split())


def test_convert_and_prepare_print_their_results_below_progress_bars(folders: Any, tmp_path: Path) -> None:
    program, done = folders["bertblocks"], tmp_path / "convert.json"
    code, shown = on_terminal(f"{program} convert {folders['embed']} {tmp_path / 'ours'} --json > {done}")
    assert code == 0, shown
    assert json.loads(done.read_text())["target_family"] == "bertblocks"
    done = tmp_path / "prepare.json"
    texts = f"{folders['root']}/texts.txt"
    prepare = f"{program} data prepare {tmp_path / 'tokens'} {texts} --tokenizer {folders['embed']}"
    code, shown = on_terminal(f"{prepare} --one-per line --json > {done}")
    assert code == 0, shown
    assert json.loads(done.read_text())["documents"] == len(TEXTS)


def test_a_full_disk_behind_stdout_gives_one_sentence(folders: Any) -> None:
    for command in ("presets", "schema"):
        code, shown = on_terminal(f"{folders['bertblocks']} {command} > /dev/full")
        assert code == 1
        assert "bertblocks: standard output could not be written: No space left on device." in " ".join(shown.split())
        assert "Traceback" not in shown
