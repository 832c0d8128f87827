"""Runs functions of tests in a process that can import Triton, with its interpreter or its compiler.

`make` installs Triton into a folder of its own, because torch's compiler would import it on CPUs too if it could.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(
    not FOLDER.is_dir() and find_spec("triton") is None,
    reason=f"Triton is not installed: pip install --no-deps --target {FOLDER} triton",
)
CODE = """
import importlib, json, sys
module, function, arguments = sys.argv[1:]
getattr(importlib.import_module(module), function)(*json.loads(arguments))
"""


def run_with_triton(module: str, function: str, *arguments: Any, interprets: bool = True) -> None:
    """Call a function with Triton; raises what the process wrote if it fails.

    Triton decides when it is imported whether to interpret kernels.
    """
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interprets)), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER))))
    command = [sys.executable, "-c", CODE, module, function, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
