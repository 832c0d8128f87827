"""Settings and fixtures that tests share."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tiny models are faster on one thread, and there is one test process per CPU; child processes read the variable
os.environ.setdefault("OMP_NUM_THREADS", "1")
# child processes import `tests` too
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# how long an example takes says more about the machine's load than about the code
hypothesis.settings.register_profile("bertblocks", deadline=None)
hypothesis.settings.load_profile("bertblocks")


def pytest_collection_finish() -> None:
    """Spares the garbage collector the objects of torch, transformers and JAX, which live as long as the process."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words that start a Python process in which the package is already imported; see tests/warm_python.py."""
    script, path = Path(__file__).with_name("warm_python.py"), tmp_path_factory.mktemp("warm") / "socket"
    server = subprocess.Popen(
        [sys.executable, script, "--serve", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield [sys.executable, "-S", "-E", str(script), str(path)]
    server.kill()
    server.wait()
