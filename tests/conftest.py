"""Settings and fixtures that tests share."""

import os
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


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
