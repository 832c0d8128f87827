"""No command deletes or replaces a file that it did not write itself."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bertblocks import Predictor, finetune
from bertblocks.cli.main import app
from bertblocks.training.run_folder import RunFolder, RunFolderError
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import make_bert


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_bert("BertModel").save_pretrained(tmp_path / "bert")
    wrap("wordpiece").save_pretrained(tmp_path / "bert")
    shutil.copytree(tmp_path / "bert", tmp_path / "again")
    (tmp_path / "train.csv").write_text("text,label\n" + "plain words,a\ntwo here,b\n" * 16)
    (tmp_path / "corpus.txt").write_text("plain words are here\n\ntwo leading words\n\n" * 20)
    return tmp_path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fails(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@pytest.fixture
def owned(files: Any) -> Path:
    """A user's folder with the names that commands write, but without the files that mark them as ours."""
    folder = files / "mine"
    for name in ("model/model.safetensors", "checkpoints/step-00000001/complete.json", "data/tokenizer/tokenizer.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    for name in ("shard-00000.arrow", "shard-00000.json", "info.json", "tokenizer.json", "config.json", "report.html"):
        (folder / name).write_text("mine")
    return folder


COMMANDS = {
    "pretrain": ["pretrain", "run.folder={owned}"],
    "prepare": ["data", "prepare", "{owned}", "{files}/corpus.txt", "--tokenizer", "{files}/bert"],
    "prepare docstrings": ["data", "prepare", "{owned}", "--docstrings", "--tokenizer", "{files}/bert"],
    "tokenizer": ["tokenizer", "train", "{owned}", "{files}/corpus.txt", "--vocab-size", "60"],
    "finetune": [
        "finetune",
        "classify",
        "--model",
        "{files}/bert",
        "--train",
        "{files}/train.csv",
        "--output",
        "{owned}",
    ],
    "convert": ["convert", "{files}/bert", "{owned}"],
    "quantize": ["quantize", "{files}/bert", "{owned}"],
    "merge": ["merge", "{files}/bert", "{files}/again", "--output", "{owned}"],
}


@pytest.mark.parametrize("command", [*COMMANDS, "finetune --overwrite"])
def test_commands_leave_a_users_folder_unchanged(files: Any, owned: Any, command: Any) -> None:
    before = snapshot(owned)
    name, _, option = command.partition(" --")
    words = [word.format(owned=owned, files=files) for word in COMMANDS[name]]
    message = fails(*words, *([f"--{option}"] if option else []))
    assert str(owned) in message
    assert snapshot(owned) == before


@pytest.mark.parametrize("name", ["../../victim", "a/b", "/victim", "..", "", ".hidden", "tokenizer"])
def test_a_source_name_cannot_point_outside_the_run_folder(files: Any, name: Any) -> None:
    victim = files / "victim"
    victim.mkdir()
    (victim / "shard-00000.arrow").write_text("mine")
    source = f"corpus.sources=[{{name: '{name}', files: ['{files}/corpus.txt']}}]"
    message = fails("pretrain", source, f"run.folder={files / 'run'}")
    assert "name" in message
    assert snapshot(victim) == {"shard-00000.arrow": b"mine"}
    assert not (files / "run").exists()


def test_overwrite_replaces_only_prepared_tokens(files: Any) -> None:
    words = ["data", "prepare", files / "tokens", files / "corpus.txt", "--tokenizer", files / "bert"]
    assert CliRunner().invoke(app, [str(word) for word in words]).exit_code == 0
    (files / "tokens" / "shard-note.arrow").write_text("mine")
    before = snapshot(files / "tokens")
    assert "--overwrite" in fails(*words, "--one-per", "line")
    assert snapshot(files / "tokens") == before
    done = CliRunner().invoke(app, [*map(str, words), "--one-per", "line", "--overwrite"])
    assert done.exit_code == 0, done.output
    assert (files / "tokens" / "shard-note.arrow").read_text() == "mine"
    assert snapshot(files / "tokens")["plan.json"] != before["plan.json"]


def test_overwrite_keeps_the_old_model_until_the_new_one_is_complete(files: Any) -> None:
    out, train = files / "out", files / "train.csv"
    finetune("classify", files / "bert", train, output=out, epochs=1)
    (out / "notes.txt").write_text("mine")
    before = snapshot(out)
    command = [sys.executable, "-m", "bertblocks", "finetune", "classify", "--model", files / "bert", "--train", train]
    options = ["--output", out, "--overwrite", "epochs=400", "patience=1000"]
    process = subprocess.Popen([str(word) for word in [*command, *options]], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(files.glob(".out.*.new/checkpoints/*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert snapshot(out) == before
    done = finetune("classify", files / "bert", train, output=out, epochs=2, seed=5, overwrite=True)
    assert done.folder == out
    after = snapshot(out)
    assert after["notes.txt"] == b"mine"
    assert after["model.safetensors"] != before["model.safetensors"]
    assert json.loads(after["finetune.json"])["epochs"] == 2
    assert set(json.loads(after["results.json"])["files"]) | {"notes.txt", "results.json"} == set(after)
    assert Predictor(str(out)).classify(["plain words"])[0].labels in (["a"], ["b"])


def test_a_second_process_in_a_run_folder_raises(tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path / "run", "request.json", {"seed": 1}) for _ in range(2))
    first.claim()
    with pytest.raises(RunFolderError, match=r"Another process is running in .*run; wait for it to end"):
        second.claim()
    first.release()
    second.claim()
    second.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["request.json"]
