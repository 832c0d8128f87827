"""All messages of the library go through its logger; it prints nothing by itself."""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import transformers
from transformers.utils import logging as transformers_logging

import bertblocks
from bertblocks import BertBlocksForMaskedLM, BertBlocksModel
from bertblocks.core.log import quiet_transformers
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import expect_log, tiny_config

#: Imports, loads and converts; each checkpoint lacks the head of the second call.
PROGRAM = """
import sys
import bertblocks
import bertblocks.evaluation.evaluate, bertblocks.training.pretrain
for name in ("own", "bert"):
    bertblocks.load(f"{sys.argv[1]}/{name}")
    bertblocks.load(f"{sys.argv[1]}/{name}", task="token-classification")
bertblocks.convert(f"{sys.argv[1]}/bert", f"{sys.argv[1]}/converted", to="bertblocks")
"""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path / "own")
    transformers.BertForMaskedLM(FAMILY_CASES["bert"].make_config()).save_pretrained(tmp_path / "bert")
    return tmp_path


def test_a_plain_program_prints_only_log_messages(checkpoints: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    # Python shows warnings on stderr if the program does not configure logging
    message = "has no tagger: newly initialized, must be trained before use."
    assert done.stderr.splitlines() == [f"{checkpoints / name} {message}" for name in ("own", "bert")]


def test_load_reports_go_to_the_logger(checkpoints: Path) -> None:
    with expect_log(r"own has no tagger: newly initialized"):
        bertblocks.load(checkpoints / "own", task="token-classification")
    with expect_log(None):
        bertblocks.load(checkpoints / "own")


def test_quiet_transformers_hides_only_messages_of_its_thread_and_block(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger("transformers.modeling_utils")
    caplog.set_level(logging.WARNING, theirs.name)  # another test may have raised the level of transformers
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    theirs.addHandler(caplog.handler)
    try:
        with quiet_transformers():
            theirs.warning("hidden")
            other = threading.Thread(target=theirs.warning, args=("from another thread",))
            other.start()
            other.join()
            with quiet_transformers():
                assert not transformers_logging.is_progress_bar_enabled()
            assert not transformers_logging.is_progress_bar_enabled()
        assert transformers_logging.is_progress_bar_enabled()
        theirs.warning("after")
    finally:
        theirs.removeHandler(caplog.handler)
        if not was_shown:
            transformers_logging.disable_progress_bar()
    assert list(dict.fromkeys(caplog.messages)) == ["from another thread", "after"]


def test_a_failed_load_restores_the_progress_bar(tmp_path: Path) -> None:
    BertBlocksModel(tiny_config()).save_pretrained(tmp_path)
    shown = transformers_logging.is_progress_bar_enabled()
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(OSError, match="damaged"):
        bertblocks.load(tmp_path)
    assert transformers_logging.is_progress_bar_enabled() == shown
