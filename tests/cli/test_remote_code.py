"""A checkpoint folder with Python code: no command or function runs the code, whatever standard input says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bertblocks
from bertblocks.cli.main import app
from bertblocks.text.tokenizers import load_tokenizer
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import labelled, make_bert

EVIL = """
from pathlib import Path
Path({witness!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def evil(tmp_path: Path) -> tuple[Path, Path]:
    """A folder in our own format whose tokenizer is a class in a file of the folder, and the file it would write."""
    folder, witness = tmp_path / "evil", tmp_path / "witness"
    make_bert("BertForSequenceClassification", **labelled("a", "b")).save_pretrained(tmp_path / "bert")
    bertblocks.convert(tmp_path / "bert", folder)
    wrap("wordpiece").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    values["tokenizer_class"] = "Evil"
    path.write_text(json.dumps(values))
    (folder / "evil.py").write_text(EVIL.format(witness=str(witness)))
    return folder, witness


COMMANDS = {
    "embed": ["embed", "EVIL", "-"],
    "classify": ["classify", "EVIL", "-"],
    "quantize": ["quantize", "EVIL", "OUT"],
    "convert": ["convert", "EVIL", "OUT", "--to", "native"],
    "finetune": ["finetune", "classify", "--model", "EVIL", "--train", "TRAIN", "--output", "OUT"],
    "evaluate": ["evaluate", "EVIL", "--data", "TRAIN", "--task", "classify"],
    "prepare": ["data", "prepare", "OUT", "TRAIN", "--tokenizer", "EVIL"],
    "pretrain": ["pretrain", "tokenizer.load=EVIL", "run.folder=OUT", "corpus.sources=[{name: a, files: ['TRAIN']}]"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_never_run_code_of_a_checkpoint(evil: Any, tmp_path: Path, command: Any) -> None:
    folder, witness = evil
    train = tmp_path / "train.csv"
    train.write_text("text,label\n" + "plain words,a\ntwo here,b\n" * 10)
    names = {"EVIL": str(folder), "OUT": str(tmp_path / "out"), "TRAIN": str(train)}
    words = COMMANDS[command]
    for name, path in names.items():
        words = [word.replace(name, path) for word in words]
    done = CliRunner().invoke(app, words, input="y\ny\nyes\n" * 5)
    assert not witness.exists()
    assert "Traceback" not in done.stderr
    if command != "convert":  # which copies the tokenizer's files without the code and does not open them
        assert done.exit_code == 1
        assert "BertBlocks never runs" in done.stderr


def test_piped_input_cannot_consent_to_remote_code(evil: Any, warm_python: list[str]) -> None:
    folder, witness = evil
    command = [*warm_python, "-m", "bertblocks", "embed", str(folder), "-"]
    done = subprocess.run(command, input="y\nhi\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "BertBlocks never runs" in done.stderr
    assert not witness.exists()


def test_functions_never_run_code_of_a_checkpoint(evil: Any) -> None:
    folder, witness = evil
    for load in (bertblocks.load, bertblocks.Predictor, load_tokenizer):
        with pytest.raises(ValueError, match="needs Python code from the checkpoint, which BertBlocks never runs"):
            load(str(folder))
    assert not witness.exists()


def test_flax_never_runs_code_of_a_checkpoint(evil: Any) -> None:
    pytest.importorskip("flax")
    from bertblocks import flax

    folder, witness = evil
    with pytest.raises(ValueError, match="BertBlocks never runs"):
        flax.load(str(folder))
    assert not witness.exists()


def test_only_one_module_opens_tokenizers() -> None:
    root = Path(bertblocks.__file__).parent
    users = [path for path in root.rglob("*.py") if "AutoTokenizer.from_pretrained" in path.read_text()]
    assert [path.relative_to(root).as_posix() for path in users] == ["text/tokenizers.py"]
